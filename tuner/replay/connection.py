"""Connections that are open before a request needs one, and a reader that does nothing but read.

aiohttp's reader wakes a task for every chunk, which costs more than everything else together (see
docs/decisions.md, "The replay client"); here the transport calls the HTTP parser, and the parser the stream's.
A connection carries one request at a time, and no request is sent twice.
"""

import asyncio
import errno
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import cast
from urllib.parse import quote, unquote, urlsplit

import httptools

from tuner.replay.prompts import COMPLETIONS, PATHS
from tuner.replay.stream import MOST_OF_AN_ERROR, Completion, message_of
from tuner.replay.tape import Tape

REFUSED, RESET, TIMEOUT, NO_SOCKET, BROKEN = "refused", "reset", "timeout", "no_socket", "broken"

CONNECT_TIMEOUT = 30.0
# vLLM closes idle connections after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); one that we would reuse then is lost.
KEEP_ALIVE = 4.0
BATCH = 64

clock = time.perf_counter


@dataclass(frozen=True)
class Target:
    """Where requests go: a server's URL, with or without /v1, and what is asked there."""

    url: str
    endpoint: str = COMPLETIONS

    @property
    def base(self) -> str:
        """The URL without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def host(self) -> str:
        """The host's name or address."""
        return urlsplit(self.base).hostname or ""

    @property
    def port(self) -> int:
        """The port, also when the URL leaves it to its scheme."""
        return urlsplit(self.base).port or (443 if self.tls else 80)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """What an https server is checked with."""
        return ssl.create_default_context() if urlsplit(self.base).scheme == "https" else None

    @cached_property
    def _head(self) -> str:
        parts = urlsplit(self.base)
        lines = [
            f"POST {quote(unquote(parts.path))}{PATHS[self.endpoint]} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept-Encoding: identity",
            "User-Agent: tune",
            *(f"{name}: {value}" for name, value in authorization().items()),
            "Content-Length: ",
        ]
        return "\r\n".join(lines)

    def request(self, body: bytes) -> bytes:
        """Return the bytes of a request, head and body."""
        return f"{self._head}{len(body)}\r\n\r\n".encode() + body


def authorization() -> dict[str, str]:
    """Return the header with the key of the environment, if there is one."""
    key = os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class Exchange:
    """One request and its answer; notes on the tape when it has ended.

    What arrives is stamped and laid aside, and looked at some reads later, many at a time: between two sleeps the
    code that looks would be out of the processor's caches each time.
    """

    __slots__ = (
        "_is_framed", "_on_end", "_parser", "_stamps", "_tape", "answer", "connection", "feed", "is_kept", "is_over",
        "now", "on_body", "reads", "request", "row", "status", "submitted",
    )  # fmt: skip

    def __init__(self, tape: Tape, row: int, request: bytes, on_end: Callable[["Exchange"], None]) -> None:
        self._tape, self.row, self.request, self._on_end = tape, row, request, on_end
        self.answer = Completion()
        self.connection: Connection | None = None
        self.submitted = self.now = clock()
        self.status = 0
        self.is_over = self._is_framed = self.is_kept = False
        self.reads: list[bytes] = []
        self._stamps: list[float] = []
        self.on_body = self.reads.append  # called by the parser
        self._parser = httptools.HttpResponseParser(self)
        self.feed: Callable[[bytes], None] = self._parser.feed_data

    def begin(self, connection: "Connection", *, was_awaited: bool) -> None:
        """Go out on this connection now."""
        self.connection = connection
        now = clock()
        self._tape.connect_wait[self.row] = now - self.submitted if was_awaited else 0.0
        self._tape.sent[self.row] = now
        connection.transport.write(self.request)
        self.request = b""

    def stamp(self, now: float) -> None:
        """Note when what lies in `reads` came."""
        stamps, reads = self._stamps, self.reads
        while len(stamps) < len(reads):
            stamps.append(now)
        if len(stamps) >= BATCH:
            self._digest()

    def end(self) -> None:
        """Take that the answer is whole."""
        self._digest()
        if self.status == 200:
            self._close(self.answer.end(self._tape.output_len[self.row], clock()), "")
        else:
            self._close(f"http_{self.status}", message_of(b"".join(self.reads)[:MOST_OF_AN_ERROR]))

    def lost(self, why: Exception | None) -> None:
        """Take that the connection is gone."""
        if self.status and not self._is_framed:  # such a body ends with its connection
            self.end()
        else:
            self.fail(RESET, str(why or "closed before the answer was whole"))

    def fail(self, error: str, message: str = "") -> None:
        """End without a whole answer."""
        self._digest()
        self._close(error, message)

    # What the HTTP parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Look whether the answer says where it ends."""
        if name.lower() == b"content-length" or (name.lower() == b"transfer-encoding" and b"chunked" in value.lower()):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        """Note the status and when the first byte came."""
        if self.is_over:
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._tape.first_byte[self.row] = self.now

    def on_message_complete(self) -> None:
        """Note the end, unless it is that of an interim answer."""
        self.is_kept = not self.is_over and self._parser.should_keep_alive()
        self.is_over = self.status >= 200

    def _digest(self) -> None:
        if self.status == 200 and self._stamps:
            self.answer.feed_all(self.reads, self._stamps)
            self.reads.clear()
            self._stamps.clear()

    def _close(self, error: str, message: str) -> None:
        connection, self.connection = self.connection, None
        self._tape.end(self.row, self.answer, error, message, clock())
        if connection is not None:
            connection.done(is_reusable=self.is_over and self.is_kept)
        self._on_end(self)


