"""A mirror of a study kept up to date in a thread of its own, so that it can neither stop nor slow the study.

What the thread has to say is overtaken by what comes later: only the newest state waits to be published. It computes
and talks while servers start and end, and holds still while one is measured, since the load generator shares
this host; a call that is under way when the clock starts only waits for an answer.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from tuner.results import TrialResult
from tuner.seams import Sink
from tuner.serving import ServingConfig
from tuner.spec import StudySpec

UNMEASURED = {"starting", "stopping"}
SETTLE = 3.0  # for what is being computed when a replay is about to begin
AT_THE_END, WITHOUT_PROGRESS, UNSAID = 60.0, 15.0, 5.0
START, PUBLISH, OPEN, END = range(4)  # in this order


class Mirror(Sink, Protocol):
    """A sink that knows whether all it was told has arrived."""

    synced: bool

    def hint(self, program: str = "mlflow") -> str:
        """Return what to type, and where to look."""


class Pace:
    """When the thread of a mirror may work, and whether it gets on."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_free = True
        self._computes = False
        self._last_call = time.monotonic()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surround a call to the tracking server; it starts, and what follows it goes on, when there is time."""
        self._hold()
        try:
            yield
        finally:
            self._hold()
            with self._condition:
                self._computes = True
                self._last_call = time.monotonic()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Surround everything the thread does."""
        self._hold()
        with self._condition:
            self._computes = True
        try:
            yield
        finally:
            with self._condition:
                self._computes = False
                self._condition.notify_all()

    def _hold(self) -> None:
        with self._condition:
            self._computes = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_free)

    def free(self) -> None:
        """Let the thread work."""
        with self._condition:
            self._is_free = True
            self._condition.notify_all()

    def quiet(self) -> None:
        """Let the thread hold still, and wait a moment until it does."""
        with self._condition:
            self._is_free = False
            self._condition.wait_for(lambda: not self._computes, timeout=SETTLE)

    @property
    def stalled(self) -> float:
        """Seconds since the last answer of the tracking server."""
        return time.monotonic() - self._last_call


class Aside:
    """A sink that passes what it hears to a mirror, in a thread.

    Args:
        mirror: what publishes; its calls are surrounded by `pace.call`.
        pace: shared with it.
        warn: is told at the end when that takes long, and when the mirror is not up to date.
        how_to_sync: the command that sends what is missing.
        patience: seconds that the end is waited for, as long as the tracking server gets on.
    """

    def __init__(
        self, mirror: Mirror, pace: Pace, warn: Callable[[str], None], how_to_sync: str, patience: float = AT_THE_END
    ) -> None:
        self._patience = patience
        self._mirror, self._pace, self._warn, self._how = mirror, pace, warn, how_to_sync
        self._waiting: dict[int, Callable[[], None]] = {}
        self._condition = threading.Condition()
        self._is_done = False
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    @property
    def synced(self) -> bool:
        """Whether everything of the study arrived."""
        return self._is_done and self._mirror.synced

    def hint(self, program: str = "mlflow") -> str:
        """Return what to type, and where to look."""
        return self._mirror.hint(program)

    def study_started(self, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        """Publish what is already measured."""
        self._pace.free()
        self._thread.start()
        self._put(START, lambda: self._mirror.study_started(spec, results))

    def trial_started(self, number: int, config: ServingConfig, label: str) -> None:
        """Show what is being tried."""
        self._pace.free()
        self._put(OPEN, lambda: self._mirror.trial_started(number, config, label))

    def phase(self, name: str, *, expected: float | None = None) -> None:
        """Hold still while a server is measured."""
        del expected
        if name in UNMEASURED:
            self._pace.free()
        else:
            self._pace.quiet()

    def trial_ended(self, result: TrialResult, results: Sequence[TrialResult]) -> None:
        """Publish the trial, and what it changes about the others and the study."""
        self._pace.free()
        with self._condition:
            self._waiting.pop(OPEN, None)  # overtaken
        self._put(PUBLISH, lambda: self._mirror.trial_ended(result, results))

    def study_ended(self, results: Sequence[TrialResult]) -> None:
        """Publish the end and wait for it, as long as the tracking server gets on."""
        self._pace.free()
        with self._condition:
            self._waiting = {kind: job for kind, job in self._waiting.items() if kind == START}
        self._put(END, lambda: self._mirror.study_ended(results))
        with suppress(KeyboardInterrupt):  # the study is over, an interrupt is of this waiting
            self._await_end()
        if not self.synced:
            self._warn(f"MLflow is not up to date; the run folder has everything, and {self._how} sends it")

    def _await_end(self) -> None:
        began, said = time.monotonic(), False
        with self._condition:
            while not self._is_done and (waited := time.monotonic() - began) < self._patience:
                if min(self._pace.stalled, waited) > WITHOUT_PROGRESS:
                    return
                if waited > UNSAID and not said:
                    said = True
                    self._warn("waiting for MLflow; Ctrl-C leaves what is missing for later")
                self._condition.wait(0.2)

    def _put(self, kind: int, job: Callable[[], None]) -> None:
        with self._condition:
            self._waiting[kind] = job
            self._condition.notify_all()

    def _work(self) -> None:
        kind = START
        while kind != END:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._waiting))
                kind = min(self._waiting)
                job = self._waiting.pop(kind)
            with self._pace.work():
                job()
        with self._condition:
            self._is_done = True
            self._condition.notify_all()
