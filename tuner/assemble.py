"""The switchboard: the only place that picks implementations and joins the rooms into what a verb does."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner import export as exporting
from tuner import gather, measure, origin, units
from tuner import plan as plans
from tuner import spec as specs
from tuner import workload as workloads
from tuner.deployment.launcher import LocalLauncher
from tuner.deployment.program import as_typed
from tuner.deployment.stopping import end_leftovers
from tuner.errors import ExitCode, HostError, Interrupted, SpecError
from tuner.evaluate import LiveEvaluator
from tuner.origin import Address, Origin
from tuner.outside import without_secret
from tuner.plan import Plan
from tuner.results import TrialResult, front, limits
from tuner.seams import Measurement, Sink
from tuner.serving import Json
from tuner.sinks import aside, card, provenance, replayed
from tuner.sinks import verdict as words
from tuner.sinks.bench import to_bench
from tuner.sinks.console import ConsoleSink, rendered, say
from tuner.sinks.runfolder import RunFolder, make_folder, write_atomically, write_json
from tuner.sinks.ticker import Ticker
from tuner.sinks.topologies import is_on_cpu
from tuner.spec import StudySpec
from tuner.study import storage, store
from tuner.study.loop import Study
from tuner.workload import Workload

SYNCING = 1800.0  # seconds that `show --sync` may take, as long as MLflow gets on
STORAGE, MLFLOW = "TUNE_STORAGE", "TUNE_MLFLOW"  # an address with a password need not stand in a process list
NIXL_PLUGIN = Path(__file__).resolve().parent / "inside_vllm" / "nixl_idle"


@dataclass(frozen=True, slots=True)
class Where:
    """Where results go: the runs folder, the tracking URI ("off" for none), the Optuna storage."""

    runs: Path = Path("runs")
    mlflow: str | None = None
    storage: str | None = None


def run(plan: Plan, where: Where) -> int:
    """Run a study in a new run folder; return the exit code.

    Raises:
        HostError: the Optuna storage does not answer, or has such a study of another run.
    """
    where = Where(where.runs, where.mlflow or os.environ.get(MLFLOW), where.storage or os.environ.get(STORAGE))
    if where.storage is not None:
        storage.close(storage.open_storage(where.storage))  # a mistake here leaves no run folder behind
    folder = RunFolder.create(where.runs, plan.spec)
    rows = folder.keep_rows(plan.workload)
    provenance.copy(specs.find_workload(plan.spec.workload.path, plan.source), folder.path / "workload")
    shutil.copyfile(plan.source, folder.path / "study-as-written.yaml")
    begun = Origin(
        uid=origin.new_uid(), study_name=folder.path.name, study=origin.digest_of_study(folder.spec),
        source=str(plan.source), baseline=plan.baseline, workload=origin.facts_of(plan.workload), rows=rows,
        vllm_version=plan.vllm.version if plan.vllm else None, host=plan.host,
        storage=Address.of(where.storage and storage.absolute(where.storage)),
        mlflow=Address.of(where.mlflow),
    )  # fmt: skip
    write_json(folder.path / "plan.json", origin.to_json(begun))
    with folder.locked():
        return _conduct(plan, folder, begun, where)


def resume(path: Path, where: Where, budget: Mapping[str, Any]) -> int:
    """Continue a run folder; return the exit code.

    Raises:
        SpecError: not a run folder, or its study or workload was changed.
        HostError: another vLLM than the run began with, or another tune is at work.
    """
    folder = RunFolder.open(path)
    with folder.locked():
        _refuse_damaged(folder.path / "study.yaml")
        spec, begun = specs.load(folder.path / "study.yaml", budget), folder.origin
        if begun.study != origin.digest_of_study(spec):
            raise SpecError(
                f"{folder.path / 'study.yaml'} was changed since the run began: its results would mix two studies",
                hint=f"start a new run: {as_typed('tune')} run {shlex.quote(str(folder.path / 'study.yaml'))}",
            )
        where = _remembered(begun, where)
        workload = _workload(folder, begun)
        if budget:
            write_atomically(folder.path / "study.yaml", specs.dump(spec))
        return _continue(folder, spec, begun, workload, where)


def _refuse_damaged(study: Path) -> None:
    """Refuse a run's own study that is none any more."""
    try:
        specs.load(study)
    except SpecError as error:
        first = error.message.splitlines()[0].removeprefix(str(study)).lstrip(":")
        raise SpecError(
            f"{study}: was changed or cut off since the run began ({first})",
            hint="put it back as it was, or start a new run",
        ) from error


