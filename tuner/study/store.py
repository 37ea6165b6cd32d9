"""Which trials exist: the Optuna storage, and how a study is taken up again after it was cut off."""

import re
import uuid
import warnings
from collections.abc import Callable, Sequence

import optuna
import sqlalchemy.exc
from optuna.trial import FrozenTrial, TrialState

from tuner.errors import FailureKind, HostError
from tuner.results import TrialResult
from tuner.spec import StudySpec

RETRIES = 2


def open_study(storage: str, spec: StudySpec) -> optuna.Study:
    """Open the study in the storage, made if it is not there; it carries a uid that never changes.

    Raises:
        HostError: the storage cannot be opened.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    try:
        study = optuna.create_study(
            study_name=spec.name, storage=storage, directions=["minimize", "minimize"], load_if_exists=True
        )
    except (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError, ImportError, ValueError) as error:
        raise HostError(
            re.sub(r"//[^@/\s]*@", "//***@", f"Optuna storage {storage}: {error}"),
            hint="is the disk full or the database locked?",
        ) from error
    if "uid" not in study.user_attrs:
        study.set_user_attr("uid", uuid.uuid4().hex[:16])
    return study


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
    """Return how many trials are finished."""
    return sum(t.state.is_finished() for t in study.get_trials(deepcopy=False))


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


def enqueue_again(study: optuna.Study, trial: FrozenTrial, *, counted: bool = True) -> bool:
    """Queue the parameters of a trial that was lost through no fault of its own.

    At most twice, but for what is not `counted`: a user may interrupt as often as they like.
    """
    retry = int(trial.user_attrs.get("retry", 0))
    queued = {t.user_attrs.get("retry_from") for t in study.get_trials(deepcopy=False)}
    if (counted and retry >= RETRIES) or trial.number in queued or not (trial.params or trial.user_attrs.get("label")):
        return False
    attrs = {"retry": retry + counted, "retry_from": trial.number}
    if label := trial.user_attrs.get("label"):
        attrs["label"] = label
    study.enqueue_trial(trial.params, user_attrs=attrs)
    return True


def heal(study: optuna.Study, kept: Callable[[int], TrialResult | None], tell: Callable[[TrialResult], None]) -> int:
    """Settle trials that a killed session left running; return how many.

    One writer per study: whatever is RUNNING now was cut off. A result that is complete on disk is told;
    anything else is queued again first and failed second, so that a kill in between loses nothing. A trial
    that was told and whose result is no longer there is queued again as well.
    """
    healed = 0
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.COMPLETE and kept(trial.number) is None:
            healed += enqueue_again(study, trial, counted=False)
        if trial.state != TrialState.RUNNING:
            continue
        healed += 1
        result = kept(trial.number)
        if result is not None and not (result.failure and result.failure.kind is FailureKind.INTERRUPTED):
            tell(result)
        else:
            enqueue_again(study, trial)
            study.tell(trial.number, state=TrialState.FAIL)
    return healed
