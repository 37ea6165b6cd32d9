"""When each request goes out, in seconds after the replay's anchor."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tuner.workload import Request, Workload

Floats = npt.NDArray[np.float64]

LEAST_WARM_UP_ROWS = 4


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows in the order in which they go out, and when each is due."""

    rows: tuple[Request, ...]
    due: Floats

    @property
    def window(self) -> float:
        """Seconds from the first row to the last: what throughput and goodput are counted over."""
        return float(self.due[-1]) if len(self.due) else 0.0


def schedule(rows: tuple[Request, ...]) -> Schedule:
    """Return the recorded times, counted from the first row; ties keep the file's order."""
    ordered = sorted(rows, key=lambda row: row.arrival)
    arrivals = np.array([row.arrival for row in ordered], dtype=np.float64)
    return Schedule(tuple(ordered), arrivals - arrivals[:1])


def warm_up_rows(workload: Workload, *, duration: float, seed: int) -> tuple[Request, ...]:
    """Return made-up rows with the workload's lengths at its rate, the longest prompt first.

    They have no block ids and no prompts: they cannot leave a measured row's prefix in the cache.
    """
    rng = np.random.default_rng(seed)
    rate = len(workload.requests) / workload.span if workload.span > 0 else 1.0
    count = max(LEAST_WARM_UP_ROWS, round(rate * duration))
    longest = max(workload.requests, key=lambda row: row.input_len)
    drawn = [longest, *(workload.requests[i] for i in rng.integers(len(workload.requests), size=count - 1))]
    arrivals = np.sort(rng.uniform(0, duration, size=count))
    return tuple(
        replace(row, arrival=float(at), block_ids=None, block_size=None, prompt=None, session=None, parent=None)
        for row, at in zip(drawn, arrivals, strict=True)
    )


def warm_prefixes(workload: Workload, capacity: int | None = None) -> tuple[Request, ...]:
    """Return rows that leave in the cache what the window's rows will hit of the history, latest use last.

    Each row is the leading blocks of a history row that the window knows, for one output token. Rows that
    are the beginning of another are left out; beyond `capacity` tokens the oldest are.
    """
    known = {block for row in workload.requests for block in row.block_ids or ()}
    prefixes: dict[tuple[int, ...], Request] = {}
    # A history row's arrival counts backwards from the window's start.
    for row in sorted(workload.history, key=lambda row: -row.arrival):
        blocks = _leading(row, known)
        if blocks:
            prefixes.pop(blocks, None)
            prefixes[blocks] = row
    starts = {blocks[:n] for blocks in prefixes for n in range(1, len(blocks))}
    kept: list[Request] = []
    left = capacity
    for blocks, row in reversed([item for item in prefixes.items() if item[0] not in starts]):
        tokens = len(blocks) * (row.block_size or 0)
        if left is not None and tokens > left:
            break
        left = None if left is None else left - tokens
        kept.append(replace(row, input_len=tokens, output_len=1, block_ids=blocks, prompt=None))
    return tuple(reversed(kept))


def _leading(row: Request, known: set[int]) -> tuple[int, ...]:
    """Return the full blocks at the row's start that the window knows."""
    if row.block_ids is None or row.block_size is None:
        return ()
    full = row.block_ids[: row.input_len // row.block_size]
    count = next((i for i, block in enumerate(full) if block not in known), len(full))
    return full[:count]
