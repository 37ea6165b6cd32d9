"""What is done to the rows of a trace on their way into a workload: which stay, how they shrink, when they arrive.

In this order: shrink, length limit, spreading, time scale, rate, window.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as changed

from tuner import reuse, transforms, units
from tuner.errors import SpecError
from tuner.readers.spool import Spool
from tuner.transforms import Columns, Ints, Selection
from tuner.workload import GREATEST_BLOCK, LATEST, Request

LONG = 1800.0  # seconds that a trial should not take for its replay alone
FASTEST = 1000.0  # requests a second, beyond which a wrong unit of time is likelier


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be changed; the defaults change nothing.

    Attributes:
        shrink: divide prompts and their blocks by it.
        shrink_output: divide outputs by it.
        max_len: drop rows of more tokens, prompt and output together.
        spread_steps: draw arrivals evenly inside the steps of the recording's clock.
        time_scale: what every second of the recording becomes.
        rate_scale: the request rate, times the recorded one.
        window: seconds of a window to choose, with another for confirmation and the history before them.
        seed: of everything that is drawn.
    """

    shrink: int = 1
    shrink_output: int = 1
    max_len: int | None = None
    spread_steps: bool = False
    time_scale: float = 1.0
    rate_scale: float = 1.0
    window: float | None = None
    seed: int = 0


