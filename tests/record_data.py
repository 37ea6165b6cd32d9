"""A recorder in a process of its own, an upstream whose every byte is scripted, and a client that sees every byte."""

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

REPO = Path(__file__).resolve().parents[1]
ENV = {"PYTHONPATH": str(REPO), "COLUMNS": "120"}
PATIENCE = 20.0

HOLD, RESET = "hold", "reset"
Step = bytes | float | str
"""Of a scripted answer: bytes to send, seconds to wait, hold: until the client has gone, or reset."""


# --- Upstream ---------------------------------------------------------------------------------------------


@dataclass
class Heard:
    """A request as it came."""

    head: bytes
    body: bytes
    client_left: threading.Event = field(default_factory=threading.Event)

    def header(self, name: str) -> str | None:
        found = re.search(rb"(?im)^" + name.encode() + rb":[ \t]*(.*?)\r?$", self.head)
        return None if found is None else found[1].decode("latin-1")

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode("latin-1")


@dataclass
class Upstream:
    """Answers each path with the bytes it was given, one connection a request."""

    sock: socket.socket
    answers: dict[str, Sequence[Step]] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.sock.getsockname()[1]}"

    def last(self, path: str) -> Heard:
        return next(one for one in reversed(self.heard) if one.line.split(" ")[1].split("?")[0] == path)

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.sock.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(PATIENCE)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            heard = _read_request(connection)
            if heard is None:
                return
            self.heard.append(heard)
            path = heard.line.split(" ")[1].split("?")[0]
            for step in self.answers.get(path, [whole(404, b'{"detail":"Not Found"}')]):
                _take(step, connection, heard)


def _take(step: Step, connection: socket.socket, heard: Heard) -> None:
    if isinstance(step, bytes):
        connection.sendall(step)
    elif step == RESET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    elif step == HOLD:
        with suppress(ConnectionError):
            connection.recv(1)
        heard.client_left.set()
    else:
        threading.Event().wait(float(step))


def _read_request(connection: socket.socket) -> Heard | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(65536)):
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    heard = Heard(head, b"")
    if heard.header("Transfer-Encoding"):
        while not body.endswith(b"0\r\n\r\n"):
            body += connection.recv(65536)
        heard.body = dechunked(body)
        return heard
    while len(body) < int(heard.header("Content-Length") or 0):
        body += connection.recv(65536)
    heard.body = body
    return heard


def whole(status: int, body: bytes, *headers: str, reason: str = "Made Up") -> bytes:
    """Return an answer with a length."""
    said = ["Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return f"HTTP/1.1 {status} {reason}\r\n".encode() + "\r\n".join(said).encode() + b"\r\n\r\n" + body


def stream_head(*headers: str) -> bytes:
    """Return how a stream begins."""
    said = ["Content-Type: text/event-stream", "Transfer-Encoding: chunked", "Connection: close", *headers]
    return b"HTTP/1.1 200 OK\r\n" + "\r\n".join(said).encode() + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return a part of a stream, as HTTP frames it; of nothing, its end."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def dechunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def event(payload: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + (payload.encode() if isinstance(payload, str) else json.dumps(payload).encode()) + b"\n\n"


@contextmanager
def upstream() -> Iterator[Upstream]:
    """Serve scripted answers until the block is left; /v1/models is there."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        made = Upstream(sock, {"/v1/models": [whole(200, b'{"object":"list","data":[{"id":"m"}]}')]})
        threading.Thread(target=made.run, daemon=True).start()
        yield made
        sock.shutdown(socket.SHUT_RDWR)


# --- Recorder ---------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """A running `tune record`."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    errors: Path

    def stop(self, number: int = signal.SIGINT) -> str:
        """End it and return what it printed."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=PATIENCE)
        return said

    def rows(self) -> list[dict[str, Any]]:
        """Return the workload's rows."""
        return lines(self.folder / "workload.jsonl")

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "recording.json").read_text())
        return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tune(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run tune to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tuner", *words], env=os.environ | ENV | (env or {}), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


@contextmanager
def recording(folder: Path, url: str, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Recorder]:
    """Run `tune record -o FOLDER` in a process group of its own until the block is left."""
    words = ["record", "--upstream", url, "--port", "0", "-o", str(folder), *flags]
    errors = folder.parent / f"{folder.name}.stderr"
    with errors.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tuner", *words], env=os.environ | ENV | (env or {}),
            stdout=subprocess.PIPE, stderr=said, text=True, process_group=0,
        )  # fmt: skip
    try:
        yield Recorder(process, _listening(process, errors), folder, errors)
    finally:
        process.kill()
        process.communicate()


def _listening(process: "subprocess.Popen[str]", errors: Path) -> str:
    for _ in range(round(PATIENCE / 0.02)):
        if (found := re.search(r"recording at (http://\S+)", errors.read_text())) is not None:
            return found[1]
        if process.poll() is not None:
            break
        threading.Event().wait(0.02)
    raise AssertionError(errors.read_text())


def until(holds: Any, patience: float = PATIENCE) -> None:
    """Wait until something holds."""
    for _ in range(round(patience / 0.01)):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not become so")


# --- Client -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Got:
    """An answer as a client saw it."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


def ask(url: str, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Got:
    """Send a request and read its answer to the end.

    Raises:
        http.client.HTTPException, OSError: the answer breaks off.
    """
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)) as connection:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return Got(answer.status, answer.reason, answer.getheaders(), answer.read())


def post(url: str, path: str, said: object, **headers: str) -> Got:
    """Post JSON."""
    return ask(url, "POST", path, json.dumps(said).encode(), {"Content-Type": "application/json", **headers})


def send(url: str, data: bytes) -> socket.socket:
    """Send bytes and return the connection."""
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE)
    sock.sendall(data)
    return sock


def receive(sock: socket.socket, wanted: bytes) -> bytes:
    """Return what comes until there is something in it."""
    data = b""
    while wanted not in data:
        part = sock.recv(65536)
        assert part, data
        data += part
    return data


def posting(path: str, said: object) -> bytes:
    """Return a request's bytes."""
    body = json.dumps(said).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
