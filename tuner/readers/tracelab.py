"""TraceLab's JSONL: the rounds of coding agents, with token counts, how much was cached, and the times of events.

Format: github.com/uw-syfi/TraceLab, docs/prompt_cache_accounting.md. A round was sent at its last user message or tool
result before the first output; `output_tokens` has the reasoning in it. `prefix_tokens` is what the service found in
its cache, nearly always of the round before: so much of it the two prompts share, in whole blocks. What is cached of
other sessions (the prefix of a first round) or of the answer is no prompt that is known, and counted as new.
"""

from dataclasses import dataclass

import msgspec

from tuner.readers.blocks import BLOCK, Run
from tuner.readers.clock import NO_ARRIVAL
from tuner.readers.format import DAMAGE, NO_OUTPUT, NO_PROMPT, Format, Head, Options, Row, by_line, instant
from tuner.readers.source import Damaged, Source, Tally
from tuner.workload import Request, Tokens

INPUT, OUTPUT = frozenset({"user_message", "tool_result"}), frozenset({"reasoning", "text", "tool_call"})
OTHERS = "cached tokens that the round before did not have in its prompt: counted as new"


class _Event(msgspec.Struct):
    event_type: str
    timestamp: str


class _Round(msgspec.Struct):
    session_id: str
    round_index: int
    input_tokens_total: Tokens
    prefix_tokens: Tokens
    output_tokens: Tokens
    timing_events: list[_Event]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the first reading keeps of a round."""

    index: int
    arrival: float
    end: float | None
    input_len: int
    prefix: int
    line: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a round stands in its session: its name and prompt, and the round before it."""

    id: str
    run: Run
    end: float | None
    input_len: int
    before: "_Place | None" = None


def _make(options: Options, tally: Tally) -> Row:
    size = options.block_size or BLOCK
    decode = msgspec.json.Decoder(_Round).decode
    places = _places(_sessions(tally.source), size)

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        arrival, _ = _times(found)
        if reason := _useless(found):
            return reason
        place = places[number]
        before = place.before
        if found.prefix_tokens > (0 if before is None else before.input_len):
            tally.note(OTHERS, number)
        return Request(
            arrival, found.input_tokens_total, found.output_tokens, place.run.ids, size, source_line=number,
            id=place.id, session=found.session_id, parent=None if before is None else before.id, model=found.model,
            think_time=None if before is None or before.end is None or before.end > arrival
            else round(arrival - before.end, 6),
        )  # fmt: skip

    return row


def _useless(found: _Round) -> str | None:
    if not found.input_tokens_total:
        return NO_PROMPT
    return None if found.output_tokens else NO_OUTPUT


def _times(found: _Round) -> tuple[float, float | None]:
    """Return when a round was sent and when its last output came.

    Raises:
        Damaged: nothing was sent before the first output.
    """
    kinds = [event.event_type for event in found.timing_events]
    first = next((place for place, kind in enumerate(kinds) if kind in OUTPUT), len(kinds))
    sent = [event.timestamp for event in found.timing_events[:first] if event.event_type in INPUT]
    if not sent:
        raise Damaged(f"{NO_ARRIVAL}: no user_message or tool_result before the first output")
    came = [instant(event.timestamp) for event in found.timing_events if event.event_type in OUTPUT]
    return max(map(instant, sent)), max(came, default=None)


def _sessions(source: Source) -> dict[str, list[_Seen]]:
    """Return the rounds of each session, from a first reading: they may stand in any order."""
    decode = msgspec.json.Decoder(_Round).decode
    sessions: dict[str, list[_Seen]] = {}
    for line, text in source.lines():
        try:
            found = decode(text)
            arrival, end = _times(found)
        except DAMAGE:
            continue
        if not _useless(found):
            seen = _Seen(found.round_index, arrival, end, found.input_tokens_total, found.prefix_tokens, line)
            sessions.setdefault(found.session_id, []).append(seen)
    return sessions


def _places(sessions: dict[str, list[_Seen]], size: int) -> dict[int, _Place]:
    """Return the place of each line's round; what a prompt has in common with the one before it is one piece."""
    places: dict[int, _Place] = {}
    fresh = 0
    for session, rounds in sessions.items():
        before: _Place | None = None
        for count, seen in enumerate(sorted(rounds, key=lambda seen: (seen.index, seen.arrival, seen.line))):
            blocks = -(-seen.input_len // size)
            shared = 0 if before is None else min(seen.prefix, before.input_len, seen.input_len) // size
            new = blocks - shared
            run = Run(fresh, new) if before is None else before.run.extended(shared, fresh, new)
            before = places[seen.line] = _Place(f"{session}/{count}", run, seen.end, seen.input_len, before)
            fresh += new
    return places


def _is_this(head: Head) -> bool:
    return head.is_json and {"session_id", "round_index", "timing_events", "prefix_tokens"} <= head.keys


FORMAT = Format(
    name="tracelab",
    title="TraceLab rounds JSONL: session_id, round_index, token counts with a cached prefix, timing_events",
    is_this=_is_this,
    read=by_line(_make),
    takes=frozenset({"block_size"}),
)
