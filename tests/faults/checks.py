"""What must hold after every fault: nothing of ours is left, no finished trial is lost, all three records agree."""

import fcntl
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from mlflow import MlflowClient
from mlflow.entities import Run
from optuna.trial import FrozenTrial, TrialState

from tests.faults.project import NAME, PATIENCE, BrokenError, Project, Tune
from tuner.errors import FailureKind
from tuner.results import TrialResult, from_json
from tuner.sinks.runfolder import RunFolder

LEFT_AFTER = 10.0  # seconds: what the README promises
OBJECTIVES = ("ttft_p99", "itl_p99")


@dataclass
class Verdict:
    """What a fault did to a study; it was survived when nothing is wrong, lost or leaked."""

    kind: str
    seed: int
    moment: str = ""
    wrong: list[str] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    leaked: list[str] = field(default_factory=list)
    folder: Path | None = None

    @property
    def survived(self) -> bool:
        return not (self.wrong or self.lost or self.leaked)

    def complaints(self) -> list[str]:
        return [
            *self.wrong,
            *(f"finished trial {number} is lost or changed" for number in sorted(self.lost)),
            *(f"left over: {what}" for what in self.leaked),
        ]


def ended(tune: Tune, *codes: int, says: str = "", patience: float = PATIENCE) -> int:
    """Wait for a tune's end and hold its exit code and words against what they must be.

    Args:
        tune: was started, and may have ended.
        codes: allowed exit codes.
        says: a pattern that its words must match: the cause.
        patience: seconds until it must have ended.

    Raises:
        BrokenError: another code, no words, no advice, or a traceback.
    """
    code = tune.end(patience)
    said, words = tune.said, f"tune {' '.join(tune.words)}"
    if "Traceback" in said or "Traceback" in tune.printed:
        raise BrokenError(f"{words} shows a traceback (exit {code}): {said.strip().splitlines()[-1][:300]}")
    if code not in codes:
        raise BrokenError(f"{words}: exit {code}, not {' or '.join(map(str, codes))}; said: {_last(said)}")
    if says and not re.search(says, said):
        raise BrokenError(f"{words}: does not say {says!r}, but: {_last(said)}")
    if code not in {0, 3} and code > 0 and not re.search(r"^tune: .+\n {6}\S.+$", said, re.MULTILINE):
        raise BrokenError(f"{words}: exit {code} without a line and what to do; said: {_last(said)}")
    return code


def _last(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-3:])[:500] or "nothing"


def nothing_left(project: Project, verdict: Verdict) -> None:
    """Within ten seconds from now no process, port, lock or shared memory of the project's tunes is left."""
    deadline = time.monotonic() + LEFT_AFTER
    while (left := list(_left(project))) and time.monotonic() < deadline:
        time.sleep(0.1)
    verdict.leaked += left
    if left:
        project.destroy()


def _left(project: Project) -> Iterator[str]:
    for process in project.processes():
        yield f"process {process.pid} ({_name(process.name)})"
    ports = {entry["port"] for entry in project.journal() if "port" in entry}
    yield from (f"port {port}" for port in ports & _listening())
    yield from (f"lock of port {port}" for port in ports & _locked_ports())
    yield from (path for path in project.shared_memory if Path(path).exists())
    lock = project.run_folder / "lock"
    if lock.exists():
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield f"lock {lock}"


def _name(name: Callable[[], str]) -> str:
    try:
        return name()
    except Exception:  # noqa: BLE001 (it ended while it was looked at)
        return "?"


def _listening() -> set[int]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def _locked_ports() -> set[int]:
    return {int(port) for port in re.findall(r"@tune-port-(\d+)$", Path("/proc/net/unix").read_text(), re.MULTILINE)}


def nothing_lost(project: Project, verdict: Verdict) -> None:
    """Every result that was complete at some moment is there with the same content."""
    now = project.results()
    verdict.lost |= {number for number, text in project.finished.items() if now.get(number) != text}


