"""The shape of recorded traffic: how much, how fast, in which bursts, how long, how much alike.

Everything here is pure: rows in, a `Shape` out. Times are seconds, lengths tokens, shares from 0 to 1. What these rows
do not say is absent: one row has no rate, a trace without sessions no turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Self

import numpy as np
import numpy.typing as npt

from tuner.reuse import ideal_hits
from tuner.transforms import Steps, clock_steps
from tuner.workload import Request

SERVER_BLOCK = 16  # tokens of a block of vLLM's prefix cache, unless it is told otherwise
LIMITS = {"4k": 4096, "8k": 8192, "16k": 16_384, "32k": 32_768, "64k": 65_536, "128k": 131_072}
BINS = (1, 10)  # seconds, over which dispersion is told
FEWEST_BINS = 10  # a variance of fewer says little
MOST_BLOCKS = 5_000_000  # ids, of some 300 bytes each while they are counted

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or of answers: percentiles (numpy's `linear`), the longest, all together."""

    p5: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: int
    total: int

    @classmethod
    def of(cls, tokens: Numbers) -> Self:
        """Return what is told of lengths, one a row."""
        p5, p50, p90, p95, p99 = map(float, np.percentile(tokens, (5, 50, 90, 95, 99)))
        return cls(p5, p50, p90, p95, p99, max=int(tokens.max()), total=int(tokens.sum()))


@dataclass(frozen=True, slots=True)
class Above:
    """The share of rows that are longer than a limit, prompt and answer together, and of all tokens that are theirs."""

    limit: int
    rows: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Reuse:
    """What an ideal prefix cache, of no limit and nothing else to do, would hold of the prompts.

    Attributes:
        cold: share of all prompt tokens that stood in earlier rows, in leading whole blocks; None where there are
            too many blocks to count.
        after_history: the same when the rows of the history came before; None without one.
        block_size: tokens of the blocks that are counted, the server's.
        recorded: block sizes of the trace itself.
        rows: share of rows that have block ids; the others count as unlike any other.
    """

    cold: float | None
    after_history: float | None
    block_size: int
    recorded: tuple[int, ...]
    rows: float


@dataclass(frozen=True, slots=True)
class Sessions:
    """Rows that belong to conversations.

    Attributes:
        count: of conversations.
        rows: that belong to one.
        turns_p50, turns_max: rows of a conversation.
        timed: share of the later turns whose think time is known; None when there is no later turn.
    """

    count: int
    rows: int
    turns_p50: float
    turns_max: int
    timed: float | None


@dataclass(frozen=True, slots=True)
class Shape:
    """What was observed of rows.

    Attributes:
        rows: how many.
        span: seconds from the first arrival to the last; None of one row.
        rate: rows per second of the span; None where all arrive at once.
        dispersion: variance / mean of the arrivals per full bin, by seconds of the bin: 1 for Poisson.
        input_len, output_len: of prompts and of answers.
        above: a share for each of `LIMITS`.
        single: rows whose answer is one token at most: they have a TTFT and no ITL.
        reuse: None where no row has block ids.
        sessions: None where no row has one.
        steps: None where the clock has none.
    """

    rows: int
    span: float | None
    rate: float | None
    dispersion: Mapping[int, float]
    input_len: Lengths
    output_len: Lengths
    above: tuple[Above, ...]
    single: int
    reuse: Reuse | None
    sessions: Sessions | None
    steps: Steps | None


