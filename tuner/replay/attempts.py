"""Replay until it says something: once more when the client was late, and not a third time."""

from collections.abc import Callable
from dataclasses import replace

from tuner.errors import FailureKind, InvalidReplay
from tuner.seams import Replay

ATTEMPTS = 2


def valid(once: Callable[[int], Replay], judge: Callable[[Replay], tuple[str, ...]]) -> Replay:
    """Return a replay that is a measurement; its notes end with what to be careful about.

    Args:
        once: replays, given the attempt's number: 1, then 2 (for a salt of its own).
        judge: returns cautions, or raises InvalidReplay.

    Raises:
        InvalidReplay: the client was late twice, or the replay says nothing for another reason.
    """
    for attempt in range(1, ATTEMPTS + 1):
        seen = once(attempt)
        try:
            cautions = judge(seen)
        except InvalidReplay as error:
            if error.kind is not FailureKind.CLIENT_LAG or attempt == ATTEMPTS:
                raise
        else:
            return replace(seen, notes=(*seen.notes, *cautions))
    raise AssertionError("the last attempt returns or raises")
