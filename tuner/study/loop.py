"""Ask, evaluate, tell: the study itself.

Truth lies in two places, in this order: a result is complete in the archive, then Optuna is told, and only
then do sinks hear of it. What Optuna is told about a trial without numbers follows one rule: a fault of the
configuration is a complete trial that violates every constraint (samplers ignore FAIL and go back to the
crash), any other fault is a FAIL whose parameters are queued again.
"""

import errno
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import optuna
from optuna.trial import BaseTrial, TrialState

from tuner.errors import FailureKind, HostError, Interrupted, SpecError, TrialError
from tuner.results import Failure, TrialResult, combine, limits
from tuner.seams import Archive, Evaluation, Evaluator, Sink
from tuner.serving import Json, ServingConfig
from tuner.slo import Slo
from tuner.spec import StudySpec
from tuner.study import space, store

log = logging.getLogger(__name__)

WORST = math.log(3600.0)  # what an objective of a trial without one is told as; nothing of ours reads it
NOT_MEASURED = 10.0  # the excess of an SLO that could not be measured
REPEATS_BEFORE_DRAW = 4
LOST_IN_A_ROW = 6
DRAWS = 400
# Of a disk, not of a configuration.
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.ENOENT}
DEFAULT, BASELINE = "default", "baseline"


@dataclass(slots=True)
class Study:
    """A study in progress.

    Attributes:
        spec: what is asked.
        optuna: Optuna's study; which trials exist.
        archive: what was measured.
        evaluator: measures a configuration.
        sinks: hear about it.
        host: what vLLM resolves its defaults to on this host.
        baseline: the user's present configuration, or None.
        vllm_version: recorded with each result.
        check_writer: raises HostError when somebody else has taken over the storage.
    """

    spec: StudySpec
    optuna: optuna.Study
    archive: Archive
    evaluator: Evaluator
    sinks: Sequence[Sink]
    host: Mapping[str, Json] = field(default_factory=dict)
    baseline: ServingConfig | None = None
    vllm_version: str | None = None
    check_writer: Callable[[], None] = lambda: None
    results: list[TrialResult] = field(default_factory=list)

    def phase(self, name: str, *, expected: float | None = None) -> None:
        """Pass a trial's phase on to whoever is watching."""
        for sink in self.sinks:
            sink.phase(name, expected=expected)

    def run(self) -> list[TrialResult]:
        """Run trials until the budget is spent or the space is exhausted; return all results.

        Raises:
            Interrupted: Ctrl-C; everything measured is kept.
            SpecError: vLLM refused its own default, or a relative SLO has nothing to refer to.
            HostError: a clean-up could not be proven.
        """
        self.check_writer()
        self.results = self.archive.read_all()
        store.refuse_if_shorter(self.optuna, self.results)
        store.heal(self.optuna, self.archive.read, self._tell)
        self._check_default(is_lost_for_good=False)
        for sink in self.sinks:
            sink.study_started(self.spec, self.results)
        try:
            started = time.monotonic()
            while self._budget_left(time.monotonic() - started):
                self._queue_first_trials()
                if not self._have_point():
                    break
                self._one_trial()
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        finally:
            for sink in self.sinks:
                sink.study_ended(self.results)
        return self.results

    def _queue_first_trials(self) -> None:
        """Queue what goes before anything searched, one at a time, so that a retry comes before the next.

        Trial 0 is vLLM's default, trial 1 what the user runs now; both may lie outside the space. Then each
        topology gets a first trial: as it is without what is searched, or where that lies outside, any. A topology
        that is met late, or once with unlucky arguments, would be judged by that.
        """
        trials = self.optuna.get_trials(deepcopy=False)
        if any(t.state == TrialState.WAITING for t in trials):
            return
        given_up = {t.user_attrs.get("label"): t.user_attrs.get(store.GIVEN_UP) for t in trials}
        for label, config in {DEFAULT: space.default_config(self.spec), BASELINE: self.baseline}.items():
            if config is None or any(r.label == label and _settled(r) for r in self.results):
                continue
            if label == DEFAULT and given_up.get(label) == store.KILLED:
                raise HostError(
                    f"tune was killed {store.LIMITS[store.KILLED] + 1} times while it measured vLLM's default",
                    hint="is it too large for this host? Then start a new run with smaller engine_args",
                )
            if label == DEFAULT or not given_up.get(label):
                inside = space.parameters_of(config, self.spec, self.host)
                self.optuna.enqueue_trial(dict(inside or {}), user_attrs={"label": label})
                return
        budget = self.spec.budget.trials
        if budget is not None and budget <= len(self.spec.topologies):
            return
        done = {str(space.default_config(self.spec).topology), *(t.user_attrs.get("first_of") for t in trials)}
        for topology in (t for t in self.spec.topologies if str(t) not in done):
            plain = space.resolve(topology, {}, self.spec, self.host)
            params = space.parameters_of(plain, self.spec, self.host) or space.topology_parameters(topology, self.spec)
            self.optuna.enqueue_trial(dict(params), user_attrs={"first_of": str(topology)})
            return

    def _budget_left(self, session: float) -> bool:
        budget = self.spec.budget
        counted = [r for r in self.results if _counts(r)]
        if budget.trials is not None and len(counted) >= budget.trials:
            return False
        if budget.trials is not None and len(self.results) >= 5 * budget.trials + 20:
            log.warning(
                "stopped: %d trials for a budget of %d; most were lost or repeats", len(self.results), budget.trials
            )
            return False
        if budget.time is None:
            return True
        durations = [r.ended - r.started for r in counted]
        earlier = sum(r.ended - r.started for r in self.results) - session
        spent = session + max(0.0, earlier)
        typical = float(np.median(durations)) if durations else 0.0
        return spent + typical / 2 < budget.time

    def _have_point(self) -> bool:
        """Make sure that the next trial can be new; False when the space is exhausted."""
        settled = [r for r in self.results if _settled(r)]
        recent = settled[-REPEATS_BEFORE_DRAW:]
        waiting = any(t.state == TrialState.WAITING for t in self.optuna.get_trials(deepcopy=False))
        if waiting or len(recent) < REPEATS_BEFORE_DRAW or any(r.same_as is None for r in recent):
            return True
        rng = np.random.default_rng([self.spec.seed, len(settled)])
        for _ in range(DRAWS):
            params = space.draw(self.spec, rng)
            topology, values = space.suggest(optuna.trial.FixedTrial(params), self.spec)
            if self._measured_as(space.resolve(topology, values, self.spec, self.host)) is None:
                self.optuna.enqueue_trial(params)
                return True
        log.warning("space exhausted: every point of the search space has been measured")
        return False

    def _one_trial(self) -> None:
        self.check_writer()
        self.optuna.sampler = store.sampler(self.spec, store.told(self.optuna))
        trial = self.optuna.ask()
        label = str(trial.user_attrs.get("label", ""))
        config = self._config(trial, label)
        trial.set_user_attr(store.BEGAN, True)  # drawn to its end
        earlier = self._measured_as(config)
        if earlier is not None:
            now = time.time()
            same = replace(earlier, number=trial.number, params=dict(trial.params), label=label, same_as=earlier.number,
                           cost={}, started=now, ended=now)  # fmt: skip
            self._finish(same)
            return
        result, late = self._measure(trial.number, dict(trial.params), config, label)
        self._finish(result)
        if late is not None:
            raise late

    def _config(self, trial: BaseTrial, label: str) -> ServingConfig:
        fixed = space.default_config(self.spec) if label == DEFAULT else self.baseline if label == BASELINE else None
        if fixed is None:
            topology, values = space.suggest(trial, self.spec)
            return space.resolve(topology, values, self.spec, self.host)
        if space.parameters_of(fixed, self.spec, self.host) is not None:
            space.suggest(trial, self.spec)  # puts the queued parameters on the trial, for the sampler to learn from
        return fixed

    def _measured_as(self, config: ServingConfig) -> TrialResult | None:
        key = space.identity(config, self.host)
        return next(
            (
                r
                for r in self.results
                if r.same_as is None and _settled(r) and space.identity(r.config, self.host) == key
            ),
            None,
        )

    def _measure(
        self, number: int, params: dict[str, Json], config: ServingConfig, label: str
    ) -> tuple[TrialResult, BaseException | None]:
        for sink in self.sinks:
            sink.trial_started(number, config, label)
        started, clock = time.time(), time.perf_counter()

        def ended() -> float:
            return started + time.perf_counter() - clock  # the wall clock may be set meanwhile

        blank = TrialResult(
            number=number, config=config, params=params, label=label, started=started,
            effective=space.effective(config, self.host), vllm_version=self.vllm_version,
        )  # fmt: skip
        try:
            directory = self.archive.directory(number)
            found = self.evaluator.evaluate(config, self.slos(), directory, self)
        except TrialError as error:
            failure = Failure(error.kind, error.message, error.log)
            return replace(blank, failure=failure, slos_met=False if self.spec.slo else None, ended=ended()), None
        except (KeyboardInterrupt, HostError, OSError) as error:
            late = _of_the_disk(error, directory) if isinstance(error, OSError) else error
            words = late.message if isinstance(late, HostError) else "interrupted"
            self._finish(replace(blank, failure=Failure(FailureKind.INTERRUPTED, words), ended=ended()))
            raise late from error
        return self._judged(blank, found, ended()), found.late

    def _judged(self, blank: TrialResult, found: Evaluation, ended: float) -> TrialResult:
        metrics = combine(found.repeats)
        slos = self.slos() if blank.label != DEFAULT else tuple(s.against(metrics) for s in self.spec.slo)
        excess = {s.metric: e for s in slos if (e := s.excess(metrics)) is not None}
        met = all(excess.get(s.metric, NOT_MEASURED) <= 0 for s in slos) if slos else None
        return replace(
            blank, repeats=found.repeats, metrics=metrics, excess=excess, slos_met=met, cost=found.cost,
            effective=dict(blank.effective) | dict(found.effective), ended=ended,
        )  # fmt: skip

    def slos(self) -> tuple[Slo, ...]:
        """Return the SLOs, relative ones resolved once the default is measured."""
        return limits(self.spec.slo, self.results)

    def _finish(self, result: TrialResult) -> None:
        self.archive.write(result)
        self.check_writer()
        self._tell(result)
        self.results = [*(r for r in self.results if r.number != result.number), result]
        for sink in self.sinks:
            sink.trial_ended(result, self.results)
        self._check_default()
        self._check_host()

    def _check_default(self, *, is_lost_for_good: bool = True) -> None:
        default = next((r for r in reversed(self.results) if r.label == DEFAULT), None)
        if default is None or default.failure is None or self._is_queued(DEFAULT):
            return
        failure = default.failure
        if failure.kind is FailureKind.BAD_ARGUMENT:
            raise SpecError(f"vLLM refuses the default of this study: {failure.message}", hint="mend engine_args")
        is_lost = not failure.kind.is_configurations_fault and failure.kind is not FailureKind.INTERRUPTED
        if is_lost and is_lost_for_good:
            raise HostError(
                f"the default could not be measured in {store.RETRIES + 1} tries: {failure.message}",
                hint=_why_lost(failure.kind),
            )
        if failure.kind.is_configurations_fault and any(s.relative is not None for s in self.spec.slo):
            raise SpecError(
                f"the default could not be measured ({failure.kind}: {failure.message}), "
                "so a relative SLO has no meaning",
                hint="give absolute limits, such as itl_p99=50ms",
            )

    def _is_queued(self, label: str) -> bool:
        trials = self.optuna.get_trials(deepcopy=False)
        return any(t.state == TrialState.WAITING and t.user_attrs.get("label") == label for t in trials)

    def _check_host(self) -> None:
        ran = [r for r in self.results if not (r.failure and r.failure.kind is FailureKind.INTERRUPTED)]
        lost = [r.failure for r in ran[-LOST_IN_A_ROW:] if r.failure and not _settled(r)]
        if len(lost) == LOST_IN_A_ROW:
            raise HostError(
                f"{len(lost)} trials in a row were lost through no fault of theirs; the last: {lost[-1].message}",
                hint=_why_lost(lost[-1].kind),
            )

    def _tell(self, result: TrialResult) -> None:
        """Tell Optuna; the commit point."""
        number = result.number
        if result.failure is not None and not result.failure.kind.is_configurations_fault:
            frozen = self.optuna.get_trials(deepcopy=False)[number]
            by_user = result.failure.kind is FailureKind.INTERRUPTED
            store.enqueue_again(self.optuna, frozen, None if by_user else store.RETRY)
            self.optuna.tell(number, state=TrialState.FAIL)
            return
        frozen = self.optuna.get_trials(deepcopy=False)[number]
        trial = optuna.Trial(self.optuna, frozen._trial_id)  # noqa: SLF001
        constraints = {"measured": 1.0 if result.failure else -1.0}
        for slo in self.spec.slo:
            constraints[slo.metric] = NOT_MEASURED if result.failure else result.excess.get(slo.metric, NOT_MEASURED)
        known = frozen.constraints  # a session that was killed may have set some
        for name in (name for name in constraints if name not in known):
            trial.set_constraint(name, constraints[name])
        if result.same_as is not None:
            trial.set_user_attr(store.SAME_AS, result.same_as)
        values = [
            math.log(result.metrics[m]) if result.metrics.get(m, 0) > 0 else WORST for m in self.spec.objective_metrics
        ]
        self.optuna.tell(number, [min(v, WORST) for v in values])


def _of_the_disk(error: OSError, directory: Path) -> HostError:
    """Return what a full or read-only disk is told as; any other error of the system is a bug."""
    if error.errno not in STORAGE_ERRORS:
        raise error
    return HostError(f"{error.filename or directory}: {error.strerror}", hint="is the disk full or read-only?")


def _why_lost(kind: FailureKind) -> str:
    if kind is FailureKind.LENGTHS_OFF:
        return "does the server change lengths, or does the workload name another model's prompts?"
    return "is something else running on this machine? tune doctor looks"


def _counts(result: TrialResult) -> bool:
    """Whether the trial is paid for by the budget."""
    return result.same_as is None and _settled(result)


def _settled(result: TrialResult) -> bool:
    return result.failure is None or result.failure.kind.is_configurations_fault
