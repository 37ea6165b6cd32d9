"""Change the load of recorded rows without breaking what makes them real: bursts, order, and who shares what.

Everything here takes columns that are sorted by arrival and returns columns or places in them. Methods and their
reasons: README, "A workload".
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MOST_WINDOWS = 2000  # that are compared
QUANTILES = (50, 90, 99)
FEWEST_STAMPS = 5
TIES = 1.5  # rows a stamp, from which on ties are more than chance
SHORTEST_STEP = 0.01  # s; a finer clock decides nothing that is measured here
JITTER = 0.0015  # s; one of Mooncake's steps of 3 s is a millisecond shorter or longer than the next


@dataclass(frozen=True, slots=True)
class Columns:
    """What is known of each row without its block ids, in order of arrival.

    Attributes:
        arrival: seconds from the first one.
        input_len, output_len: tokens.
        group: rows with the same number share a prefix or a session.
    """

    arrival: Floats
    input_len: Ints
    output_len: Ints
    group: Ints

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of the rows, in order of arrival.

    Attributes:
        row: each one's place in the columns.
        copy: which copy of it this is, 0 the original.
        arrival: seconds.
    """

    row: Ints
    copy: Ints
    arrival: Floats

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def of(cls, columns: Columns) -> "Selection":
        """Return all rows as they are."""
        n = len(columns)
        return cls(np.arange(n), np.zeros(n, dtype=np.int64), columns.arrival)

    def where(self, chosen: Bools | Ints, start: float | None = None) -> "Selection":
        """Return those chosen, on a clock that starts at `start`, or at the first of them."""
        arrival = self.arrival[chosen]
        if start is None:
            start = float(arrival[0]) if len(arrival) else 0.0
        return Selection(self.row[chosen], self.copy[chosen], np.round(arrival - start, 6))


# --- Rate -------------------------------------------------------------------------------------------------


def scale_rate(columns: Columns, factor: float, rng: np.random.Generator) -> Selection:
    """Return the rows at `factor` times their rate, on the recorded clock, in order of arrival.

    Down: whole groups are kept or dropped, so that reuse inside a group survives (thinning single rows of a trace
    with shared prefixes loses a third to two thirds of it). Up: copies, each turned by a time of its own around the
    span, are laid over one another; whoever writes them relabels what they share, or reuse would be doubled.
    """
    copies, rest = divmod(factor, 1)
    whole = [_copy(columns, number, rng) for number in range(int(copies))]
    if rest > 1e-9:
        last = _copy(columns, int(copies), rng)
        kept = keep_groups(columns.group, rest, rng)
        whole.append(Selection(last.row[kept], last.copy[kept], last.arrival[kept]))
    row, copy, arrival = (
        np.concatenate([getattr(part, name) for part in whole]) for name in ("row", "copy", "arrival")
    )
    order = np.argsort(arrival, kind="stable")
    return Selection(row[order], copy[order], arrival[order])


def _copy(columns: Columns, number: int, rng: np.random.Generator) -> Selection:
    n, arrival = len(columns), columns.arrival
    if number:
        span = columns.span or 1.0
        arrival = arrival[0] + (arrival - arrival[0] + float(rng.uniform(0, span))) % span
    return Selection(np.arange(n), np.full(n, number), arrival)


def keep_groups(group: Ints, share: float, rng: np.random.Generator) -> Bools:
    """Return which rows stay when whole groups do, about `share` of the rows.

    Groups are drawn in a random order, each taken if the rows are nearer to the wanted number with it than without.
    """
    numbers, sizes = _by_first_appearance(group)
    wanted, taken = share * len(group), 0
    is_kept = np.zeros(len(sizes), dtype=bool)
    for index in rng.permutation(len(sizes)):
        if taken + sizes[index] / 2 <= wanted:
            is_kept[index] = True
            taken += sizes[index]
    return np.asarray(is_kept[numbers], dtype=bool)


def _by_first_appearance(group: Ints) -> tuple[Ints, Ints]:
    """Return each row's group, numbered in order of appearance, and the groups' sizes."""
    _, first, inverse, sizes = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[inverse], sizes[order]


# --- Clock ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Steps:
    """A clock that moves in steps: rows that share a stamp arrived together for the recorder, not for the server.

    Attributes:
        step: seconds between neighbouring stamps.
        stamps: how many there are.
        most: rows on the fullest one.
    """

    step: float
    stamps: int
    most: int


