"""Which trials exist: the Optuna storage, and how a study is taken up again after it was cut off."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from tuner.errors import HostError
from tuner.results import TrialResult
from tuner.spec import StudySpec
from tuner.study import storage as storages
from tuner.study.writer import Writer

log = logging.getLogger(__name__)

BEGAN, SAME_AS, RETRY, KILLED, RETRY_FROM, UID = "began", "same_as", "retry", "killed", "retry_from", "uid"
RETRIES = 2
# Tune itself may have been killed by what a configuration did to the host, over and over again.
LIMITS = {RETRY: RETRIES, KILLED: 5}
GIVEN_UP = "given_up"
FIXED = "fixed_params"  # what Optuna calls the parameters of a trial that was queued


@contextmanager
def opened(
    name: str, uid: str, url: str, say: Callable[[str], None] = lambda _: None, *, shared: bool = False
) -> Iterator[tuple[optuna.Study, Callable[[], None]]]:
    """Open a run's study in the storage at `url`; of a shared one with the right to write, and how to check it.

    Raises:
        HostError: the storage does not answer, now or later; another tune writes to the study, or it is another run's.
    """
    with storages.answering(url), ExitStack() as stack:
        found = storages.open_storage(url)
        stack.callback(storages.close, found)
        study = open_study(found, name)
        writer = stack.enter_context(Writer(study, url, say)) if shared else None
        settle_identity(study, uid)
        yield study, writer.check if writer is not None else lambda: None


def open_study(storage: BaseStorage, name: str) -> optuna.Study:
    """Open the study of that name in a storage, made if it is not there."""
    study = optuna.create_study(
        study_name=name, storage=storage, directions=["minimize", "minimize"], load_if_exists=True
    )
    if study.directions != [optuna.study.StudyDirection.MINIMIZE] * 2:
        raise HostError(
            f"the Optuna storage has a study {name!r} that is not one of tune's", hint="give the new run another --name"
        )
    return study


def settle_identity(study: optuna.Study, uid: str) -> None:
    """Make sure that a study of the storage is the run's own; one that is new becomes it.

    Raises:
        HostError: it is another run's.
    """
    known, trials = study.user_attrs.get(UID), study.get_trials(deepcopy=False)
    if known is None and not trials:
        study.set_user_attr(UID, uid)
    elif known != uid:
        raise HostError(
            f"the Optuna storage has a study {study.study_name!r} with {len(trials)} trials that is not this run's",
            hint="give the new run another --name, or resume the run folder that the study belongs to",
        )


def sampler(spec: StudySpec, told: int) -> optuna.samplers.BaseSampler:
    """Return a fresh sampler seeded by how many trials were told, so that a resumed study does not repeat itself.

    `TPESampler(multivariate=True, group=True)` handles the conditional space; the start-up is short because
    baselines come first.
    """
    seed = (spec.seed * 100_003 + told) % (1 << 32)
    if spec.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    budget = spec.budget.trials or 30
    startup = min(max(budget // 5, min(6, max(2, budget // 2))), 13)
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=startup)


def told(study: optuna.Study) -> int:
    """Return how many points the study has dealt with, which seeds the sampler.

    A trial that was lost and is tried again under another number is one point, and one that was cut off while its
    parameters were drawn is none: so a study that was interrupted draws what it would have drawn otherwise.
    """
    trials = study.get_trials(deepcopy=False)
    again = {t.user_attrs.get(RETRY_FROM) for t in trials}
    lost = [t for t in trials if t.state == TrialState.FAIL and t.number not in again and BEGAN in t.user_attrs]
    return len(lost) + sum(t.state == TrialState.COMPLETE and t.number not in again for t in trials)


def refuse_if_shorter(study: optuna.Study, results: Sequence[TrialResult]) -> None:
    """Refuse a storage that knows fewer trials than the run folder has: numbers would be given away twice.

    Raises:
        HostError: the storage was lost, or it is another run's.
    """
    known = len(study.get_trials(deepcopy=False))
    beyond = [r.number for r in results if r.number >= known]
    if beyond:
        raise HostError(
            f"the Optuna storage knows {known} trials, the run folder has trial {beyond[-1]}: the storage was lost "
            "or is another run's", hint="put the storage back, or start a new run; tune show still reads this one",
        )  # fmt: skip


def enqueue_again(study: optuna.Study, trial: FrozenTrial, cause: str | None = RETRY) -> bool:
    """Queue the parameters of a trial that was lost through no fault of its own; return whether it is queued.

    What a `cause` may take from one point is limited. None is without a limit: a user may interrupt as often as
    they like.
    """
    if trial.number in {t.user_attrs.get(RETRY_FROM) for t in study.get_trials(deepcopy=False)}:
        return True
    attrs = {name: value for name, value in trial.user_attrs.items() if name not in {BEGAN, SAME_AS}}
    attrs[RETRY_FROM] = trial.number
    if cause is not None:
        attrs[cause] = attrs.get(cause, 0) + 1
        if attrs[cause] > LIMITS[cause]:
            optuna.Trial(study, trial._trial_id).set_user_attr(GIVEN_UP, cause)  # noqa: SLF001 (still running)
            return False
    params = trial.params if BEGAN in trial.user_attrs else trial.system_attrs.get(FIXED, {})  # else they are a part
    study.enqueue_trial(params, user_attrs=attrs)
    return True


def heal(study: optuna.Study, kept: Callable[[int], TrialResult | None], tell: Callable[[TrialResult], None]) -> int:
    """Settle trials that a killed session left running; return how many.

    One writer per study: whatever is RUNNING now was cut off. A result that is complete on disk is told;
    anything else is queued again first and failed second, so that a kill in between loses nothing. A point that
    the sampler had not drawn to its end is not queued: the sampler draws it again. A trial that was told and
    whose result is no longer there is queued again as well.
    """
    healed = 0
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.COMPLETE and kept(trial.number) is None:
            healed += enqueue_again(study, trial, None)
        if trial.state != TrialState.RUNNING:
            continue
        healed += 1
        number = trial.number
        if (result := kept(number)) is not None:
            tell(result)
            continue
        began = BEGAN in trial.user_attrs
        if (began or FIXED in trial.system_attrs) and not enqueue_again(study, trial, KILLED if began else None):
            log.warning("trial %d is left out: tune was killed in it and in %d retries", number, LIMITS[KILLED])
        study.tell(number, state=TrialState.FAIL)
    return healed
