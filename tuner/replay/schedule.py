"""When each request goes out, in seconds after the replay's anchor, and which wait for an answer first.

Following sessions closes the loop inside a conversation, as its user did: who reads an answer cannot ask the next
question before it is there. A slow server is then asked later, never earlier, and what it was asked later is told.
Between conversations the loop stays open: they begin when they were recorded to begin, however slow the server is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from tuner.records import Floats, Ints
from tuner.workload import Request, Workload

LEAST_WARM_UP_ROWS = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """A row that waits: for the end of the row at place `after` of the schedule, and then `think` seconds."""

    after: int
    think: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows in the order in which they go out, when each is due, and by place the turns among them."""

    rows: tuple[Request, ...]
    due: Floats
    turns: Mapping[int, Turn] = field(default_factory=dict)

    @property
    def window(self) -> float:
        """Seconds from the first row to the last, as recorded: what throughput and goodput are counted over."""
        return float(self.due[-1]) if len(self.due) else 0.0

    def part(self, chosen: Ints) -> "Schedule":
        """Return the schedule of some of the rows, ascending; a turn comes with the row that it waits for."""
        place = {int(row): i for i, row in enumerate(chosen)}
        turns = {place[row]: Turn(place[t.after], t.think) for row, t in self.turns.items() if row in place}
        return Schedule(tuple(self.rows[row] for row in chosen), self.due[chosen], turns)


def schedule(rows: Sequence[Request], *, follow: bool = False) -> Schedule:
    """Return the recorded times, counted from the first row; ties keep the file's order.

    Args:
        rows: in any order.
        follow: have turns wait for the answer before them, where the think time between is known.
    """
    ordered = sorted(rows, key=lambda row: row.arrival)
    arrivals = np.array([row.arrival for row in ordered], dtype=np.float64)
    return Schedule(tuple(ordered), arrivals - arrivals[:1], _turns(ordered) if follow else {})


def _turns(ordered: Sequence[Request]) -> dict[int, Turn]:
    """Return which rows wait for which: always for one that came before, so that all come in the end."""
    named: dict[str, int] = {}
    latest: dict[str, int] = {}
    found: dict[int, Turn] = {}
    for place, row in enumerate(ordered):
        after = None
        if row.parent is not None:
            after = named.get(row.parent)
        elif row.session is not None:
            after = latest.get(row.session)
        if after is not None and row.think_time is not None:
            found[place] = Turn(after, row.think_time)
        if row.id is not None:
            named[row.id] = place
        if row.session is not None:
            latest[row.session] = place
    return found


def turn_facts(plan: Schedule, due: Floats) -> dict[str, float]:
    """Return how many turns were due later than recorded, and by how much; nothing where none waits.

    turns_followed: rows that wait for an answer.
    turns_delayed: those that it made later; turn_delay_p50, turn_delay_max: by how many seconds.

    Args:
        plan: as recorded.
        due: when each row was due in the end.
    """
    if not plan.turns:
        return {}
    delay = due - plan.due
    late = delay[delay > 0]
    found = {"turns_followed": float(len(plan.turns)), "turns_delayed": float(len(late))}
    if len(late):
        found |= {"turn_delay_p50": float(np.median(late)), "turn_delay_max": float(late.max())}
    return found


def warm_up_rows(workload: Workload, *, duration: float, seed: int) -> tuple[Request, ...]:
    """Return made-up rows with the workload's lengths at its rate, the longest prompt first.

    They have no block ids, prompts or sessions: they cannot leave a measured row's prefix in the cache.
    """
    rng = np.random.default_rng(seed)
    rate = len(workload.requests) / workload.span if workload.span > 0 else 1.0
    count = max(LEAST_WARM_UP_ROWS, round(rate * duration))
    longest = max(workload.requests, key=lambda row: row.input_len)
    drawn = [longest, *(workload.requests[i] for i in rng.integers(len(workload.requests), size=count - 1))]
    arrivals = np.sort(rng.uniform(0, duration, size=count))
    return tuple(
        replace(row, arrival=float(at), block_ids=None, block_size=None, prompt=None, session=None, parent=None,
                think_time=None)
        for row, at in zip(drawn, arrivals, strict=True)
    )  # fmt: skip
