"""When requests arrived, where a trace leaves that open: without a clock, or with one of an unknown unit."""

from collections.abc import Callable

import numpy as np

from tuner.readers.format import Options, instant
from tuner.readers.source import Damaged, Source
from tuner.workload import LATEST

NO_ARRIVAL = "no arrival time"
DRAWN = "arrivals were drawn (Poisson, {rate:g} a second, seed {seed}): the trace has no clock"


def drawn(options: Options, source: Source) -> tuple[Callable[[], float], str]:
    """Return the function that draws the next arrival of a Poisson process, and the words to note it with.

    Raises:
        SpecError: no rate was given.
    """
    rate = options.rate
    if rate is None or not 0 < rate < LATEST:
        raise source.refused(
            None,
            "these requests have no arrival times" if rate is None else f"--rate {rate:g} is no rate",
            "say how many a second, and they are drawn: --rate 2/s (and --seed 1 for others)",
        )
    gap, now = np.random.default_rng(options.seed), 0.0

    def arrival() -> float:
        nonlocal now
        now += float(gap.exponential(1 / rate))
        return now

    return arrival, DRAWN.format(rate=rate, seed=options.seed)


def unit(options: Options, source: Source) -> float:
    """Return how many seconds a unit of the trace's clock is.

    Raises:
        SpecError: the user did not say.
    """
    if options.time_unit is None:
        raise source.refused(None, "nothing says in which unit its times are", "say it: --time-unit s, ms or us")
    return options.time_unit


def moment(value: float | str | None, name: str) -> float:
    """Return a time as seconds since 1970, from a number of seconds or an ISO 8601 text.

    Raises:
        Damaged: there is none, or it is none.
    """
    if value is None or value == "":
        raise Damaged(f"{NO_ARRIVAL}: {name} is missing")
    if isinstance(value, str):
        return instant(value)
    if not abs(value) <= LATEST:
        raise Damaged(f"{name} must be a number of seconds, not {value!r}")
    return float(value)


def nanoseconds(value: int | str, name: str) -> float:
    """Return nanoseconds since 1970 as seconds, rounded to microseconds: vLLM's are products of floats.

    Raises:
        Damaged: it is no whole number, or no time that there is.
    """
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise Damaged(f"{name} must be nanoseconds since 1970, not {text[:40]!r}")
    return (int(text) + 500) // 1000 / 1e6
