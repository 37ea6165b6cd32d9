"""One evaluation of one configuration: start it, warm it up, replay the workload, collect the facts.

The only place in which deployment and replay meet.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner import metrics, units
from tuner.errors import HostError
from tuner.replay import attempts, gate, pairs, transfer
from tuner.replay import run as replaying
from tuner.results import Repeat
from tuner.seams import Deployment, Evaluation, Launcher, Progress, Replay
from tuner.serving import Role, ServingConfig
from tuner.sinks.runfolder import write_json
from tuner.slo import Slo
from tuner.spec import FOLLOW, StudySpec
from tuner.workload import Workload

# Of the server's counters, those that explain a result; all of them are in counters.json.
TELLING = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_cache_queried_tokens",
    "vllm:prefix_cache_hits_total": "prefix_cache_hit_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
}
PROMPT_COUNTERS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_queue_time_seconds_count",
)
OUTPUT_COUNTERS = ("vllm:generation_tokens_total",)


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what the block takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class LiveEvaluator:
    """Measures a configuration on a real server that is started for it.

    Attributes:
        launcher: starts and ends servers.
        spec: how the workload is replayed, how often, and which metrics matter.
        workload: the rows.
        vocab_size: of the model; prompts are made of ordinary tokens below it.
    """

    launcher: Launcher
    spec: StudySpec
    workload: Workload
    vocab_size: int

    def evaluate(self, config: ServingConfig, slos: Sequence[Slo], directory: Path, progress: Progress) -> Evaluation:
        """Return what was measured.

        Raises:
            TrialError: no measurement: the server did not start or died, or the replay is invalid.
            HostError: the server could not be ended completely.
        """
        watch = Stopwatch()
        repeats: list[Repeat] = []
        late: BaseException | None = None
        try:
            self._measure(config, slos, directory, progress, watch, repeats)
        except (KeyboardInterrupt, HostError) as error:
            if len(repeats) < self.spec.repeats:
                raise
            late = error
        return Evaluation(tuple(repeats), {}, watch.seconds, late)

    def _measure(  # noqa: PLR0917 (what, how, and where to)
        self, config: ServingConfig, slos: Sequence[Slo], directory: Path, progress: Progress, watch: Stopwatch,
        repeats: list[Repeat],
    ) -> None:  # fmt: skip
        progress.phase("starting")
        started = time.perf_counter()
        with ExitStack() as stack:
            deployment = stack.enter_context(self.launcher.launch(config, directory))
            watch.seconds["start"] = time.perf_counter() - started
            with watch.phase("warm_up"):
                self._introduce(config, deployment, progress)
                self._warm_up(config, deployment, progress)
            for number in range(1, self.spec.repeats + 1):
                with watch.phase("replay"):
                    seen = self._replay(config, deployment, number, slos, progress)
                repeats.append(self._write_down(seen, slos, directory / f"repeat-{number}"))
            progress.phase("stopping")
            with watch.phase("stop"):
                stack.close()

    def _introduce(self, config: ServingConfig, deployment: Deployment, progress: Progress) -> None:
        """Let each prefiller meet each decoder; without PD nobody needs to."""
        if not config.topology.is_pd:
            return
        progress.phase("first transfers")
        pairs.warm(
            deployment.members, served_name(config), seed=self.spec.seed, vocab_size=self.vocab_size,
            check_alive=deployment.check_alive,
        )  # fmt: skip

    def _warm_up(self, config: ServingConfig, deployment: Deployment, progress: Progress) -> None:
        progress.phase("warm-up", expected=self.spec.workload.warm_up)
        replaying.warm_up(
            deployment.url,
            served_name(config),
            self.workload,
            duration=self.spec.workload.warm_up,
            seed=self.spec.seed,
            vocab_size=self.vocab_size,
            check_alive=deployment.check_alive,
            drain_timeout=self.spec.workload.drain_timeout,
        )

    def _replay(
        self, config: ServingConfig, deployment: Deployment, number: int, slos: Sequence[Slo], progress: Progress
    ) -> Replay:
        """Replay once, and once more when the client could not drive it; then the trial is invalid."""
        keys = [*self.spec.objective_metrics, *(s.metric for s in slos)]

        def once(attempt: int) -> Replay:
            again = " again: the client was late" if attempt == 2 else ""
            progress.phase(f"replay {number} of {self.spec.repeats}{again}", expected=self.workload.span)
            salt = f"{self.spec.seed}/{number}/{attempt}"
            how: Any = {"salt": salt, "vocab_size": self.vocab_size, "members": deployment.members}
            cache = replaying.warm_prefix(
                deployment.url, served_name(config), self.workload, check_alive=deployment.check_alive, **how
            )
            return replaying.replay(
                deployment.url, served_name(config), self.workload, cache=cache, **how,
                follow_sessions=self.spec.workload.sessions == FOLLOW,
                drain_timeout=self.spec.workload.drain_timeout, check_alive=deployment.check_alive,
            )  # fmt: skip

        def judge(seen: Replay) -> tuple[str, ...]:
            cautions = gate.judge(
                seen, ttft_limit=tightest(slos, "ttft"), itl_limit=tightest(slos, "itl"), keys=keys,
                classes=self.spec.workload.classes,
            )  # fmt: skip
            if config.topology.is_pd:
                transfer.judge(seen)
            return cautions

        return attempts.valid(once, judge)

    def _write_down(self, seen: Replay, slos: Sequence[Slo], folder: Path) -> Repeat:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {**self._numbers(seen, slos), **seen.client, **seen.server}
        counters = seen.counters_grown
        seen.records.save(folder / "records.npz")
        write_json(folder / "counters.json", counters)
        write_json(folder / "metrics.json", units.to_outside(numbers))
        most = gate.limits(tightest(slos, "ttft"), tightest(slos, "itl"))
        write_json(folder / "client.json", {"facts": units.to_outside(seen.client), "limits": units.to_outside(most)})
        return Repeat(numbers, telling(seen), seen.notes)

    def _numbers(self, seen: Replay, slos: Sequence[Slo]) -> dict[str, float]:
        """Summarise; limits still relative are relative to this very replay (it is the default's)."""
        classes, extra = self.spec.workload.classes, self.spec.objective_metrics
        known = [s for s in slos if s.limit is not None]
        numbers = metrics.summarise(
            seen.records, window=seen.window, classes=classes, slos=known,
            extra=[*extra, *(s.metric for s in slos)],
        )  # fmt: skip
        if len(known) < len(slos):
            resolved = [r for s in slos if (r := s.against(numbers)).limit is not None]
            numbers = metrics.summarise(seen.records, window=seen.window, classes=classes, slos=resolved, extra=extra)
        return numbers


def tightest(slos: Sequence[Slo], family: str) -> float | None:
    """Return the lowest limit in seconds that a promise sets for "ttft" or "itl", None when none does."""
    limits = (s.limit for s in slos if units.family(s.metric) == family and s.limit is not None)
    return min(limits, default=None)


def served_name(config: ServingConfig) -> str:
    """Return the name under which vLLM answers for the model."""
    name = config.args.get("served_model_name")
    if isinstance(name, list) and name:
        name = name[0]
    return name if isinstance(name, str) else config.model


def telling(seen: Replay) -> dict[str, float]:
    """Return the servers' own counts that explain a result; the mean queue time in seconds.

    In a PD group both servers of a request count its prompt and its tokens: prompts are told as prefillers saw
    them, output as decoders did.
    """
    counters = dict(seen.counters_grown)
    for names, role in ((PROMPT_COUNTERS, Role.DECODER), (OUTPUT_COUNTERS, Role.PREFILLER)):
        for tally in (tally for tally in seen.tallies if tally.member.role is role):
            counters |= {name: counters[name] - tally.grown.get(name, 0.0) for name in names if name in counters}
    found = {name: counters[key] for key, name in TELLING.items() if key in counters}
    waited, n = (counters.get(f"vllm:request_queue_time_seconds_{part}") for part in ("sum", "count"))
    if waited is not None and n:
        found["queue_time_mean"] = waited / n
    return found