def _remembered(begun: Origin, where: Where) -> Where:
    """Return where results go: as is said now, else as it was when the run began, a password from the environment."""
    kept, mlflow = where.storage or begun.storage.text, where.mlflow or begun.mlflow.text
    if where.storage is None and begun.storage.lacks_password and not (kept := os.environ.get(STORAGE)):
        raise SpecError(
            f"this run's Optuna storage is {begun.storage.text}, whose password was not written down",
            hint=f"give --storage again, or set {STORAGE}",
        )
    if where.mlflow is None and begun.mlflow.lacks_password and not (mlflow := os.environ.get(MLFLOW)):
        mlflow = begun.mlflow.text
        say(f"the password for MLflow at {mlflow} was not written down: if it asks, give --mlflow again, "
             f"or set {MLFLOW}")  # fmt: skip
    return replace(where, storage=kept, mlflow=mlflow)


def _workload(folder: RunFolder, begun: Origin) -> Workload:
    """Return the rows that the run began with.

    Raises:
        SpecError: the run folder's copy of them was changed.
    """
    if folder.digest_of_rows() != begun.rows:
        raise SpecError(
            f"{folder.path / 'workload'}: was changed since the run began: its results would mix two workloads",
            hint="put it back as it was, or start a new run",
        )
    known = begun.workload
    rows = workloads.load(folder.path / "workload")
    return replace(rows, name=known["name"], sha256=known["sha256"], transforms=tuple(known["transforms"]))


def _continue(folder: RunFolder, spec: StudySpec, begun: Origin, workload: Workload, where: Where) -> int:
    found = plans.check(spec, folder.path / "study.yaml", workload, None)
    version = found.vllm and found.vllm.version
    if begun.vllm_version and version != begun.vllm_version:
        raise HostError(
            f"{folder.path} was begun with vLLM {begun.vllm_version}, here is {version}: their numbers do not mix",
            hint=f"start a new run, or go on where vLLM {begun.vllm_version} is",
        )
    if moved := [name for name, value in begun.host.items() if found.host.get(name, value) != value]:
        told = ", ".join(f"{name} {begun.host[name]}, here {found.host[name]}" for name in moved)
        raise HostError(
            f"{folder.path} was begun where vLLM's defaults are others ({told}): their numbers do not mix",
            hint="go on where it was begun, or start a new run",
        )
    for pid in end_leftovers(folder.path / "processes.jsonl"):
        say(f"ended process {pid}, left over from the interrupted run")
    for file in folder.set_damaged_aside():
        say(f"{file}: damaged; kept as {file.name}.damaged, and its trial is measured again")
    return _conduct(replace(found, baseline=begun.baseline), folder, begun, where)


def _keep_card(folder: RunFolder, workload: Workload) -> None:
    """Write the card of what is replayed beside the rows, once."""
    if not (folder.path / "workload" / card.PAGE).is_file():
        card.write(folder.path / "workload", workload, name=card.PAGE)


def _measuring(plan: Plan) -> dict[str, Json]:
    """Return arguments that let the server time each request itself, where this vLLM knows them."""
    known = plan.vllm.flags if plan.vllm else {}
    wanted = ["enable_per_request_metrics"]
    # vllm-router drops the request's `continuous_usage_stats`, which says how many tokens a chunk has.
    wanted += ["enable_force_include_usage"] if any(t.is_group for t in plan.spec.topologies) else []
    return {name: True for name in wanted if name in known}


def _plugin(plan: Plan) -> Path | None:
    """Return the folder of the plugin that NIXL needs where the CPU is the device."""
    return NIXL_PLUGIN if plan.vllm is not None and plan.vllm.platform == "cpu" else None


def _conduct(plan: Plan, folder: RunFolder, begun: Origin, where: Where) -> int:
    for note in plan.notes:
        say(note)
    spec = plan.spec
    _keep_card(folder, plan.workload)
    launcher = LocalLauncher(
        port=spec.vllm.port, gpus=plan.gpus, start_timeout=spec.vllm.start_timeout,
        stop_patience=spec.vllm.stop_timeout, stop_command=spec.vllm.stop_command or (),
        journal=folder.path / "processes.jsonl", measuring=_measuring(plan), share_devices=spec.share_devices,
        plugin=_plugin(plan),
    )  # fmt: skip
    evaluator = LiveEvaluator(launcher, spec, plan.workload, plan.vocab_size)
    mirror = _mirror(folder, spec, begun, plan.workload, where)
    sinks: list[Sink] = [ConsoleSink(), *([mirror] if mirror else [])]
    url, shared = where.storage or folder.storage, where.storage is not None
    say(f"run folder {folder.path}; continue it after an interruption with: {_resuming(folder)}")
    try:
        with store.opened(begun.study_name, begun.uid, url, say, shared=shared) as (study, check_writer):
            results = Study(
                spec, study, folder, evaluator, sinks, plan.host, plan.baseline, begun.vllm_version, check_writer
            ).run()
    except HostError as error:
        raise HostError(error.message, hint=error.hint or f"continue with: {_resuming(folder)}") from error
    except (Interrupted, KeyboardInterrupt):
        said = "interrupted; everything measured so far is kept"
        raise Interrupted(said, hint=f"continue with: {_resuming(folder)}") from None
    with suppress(BrokenPipeError):  # whoever read has gone; the exit code still says how it ended
        print(_closing(spec, results, folder, mirror), end="", flush=True)
    return _exit_code(spec, results)