def clock_steps(arrival: Floats) -> Steps | None:
    """Return the steps of a clock: rows share stamps, and all stamps lie on one grid; None where it has none.

    Args:
        arrival: ascending, in seconds.
    """
    distinct, rows = np.unique(np.rint((arrival - arrival[:1]) * 1e6), return_counts=True)
    if len(distinct) < FEWEST_STAMPS or len(arrival) < TIES * len(distinct):
        return None
    gaps = np.diff(distinct) / 1e6
    times = np.rint(gaps / gaps.min())
    step = float(gaps.sum() / times.sum())
    on_grid = np.abs(gaps - times * step) <= max(JITTER, 0.02 * step)
    if step < SHORTEST_STEP or on_grid.mean() < 0.99:
        return None
    return Steps(step, len(distinct), int(rows.max()))


def spread(arrival: Floats, step: float, rng: np.random.Generator) -> Floats:
    """Return arrivals drawn evenly inside the step at whose beginning they were stamped, sorted."""
    return np.sort(np.round(arrival + rng.uniform(0, step, len(arrival)), 6))


# --- Windows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of [start, start + length) seconds; `distance` is how far their shape is from the whole trace's."""

    start: float
    length: float
    distance: float

    def holds(self, arrival: Floats) -> Bools:
        """Return which rows lie in it."""
        return np.asarray((arrival >= self.start) & (arrival < self.start + self.length), dtype=bool)

    def overlaps(self, other: "Window") -> bool:
        """Whether any moment is in both."""
        return abs(self.start - other.start) < self.length


def choose_windows(columns: Columns, length: float) -> tuple[Window, ...]:
    """Return the window most like the whole trace and the next most like it that does not overlap; one if none fits.

    Compared are the rate, length quantiles (p50, p90, p99) of prompts and outputs and the dispersion of arrivals at 1
    and 10 s with the whole trace's, and the rows a group with the median window's: the mean of the absolute
    logarithms of the ratios. A window is never taken for being the busiest.
    """
    starts = _starts(columns, length)
    shapes = [_shape(columns, start, length) for start in starts]
    whole = dict(_shape(columns, float(columns.arrival[0]), columns.span))
    whole["rows_a_group"] = float(np.median([shape["rows_a_group"] for shape in shapes if shape] or [1.0]))
    windows = sorted(
        (Window(start, length, _distance(shape, whole)) for start, shape in zip(starts, shapes, strict=True) if shape),
        key=lambda window: (round(window.distance, 9), window.start),
    )
    best = windows[:1]
    return (*best, *[window for window in windows if not window.overlaps(best[0])][:1])


def _starts(columns: Columns, length: float) -> list[float]:
    first, room = float(columns.arrival[0]), max(columns.span - length, 0.0)
    step = max(length / 20, room / MOST_WINDOWS)
    return [first + step * i for i in range(int(room / step) + 1)] if step > 0 else [first]


def _shape(columns: Columns, start: float, length: float) -> Mapping[str, float]:
    """Return what is compared, empty where too little arrives."""
    begin, end = np.searchsorted(columns.arrival, [start, start + length], side="left")
    if end - begin < 2:
        return {}
    rows = slice(int(begin), int(end))
    arrival = columns.arrival[rows] - start
    found = {"rate": (end - begin) / length, "rows_a_group": (end - begin) / len(np.unique(columns.group[rows]))}
    for name, lengths in (("input", columns.input_len[rows]), ("output", columns.output_len[rows])):
        found |= dict(zip([f"{name}_p{q}" for q in QUANTILES], np.percentile(lengths, QUANTILES), strict=True))
    for width in (1.0, 10.0):
        if length >= 2 * width:
            found[f"dispersion_{width:g}"] = dispersion(arrival, width, length)
    return found


def dispersion(arrival: Floats, width: float, length: float) -> float:
    """Return variance / mean of the arrivals a bin of `width` seconds, whole bins of [0, length) only: Poisson is 1."""
    bins = int(length / width)
    places = arrival[arrival < bins * width] // width
    counts = np.unique(places, return_counts=True)[1]  # of bins with rows: there may be years between
    n = int(counts.sum())
    return float((counts**2).sum() / n - n / bins) if n else float("nan")


def _distance(shape: Mapping[str, float], whole: Mapping[str, float]) -> float:
    ratios = [shape[name] / whole[name] for name in shape if shape[name] > 0 and whole.get(name, 0) > 0]
    return float(np.mean(np.abs(np.log(ratios))))