def describe(rows: Sequence[Request], history: Sequence[Request] = ()) -> Shape:
    """Return the shape of rows, in any order; `history` is what a running server had seen before them.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("no rows have no shape")
    rows = sorted(rows, key=attrgetter("arrival"))
    stamps = _stamps(rows)
    inputs = np.array([r.input_len for r in rows], dtype=np.int64)
    outputs = np.array([r.output_len for r in rows], dtype=np.int64)
    span = float(stamps.max()) / 1e6
    return Shape(
        rows=len(rows), span=span if len(rows) > 1 else None, rate=len(rows) / span if span > 0 else None,
        dispersion={width: d for width in BINS if (d := _dispersion(stamps, width)) is not None},
        input_len=Lengths.of(inputs), output_len=Lengths.of(outputs), above=_above(inputs + outputs),
        single=int((outputs <= 1).sum()), reuse=_reuse(rows, history, int(inputs.sum())), sessions=_sessions(rows),
        steps=clock_steps(stamps / 1e6),
    )  # fmt: skip


def _stamps(rows: Sequence[Request]) -> Numbers:
    """Return arrivals in whole microseconds from the first, as exact as a trace: no bin depends on a rounding."""
    arrivals = np.array([r.arrival for r in rows])
    return np.asarray(np.rint((arrivals - arrivals[0]) * 1e6), dtype=np.int64)


def _dispersion(stamps: Numbers, width: int) -> float | None:
    """Return variance / mean of the rows per full bin of `width` seconds; a bin cut short would count as a lull."""
    places = stamps // (width * 1_000_000)
    bins = int(places.max())
    if bins < FEWEST_BINS:
        return None
    counts = np.unique(places[places < bins], return_counts=True)[1]  # of bins with rows: there may be years between
    n = int(counts.sum())
    return float((counts**2).sum() / n - n / bins)


def _above(tokens: Numbers) -> tuple[Above, ...]:
    total = int(tokens.sum())
    return tuple(
        Above(limit, float((tokens > limit).mean()), float(tokens[tokens > limit].sum() / total))
        for limit in LIMITS.values()
    )


def _reuse(rows: Sequence[Request], history: Sequence[Request], total: int) -> Reuse | None:
    with_ids = [r for r in rows if r.block_ids]
    if not with_ids:
        return None
    cold = warm = None
    if is_countable(rows, history):
        cold = int(ideal_hits(rows, SERVER_BLOCK).sum()) / total
        warm = int(ideal_hits(rows, SERVER_BLOCK, history).sum()) / total if history else None
    return Reuse(
        cold=cold,
        after_history=warm,
        block_size=SERVER_BLOCK,
        recorded=tuple(sorted({r.block_size for r in with_ids if r.block_size})),
        rows=len(with_ids) / len(rows),
    )


def is_countable(rows: Sequence[Request], history: Sequence[Request]) -> bool:
    """Return whether what prompts share can be counted in the memory of a usual host."""
    return sum(len(r.block_ids or ()) for r in chain(rows, history)) <= MOST_BLOCKS


def _sessions(rows: Sequence[Request]) -> Sessions | None:
    turns: dict[str, list[Request]] = {}
    for row in rows:
        if row.session is not None:
            turns.setdefault(row.session, []).append(row)
    if not turns:
        return None
    counts = [len(of) for of in turns.values()]
    later = [row.think_time is not None for of in turns.values() for row in of[1:]]
    timed = sum(later) / len(later) if later else None
    return Sessions(len(turns), sum(counts), float(np.median(counts)), max(counts), timed)


def figures(shape: Shape) -> dict[str, float | int]:
    """Return the shape as plain numbers by name, for files and MLflow; what is absent has no key."""
    told: dict[str, float | int | None] = {
        "requests": shape.rows,
        "span_s": shape.span,
        "request_rate": shape.rate,
        **{f"dispersion_{width}s": value for width, value in shape.dispersion.items()},
    }
    for side in ("input_len", "output_len"):
        lengths = getattr(shape, side)
        told |= {f"{side}_{name}": getattr(lengths, name) for name in Lengths.__dataclass_fields__}
    for name, above in zip(LIMITS, shape.above, strict=True):
        told |= {f"rows_above_{name}": above.rows, f"tokens_above_{name}": above.tokens}
    told["single_token_answers"] = shape.single
    return {name: _rounded(value) for name, value in (told | _details(shape)).items() if value is not None}


def _details(shape: Shape) -> dict[str, float | int | None]:
    told: dict[str, float | int | None] = {}
    if (reuse := shape.reuse) is not None:
        told |= {"ideal_prefix_hit": reuse.cold, "ideal_prefix_hit_after_history": reuse.after_history,
                 "ideal_prefix_hit_block_size": reuse.block_size}  # fmt: skip
    if (talks := shape.sessions) is not None:
        told |= {"sessions": talks.count, "turns_p50": talks.turns_p50, "turns_max": talks.turns_max,
                 "turns_with_think_time": talks.timed}  # fmt: skip
    if (steps := shape.steps) is not None:
        told |= {"clock_step_ms": steps.step * 1e3, "clock_stamps": steps.stamps, "clock_rows_max": steps.most}
    return told


def _rounded(value: float) -> float | int:
    return value if isinstance(value, int) else round(value, 4)