def _resuming(folder: RunFolder) -> str:
    return f"{as_typed('tune')} run --resume {shlex.quote(str(folder.path))}"


def _mirror(folder: RunFolder, spec: StudySpec, begun: Origin, workload: Workload, where: Where) -> Any:
    """Return MLflow as a sink that cannot hold the study up, None without MLflow."""
    if where.mlflow == "off":
        return None
    pace = aside.Pace()
    published = _mlflow(folder, spec, begun, workload, where.mlflow, surrounding=pace.call)
    return aside.Aside(published, pace, say, _syncing(folder))


def _mlflow(
    folder: RunFolder, spec: StudySpec, begun: Origin, workload: Workload, address: str | None, **more: Any
) -> Any:
    from tuner.sinks import mlflow, pages  # noqa: PLC0415 (two seconds and 80 MB, only when asked for)

    uri, artifacts = (address, None) if address else mlflow.embedded(folder.path.parent)
    return mlflow.MlflowSink(
        tracking_uri=uri,
        artifact_root=artifacts,
        study_uid=begun.uid,
        run_folder=folder.path,
        workload=pages.WorkloadFacts.of(workload),
        experiment=f"{pages.short_model(spec.model)} on {workload.name}",
        vllm_version=begun.vllm_version,
        warn=say,
        **more,
    )


def sync(path: Path, where: Where) -> str:
    """Bring MLflow to what a run folder says; return what to tell the user.

    Raises:
        SpecError: not a run folder, or its run keeps no MLflow.
        HostError: another tune is at work there, or MLflow cannot be used.
    """
    folder = RunFolder.open(path)
    with folder.locked():
        spec, begun, results = folder.spec, folder.origin, folder.read_all()
        where = _remembered(begun, replace(where, storage=folder.storage))
        if where.mlflow == "off":
            raise SpecError(f"{path}: was begun with --mlflow off", hint="say where: --mlflow URI")
        if where.mlflow:
            say(f"sending {folder.path} to MLflow at {without_secret(where.mlflow)}")
        pace = aside.Pace()
        published = _mlflow(folder, spec, begun, _workload(folder, begun), where.mlflow, surrounding=pace.call)
        mirror = aside.Aside(published, pace, say, _syncing(folder), SYNCING)
        mirror.study_started(spec, results)
        mirror.study_ended(results)
    if not mirror.synced:
        raise HostError("MLflow is not up to date", hint=f"try again: {_syncing(folder)}")
    return f"MLflow has all {len(results)} trials of {folder.path}\n{mirror.hint(as_typed('mlflow'))}\n"


def _syncing(folder: RunFolder) -> str:
    return f"{as_typed('tune')} show --sync {shlex.quote(str(folder.path))}"


def _exit_code(spec: StudySpec, results: Sequence[TrialResult]) -> int:
    if spec.slo:
        return ExitCode.OK if any(r.slos_met for r in results) else ExitCode.SLO_NOT_MET
    return ExitCode.OK if front(results, *spec.objective_metrics) else ExitCode.SLO_NOT_MET


def _closing(spec: StudySpec, results: Sequence[TrialResult], folder: RunFolder, mirror: Any) -> str:
    """Return the last words of a study: verdict, Pareto front, what to do next."""
    parts, commands = [words.verdict(spec, results)], []
    if any(r.is_measured for r in results):
        parts += ["", _front_table(spec, results)]
    if (best := exporting.best(results, spec)) is not None:
        commands.append(_export(best, spec, results, folder, folder.path / "best").start_line)
    commands.append(f"{as_typed('tune')} show {shlex.quote(str(folder.path))}")
    if mirror is not None:
        commands += mirror.hint(as_typed("mlflow")).splitlines()
        parts += [] if mirror.synced else [f"MLflow lacks a part of this run; {_syncing(folder)} sends it."]
    return "\n".join([*parts, "Next:", *(f"  {command}" for command in commands)]) + "\n"


def _front_table(spec: StudySpec, results: Sequence[TrialResult]) -> str:
    """Return the Pareto front beside the default and the baseline."""
    x, y = spec.objective_metrics
    numbers = {r.number for r in front(results, x, y)}
    shown = numbers | {r.number for r in results if r.label and r.is_measured and r.same_as is None}
    return f"Pareto front of {x} against {y}:\n{rendered(words.render_trials(spec, results, only=shown))}"


