"""Kill a study before every single step that reaches the disk, resume it, and compare with one that was left alone.

    python -m tests.kill_points [--mlflow] [--twice] [--sample N --seed S]

A step is a commit of a database that wrote something (Optuna's or MLflow's), a file renamed into its place, or an
artifact copied. Killed before step k means killed after step k - 1, so all k together are before and after every one.
The evaluator's answer depends on the configuration alone; one configuration is out of memory and one is lost to a
late client the first time. `--twice` kills the resumed study as well, before one of its first steps. Each point is a
process of its own, forked from one that has everything loaded, and ends by SIGKILL.

The last line is `RESULT points=... clean=...`.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.trial import TrialState

from tuner import spec as specs
from tuner.errors import FailureKind, InvalidReplay, StartError
from tuner.results import Repeat, TrialResult
from tuner.seams import Evaluation, Progress, Sink
from tuner.serving import Json, ServingConfig
from tuner.sinks.runfolder import RunFolder
from tuner.slo import Slo
from tuner.study import store
from tuner.study.loop import Study

HOST: dict[str, Json] = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "max_model_len": 4096,
                         "long_prefill_token_threshold": 0}  # fmt: skip
STUDY = """\
name: s
model: m
search_space:
  max_num_batched_tokens: {low: 128, high: 8192, log: true}
  max_num_seqs: [32, 64, 128]
topologies: [2x, 1p1d]
workload: w
slo: [ttft=800ms, itl=0.9x]
budget: {trials: 7}
"""
BASELINE = ServingConfig("m", {"max_num_batched_tokens": 16384})
WRITES = ("INSERT", "UPDATE", "DELETE", "CREATE", "ALTER")
PATIENCE = 120.0


@dataclass(slots=True)
class Steps:
    """Counts what reaches the disk, and kills this process before one of them."""

    kill_before: int | None = None
    n: int = 0

    def step(self) -> None:
        self.n += 1
        if self.n == self.kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", self._executes)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", self._commits)
        for owner, name in ((os, "replace"), (shutil, "copy2"), (shutil, "copyfile")):
            setattr(owner, name, self._before(getattr(owner, name)))

    def _executes(self, connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip().upper().startswith(WRITES):
            connection.info["wrote"] = True

    def _commits(self, connection: Any) -> None:
        if connection.info.pop("wrote", False):
            self.step()

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **more: Any) -> Any:
            self.step()
            return function(*args, **more)

        return stepped


@dataclass(frozen=True, slots=True)
class Model:
    """An evaluator whose answer depends on the configuration, and on what the run folder knows of it."""

    folder: RunFolder

    def evaluate(self, config: ServingConfig, slos: Sequence[Slo], directory: Path, progress: Progress) -> Evaluation:
        given = config.for_role(config.topology.roles[-1])
        budget, seqs = given.get("max_num_batched_tokens", 2048), given.get("max_num_seqs", 128)
        assert isinstance(budget, int)
        assert isinstance(seqs, int)
        if budget > 4096 and config != BASELINE:
            raise StartError(FailureKind.OOM, "out of memory")
        if config.topology.is_pd and not any(r.failure and r.config == config for r in self.folder.read_all()):
            raise InvalidReplay(FailureKind.CLIENT_LAG, "the client was late")
        numbers = {"ttft_p99": 0.4 + 40 / budget + seqs / 1e4, "itl_p99": 0.04 + budget / 1e4 + seqs / 1e5}
        return Evaluation((Repeat(numbers),), {}, {"replay": 1.0})


def run(path: Path, *, mlflow: bool) -> list[TrialResult]:
    """Begin or continue the study in a folder."""
    spec, folder = specs.parse(STUDY, "s.yaml"), RunFolder(path)
    sinks: list[Sink] = [_mlflow(path)] if mlflow else []
    with store.opened("s", "uid", folder.storage) as (study, _):
        return Study(spec, study, folder, Model(folder), sinks, HOST, BASELINE).run()


def _mlflow(path: Path) -> Any:
    from tuner.sinks import plots
    from tuner.sinks.mlflow import MlflowSink, embedded
    from tuner.sinks.pages import WorkloadFacts
    from tuner.workload import Request, Workload

    plots.figure_html, plots.figure_png = (lambda *_, **__: "figure"), (lambda *_, **__: b"figure")  # a second each
    uri, artifacts = embedded(path.parent)
    facts = WorkloadFacts.of(Workload("w", (Request(0.0, 10, 5), Request(1.0, 10, 5)), "0" * 64))
    return MlflowSink(tracking_uri=uri, artifact_root=artifacts, study_uid="uid", run_folder=path, workload=facts,
                      experiment="m on w", warn=lambda _: None)  # fmt: skip


def story(results: Sequence[TrialResult]) -> list[Any]:
    """Return what a study found, in order and without trial numbers; what was lost and made again is one."""
    by_number = {r.number: r for r in results}
    kept = [r for r in results if r.failure is None or r.failure.kind.is_configurations_fault]
    return [
        [r.label, str(r.config), dict(r.params), dict(r.metrics), r.slos_met, r.failure and str(r.failure.kind),
         None if r.same_as is None else str(by_number[r.same_as].config)]
        for r in kept
    ]  # fmt: skip


def disagreements(path: Path, results: Sequence[TrialResult], *, mlflow: bool) -> Iterator[str]:
    """Say where Optuna's storage, the run folder and MLflow do not agree."""
    study = optuna.load_study(study_name="s", storage=RunFolder(path).storage)
    kept = {r.number: r for r in results}
    for trial in study.trials:
        result = kept.get(trial.number)
        is_lost = result is None or (result.failure is not None and not result.failure.kind.is_configurations_fault)
        wanted = TrialState.FAIL if is_lost else TrialState.COMPLETE
        if trial.state != wanted:
            yield f"trial {trial.number} is {trial.state.name} in Optuna, {wanted.name} by the run folder"
        if not is_lost and set(trial.constraints) != {"measured", "ttft_p99", "itl_p99"}:
            yield f"trial {trial.number} has constraints {sorted(trial.constraints)}"
    if strangers := sorted(set(kept) - {t.number for t in study.trials}):
        yield f"Optuna does not know trials {strangers}"
    if mlflow:
        yield from _mlflow_disagreements(path, kept)