def complete(project: Project, verdict: Verdict, *, failures: int = 0, mirrored: bool = True) -> None:
    """The study reached its end: its budget is spent, nothing was measured twice, and all records agree.

    Args:
        project: whose study has ended.
        verdict: gets what is wrong.
        failures: how many of the trials may have failed through the fault.
        mirrored: MLflow is held against the run folder too.
    """
    results = RunFolder(project.run_folder).read_all()
    counted = [r for r in results if r.same_as is None and _is_settled(r)]
    if len(counted) != project.trials:
        verdict.wrong.append(f"{len(counted)} trials count, the budget is {project.trials}")
    if (n := sum(r.failure is not None for r in counted)) > failures:
        verdict.wrong.append(f"{n} trials failed, the fault explains {failures}")
    seen = Counter(json.dumps(dict(r.config.args), sort_keys=True) for r in counted)
    twice = [key for key, n in seen.items() if n > 1]
    verdict.wrong += [f"measured twice: {key}" for key in twice]
    study = optuna.load_study(study_name=NAME, storage=f"sqlite:///{project.storage}")
    verdict.wrong += list(_against_optuna(results, study.get_trials(deepcopy=False)))
    if mirrored:
        verdict.wrong += list(_against_mlflow(results, project.tracking_uri, study.user_attrs["uid"]))


def _is_settled(result: TrialResult) -> bool:
    return result.failure is None or result.failure.kind.is_configurations_fault


def _against_optuna(results: list[TrialResult], trials: list[FrozenTrial]) -> Iterator[str]:
    known = {trial.number: trial for trial in trials}
    again = {trial.user_attrs.get("retry_from") for trial in trials}  # a result that was damaged is measured again
    kept = {result.number: result for result in results}
    for trial in trials:
        if trial.state == TrialState.RUNNING:
            yield f"Optuna: trial {trial.number} is still running"
        if trial.state == TrialState.COMPLETE and trial.number not in {*kept, *again}:
            yield f"Optuna: trial {trial.number} is complete, the run folder has no result"
    for number, result in kept.items():
        state = known[number].state if number in known else None
        wanted = TrialState.COMPLETE if _is_settled(result) else TrialState.FAIL
        if state is not wanted:
            yield f"Optuna: trial {number} is {state and state.name}, its result says {wanted.name}"
        elif result.failure is None and not _are_its_values(result, known[number].values):
            yield f"Optuna: trial {number} was told {known[number].values}, which are not its result's"


def _are_its_values(result: TrialResult, told: list[float]) -> bool:
    return all(
        math.isclose(value, math.log(result.metrics[name]), rel_tol=1e-6, abs_tol=1e-6)
        for name, value in zip(OBJECTIVES, told, strict=True)
        if result.metrics.get(name, 0) > 0
    )


def _against_mlflow(results: list[TrialResult], uri: str, uid: str) -> Iterator[str]:
    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.`tune.study_uid` = '{uid}'")
    parents = [run for run in runs if run.data.tags.get("tune.kind") == "study"]
    children: dict[int, list[Run]] = {}
    for run in runs:
        if run.data.tags.get("tune.kind") == "trial":
            children.setdefault(int(run.data.tags["tune.trial"]), []).append(run)
    if [run.info.status for run in parents] != ["FINISHED"]:
        yield f"MLflow: the study's runs are {[run.info.status for run in parents]}, not one that is FINISHED"
    for result in results:
        found = children.pop(result.number, [])
        if len(found) != 1:
            yield f"MLflow: {len(found)} runs of trial {result.number}"
        elif (complaint := _differs(found[0], result)) is not None:
            yield f"MLflow: trial {result.number}: {complaint}"
    for number, left in children.items():
        if any(run.info.status != "KILLED" and run.data.tags.get("tune.outcome") != "lost" for run in left):
            yield f"MLflow: trial {number} is {left[0].info.status}, the run folder has no result"


def _differs(run: Run, result: TrialResult) -> str | None:
    wanted = "FINISHED" if result.failure is None else "KILLED" if _is_interrupted(result) else "FAILED"
    if run.info.status != wanted:
        return f"is {run.info.status}, not {wanted}"
    if "tune.synced" not in run.data.tags:
        return "was not sent to its end"
    if not result.is_measured or result.same_as is not None:
        return None
    told, measured = run.data.metrics.get("ttft_p99_ms"), result.metrics.get("ttft_p99")
    if (told is None and measured is None) or (told and measured and math.isclose(told, measured * 1e3)):
        return None
    return f"TTFT p99 is {told} ms, the result's {measured} s"


def _is_interrupted(result: TrialResult) -> bool:
    return result.failure is not None and result.failure.kind is FailureKind.INTERRUPTED


def failed_kinds(project: Project) -> list[str]:
    """Return why trials failed, interruptions aside, in order."""
    found = [from_json(text) for _, text in sorted(project.results().items())]
    return [str(r.failure.kind) for r in found if r.failure is not None and not _is_interrupted(r)]