def show(target: Path) -> str:
    """Return a run's trials, front and verdict, or a workload's card."""
    if not (target / "study.yaml").is_file() and not gather.is_workload(target):
        with suppress(SpecError):
            target = specs.find_workload(str(target), None)
    if not gather.is_workload(target):
        folder = RunFolder.open(target)
        spec, results = folder.spec, folder.read_all()
        told = rendered(words.render_trials(spec, results)) + words.verdict(spec, results) + "\n"
        return told + _interrupted(folder, results)
    return gather.card_of(target)


def _interrupted(folder: RunFolder, results: Sequence[TrialResult]) -> str:
    """Say which trial was begun last, if it has no result."""
    begun = max((int(p.name) for p in (folder.path / "trials").glob("[0-9]*") if p.name.isdigit()), default=-1)
    if begun <= max((result.number for result in results), default=-1):
        return ""
    return f"trial {begun} was begun and has no result; unless it is running, go on with: {_resuming(folder)}\n"


def replay(asked: measure.Wanted, out: Path | None, bench_file: Path | None, *, as_json: bool) -> int:
    """Replay a workload at a URL, say and write what was found; return the exit code."""
    if out is not None and ((out / "metrics.json").exists() or any(out.glob("repeat-*"))):
        raise SpecError(f"-o {out}: holds a replay already", hint="name another folder, or remove this one")
    for folder in filter(None, (out, bench_file and bench_file.parent)):
        make_folder(folder)
    ticker = Ticker()
    with ExitStack() as unless_measured:
        if out is not None:
            unless_measured.callback(_leave_out, out)
        try:
            found = measure.run(asked, ticker, ticker.count)
        finally:
            ticker.ended()
        unless_measured.pop_all()
    if out is not None:
        _keep(found, out)
    if bench_file is not None:
        lines = [json.dumps(to_bench(found, repeat)) for repeat in range(len(found.replays))]
        write_atomically(bench_file, "\n".join(lines) + "\n")
    with suppress(BrokenPipeError):
        text = json.dumps(replayed.to_json(found), indent=1) + "\n" if as_json else rendered(replayed.render(found))
        print(text, end="", flush=True)
    return ExitCode.SLO_NOT_MET if found.slos_met is False else ExitCode.OK


def _leave_out(folder: Path) -> None:
    """Remove a folder in which nothing was written."""
    with suppress(OSError):  # it holds something else
        folder.rmdir()


def _keep(found: Measurement, out: Path) -> None:
    """Write records, metrics and the picture of each repeat; of several, each in a folder of its own."""
    from tuner.sinks import timeline  # noqa: PLC0415 (a second, only when asked for)

    several = len(found.replays) > 1
    if several:
        write_json(out / "metrics.json", units.to_outside(found.metrics))
    for number, (seen, repeat) in enumerate(zip(found.replays, found.repeats, strict=True), start=1):
        folder = out / f"repeat-{number}" if several else out
        make_folder(folder)
        seen.records.save(folder / "records.npz")
        write_json(folder / "metrics.json", units.to_outside(repeat.metrics))
        title = f"{found.workload.name} at {found.url} ({found.model})" + (f", repeat {number}" if several else "")
        (folder / "replay.png").write_bytes(timeline.figure_png(seen, found.slos, title=title))


def export_run(target: Path, out: Path | None, pick: str) -> str:
    """Export a trial of a run; return what to tell the user."""
    folder = RunFolder.open(target)
    spec, results = folder.spec, folder.read_all()
    chosen = exporting.pick(results, spec, pick)
    exported = _export(chosen, spec, results, folder, out or folder.path / "best")
    slos = limits(spec.slo, results)
    missed = [s for s in slos if chosen.excess.get(s.metric, 1) > 0]
    miss = f"; it does NOT meet {', '.join(s.metric for s in missed)}" if missed else ""
    *others, last = map(str, exported.files)
    written = f"{', '.join(others)} and {last}"
    return f"trial {chosen.number} written to {written}{miss}\nstart it with:\n  {exported.start_line}\n"


def _export(
    chosen: TrialResult, spec: StudySpec, results: Sequence[TrialResult], folder: RunFolder, out: Path
) -> exporting.Exported:
    workload = folder.origin.workload
    facts = {
        "Workload": f"{workload['name']}, sha256 {workload['sha256']}"
        + "".join(f"; {t}" for t in workload["transforms"]),
        "Run folder": folder.path.name,
    }
    config = chosen.config
    return exporting.write(
        chosen, spec, limits(spec.slo, results), out, facts, as_typed(config.command[0]),
        front_program=as_typed(config.front.command[0]), gpus=shutil.which("nvidia-smi") is not None,
        plugin=NIXL_PLUGIN if config.topology.is_pd and is_on_cpu(chosen) else None,
    )  # fmt: skip
