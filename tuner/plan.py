"""A study checked against this host: everything that can be wrong is found before a server starts."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import baseline as baselines
from tuner import spec as specs
from tuner import tiny_model, units
from tuner import workload as workloads
from tuner.deployment import gpu, probe
from tuner.errors import HostError, SpecError
from tuner.replay.prompts import LEAST_VOCABULARY, vocabulary_of
from tuner.serving import Json, ServingConfig, to_argv
from tuner.spec import StudySpec
from tuner.study import space
from tuner.workload import Workload

QUICKSTART, ON_GPU = "cpu-quickstart", "qwen2.5-7b-instruct-4090"
# What starting and stopping a server takes when no run has told yet; for the estimate of --dry-run alone.
ASSUMED_START = {"cpu": 35.0, "cuda": 90.0}
STOPPING = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A study that has been checked against this host and may start.

    Attributes:
        spec: as resolved.
        source: the study file.
        workload: the rows as they will be replayed.
        default: vLLM's own default, trial 0.
        baseline: the user's present configuration, or None.
        host: what vLLM resolves its defaults to here; empty when it could not be asked.
        vllm: what the installed vLLM says of itself; None when there is none (--dry-run only).
        gpus: indices of the GPUs to use; empty on a CPU.
        vocab_size: of the model, for prompts of ordinary tokens.
        notes: what the user must know before it starts.
    """

    spec: StudySpec
    source: Path
    workload: Workload
    default: ServingConfig
    baseline: ServingConfig | None
    host: Mapping[str, Json]
    vllm: probe.Probe | None
    gpus: tuple[int, ...]
    vocab_size: int
    notes: tuple[str, ...] = ()


def find_study(name: str | None) -> tuple[Path, str | None]:
    """Return the study file a user means, and what to say about the choice.

    Raises:
        SpecError: no such study.
    """
    if name is None:
        gpus = gpu.list_gpus()
        chosen = ON_GPU if gpus else QUICKSTART
        why = f"this host has {gpus[0].name}" if gpus else "this host has no GPU"
        path = _shipped_study(chosen)
        return path, f"no study given: taking {chosen}, because {why}"
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        return path, None
    return _shipped_study(name), None


def _shipped_study(name: str) -> Path:
    places = specs.places(None)
    for base in places:
        if (path := base / "studies" / f"{name}.yaml").is_file():
            return path
    names = sorted({p.stem for base in places for p in base.glob("studies/*.yaml")})
    raise SpecError(f"no study {name!r}", hint=f"give a YAML file or one of: {', '.join(names)}")


def make(
    study: str | None, overrides: Mapping[str, Any], baseline: str | None = None, *, may_lack_vllm: bool = False
) -> Plan:
    """Check a study against this host; nothing is started but a look at the installed vLLM.

    Raises:
        SpecError: study, workload or baseline are wrong, or vLLM refuses what they ask for.
        HostError: no vLLM, no such GPU, or a busy one.
    """
    source, note = find_study(study)
    spec = specs.load(source, overrides)
    workload = workloads.load(specs.find_workload(spec.workload.path, source))
    workload = workloads.scale_rate(workload, spec.workload.rate_scale, spec.seed)
    return check(spec, source, workload, baseline, notes=(note,) if note else (), may_lack_vllm=may_lack_vllm)


def check(
    spec: StudySpec, source: Path, workload: Workload, baseline: str | None, *, notes: Sequence[str] = (),
    may_lack_vllm: bool = False,
) -> Plan:  # fmt: skip
    """Check resolved parts of a study against this host."""
    for topology in spec.topologies:
        if topology.n_servers != 1:
            where = specs.where(source, "topologies")
            raise SpecError(f"{where}: {topology} needs a group of servers", hint="this version serves 1x only")
    _refuse_partial_prefills(spec, source)
    _refuse_empty_classes(spec, workload)
    if spec.gpus is not None and not gpu.list_gpus():
        raise HostError(f"the study asks for GPUs {list(spec.gpus)}, but this host has none (no nvidia-smi)",
                        hint="take a study for CPUs: tune run cpu-quickstart")  # fmt: skip
    served = spec.model_copy(update={"model": _model(spec.model)})
    default = space.default_config(served)
    base = baselines.read(baseline, default) if baseline is not None else None
    try:
        found: probe.Probe | None = _ask_vllm(served, default, base)
    except HostError as error:
        if not may_lack_vllm:
            raise
        found, notes = None, [*notes, f"vLLM was not asked: {error.message}"]
    host: dict[str, Json] = {}
    vocab_size = None
    if found is not None:
        _check_names(spec, source, base, found)
        host = _values(found, spec, source)
        vocab_size = host.pop("vocab_size", None)
        notes = [*notes, *filter(None, [probe.version_warning(found.version)])]
    model_len = host.get("max_model_len", spec.engine_args.get("max_model_len"))
    if isinstance(model_len, int):
        workloads.check_fits(workload, model_len)
    gpus = _gpus(spec, found)
    vocabulary = vocab_size if isinstance(vocab_size, int) else vocabulary_of(served.model) or LEAST_VOCABULARY
    return Plan(served, source, workload, default, base, host, found, gpus, vocabulary, tuple(notes))


def _model(name: str) -> str:
    return str(tiny_model.ensure()) if name == specs.TINY_MODEL else name


def _refuse_partial_prefills(spec: StudySpec, source: Path) -> None:
    """0.26 takes these two arguments at 1 only, 0.32 has them no more (see docs/decisions.md)."""
    for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
        for part in ("engine_args", "search_space"):
            if name in getattr(spec, part) and spec.engine_args.get(name) != 1:
                raise SpecError(
                    f"{specs.where(source, f'{part}.{name}')}: {part}.{name}: vLLM 0.26 refuses every value but 1, "
                    "and 0.32 has no such argument", hint="remove the line",
                )  # fmt: skip


