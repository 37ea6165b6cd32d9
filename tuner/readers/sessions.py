"""What the rows of a log of calls have to do with each other: calls inside calls, and turns of a session."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tuner.readers.source import Tally
from tuner.workload import Request

AGAIN = "logged before under the same id"
WRAPPER = "wraps another call of the file (the same request, seen from outside)"


@dataclass(slots=True)
class Calls:
    """What is known beside the rows of a log.

    Attributes:
        ends: when each row's answer was complete, on the clock of `arrival`; None where that is not known.
        around: of everything logged, whether a row or not, the id of what it happened inside.
    """

    ends: list[float | None] = field(default_factory=list)
    around: dict[str, str] = field(default_factory=dict)


def settled(rows: Sequence[Request], calls: Calls, tally: Tally) -> list[Request]:
    """Return the rows that stand for a request each, the innermost where calls are nested, joined to sessions."""
    again = _again(rows)
    outer = _outer(rows, calls) - again
    kept = [place for place in range(len(rows)) if place not in outer and place not in again]
    for reason, places in ((AGAIN, again), (WRAPPER, outer)):
        for _ in places:
            tally.drop(reason)
    return linked([rows[place] for place in kept], [calls.ends[place] for place in kept])


def _again(rows: Sequence[Request]) -> set[int]:
    """Return the places of rows whose id stood before: an exporter that gets no answer sends once more."""
    seen: set[str] = set()
    found: set[int] = set()
    for place, row in enumerate(rows):
        if row.id in seen:
            found.add(place)
        elif row.id is not None:
            seen.add(row.id)
    return found


def _outer(rows: Sequence[Request], calls: Calls) -> set[int]:
    """Return the places of the rows that were still going on when one inside them began.

    Some traces hang a turn below the turn before it, which was over by then.
    """
    places = {row.id: place for place, row in enumerate(rows) if row.id is not None}
    found: set[int] = set()
    for row in rows:
        place = _around(row.id, calls.around, places)
        if place is not None and ((end := calls.ends[place]) is None or end > row.arrival):
            found.add(place)
    return found


def _around(name: str | None, around: Mapping[str, str], places: Mapping[str, int]) -> int | None:
    """Return the place of the nearest row around something logged."""
    seen: set[str | None] = {name}
    while name is not None and (name := around.get(name)) not in seen:
        if name in places:
            return places[name]
        seen.add(name)
    return None


def linked(rows: Sequence[Request], ends: Sequence[float | None]) -> list[Request]:
    """Return the rows with their `parent` and `think_time`, in the order they came in.

    A turn waited for the last answer of its session that was complete when it began. One that began before any was
    complete has no parent: it was sent beside the others.

    Args:
        rows: with the `session` that the trace names, and an `id`.
        ends: when each one's answer was complete, on the clock of `arrival`; None where that is not known.
    """
    found = list(rows)
    sessions: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row.session is not None:
            sessions.setdefault(row.session, []).append(place)
    for places in sessions.values():
        order = sorted(places, key=lambda p: rows[p].arrival)
        answered = sorted(
            (max(end, rows[p].arrival), rows[p].id or "", p) for p in order if (end := ends[p]) is not None
        )
        for place, before in _answered_before(order, answered, rows):
            end, _, parent = answered[before]
            think_time = round(rows[place].arrival - end, 6)
            found[place] = replace(rows[place], parent=rows[parent].id, think_time=think_time)
    return found


def _answered_before(
    order: Sequence[int], answered: Sequence[tuple[float, str, int]], rows: Sequence[Request]
) -> Iterator[tuple[int, int]]:
    """Yield each turn that has one with the last answer before it, which has an id and began before it did."""
    known = 0
    for place in order:
        arrival = rows[place].arrival
        while known < len(answered) and answered[known][0] <= arrival:
            known += 1
        last = known - 1
        while last >= 0 and rows[answered[last][2]].arrival == arrival:
            last -= 1
        if last >= 0 and rows[answered[last][2]].id is not None:
            yield place, last