def shrunk(row: Request, changes: Changes) -> Request:
    """Return the row of the size that is wanted.

    Raises:
        SpecError: its blocks cannot be divided so.
    """
    if changes.shrink == changes.shrink_output == 1:
        return row
    size = row.block_size
    if size is not None and size % changes.shrink:
        raise SpecError(f"--shrink {changes.shrink}: blocks of {size} tokens cannot be divided by it",
                        hint=f"use a divisor of {size}")  # fmt: skip
    return changed(
        row, input_len=-(-row.input_len // changes.shrink), output_len=-(-row.output_len // changes.shrink_output),
        block_size=None if size is None else size // changes.shrink, prompt=row.prompt if changes.shrink == 1 else None,
    )  # fmt: skip


# --- What is kept, and when it arrives --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What each file will hold, by places in the spool, what was done, and what a reader must know."""

    parts: Mapping[str, Selection]
    dropped: Mapping[str, int]
    transforms: tuple[str, ...]
    notes: tuple[str, ...]


def plan(changes: Changes, spool: Spool) -> Plan:
    """Return what becomes of the rows.

    Raises:
        SpecError: what is wanted cannot be done with this trace; names the flag.
    """
    rng = np.random.default_rng(changes.seed)
    place, recorded = spool.sorted()
    columns, words = _clock(changes, recorded, rng)
    rows, said = _rate(changes, columns, rng)
    _check_room(changes, spool, rows)
    parts = {"workload": rows}
    dropped = Counter({"thinned to the rate": len(columns) - len(np.unique(rows.row))})
    if changes.window is not None:
        parts, windows = _windows(changes.window, spool, place, columns, rows)
        said += windows
        kept = np.unique(np.concatenate([part.row for part in parts.values()]))
        dropped["outside the windows"] = len(np.unique(rows.row)) - len(kept)
    found = {name: replace(part, row=place[part.row]) for name, part in parts.items() if len(part)}
    words = [*_row_words(changes), *words, *said]
    notes = [*_clock_notes(changes, recorded), *_length_notes(changes, rows)]
    return Plan(found, +dropped, tuple(words), tuple(notes))


def _check_room(changes: Changes, spool: Spool, rows: Selection) -> None:
    """Refuse copies whose block ids would be larger than any reader takes."""
    if (spool.greatest_block + 1) * (int(rows.copy.max()) + 1) > GREATEST_BLOCK:
        raise SpecError(
            f"--rate-scale {changes.rate_scale:g}: with block ids up to {spool.greatest_block} there are none left for "
            f"the copies, which may go up to {GREATEST_BLOCK}", hint="number the trace's block ids from 0 on"
        )  # fmt: skip


def _row_words(changes: Changes) -> Iterator[str]:
    if changes.shrink != 1:
        yield f"SCALED: prompts and their blocks divided by {changes.shrink}, rounded up; shared prefixes stay shared"
    if changes.shrink_output != 1:
        yield f"SCALED: outputs divided by {changes.shrink_output}, rounded up"
    if changes.max_len is not None:
        yield f"rows above {changes.max_len:,} tokens dropped, for every configuration alike"


def _clock(changes: Changes, columns: Columns, rng: np.random.Generator) -> tuple[Columns, list[str]]:
    """Return the columns on the clock that is wanted, and what was done to it."""
    arrival, words = columns.arrival, []
    if changes.spread_steps:
        steps = transforms.clock_steps(arrival)
        if steps is None:
            raise SpecError("--spread-steps: the clock of this trace does not go in steps",
                            hint="leave the flag out; where a rate was raised, spread the trace itself")  # fmt: skip
        arrival = transforms.spread(arrival, steps.step, rng)
        words.append(f"arrivals spread evenly inside their steps of {steps.step:.3g} s (seed {changes.seed})")
    if changes.time_scale != 1:
        arrival = arrival * changes.time_scale
        if arrival[-1] - arrival[0] > LATEST:
            raise SpecError(f"--time-scale {changes.time_scale:g}: the last arrival would be later than any clock",
                            hint="use a smaller factor")  # fmt: skip
        words.append(
            f"recorded times multiplied by {changes.time_scale:g}: "
            "bursts, and the gaps between uses of a prefix, change with them"
        )
    return replace(columns, arrival=np.round(arrival - arrival[0], 6)), words


def _rate(changes: Changes, columns: Columns, rng: np.random.Generator) -> tuple[Selection, list[str]]:
    factor, rows = changes.rate_scale, Selection.of(columns)
    if factor == 1:
        return rows, []
    scaled = transforms.scale_rate(columns, factor, rng)
    if not len(scaled):
        raise SpecError(f"--rate-scale {factor:g}: no row is left", hint="use a larger factor")
    how = "whole prefix groups and sessions kept" if factor < 1 else "shifted copies with relabelled ids"
    words = f"rate scaled {factor:g}x ({how}, seed {changes.seed}): {len(scaled):,} of {len(rows):,} rows"
    if span := columns.span:
        words += f", {len(rows) / span:.3g} -> {len(scaled) / span:.3g} requests/s"
    for width in (1.0, 10.0):
        if span >= 10 * width:
            before, after = (transforms.dispersion(part.arrival, width, span) for part in (rows, scaled))
            words += f", dispersion at {width:g} s {before:.2f} -> {after:.2f}"
    return scaled.where(np.arange(len(scaled))), [words]


def _clock_notes(changes: Changes, columns: Columns) -> Iterator[str]:
    n, span = len(columns), columns.span
    if changes.rate_scale > 1 and not changes.spread_steps and (steps := transforms.clock_steps(columns.arrival)):
        yield (
            f"the recording's clock goes in steps of {steps.step:.3g} s, with up to {steps.most:,} requests on one, "
            "and so does each copy, at times of its own: most of such a burst is the recorder's (--spread-steps)"
        )
    if n > 1 and (not span or n / span > FASTEST):
        yield f"{n:,} requests in {span:g} s: is the unit of time right? (--time-unit, --time-scale)"


def _length_notes(changes: Changes, rows: Selection) -> Iterator[str]:
    span = float(rows.arrival.max() - rows.arrival.min())
    if changes.window is None and span > LONG:
        yield (
            f"from first to last row {units.format_elapsed(span)}, and each trial replays all of it: "
            "--window 10m chooses ten minutes that are like the whole"
        )


# --- The windows ------------------------------------------------------------------------------------------


def _windows(
    length: float, spool: Spool, place: Ints, columns: Columns, rows: Selection
) -> tuple[dict[str, Selection], list[str]]:
    """Return the window, the one for confirmation and what each will hit of what came before, and say so."""
    group = columns.group[rows.row] * (1 + rows.copy.max(initial=0)) + rows.copy  # copies share nothing
    now = Columns(rows.arrival, columns.input_len[rows.row], columns.output_len[rows.row], group)
    chosen = transforms.choose_windows(now, length) if now.span >= length else ()
    if not chosen:
        why = "no window has two requests" if now.span >= length else f"the trace lasts {now.span:g} s"
        raise SpecError(
            f"--window {length:g}s: {why}", hint="choose another length, or leave it out to keep everything"
        )
    parts, words = {}, []
    for (name, history), window in zip(NAMES, chosen, strict=False):
        parts[name] = rows.where(window.holds(rows.arrival), window.start)
        before = rows.where(rows.arrival < window.start, 0.0)
        parts[history] = _hit_later(spool, place, parts[name], before)
        words.append(
            f"{name}: the window of {length:g} s from {window.start:g} s, {len(parts[name]):,} rows; its shape is "
            f"{window.distance:.0%} from the whole trace's (mean over rate, lengths, dispersion and reuse)"
        )
    if len(chosen) == 1:
        words.append("the trace has no room for a second window: no confirm.jsonl")
    return parts, words


NAMES = (("workload", "history"), ("confirm", "confirm_history"))


def _hit_later(spool: Spool, place: Ints, part: Selection, before: Selection) -> Selection:
    """Return the rows of `before` whose blocks the part's rows find in an endless cache, the last user of each.

    The other rows of the history leave nothing behind that the window asks for.
    """
    if spool.greatest_block < 0:
        return before.where(np.zeros(0, dtype=np.int64))
    users = reuse.last_users(spool.rows(place[part.row], part.copy), spool.rows(place[before.row], before.copy))
    return before.where(np.array(users, dtype=np.int64))