def _mlflow_disagreements(path: Path, kept: dict[int, TrialResult]) -> Iterator[str]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{path.parent / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()], max_results=1000)
    parents = [r for r in runs if r.data.tags.get("tune.kind") == "study"]
    children = [r for r in runs if r.data.tags.get("tune.kind") == "trial"]
    if len(parents) != 1 or parents[0].info.status != "FINISHED":
        yield f"{len(parents)} parent runs: {[r.info.status for r in parents]}"
    numbers = [int(r.data.tags["tune.trial"]) for r in children]
    if len(numbers) != len(set(numbers)) or not set(kept) <= set(numbers):
        yield f"MLflow has trials {sorted(numbers)}, the run folder {sorted(kept)}"
    for child in children:
        result = kept.get(int(child.data.tags["tune.trial"]))
        if result is None:
            if child.info.status != "KILLED":
                yield f"{child.info.run_name} has no result and is {child.info.status}"
            continue
        told = {key: 1e3 * value for key, value in result.metrics.items()}
        seen = {key: child.data.metrics.get(f"{key}_ms") for key in told}
        if any(seen[key] is None or abs(seen[key] - told[key]) > 1e-6 for key in told):
            yield f"{child.info.run_name}: MLflow has {seen}, the run folder {told}"
        if any(len(client.get_metric_history(child.info.run_id, key)) != 1 for key in child.data.metrics):
            yield f"{child.info.run_name}: a metric has several points"


