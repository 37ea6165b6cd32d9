"""What an answer says about itself, read as it passes: its lengths, whether it is whole, what it said.

An answer is a stream of events or one JSON object; a part of it may end anywhere, also within a character.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tuner.proxy.asked import Message, Unreplayable
from tuner.workload import MOST_TOKENS, TokenId

NO_STREAM_USAGE = "no usage in the stream: ask for stream_options.include_usage"
NO_USAGE = "no usage in the answer"
NOTHING_MADE = "no tokens in the prompt or the answer"
TOO_MANY = "more tokens in its usage than there can be"
IN_BAND = "an error in the answer"
CUT_SHORT = "the answer ended before its end"
NOT_READ = "the answer is not JSON of this endpoint"
TOO_LARGE = "too large to read"
COMPRESSED = "compressed"

MOST_OF_AN_EVENT = 4 << 20  # bytes
MOST_OF_AN_ANSWER = 32 << 20  # that is not streamed
MOST_KEPT_OF_A_REPLY = 1 << 20  # characters; a longer one is not compared with later requests

_NEWLINE = re.compile(rb"\r\n|\n|\r")


class _Call(msgspec.Struct):
    id: str | None = None


class _Said(msgspec.Struct):
    content: Any = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Part(msgspec.Struct):
    text: str | None = None


class _Item(msgspec.Struct):
    type: str = ""
    content: list[_Part] | None = None


class _Event(msgspec.Struct):
    """An event of a stream, or a whole answer, of any of the three endpoints."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    error: Any = None
    usage: _Usage | None = None
    choices: list[_Choice] = []
    prompt_token_ids: list[TokenId] | None = None
    response: "_Event | None" = None
    output: list[_Item] | None = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Told:
    """A whole answer.

    Attributes:
        input_len, output_len: tokens, as the server counted them.
        reply: what it said, as a message of the next request; None where that is not known.
        prompt_ids: the prompt's tokens, where the request asked for them.
        id: by which a later request of the responses API may go on from it.
    """

    input_len: int
    output_len: int
    reply: Message | None = None
    prompt_ids: tuple[int, ...] | None = None
    id: str | None = None


@dataclass(slots=True)
class Reader:
    """Reads one answer part by part and keeps what a row needs; a fault is kept too, and told at the end."""

    is_stream: bool
    fault: str | None = None
    is_over: bool = False  # the stream has said that nothing follows
    _rest: bytearray = field(default_factory=bytearray)
    _data: list[bytes] = field(default_factory=list)
    _size: int = 0
    _usage: _Usage | None = None
    _prompt_ids: list[int] | None = None
    _made: int | None = None
    _said: list[str] = field(default_factory=list)
    _length: int = 0
    _calls: list[str] = field(default_factory=list)
    _id: str | None = None
    _finished: bool = False

    def feed(self, data: bytes) -> None:
        """Read a part; after a fault nothing is kept."""
        if self.fault is not None:
            return
        self._rest += data
        if len(self._rest) > (MOST_OF_AN_EVENT if self.is_stream else MOST_OF_AN_ANSWER):
            self._give_up(TOO_LARGE)
        elif self.is_stream and (b"\n" in data or b"\r" in data):
            for event in self._events():
                self._read(event)

    def end(self) -> Told:
        """Return what the answer said.

        Raises:
            Unreplayable: it is not whole, or does not say its lengths.
        """
        if self.is_stream:
            self.feed(b"\n\n")
        elif self.fault is None:
            self._read(bytes(self._rest))
        if self.fault is not None:
            raise Unreplayable(self.fault)
        if not self._finished:
            raise Unreplayable(CUT_SHORT)
        return self._told()

    def _events(self) -> Iterator[bytes]:
        """Yield the data of the events that are whole; a CR at the end may be the half of a CRLF."""
        held = self._rest.endswith(b"\r")
        lines = _NEWLINE.split(self._rest[:-1] if held else self._rest)
        self._rest = bytearray(lines.pop() + (b"\r" if held else b""))
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
                self._size = 0
            if self._size > MOST_OF_AN_EVENT:
                self._give_up(TOO_LARGE)
                return

    def _read(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._finished = self.is_over = True
            return
        try:
            event = _EVENT.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._give_up(NOT_READ)
            return
        if event.error is not None or event.type in {"error", "response.failed"}:
            self._give_up(IN_BAND)
            return
        self._note(event if event.response is None else event.response)

    def _note(self, event: _Event) -> None:
        self._usage = event.usage or self._usage
        self._prompt_ids = event.prompt_token_ids or self._prompt_ids
        if event.status in {"completed", "incomplete"}:  # the responses API
            self._finished, self.is_over, self._id = True, True, event.id
            texts = [part.text for item in event.output or () for part in item.content or () if item.type == "message"]
            self._say("".join(text for text in texts if text))
        for choice in event.choices:
            self._choice(choice)

    def _choice(self, choice: _Choice) -> None:
        self._finished = self._finished or choice.finish_reason is not None
        if choice.token_ids is not None:
            self._made = (self._made or 0) + len(choice.token_ids)
        if (said := choice.message or choice.delta) is None:
            return
        if isinstance(said.content, str):
            self._say(said.content)
        self._calls += [call.id for call in said.tool_calls or () if call.id]

    def _say(self, text: str) -> None:
        self._length += len(text)
        if self._length <= MOST_KEPT_OF_A_REPLY:
            self._said.append(text)
        else:
            self._said.clear()

    def _told(self) -> Told:
        usage = self._usage or _Usage()
        counted = None if self._prompt_ids is None else len(self._prompt_ids)
        input_len = _first(usage.prompt_tokens, usage.input_tokens, counted)
        output_len = _first(usage.completion_tokens, usage.output_tokens, self._made)
        if input_len is None or output_len is None:
            raise Unreplayable(NO_STREAM_USAGE if self.is_stream else NO_USAGE)
        if input_len < 1 or output_len < 1:
            raise Unreplayable(NOTHING_MADE)
        if max(input_len, output_len) > MOST_TOKENS:
            raise Unreplayable(TOO_MANY)
        known = self._length <= MOST_KEPT_OF_A_REPLY
        reply = Message("assistant", "".join(self._said), tuple(self._calls)) if known else None
        ids = None if self._prompt_ids is None else tuple(self._prompt_ids)
        return Told(input_len, output_len, reply, ids, self._id)

    def _give_up(self, why: str) -> None:
        self.fault, self._rest, self._data = why, bytearray(), []
        self._said.clear()


def _first(*counts: int | None) -> int | None:
    return next((count for count in counts if count is not None), None)
