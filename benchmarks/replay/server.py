"""Play a stream of known timing to load clients, and keep the truth that they are judged by.

    python -m benchmarks.replay.server --port 8765 [--ttft 0.1] [--itl 0.02] [--head-at-once]

An OpenAI-compatible server without a model: the first token `ttft` after a request is read, one more each `itl`,
one a chunk, on an absolute schedule. All bytes are rendered beforehand, and one loop over epoll writes them: the
timers of uvloop are whole milliseconds, and so are asyncio's waits; select() on the epoll descriptor is exact to
tens of microseconds.

    POST /v1/completions, /v1/chat/completions    streams; `max_tokens` says how many chunks
    GET  /v1/models, /health
    GET  /log      {"ttft", "itl", "requests": [{"arrival", "n", "writes"}]}, CLOCK_MONOTONIC, completed requests only
    POST /reset    forgets the log
"""

import argparse
import gc
import heapq
import json
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

MODEL = "tiny"
MAX_TOKENS = 2048
TEXT = " a"
READ = 1 << 18
SEND_BUFFER = 1 << 20  # holds a whole stream: a client that is slow to read must not make the server wait
BACKLOG = 4096

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"

monotonic = time.perf_counter  # CLOCK_MONOTONIC on Linux, like time.monotonic


# --- What is said -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Style:
    """What a client asked its stream to look like."""

    is_chat: bool
    usage_in_chunks: bool
    usage_at_end: bool
    prompt_tokens: int


def usage(style: Style, tokens: int) -> dict[str, int]:
    """Return OpenAI's usage after so many tokens."""
    prompt = style.prompt_tokens
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


def event(style: Style, index: int, *, is_last: bool) -> bytes:
    """Return the chunk that carries token `index`."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length" if is_last else None}
    if style.is_chat:
        choice["delta"] = {"role": "assistant", "content": TEXT} if index == 0 else {"content": TEXT}
    else:
        choice["text"] = TEXT
    return framed(_answer(style, [choice], usage(style, index + 1) if style.usage_in_chunks else None))


def _answer(style: Style, choices: list[dict[str, Any]], counts: dict[str, int] | None) -> bytes:
    kind = "chat.completion.chunk" if style.is_chat else "text_completion"
    answer = {"id": "cmpl-0123456789abcdef", "object": kind, "created": 1700000000, "model": MODEL, "choices": choices}
    return b"data: " + to_json(answer if counts is None else answer | {"usage": counts}) + b"\n\n"


def framed(data: bytes) -> bytes:
    """Return data as one chunk of HTTP's chunked transfer."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def to_json(value: object) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


@cache
def stream(style: Style, tokens: int, *, head_at_once: bool) -> tuple[bytes, list[bytes]]:
    """Return what is written at once, and for each token; the last write closes the stream as well."""
    writes = [event(style, index, is_last=index == tokens - 1) for index in range(tokens)]
    head = HEAD if head_at_once else b""
    writes[0] = (b"" if head_at_once else HEAD) + writes[0]
    if style.usage_at_end:
        writes[-1] += framed(_answer(style, [], usage(style, tokens)))
    writes[-1] += framed(b"data: [DONE]\n\n") + END
    return head, writes


def plain(value: object, status: bytes = b"200 OK") -> bytes:
    """Return a whole answer that is not streamed."""
    body = to_json(value)
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


# --- Who is spoken to -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Connection:
    """A client's connection and the stream that is played on it."""

    socket: socket.socket
    send: Callable[[bytes], int]
    received: bytes = b""
    writes: list[bytes] = field(default_factory=list)
    log: list[float] = field(default_factory=list)
    arrival: float = 0.0
    turn: int = 0  # which stream of the connection a timer was set for