def in_a_child(work: Callable[[], object], out: Path | None = None) -> int:
    """Run something in a forked process; return its exit status as `wait` tells it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            found = work()
            if out is not None:
                out.write_text(json.dumps(found))
            code = 0
        except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("a study did not end")


def whole(path: Path, *, mlflow: bool, kill_before: int | None = None) -> dict[str, Any]:
    """Run the study to its end; return its story, what disagrees, and how many steps it took."""
    steps = Steps(kill_before)
    steps.watch()
    results = run(path, mlflow=mlflow)
    taken = steps.n
    steps.kill_before = None
    return {"story": story(results), "wrong": list(disagreements(path, results, mlflow=mlflow)), "steps": taken,
            "numbers": [r.number for r in results]}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bench:
    """Where studies are killed: a folder, an empty MLflow store to copy, and what the undisturbed study found."""

    folder: Path
    mlflow: bool

    def place(self, name: str) -> Path:
        runs = self.folder / name
        (runs / "s").mkdir(parents=True)
        if (template := self.folder / "mlflow.db").exists():
            shutil.copyfile(template, runs / "mlflow.db")
        return runs / "s"

    def found(self, name: str, path: Path) -> dict[str, Any]:
        out = self.folder / f"{name}.json"
        if in_a_child(lambda: whole(path, mlflow=self.mlflow), out) != 0:
            return {"story": None, "wrong": ["the resumed study failed"], "steps": 0}
        return dict(json.loads(out.read_text()))

    def undisturbed(self) -> dict[str, Any]:
        if self.mlflow:
            in_a_child(lambda: _make_store(self.folder / "mlflow.db"))
        return self.found("undisturbed", self.place("undisturbed"))

    def killed(self, before: Sequence[int], reference: dict[str, Any]) -> str | None:
        """Kill before these steps, one session each, then resume; return what is wrong."""
        name = "-".join(map(str, before))
        path = self.place(name)
        for step in before:
            status = in_a_child(lambda step=step: whole(path, mlflow=self.mlflow, kill_before=step))  # type: ignore[misc]
            if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
                return f"no step {step}: the study ended first" if len(before) == 1 else None
        found = self.found(name, path)
        shutil.rmtree(path.parent)
        if found["story"] is not None and found["story"] != reference["story"]:
            pairs = enumerate(zip_longest(found["story"], reference["story"]))
            at, (own, other) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            return f"another study than the undisturbed one, from its trial {at} on: {own} instead of {other}"
        return "; ".join(found["wrong"]) or None


def _make_store(database: Path) -> None:
    from mlflow import MlflowClient

    MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlflow", action="store_true", help="mirror the study to MLflow, and kill in that too")
    parser.add_argument("--twice", action="store_true", help="kill the resumed study too")
    parser.add_argument("--sample", type=int, help="so many points instead of all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.mlflow:
        _mlflow(Path("unused"))  # loaded once, before the forks
    with tempfile.TemporaryDirectory(prefix="tune-kill-") as folder:
        bench = Bench(Path(folder), options.mlflow)
        reference = bench.undisturbed()
        if reference["wrong"]:
            print(f"undisturbed: {reference['wrong']}")
            return 1
        rng = random.Random(options.seed)
        steps = list(range(1, reference["steps"] + 1))
        if options.sample:
            steps = sorted(rng.sample(steps, min(options.sample, len(steps))))
        points = [(step, rng.randint(1, 12)) if options.twice else (step,) for step in steps]
        print(f"{reference['steps']} steps, {len(points)} points, seed {options.seed}", flush=True)
        clean = 0
        for point in points:
            wrong = bench.killed(point, reference)
            clean += wrong is None
            if wrong:
                print(f"killed before {point}: {wrong}", flush=True)
    print(f"RESULT points={len(points)} clean={clean}")
    return 0 if clean == len(points) else 1


if __name__ == "__main__":
    sys.exit(main())