class Connection(asyncio.Protocol):
    """A connection of the pool: idle, or with the answer to one request on its way."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._exchange: Exchange | None = None
        self.used: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)

    def carry(self, exchange: Exchange, *, was_awaited: bool) -> None:
        """Send a request."""
        self._exchange = exchange
        exchange.begin(self, was_awaited=was_awaited)

    def data_received(self, data: bytes) -> None:
        """Stamp what came and have it parsed."""
        exchange = self._exchange
        if exchange is None:  # nothing was asked
            self.transport.abort()
            return
        exchange.now = now = clock()
        try:
            exchange.feed(data)
        except httptools.HttpParserCallbackError:
            raise  # a mistake of ours
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.stamp(now)
            if not exchange.is_over:
                exchange.fail(BROKEN, str(error))
                return
            exchange.is_kept = False  # what follows a whole answer is not the answer's fault
        exchange.stamp(now)
        if exchange.is_over:
            exchange.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """End with the connection."""
        self._pool.forget(self)
        if self._exchange is not None:
            self._exchange.lost(exc)

    def done(self, *, is_reusable: bool) -> None:
        """Be free for the next request, or close."""
        self._exchange = None
        self.used = clock()
        if is_reusable and not self.transport.is_closing():
            self._pool.take_back(self)
        else:
            self.transport.abort()

    @property
    def is_fresh(self) -> bool:
        """Whether the server has no reason yet to close it."""
        return not self.transport.is_closing() and (self.used is None or clock() - self.used < KEEP_ALIVE)


class Pool:
    """Connections to one server, as many as are needed: nothing waits that need not."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._waiting: deque[Exchange] = deque()
        self._dialing: set[asyncio.Task[None]] = set()
        self._addresses: list[tuple[str, int]] = []
        self.opened = 0

    async def open(self, count: int) -> None:
        """Find the server's address and open connections; failures are left to those who will need one."""
        host, port = self._target.host, self._target.port
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._addresses = list(dict.fromkeys((str(entry[4][0]), port) for entry in found))
        self._addresses = self._addresses or [(host, port)]
        self.reserve(count)
        if self._dialing:
            await asyncio.wait(self._dialing, timeout=CONNECT_TIMEOUT)

    def reserve(self, count: int) -> None:
        """See to it that this many connections are idle, or soon will be."""
        fresh = [connection for connection in self._idle if connection.is_fresh]
        for connection in set(self._idle) - set(fresh):
            connection.transport.abort()
        self._idle = fresh
        for _ in range(count + len(self._waiting) - len(fresh) - len(self._dialing)):
            self._dial()

    def submit(self, exchange: Exchange) -> None:
        """Send a request on an idle connection; without one it waits for the next."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                connection.carry(exchange, was_awaited=False)
                return
            connection.transport.abort()
        self._waiting.append(exchange)
        if len(self._dialing) < len(self._waiting):
            self._dial()

    def withdraw(self, exchange: Exchange) -> None:
        """Give up a request, wherever it is."""
        if exchange.connection is not None:
            exchange.fail(TIMEOUT)
        elif exchange in self._waiting:
            self._waiting.remove(exchange)
            exchange.fail(TIMEOUT, "no connection in time")

    def take_back(self, connection: Connection) -> None:
        """Have a connection whose answer is complete, or that has just been opened."""
        if self._waiting:
            connection.carry(self._waiting.popleft(), was_awaited=True)
        else:
            self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is gone."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        """Close every connection, also those with an answer on its way."""
        dialing = list(self._dialing)
        for dial in dialing:
            dial.cancel()
        await asyncio.gather(*dialing, return_exceptions=True)
        for connection in list(self._all):
            connection.transport.abort()
        await asyncio.sleep(0)

    def _dial(self) -> None:
        dial = asyncio.ensure_future(self._connect())
        self._dialing.add(dial)
        dial.add_done_callback(self._dialing.discard)

    async def _connect(self) -> None:
        dial = asyncio.current_task()
        try:
            connection = await self._first_that_answers()
        except (OSError, TimeoutError) as failure:
            # Gone before anybody hears of it: the next request must not wait for this dial.
            self._dialing.discard(dial)
            if self._waiting:
                self._waiting.popleft().fail(_kind(failure), str(failure))
            return
        self._all.add(connection)
        self.opened += 1
        self._dialing.discard(dial)
        self.take_back(connection)

    async def _first_that_answers(self) -> Connection:
        loop, tls = asyncio.get_running_loop(), self._target.tls
        last: OSError | None = None
        for address in list(self._addresses):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    _, connection = await loop.create_connection(
                        lambda: Connection(self), *address, ssl=tls,
                        server_hostname=self._target.host if tls else None,
                    )  # fmt: skip
            except OSError as failure:
                last = failure
                if getattr(failure, "errno", None) in {errno.EMFILE, errno.ENFILE}:
                    break
            else:
                self._addresses.remove(address)
                self._addresses.insert(0, address)
                return connection
        raise last or OSError(f"{self._target.url}: no address")


def _kind(failure: Exception) -> str:
    if isinstance(failure, TimeoutError):
        return TIMEOUT
    return NO_SOCKET if getattr(failure, "errno", None) in {errno.EMFILE, errno.ENFILE} else REFUSED
