"""What one room may ask of another, as protocols; assemble.py picks who answers."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuner.records import Records
from tuner.results import Repeat, TrialResult
from tuner.serving import Json, Role, ServingConfig
from tuner.slo import Slo
from tuner.spec import StudySpec
from tuner.workload import Workload


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a deployment, where it answers itself, past any front.

    Attributes:
        role: what it does.
        url: without /v1.
        ranks: its tensor-parallel size: each rank transfers its own part of a request's KV cache.
    """

    role: Role
    url: str
    ranks: int = 1

    @property
    def metrics_url(self) -> str:
        """Its Prometheus endpoint."""
        return f"{self.url}/metrics"


@dataclass(frozen=True, slots=True)
class Tally:
    """What one member counted over the window of a replay.

    Attributes:
        member: whose.
        grown: by how much each counter grew; `name{source="x"}` where it has a label `source`.
    """

    member: Member
    grown: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Replay:
    """What one replay of a workload saw.

    Attributes:
        records: one row an offered request, warm-up excluded.
        window: seconds of the scheduled window (throughput and goodput are per second of it).
        counters_before, counters_after: the server's own counters ("vllm:num_preemptions_total" and the like,
            summed over labels) around the measured window; empty when the server has no metrics endpoint.
        heartbeat_lag: how late each beat of a 10 ms timer beside the client was, in seconds.
        client: what the client says of itself ("send_lag_p99", "client_cpu_share"; see `replay.gate.facts`).
        server: the server's own figures for the same requests ("server_ttft_mean"), where it has any.
        tallies: the same counters by member; empty with `counters_after`.
        notes: what a reader of the numbers must know, in words.
    """

    records: Records
    window: float
    counters_before: Mapping[str, float]
    counters_after: Mapping[str, float]
    heartbeat_lag: Sequence[float]
    notes: tuple[str, ...] = ()
    client: Mapping[str, float] = field(default_factory=dict)
    server: Mapping[str, float] = field(default_factory=dict)
    tallies: tuple[Tally, ...] = ()

    @property
    def counters_grown(self) -> dict[str, float]:
        """By how much the server's counters grew over the window."""
        return {name: value - self.counters_before.get(name, 0.0) for name, value in self.counters_after.items()}


@dataclass(frozen=True, slots=True)
class Measurement:
    """What replays of a workload at a URL found.

    Attributes:
        url: of the server, without /v1.
        model: the served model's name.
        endpoint: "completions" or "chat".
        workload: the rows as they were sent.
        seed: of the prompts.
        slos: with limits in numbers.
        replays: what each repeat saw.
        repeats: the numbers of each repeat.
        metrics: the median over repeats of each metric that every repeat has.
        notes: what a reader must know of all repeats, in words.
        started: wall clock, seconds since the epoch; a label only.
    """

    url: str
    model: str
    endpoint: str
    workload: Workload
    seed: int
    slos: tuple[Slo, ...]
    replays: tuple[Replay, ...]
    repeats: tuple[Repeat, ...]
    metrics: Mapping[str, float]
    notes: tuple[str, ...]
    started: float

    @property
    def slos_met(self) -> bool | None:
        """Whether every SLO is met, None without SLOs; one that could not be measured is missed."""
        if not self.slos:
            return None
        return all((excess := slo.excess(self.metrics)) is not None and excess <= 0 for slo in self.slos)


class Deployment(Protocol):
    """Servers that are up; closing them is the launcher's business."""

    @property
    def url(self) -> str:
        """Where requests go, such as "http://127.0.0.1:8012": the front of a group, or the one server."""

    @property
    def members(self) -> Sequence[Member]:
        """The servers, prefillers before decoders; not the front."""

    def check_alive(self) -> None:
        """Raise ServerDied when a member has ended; cheap enough to call every 100 ms."""


class Launcher(Protocol):
    """Starts a configuration and ends it, whatever happens in between."""

    def launch(self, config: ServingConfig, directory: Path) -> AbstractContextManager[Deployment]:
        """Start the servers of `config`, logs and command line in `directory`; ready when entered.

        Raises:
            StartError: it did not come up; everything started is gone again.
            HostError: on leaving, when the clean-up could not be proven.
        """


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluator found about one configuration.

    Attributes:
        repeats: one entry a replay.
        effective: engine arguments that the server was seen to run with.
        cost: seconds by phase.
        late: an interrupt or a failed clean-up that came when everything was measured; to be raised once
            the measurement is kept.
    """

    repeats: tuple[Repeat, ...]
    effective: Mapping[str, Json]
    cost: Mapping[str, float]
    late: BaseException | None = None


class Progress(Protocol):
    """Told what a trial is doing, for whoever is watching."""

    def phase(self, name: str, *, expected: float | None = None) -> None:
        """A trial enters a phase ("starting", "warm-up", "replay 1 of 2", "stopping"); `expected` in seconds."""


class Evaluator(Protocol):
    """Measures one configuration."""

    def evaluate(self, config: ServingConfig, slos: Sequence[Slo], directory: Path, progress: Progress) -> Evaluation:
        """Return what was measured; SLOs still relative are taken relative to this very measurement.

        Raises:
            TrialError: this configuration gave no measurement.
        """


class Archive(Protocol):
    """Where results are kept: complete on disk before Optuna is told."""

    def directory(self, number: int) -> Path:
        """Return the trial's folder, made if it is not there."""

    def write(self, result: TrialResult) -> None:
        """Keep a result, atomically."""

    def read(self, number: int) -> TrialResult | None:
        """Return the result of a trial, or None when it was never completed."""

    def read_all(self) -> list[TrialResult]:
        """Return every kept result by number."""


class Sink(Protocol):
    """Hears about a study; what it raises must not be able to hurt the study."""

    def study_started(self, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        """The study begins or is resumed, with what is already measured."""

    def trial_started(self, number: int, config: ServingConfig, label: str) -> None:
        """A trial was asked for."""

    def phase(self, name: str, *, expected: float | None = None) -> None:
        """The running trial enters a phase."""

    def trial_ended(self, result: TrialResult, results: Sequence[TrialResult]) -> None:
        """A trial is on disk and told; `results` are all of the study so far."""

    def study_ended(self, results: Sequence[TrialResult]) -> None:
        """No more trials in this session."""
