"""Send one request and read its stream: bytes in, times and token counts out.

Chunks are not tokens and reads are not chunks: the server's running `completion_tokens` says how many tokens
each event brought, and an event may be cut anywhere by the network. HTTP 200 does not mean success either.
"""

import asyncio
import errno
import json
import math
import os
import re
import resource
import time
from array import array
from collections.abc import Iterator

import aiohttp
import numpy as np
import numpy.typing as npt

from tuner.metrics import Records

NEVER_SENT, REFUSED, RESET, TIMEOUT, NO_SOCKET = "never_sent", "refused", "reset", "timeout", "no_socket"
IN_BAND_ERROR, MALFORMED, NO_DONE, EMPTY, SHORT, LONG, BROKEN = (
    "in_band_error", "malformed", "no_done", "empty", "short", "long", "broken")  # fmt: skip

# vLLM closes idle connections after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); one that we would reuse then is lost.
KEEP_ALIVE = 4.0
SPARE_FILES = 64

# Inside a JSON string quotes are escaped, so these cannot match in generated text.
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
_NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')


class EventParser:
    """Cuts a stream of server-sent events into the data of each, however the bytes are split."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of every event that is complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if not stripped:
                yield from self.close()
            elif stripped.startswith(b"data:"):
                self._data.append(stripped[5:].removeprefix(b" "))

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
        for event in self._parser.feed(data):
            self._event(event, now)

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

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        match = _COMPLETION_TOKENS.search(data)
        if match is None:
            self._without_usage(data, now)
            return
        self.usage = data
        total = int(match[1])
        if total <= self.made:
            return
        # The closing usage event brings no token: where it is the only one with counts, chunks stay unknown.
        if not _NO_CHOICES.search(data):
            self.times.append(now)
            self.tokens.append(total - self.made)
        self.made = total

    def _without_usage(self, data: bytes, now: float) -> None:
        try:
            event = json.loads(data)
            error, choices = event.get("error"), event.get("choices") or ()
        except (ValueError, AttributeError):
            self.error, self.message = self.error or MALFORMED, data[:200].decode(errors="replace")
            return
        if error is not None:
            self.error = self.error or IN_BAND_ERROR
            self.message = str(error.get("message", error) if isinstance(error, dict) else error)
        elif any(_text(choice) for choice in choices):
            self.times.append(now)
            self.tokens.append(math.nan)


def _text(choice: dict[str, object]) -> bool:
    """Return whether a choice without counts carries tokens, in any channel."""
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else choice
    return any(said.get(name) for name in ("text", "content", "reasoning", "reasoning_content", "tool_calls"))


class Tape:
    """The columns of a replay while it runs; times are seconds after the anchor."""

    def __init__(self, due: npt.NDArray[np.float64], input_len: list[int], output_len: list[int]) -> None:
        n = len(due)
        self.due, self.anchor = due, time.perf_counter()
        self.input_len, self.output_len = input_len, output_len
        self.sent, self.ended, self.prompt_tokens, self.completion_tokens = (np.full(n, np.nan) for _ in range(4))
        self.error = [NEVER_SENT] * n
        self.chunks: list[tuple[array[float], array[float]]] = [(array("d"), array("d"))] * n
        self.messages: dict[str, str] = {}
        self.finished = 0

    def clock(self) -> float:
        """Return the seconds since the anchor."""
        return time.perf_counter() - self.anchor

    def end(self, row: int, answer: Completion, error: str, message: str) -> None:
        """Note how a request ended."""
        self.ended[row] = self.clock()
        self.prompt_tokens[row], self.completion_tokens[row] = answer.prompt_tokens, answer.completion_tokens
        self.chunks[row] = (answer.times, answer.tokens)
        self.error[row] = error
        self.finished += 1
        if error and (message or answer.message):
            self.messages.setdefault(error, message or answer.message)

    def records(self) -> Records:
        """Return what was seen."""
        counts = [len(times) for times, _ in self.chunks]
        return Records(
            due=self.due,
            sent=self.sent,
            ended=self.ended,
            input_len=np.array(self.input_len, dtype=np.int64),
            output_len=np.array(self.output_len, dtype=np.int64),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            error=np.array(self.error, dtype=np.str_),
            chunk_time=np.concatenate([np.empty(0), *(times for times, _ in self.chunks)]),
            chunk_tokens=np.concatenate([np.empty(0), *(tokens for _, tokens in self.chunks)]),
            chunk_start=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
        )


def session(tape: Tape | None = None) -> aiohttp.ClientSession:
    """Return a session that neither queues nor retries, and ignores proxies.

    With a tape, the row given as `trace_request_ctx` gets its `sent` when the body is written, so that a wait
    for a connection shows as lag.
    """
    tracing = aiohttp.TraceConfig()
    if tape is not None:

        async def written(_: object, context: object, __: object) -> None:
            row = getattr(context, "trace_request_ctx", None)
            if isinstance(row, int) and np.isnan(tape.sent[row]):
                tape.sent[row] = tape.clock()

        tracing.on_request_chunk_sent.append(written)
    key = os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
        trust_env=False,
        auto_decompress=False,
        trace_configs=[tracing] if tape is not None else None,
    )


async def ask(
    http: aiohttp.ClientSession, url: str, body: bytes, tape: Tape, row: int, *, deadline: float | None = None,
    path: str = "/v1/completions",
) -> None:  # fmt: skip
    """Send one request and note on the tape what came back; only a cancellation is raised."""
    answer, error, message = Completion(), TIMEOUT, ""
    try:
        async with (
            asyncio.timeout(deadline),
            http.post(f"{url}{path}", data=body, trace_request_ctx=row) as response,
        ):
            if response.status != 200:
                error, message = f"http_{response.status}", _message(await response.read())
                return
            while data := await response.content.readany():
                answer.feed(data, tape.clock())
            error = answer.end(tape.output_len[row], tape.clock())
    except TimeoutError:
        error = TIMEOUT
    except (aiohttp.ClientError, OSError) as failure:
        error, message = _kind(failure), str(failure)
    finally:
        tape.end(row, answer, error, message)


def _kind(failure: Exception) -> str:
    number = getattr(failure, "errno", None)
    if number in {errno.EMFILE, errno.ENFILE}:
        return NO_SOCKET
    if isinstance(failure, aiohttp.ClientConnectorError | ConnectionRefusedError):
        return REFUSED
    lost = aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError
    return RESET if isinstance(failure, lost) else BROKEN


def _message(body: bytes) -> str:
    """Return what a server said beside an HTTP status."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace")


def allow_open_files(count: int) -> bool:
    """Raise this process's limit of open files to what `count` connections need; False when it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return True
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible >= needed