class Server:
    """Reads requests and plays their streams, in one thread."""

    def __init__(
        self, listener: socket.socket, ttft: float, itl: float, prompt_tokens: int, *, head_at_once: bool = False
    ) -> None:
        self.listener, self.ttft, self.itl, self.prompt_tokens = listener, ttft, itl, prompt_tokens
        self.head_at_once = head_at_once
        self.epoll = select.epoll()
        self.epoll.register(listener, select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        self.due: list[tuple[float, int, int, int, Connection]] = []  # when, socket, token, turn
        self.ended: list[dict[str, Any]] = []

    def serve(self) -> None:
        """Serve until the process is ended."""
        ready, waiting, due = self.epoll.poll, [self.epoll.fileno()], self.due
        while True:
            wait = max(due[0][0] - monotonic(), 0.0) if due else None
            readable = select.select(waiting, (), (), wait)[0]
            if due:
                self._play(monotonic())
            if readable:
                for number, _ in ready(0):
                    if number == self.listener.fileno():
                        self._accept()
                    else:
                        self._read(self.connections[number])

    def _play(self, now: float) -> None:
        """Write every token that is due."""
        due, itl = self.due, self.itl
        while due and due[0][0] <= now:
            at, number, index, turn, connection = due[0]
            if connection.turn != turn:  # it was closed meanwhile
                heapq.heappop(due)
                continue
            writes, log = connection.writes, connection.log
            log.append(monotonic())
            try:
                connection.send(writes[index])
            except OSError:
                self._close(connection)
                continue
            if index + 1 < len(writes):
                heapq.heapreplace(due, (at + itl, number, index + 1, turn, connection))
            else:
                heapq.heappop(due)
                connection.turn += 1
                self.ended.append({"arrival": connection.arrival, "n": len(log), "writes": log})

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.connections[client.fileno()] = Connection(client, client.send)
        self.epoll.register(client, select.EPOLLIN)

    def _close(self, connection: Connection) -> None:
        connection.turn += 1
        if self.connections.pop(connection.socket.fileno(), None) is not None:
            self.epoll.unregister(connection.socket)
            connection.socket.close()

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        arrival = monotonic()
        if not data:
            self._close(connection)
            return
        connection.received += data
        head, blank, rest = connection.received.partition(b"\r\n\r\n")
        if not blank:
            return
        if b"expect: 100-continue" in head.lower() or b"transfer-encoding: chunked" in head.lower():
            connection.send(plain({"error": "send a body with a content-length"}, b"411 Length Required"))
            self._close(connection)
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(rest) >= length:
            connection.received = rest[length:]
            self._answer(connection, head.split(b" ", 2)[1], rest[:length], arrival)

    def _answer(self, connection: Connection, path: bytes, body: bytes, arrival: float) -> None:
        if path.endswith(b"/completions"):
            self._start(connection, json.loads(body), arrival, is_chat=b"/chat/" in path)
        elif path == b"/v1/models":
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "benchmark", "max_model_len": 8192}
            self._send_all(connection, plain({"object": "list", "data": [model]}))
        elif path == b"/health":
            self._send_all(connection, plain({}))
        elif path == b"/log":
            self._send_all(connection, plain({"ttft": self.ttft, "itl": self.itl, "requests": self.ended}))
        elif path == b"/reset":
            self.ended.clear()
            self._send_all(connection, plain({}))
        else:
            self._send_all(connection, plain({"error": f"no {path.decode()}"}, b"404 Not Found"))

    def _start(self, connection: Connection, asked: dict[str, Any], arrival: float, *, is_chat: bool) -> None:
        tokens = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        if not asked.get("stream") or tokens > MAX_TOKENS:
            words = f"this server streams, at most {MAX_TOKENS} tokens"
            self._send_all(connection, plain({"error": {"message": words}}, b"400 Bad Request"))
            return
        options, prompt = asked.get("stream_options") or {}, asked.get("prompt")
        style = Style(
            is_chat=is_chat,
            usage_in_chunks=bool(options.get("continuous_usage_stats")),
            usage_at_end=bool(options.get("include_usage")),
            prompt_tokens=self._prompt_tokens(prompt),
        )
        head, connection.writes = stream(style, tokens, head_at_once=self.head_at_once)
        connection.log, connection.arrival = [], arrival
        if head:
            connection.send(head)
        entry = (arrival + self.ttft, connection.socket.fileno(), 0, connection.turn, connection)
        heapq.heappush(self.due, entry)

    def _prompt_tokens(self, prompt: object) -> int:
        is_ids = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
        return len(prompt) if is_ids and isinstance(prompt, list) else self.prompt_tokens

    def _send_all(self, connection: Connection, data: bytes) -> None:
        connection.socket.settimeout(60)
        connection.socket.sendall(data)
        connection.socket.setblocking(False)


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8765, help="0 takes a free one; it is printed")
    parser.add_argument("--ttft", type=float, default=0.1, help="seconds")
    parser.add_argument("--itl", type=float, default=0.02, help="seconds")
    parser.add_argument("--tokens", type=int, default=200, help="streams to render before the first request")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="what usage says of a prompt of text")
    parser.add_argument("--head-at-once", action="store_true", help="as vLLM does; else it comes with the first token")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener = socket.create_server(("127.0.0.1", options.port), backlog=BACKLOG)
    for is_chat, in_chunks, at_end in product((False, True), repeat=3):
        style = Style(is_chat, in_chunks, at_end, options.prompt_tokens)
        stream(style, options.tokens, head_at_once=options.head_at_once)
    print(listener.getsockname()[1], flush=True)
    # A collection stops every stream; nothing here makes cycles.
    gc.disable()
    Server(listener, options.ttft, options.itl, options.prompt_tokens, head_at_once=options.head_at_once).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
