"""Which trial a user asks for."""

from collections.abc import Sequence

from tuner import results
from tuner.errors import SpecError
from tuner.results import TrialResult
from tuner.spec import StudySpec

PICKS = ("best", "knee", "ttft", "itl")


def pick(found: Sequence[TrialResult], spec: StudySpec, choice: str) -> TrialResult:
    """Return the trial a user asks for: "best", "knee", "ttft", "itl" or a trial number.

    "best" is the recommended trial or, when no trial met the SLO, the closest one; "knee" is the knee of the
    whole front, "ttft" and "itl" its ends.

    Raises:
        SpecError: no such trial, or nothing was measured.
    """
    x, y = spec.objective_metrics
    measured = [r for r in found if r.is_measured]
    if not measured:
        raise SpecError("nothing to export: no trial was measured", hint="tune show RUN lists why")
    if choice.isdecimal():
        return _numbered(found, int(choice))
    if choice not in PICKS:
        raise SpecError(f"--pick {choice}: unknown", hint=f"one of {', '.join(PICKS)} or a trial number")
    if choice == "best" and (found_best := best(found, spec)) is not None:
        return found_best
    front = results.front(measured, x, y)
    if not front:
        raise SpecError(f"no trial has both {x} and {y}", hint="choose a trial by its number: --pick 3")
    if choice in {"ttft", "itl"}:
        return front[0] if choice == "ttft" else front[-1]
    return results.knee(front, x, y) or front[0]


def best(found: Sequence[TrialResult], spec: StudySpec) -> TrialResult | None:
    """Return the recommended trial or, when no trial met the SLO, the closest; None when there is neither."""
    measured = [r for r in found if r.is_measured]
    return results.recommend(measured, *spec.objective_metrics) or results.closest(measured)


def _numbered(found: Sequence[TrialResult], number: int) -> TrialResult:
    result = next((r for r in found if r.number == number), None)
    if result is None:
        raise SpecError(f"--pick {number}: no such trial", hint=f"there are {', '.join(str(r.number) for r in found)}")
    if result.failure is not None:
        raise SpecError(
            f"--pick {number}: this trial failed ({result.failure.kind})", hint="choose one that was measured"
        )
    return result
