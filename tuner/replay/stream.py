"""Read the answer to one request: bytes in, times and token counts out.

Chunks are not tokens and reads are not chunks: the server's running `completion_tokens` says how many tokens
each event brought, and an event may be cut anywhere by the network. HTTP 200 does not mean success either.
"""

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import gt, sub

from tuner.outside import blotted

IN_BAND_ERROR, MALFORMED, MISCOUNTED, NO_DONE, EMPTY, SHORT, LONG = (
    "in_band_error", "malformed", "miscounted", "no_done", "empty", "short", "long")  # fmt: skip

MOST_OF_AN_EVENT = 8 << 20
MOST_OF_AN_ERROR, LONGEST_MESSAGE = 64 * 1024, 300

# Inside a JSON string quotes are escaped, so these cannot match in generated text.
_COUNT = b'"completion_tokens":'
_ERROR = b'"error":'
_COUNTS = re.compile(rb'"completion_tokens":\s*(\d{1,12})')
_NUMBER = re.compile(rb"\s*(\d{1,12})")
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
_CHOICES = b'"choices":[{'  # as vLLM writes it; spaces are looked for only when this is not there
_NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')
_CHANNELS = ("text", "content", "reasoning", "reasoning_content", "refusal", "tool_calls")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventParser:
    """Cuts a stream of server-sent events into the data of each, however the bytes are split.

    Lines end in LF, CRLF or CR, as the HTML standard's section on server-sent events has it.
    """

    __slots__ = ("_after_cr", "_data", "_rest", "is_between_events")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self.is_between_events = True  # everything fed so far belongs to events that are complete

    @property
    def is_too_long(self) -> bool:
        """Whether a line has more bytes than an event may have, and no end yet."""
        return len(self._rest) > MOST_OF_AN_EVENT

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is complete now."""
        if not data:
            return
        # A CR ends its line at once, lest the event wait for the next one; the LF of a CRLF cut in two is dropped.
        text = self._rest + (data[1:] if self._after_cr and data.startswith(b"\n") else data)
        self._after_cr = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(text) if b"\r" in text else text.split(b"\n")
        for line in lines:
            if not line:
                yield from self.close()
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        self.is_between_events = not self._rest and not self._data

    def close(self) -> Iterator[bytes]:
        """Yield the data of an event that only lacks its blank line."""
        if self._data:
            data, self._data = b"\n".join(self._data), []
            yield data


class Completion:
    """What a stream of completion events has said so far."""

    __slots__ = ("_parser", "error", "is_done", "made", "message", "times", "tokens", "usage")

    def __init__(self) -> None:
        self._parser = EventParser()
        self.times, self.tokens = array("d"), array("d")
        self.made = 0
        self.usage: bytes | None = None
        self.is_done = False
        self.error = self.message = ""

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that were read at `now`."""
        parser = self._parser
        # Nearly every read is one whole event.
        if (
            data.find(b"\n") == len(data) - 2
            and data.startswith(b"data: ")
            and data.endswith(b"\n")
            and b"\r" not in data
            and parser.is_between_events
        ):
            self._event(data[6:-2], now)
            return
        if parser.is_too_long:  # and will not be looked at any more
            self.error, self.message = self.error or MALFORMED, f"an event of more than {MOST_OF_AN_EVENT >> 20} MiB"
            return
        for event in parser.feed(data):
            self._event(event, now)

    def feed_all(self, reads: Sequence[bytes], stamps: Sequence[float]) -> None:
        """Take several reads and when each came."""
        counts = self._one_event_each(reads)
        if counts is None:
            for data, now in zip(reads, stamps, strict=True):
                self.feed(data, now)
            return
        self.times.extend(stamps)
        self.tokens.extend(map(sub, counts, [self.made, *counts]))
        self.made = counts[-1]
        self.usage = reads[-1][6:-2]

    def _one_event_each(self, reads: Sequence[bytes]) -> list[int] | None:
        """Return the running counts when each read is one whole event with more tokens than before, else None.

        That is how nearly all come, and it is seen for many at once in a fraction of the time.
        """
        if not reads or not self._parser.is_between_events:
            return None
        text, n = b"".join(reads), len(reads)
        # Two line feeds for each read, which are its last two bytes: so no read has another.
        if text.count(b"\n") != 2 * n or text.count(_CHOICES) != n or b"\r" in text or _ERROR in text:
            return None
        if not all(read.startswith(b"data: {") and read.endswith(b"\n\n") for read in reads):
            return None
        counts = [int(count) for count in _COUNTS.findall(text)]
        return counts if len(counts) == n and all(map(gt, counts, [self.made, *counts])) else None

    def end(self, output_len: int, now: float) -> str:
        """Return "" for a completed request of this length, else what went wrong."""
        for event in self._parser.close():
            self._event(event, now)
        if self.error:
            return self.error
        if not self.is_done:
            return NO_DONE
        if not self.times:
            return EMPTY
        if self.usage is not None and self.made != output_len:
            return SHORT if self.made < output_len else LONG
        return ""

    @property
    def prompt_tokens(self) -> float:
        """Tokens of the prompt as the server counted them, NaN when it did not say."""
        match = _PROMPT_TOKENS.search(self.usage) if self.usage is not None else None
        return float(match[1]) if match else math.nan

    @property
    def completion_tokens(self) -> float:
        """Tokens that came, as the server counted them, NaN when it did not say."""
        return float(self.made) if self.usage is not None else math.nan

    @property
    def server_metrics(self) -> Mapping[str, float]:
        """What the server says of this request's timing, as vLLM does with --enable-per-request-metrics."""
        if self.usage is None or b'"metrics"' not in self.usage:
            return {}
        try:
            said = json.loads(self.usage)["metrics"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}
        found = said.items() if isinstance(said, dict) else ()
        return {name: value for name, value in found if isinstance(value, int | float) and math.isfinite(value)}

    def _event(self, data: bytes, now: float) -> None:
        at = data.rfind(_COUNT)
        match = _NUMBER.match(data, at + len(_COUNT)) if at >= 0 else None
        if match is None or _ERROR in data:
            self._without_usage(data, now)
            return
        self.usage = data
        total = int(match[1])
        if _CHOICES in data or not _NO_CHOICES.search(data):
            if total > self.made:
                self.times.append(now)
                self.tokens.append(total - self.made)
                self.made = total
            return
        # The closing usage event brings no token: where it is the only one with counts, chunks stay unknown.
        if self.made and total != self.made:
            self.error = self.error or MISCOUNTED
            self.message = self.message or f"the chunks' counts end at {self.made} tokens, the stream's at {total}"
        self.made = max(total, self.made)

    def _without_usage(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        if not data.strip():  # some proxies send a blank event to keep a connection open
            return
        try:
            event = json.loads(data)
            error, has_text = event.get("error"), any(_text(choice) for choice in event.get("choices") or ())
        except (ValueError, AttributeError, TypeError, RecursionError):
            self.error, self.message = self.error or MALFORMED, blotted(data.decode(errors="replace"))[:200]
            return
        if error is not None:
            self.error = self.error or IN_BAND_ERROR
            said = str(error.get("message", error) if isinstance(error, dict) else error)
            self.message = blotted(said)[:LONGEST_MESSAGE]
        elif has_text:
            self.times.append(now)
            self.tokens.append(math.nan)


def _text(choice: dict[str, object]) -> bool:
    """Return whether a choice without counts carries tokens, in any channel."""
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else choice
    return any(said.get(channel) for channel in _CHANNELS)


def message_of(body: bytes) -> str:
    """Return what a server said beside an HTTP status."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        text = body.decode(errors="replace")
    return blotted(text)[:LONGEST_MESSAGE]
