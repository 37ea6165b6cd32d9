"""A study checked against this host: everything that can be wrong is found before a server starts."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import baseline as baselines
from tuner import document, placement, tiny_model, units
from tuner import spec as specs
from tuner import topologies as groups
from tuner import workload as workloads
from tuner.deployment import gpu, probe, program
from tuner.errors import HostError, SpecError
from tuner.replay.prompts import LEAST_VOCABULARY, vocabulary_of
from tuner.serving import Json, Role, ServingConfig, front_argv, to_argv
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
    _refuse_partial_prefills(spec, source)
    _refuse_empty_classes(spec, workload)
    seen = gpu.list_gpus()
    served, auto = _resolved(spec, seen)
    asked = _asked(served, source, baseline)
    if (lacking := _lack_of_gpus(spec, seen)) is None:
        found, missing = _look(served, [argv for _, argv in asked], may_lack=may_lack_vllm)
    elif may_lack_vllm:
        found, missing = None, [f"vLLM was not asked: {lacking.message}"]
    else:
        raise lacking
    if found is not None and found.platform == "cpu":
        _refuse_gpus(spec)
        _refuse_devices(spec, source)
        seen = ()
        served, auto = _resolved(spec, seen)
    default = space.default_config(served)
    base = baselines.read(baseline, default) if baseline is not None else None
    host: dict[str, Json] = {}
    vocab_size = None
    if found is not None:
        _check_names(spec, source, base, found)
        host = _values(found, spec, [what for what, _ in asked])
        vocab_size = host.pop("vocab_size", None)
        notes = [*notes, *filter(None, [probe.version_warning(found.version)])]
    if (model_len := _model_len(spec, host)) is not None:
        workloads.check_fits(workload, model_len)
    gpus = placement.choose(served, source, seen)
    notes = [*notes, *missing, *auto, *(placement.notes(served, gpus) if lacking is None else ())]
    vocabulary = vocab_size if isinstance(vocab_size, int) else vocabulary_of(served.model) or LEAST_VOCABULARY
    return Plan(served, source, workload, default, base, host, found, gpus, vocabulary, tuple(notes))


def _resolved(spec: StudySpec, seen: Sequence[gpu.Gpu]) -> tuple[StudySpec, tuple[str, ...]]:
    """Return the study with model and topologies as they are here, and what to say about it."""
    found, notes = placement.resolve_auto(spec, seen)
    return found.model_copy(update={"model": _model(found.model)}), notes


def _look(spec: StudySpec, argvs: list[list[str]], *, may_lack: bool) -> tuple[probe.Probe | None, list[str]]:
    """Ask the installed vLLM, with the front of a group looked for first; return what is missing, where it may be."""
    missing = []
    try:
        _require_front(spec)
    except HostError as error:
        if not may_lack:
            raise
        missing.append(error.message)
    try:
        return probe.probe(spec.vllm.command, argvs, env=spec.env), missing
    except HostError as error:
        if not may_lack:
            raise
        return None, [*missing, f"vLLM was not asked: {error.message}"]


def _lack_of_gpus(spec: StudySpec, seen: Sequence[gpu.Gpu]) -> HostError | None:
    """Return what is wrong when a study names GPUs and there are none."""
    if spec.gpus is None or seen:
        return None
    other = "pd-cpu" if any(topology.is_pd for topology in spec.topologies) else QUICKSTART
    return HostError(f"the study asks for GPUs {list(spec.gpus)}, but this host has none (no nvidia-smi)",
                     hint=f"take a study for CPUs: tune run {other}; --dry-run shows this one anyway")  # fmt: skip


def _refuse_devices(spec: StudySpec, source: Path) -> None:
    """A build for CPUs moves KV cache through the host's memory only, and says so after half a minute."""
    devices = (spec.kv_transfer_config or {}).get(groups.DEVICE, "cpu")
    for device in devices if isinstance(devices, list) else [devices]:
        if device != "cpu":
            where = document.where(source, f"{groups.KV}.{groups.DEVICE}")
            raise SpecError(
                f"{where}: {groups.KV}.{groups.DEVICE}: {device}: this vLLM is a build for CPUs", hint="take cpu"
            )


def _refuse_gpus(spec: StudySpec) -> None:
    if spec.gpus is not None:
        raise HostError(f"the study asks for GPUs {list(spec.gpus)}, but this vLLM is a build for CPUs",
                        hint="install a vLLM for GPUs, or take a study for CPUs: tune run cpu-quickstart")  # fmt: skip


def _require_front(spec: StudySpec) -> None:
    """Find the program that stands before a group, when the study has one."""
    if not any(topology.is_group for topology in spec.topologies):
        return
    try:
        program.locate(spec.router.command, os.environ | spec.env)
    except HostError as error:
        raise HostError(f"front of a group: {error.message}", hint="pip install vllm-router, or say where it is: "
                        "front: {command: /path/to/vllm-router}") from error  # fmt: skip


def _model_len(spec: StudySpec, host: Mapping[str, Json]) -> int | None:
    """Return the longest row that every server takes, as far as it is known."""
    given = [value for name, value in spec.engine_args.items() if groups.split(name)[1] == "max_model_len"]
    lengths = [n for n in (host.get("max_model_len"), *given) if isinstance(n, int)]
    return min(lengths, default=None)


def _model(name: str) -> str:
    return str(tiny_model.ensure()) if name == specs.TINY_MODEL else name