def _refuse_empty_classes(spec: StudySpec, workload: Workload) -> None:
    """An SLO or an objective on prompts that the workload does not have could never be measured."""
    for metric in dict.fromkeys([*(s.metric for s in spec.slo), *spec.objective_metrics]):
        scope = metric.partition(".")[2]
        low, high = spec.workload.classes.get(scope, (0, 0))
        if scope and not any(low <= row.input_len < high for row in workload.requests):
            raise SpecError(
                f"{metric}: workload {workload.name} has no prompt of class {scope} ({low} tokens and more)",
                hint="take another metric, or classes that fit: workload.classes",
            )


def _ask_vllm(spec: StudySpec, default: ServingConfig, base: ServingConfig | None) -> probe.Probe:
    configs = [default] if base is None else [default, base]
    argvs = [to_argv(config)[len(config.command) :] for config in configs]
    return probe.probe(spec.vllm.command, argvs, env=spec.env)


def _check_names(spec: StudySpec, source: Path, base: ServingConfig | None, found: probe.Probe) -> None:
    lines = []
    for part in ("engine_args", "search_space"):
        for name, close in probe.unknown_arguments(found, getattr(spec, part)).items():
            meant = f', did you mean "{close[0]}"?' if close else ""
            where = specs.where(source, f"{part}.{name}")
            lines.append(f"{where}: {part}.{name}: vLLM {found.version} has no such argument{meant}")
    for name, close in probe.unknown_arguments(found, base.args if base else ()).items():
        meant = f', did you mean "{close[0]}"?' if close else ""
        lines.append(f"--baseline: {name}: vLLM {found.version} has no such argument{meant}")
    if lines:
        raise SpecError("\n".join(lines), hint="`vllm serve --help=all` lists every argument")


def _values(found: probe.Probe, spec: StudySpec, source: Path) -> dict[str, Json]:
    """Return what vLLM resolves the default to; a refusal of default or baseline ends it here."""
    if not found.verdicts:
        return {}
    for verdict, what in zip(found.verdicts, (str(source), "--baseline"), strict=False):
        if verdict.reason is not None:
            raise SpecError(
                f"{what}: vLLM {found.version} refuses it: {verdict.reason}", hint=_hint(verdict.reason, spec)
            )
    return dict(found.verdicts[0].values)


def _hint(reason: str, spec: StudySpec) -> str:
    if any(part in reason for part in ("is not a local folder", "Repo id must be", "huggingface.co", spec.model)):
        return f"is the model {spec.model!r} there, and may this host download it?"
    return "mend engine_args"


def _gpus(spec: StudySpec, found: probe.Probe | None) -> tuple[int, ...]:
    """Return the GPUs to use; they must be free.

    Raises:
        HostError: the study asks for GPUs that are not there or not free, or for GPUs of a CPU build.
    """
    on_cpu = found is not None and found.platform == "cpu"
    if spec.gpus is not None and on_cpu:
        raise HostError(f"the study asks for GPUs {list(spec.gpus)}, but this vLLM is a build for CPUs",
                        hint="install a vLLM for GPUs, or take a study for CPUs: tune run cpu-quickstart")  # fmt: skip
    seen = () if on_cpu else gpu.list_gpus()
    if not seen:
        return ()
    parallel = spec.engine_args.get("tensor_parallel_size", 1)
    chosen = gpu.choose(seen, parallel if isinstance(parallel, int) else 1, spec.gpus)
    gpu.require_free(chosen)
    return tuple(g.index for g in chosen)


def describe(plan: Plan) -> str:
    """Return what `--dry-run` prints: study, space, the baseline's command, an estimate of time."""
    spec = plan.spec
    lines = [*(f"note: {note}" for note in plan.notes), f"# study {plan.source}, as resolved", specs.dump(spec)]
    lines += ["# search space", *(f"  {line}" for line in space.describe(spec)), ""]
    lines += [f"# objectives: {' and '.join(spec.objective_metrics)}, both minimised", ""]
    lines += ["# trial 0, vLLM's own default", f"  {_shell(plan.default)}"]
    if plan.host:
        chosen = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "enable_chunked_prefill")
        shown = ", ".join(f"{name} {plan.host[name]}" for name in chosen if name in plan.host)
        lines.append(f"  resolves to: {shown}")
    if plan.baseline is not None:
        lines += ["# trial 1, the baseline", f"  {_shell(plan.baseline)}"]
    return "\n".join([*lines, "", _estimate(plan)])


def _shell(config: ServingConfig) -> str:
    env = [f"{name}={shlex.quote(value)}" for name, value in sorted(config.env.items())]
    return " ".join([*env, shlex.join(to_argv(config))])


def _estimate(plan: Plan) -> str:
    spec = plan.spec
    platform = plan.vllm.platform if plan.vllm else None
    start = ASSUMED_START.get(platform or "cuda", ASSUMED_START["cuda"])
    replay = plan.workload.span + 2
    trial = start + spec.workload.warm_up + spec.repeats * replay + STOPPING
    what = (
        f"start {start:.0f} s (assumed), warm-up {spec.workload.warm_up:.0f} s, "
        f"{spec.repeats} x replay {replay:.0f} s, stop {STOPPING:.0f} s"
    )
    if spec.budget.trials is None:
        return f"# time: {units.format_elapsed(spec.budget.time or 0)} in all, about {trial:.0f} s a trial: {what}"
    whole = min(trial * spec.budget.trials, spec.budget.time or float("inf"))
    return f"# time: about {units.format_elapsed(whole)}: {spec.budget.trials} trials of {trial:.0f} s each: {what}"
