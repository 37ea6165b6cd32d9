"""The mirror's thread: it can neither stop a study nor work while a server is measured."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from study_data import budgets, config, study
from test_mlflow_browser import server
from test_mlflow_sink import client, parent, runs_of, sink

from tuner.results import TrialResult
from tuner.serving import ServingConfig
from tuner.sinks import aside, pages
from tuner.sinks.aside import Aside, Pace
from tuner.spec import StudySpec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy
RESULTS = budgets()


class Mirror:
    """Writes down what it hears; what it does at each event is given."""

    def __init__(self, work: Callable[[], None] = lambda: None) -> None:
        self.heard: list[str] = []
        self.synced = False
        self._work = work

    def study_started(self, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        self._hear(f"start {len(results)}")

    def trial_started(self, number: int, config: ServingConfig, label: str) -> None:
        self._hear(f"open {number}")

    def phase(self, name: str, *, expected: float | None = None) -> None:
        raise AssertionError("phases are not passed on")

    def trial_ended(self, result: TrialResult, results: Sequence[TrialResult]) -> None:
        self._hear(f"publish {len(results)}")

    def study_ended(self, results: Sequence[TrialResult]) -> None:
        self._hear(f"end {len(results)}")
        self.synced = True

    def hint(self, program: str = "mlflow") -> str:
        return program

    def _hear(self, what: str) -> None:
        self._work()
        self.heard.append(what)


def made(mirror: Mirror, pace: Pace | None = None) -> tuple[Aside, list[str]]:
    said: list[str] = []
    return Aside(mirror, pace or Pace(), said.append, "tune show --sync runs/s"), said


def live(found: Aside, results: Sequence[TrialResult] = RESULTS) -> None:
    """Live through a study whose trials take no time."""
    found.study_started(study(), [])
    for n, result in enumerate(results):
        found.trial_started(result.number, result.config, "")
        for phase in ("starting", "warm-up", "replay 1 of 1", "stopping"):
            found.phase(phase)
        found.trial_ended(result, results[: n + 1])
    found.study_ended(results)


def test_the_mirror_hears_the_beginning_first_and_the_end_last() -> None:
    """Whatever is overtaken in between, the newest state arrives and the study is synced."""
    mirror = Mirror()
    found, said = made(mirror)
    live(found)

    assert (mirror.heard[0], mirror.heard[-1]) == ("start 0", "end 9")
    assert found.synced
    assert said == []


def test_a_slow_mirror_is_told_the_newest_state_only() -> None:
    """What piled up while it was busy is one event, not a queue of old ones."""
    ready = threading.Event()
    mirror = Mirror(ready.wait)
    found, _ = made(mirror)
    found.study_started(study(), [])
    for n, result in enumerate(RESULTS):
        found.trial_started(result.number, result.config, "")
        found.trial_ended(result, RESULTS[: n + 1])
    ready.set()
    found.study_ended(RESULTS)

    assert mirror.heard in (["start 0", "end 9"], ["start 0", "publish 9", "end 9"])


def test_a_mirror_that_hangs_does_not_hold_the_study_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All trials go by while it hangs; at the end it is waited for so long and the user is told what to do."""
    monkeypatch.setattr(aside, "WITHOUT_PROGRESS", 0.5)
    for_ever = threading.Event()
    mirror = Mirror(for_ever.wait)
    pace = Pace()

    def hang() -> None:
        with pace.call():
            for_ever.wait(60)

    mirror._work = hang
    found, said = made(mirror, pace)
    live(found)
    for_ever.set()

    assert not found.synced
    assert said == ["MLflow is not up to date; the run folder has everything, and tune show --sync runs/s sends it"]


def test_nothing_is_published_while_a_server_is_measured() -> None:
    """From the warm-up to the last answer the thread makes no step; before and after it does."""
    pace, steps = Pace(), []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with pace.call():
                pass
            steps.append(1)
            time.sleep(0.001)

    mirror = Mirror(work)
    found, _ = made(mirror, pace)
    found.study_started(study(), [])
    found.trial_started(0, config(), "")
    found.phase("starting")
    until(lambda: len(steps) > 10)
    found.phase("warm-up")
    at_first = len(steps)
    time.sleep(0.3)
    found.phase("replay 1 of 1")
    time.sleep(0.3)
    assert len(steps) <= at_first + 1, "the step that was under way may end"
    found.phase("stopping")
    until(lambda: len(steps) > at_first + 10)
    stop.set()
    found.study_ended([])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A server that takes connections and never answers; yields its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def test_a_tracking_server_that_never_answers_costs_the_study_nothing(
    black_hole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real MLflow client, nine trials: all of them go by before its first call has failed."""
    monkeypatch.setattr(aside, "WITHOUT_PROGRESS", 1.0)
    warnings: list[str] = []
    pace = Pace()
    there = sink(tmp_path, tracking_uri=f"http://127.0.0.1:{black_hole}", artifact_root=None, warn=warnings.append,
                 surrounding=pace.call)  # fmt: skip
    found = Aside(there, pace, warnings.append, "tune show --sync runs/s")
    live(found)

    assert not found.synced
    assert warnings == ["MLflow is not up to date; the run folder has everything, and tune show --sync runs/s sends it"]


@pytest.mark.skipif(not pages.has_ui(), reason="the full mlflow is not installed")
def test_a_tracking_server_that_was_dead_for_half_a_study_gets_all_of_it(tmp_path: Path) -> None:
    """Real MLflow server: nobody listens for five trials, then it starts; in the end it has every trial and number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    uri, warnings, pace = f"http://127.0.0.1:{port}", [], Pace()
    there = sink(tmp_path, tracking_uri=uri, artifact_root=None, warn=warnings.append, surrounding=pace.call)
    found = Aside(there, pace, warnings.append, "tune show --sync runs/s")
    found.study_started(study(), [])
    for n, result in enumerate(RESULTS[:5]):
        found.trial_started(result.number, result.config, "")
        found.trial_ended(result, RESULTS[: n + 1])
    until(lambda: bool(warnings))
    with server(f"sqlite:///{tmp_path / 'mlflow.db'}", port, tmp_path / "server.log"):
        for n, result in enumerate(RESULTS[5:], start=5):
            found.trial_started(result.number, result.config, "")
            found.trial_ended(result, RESULTS[: n + 1])
        found.study_ended(RESULTS)

    assert found.synced
    assert "cannot be used" in warnings[0]
    assert not any("not up to date" in said for said in warnings)
    assert parent(tmp_path).info.status == "FINISHED"
    children = {int(run.data.tags["tune.trial"]): run for run in runs_of(tmp_path, "trial")}
    assert sorted(children) == [r.number for r in RESULTS]
    for result in (r for r in RESULTS if r.same_as is None):
        seen = children[result.number].data.metrics
        assert {key: seen.get(pages.metric_key(key)) for key in result.metrics} == {
            key: pytest.approx(1e3 * value) for key, value in result.metrics.items()
        }
    for run in children.values():
        histories = [client(tmp_path).get_metric_history(run.info.run_id, key) for key in run.data.metrics]
        assert all(len({point.step for point in points}) == len(points) for points in histories)