def _refuse_partial_prefills(spec: StudySpec, source: Path) -> None:
    """0.26 takes these two arguments at 1 only, 0.32 has them no more (see docs/decisions.md)."""
    for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
        for part in ("engine_args", "search_space"):
            for key in getattr(spec, part):
                if groups.split(key)[1] != name or spec.engine_args.get(key) == 1:
                    continue
                raise SpecError(
                    f"{document.where(source, f'{part}.{key}')}: {part}.{key}: vLLM 0.26 refuses every value but 1, "
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


def _asked(spec: StudySpec, source: Path, baseline: str | None) -> list[tuple[str, list[str]]]:
    """Return the command lines that vLLM judges before a server starts, each with what to call it.

    The first is the default as every role shares it, so that its answer is what vLLM does where nothing is given.
    """
    default = space.default_config(spec)
    asked = [(str(source), to_argv(default))]
    if (first := _first_pd(spec)) is not None:
        asked += [(f"{source}: a {role} of {first.topology}", to_argv(first, role)) for role in first.topology.roles]
    if baseline is not None:
        base = baselines.read(baseline, default)
        asked += [("--baseline", to_argv(base, role)) for role in base.topology.roles]
    return [(what, argv[len(default.command) :]) for what, argv in asked]


def _first_pd(spec: StudySpec) -> ServingConfig | None:
    """Return the first PD topology with nothing of the search space given."""
    topology = next((topology for topology in spec.topologies if topology.is_pd), None)
    return None if topology is None else space.resolve(topology, {}, spec, {})


def _check_names(spec: StudySpec, source: Path, base: ServingConfig | None, found: probe.Probe) -> None:
    lines = []
    for part in ("engine_args", "search_space"):
        for name in getattr(spec, part):
            role, bare = groups.split(name)
            for close in probe.unknown_arguments(found, [bare]).values():
                prefix = "" if role is Role.ANY else f"{role}."
                meant = f', did you mean "{prefix}{close[0]}"?' if close else ""
                where = f"{document.where(source, f'{part}.{name}')}: {part}.{name}"
                lines.append(f"{where}: vLLM {found.version} has no such argument{_no_role(bare)}{meant}")
    for name, close in probe.unknown_arguments(found, base.args if base else ()).items():
        meant = f', did you mean "{close[0]}"?' if close else ""
        lines.append(f"--baseline: {name}: vLLM {found.version} has no such argument{meant}")
    if lines:
        raise SpecError("\n".join(lines), hint="`vllm serve --help=all` lists every argument")


def _no_role(name: str) -> str:
    return f", and no role is called that (there are {' and '.join(groups.ROLES)})" if "." in name else ""


def _values(found: probe.Probe, spec: StudySpec, asked: Sequence[str]) -> dict[str, Json]:
    """Return what vLLM resolves the default to; a refusal of any command line it was asked about ends it here."""
    if not found.verdicts:
        return {}
    for verdict, what in zip(found.verdicts, asked, strict=False):
        if verdict.reason is not None:
            raise SpecError(
                f"{what}: vLLM {found.version} refuses it: {verdict.reason}", hint=_hint(verdict.reason, spec)
            )
    return dict(found.verdicts[0].values)


def _hint(reason: str, spec: StudySpec) -> str:
    if any(part in reason for part in ("is not a local folder", "Repo id must be", "huggingface.co", spec.model)):
        return f"is the model {spec.model!r} there, and may this host download it?"
    return "mend engine_args" + (f" or {groups.KV}" if _first_pd(spec) else "")


def describe(plan: Plan) -> str:
    """Return what `--dry-run` prints: study, space, the baseline's command, an estimate of time."""
    spec = plan.spec
    lines = [*(f"note: {note}" for note in plan.notes), f"# study {plan.source}, as resolved", specs.dump(spec)]
    lines += ["# search space", *(f"  {line}" for line in space.describe(spec)), ""]
    lines += [f"# objectives: {' and '.join(spec.objective_metrics)}, both minimised", ""]
    lines += ["# trial 0, vLLM's own default", *_commands(plan.default)]
    if plan.host:
        chosen = ("max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "enable_chunked_prefill")
        shown = ", ".join(f"{name} {plan.host[name]}" for name in chosen if name in plan.host)
        lines.append(f"  resolves to: {shown}")
    if plan.baseline is not None:
        lines += ["# trial 1, the baseline", *_commands(plan.baseline)]
    if (first := _first_pd(spec)) is not None and first != plan.default:
        lines += [f"# {first.topology}, nothing of the search space given", *_commands(first)]
    return "\n".join([*lines, "", _estimate(plan)])


def _commands(config: ServingConfig) -> list[str]:
    """Return a command a role, and the front's; the ports of a group are examples, tune takes free ones."""
    env = [f"{name}={shlex.quote(value)}" for name, value in sorted(config.env.items())]
    topology = config.topology
    if not topology.is_group:
        return [f"  {' '.join([*env, shlex.join(to_argv(config))])}"]
    lines = []
    urls: dict[Role, list[str]] = {role: [] for role in topology.roles}
    for number, (role, _) in enumerate(topology.members, start=1):
        urls[role].append(f"http://127.0.0.1:{8000 + number}")
    for role in topology.roles:
        what = "server" if role is Role.ANY else str(role)
        lines += [f"  # {topology.count(role)} x {what}", f"  {' '.join([*env, shlex.join(to_argv(config, role))])}"]
    front = front_argv(
        config, "127.0.0.1", 8000, urls, prometheus_port=8000 + topology.n_servers + 1, hides_failures=False
    )
    return [*lines, "  # the front (ports are examples)", f"  {shlex.join(front)}"]


def _estimate(plan: Plan) -> str:
    spec = plan.spec
    platform = plan.vllm.platform if plan.vllm else None
    start = ASSUMED_START.get(platform or "cuda", ASSUMED_START["cuda"])
    if platform == "cpu":  # servers that share the cores start no faster together than one after the other
        start *= max(topology.n_servers for topology in spec.topologies)
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
