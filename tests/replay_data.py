"""Small records, workloads and servers for tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner.records import Records
from tuner.replay import run
from tuner.replay.stream import Completion
from tuner.seams import Member, Replay
from tuner.serving import Role
from tuner.workload import Request, Workload

FAKE_VLLM = Path(__file__).with_name("fake_vllm.py")
VOCAB_SIZE = 1024
DONE = b"data: [DONE]\n\n"


@dataclass
class Row:
    """One request as a test writes it: when its chunks came and how many tokens they had."""

    chunks: Sequence[float] = ()
    tokens: Sequence[float] | None = None
    due: float = 0.0
    sent: float | None = None
    error: str = ""
    input_len: int = 10
    output_len: int | None = None
    usage: bool = True
    connect_wait: float = 0.0


def steady(n: int = 11, *, gap: float = 0.01, first: float = 0.5, due: float = 0.0, **more: object) -> Row:
    """Return a request with its first token half a second after it was due, and gaps of 10 ms."""
    return Row([due + first + gap * i for i in range(n)], due=due, **more)  # type: ignore[arg-type]


def failed(output_len: int = 11, **more: object) -> Row:
    """Return a request that was answered 500."""
    return Row(error="http_500", output_len=output_len, **more)  # type: ignore[arg-type]


def records(*rows: Row) -> Records:
    """Return records of these requests; a chunk has one token unless the row says otherwise."""
    tokens = [list(row.tokens) if row.tokens is not None else [1.0] * len(row.chunks) for row in rows]
    made = [sum(t) for t in tokens]
    lens = [
        row.output_len if row.output_len is not None else int(np.nan_to_num(n))
        for row, n in zip(rows, made, strict=True)
    ]
    return Records(
        due=np.array([row.due for row in rows], dtype=float),
        sent=np.array([row.due if row.sent is None else row.sent for row in rows], dtype=float),
        connect_wait=np.array([row.connect_wait for row in rows], dtype=float),
        first_byte=np.full(len(rows), np.nan),
        server_queue=np.full(len(rows), np.nan),
        server_prefill=np.full(len(rows), np.nan),
        server_itl=np.full(len(rows), np.nan),
        ended=np.array([max(row.chunks, default=row.due) for row in rows], dtype=float),
        input_len=np.array([row.input_len for row in rows], dtype=np.int64),
        output_len=np.array(lens, dtype=np.int64),
        prompt_tokens=np.array([row.input_len if row.usage else np.nan for row in rows], dtype=float),
        completion_tokens=np.array(
            [n if row.usage else np.nan for row, n in zip(rows, made, strict=True)], dtype=float
        ),
        error=np.array([row.error for row in rows], dtype=np.str_),
        chunk_time=np.array([t for row in rows for t in row.chunks], dtype=float),
        chunk_tokens=np.array([t for ts in tokens for t in ts], dtype=float),
        chunk_start=np.concatenate([[0], np.cumsum([len(row.chunks) for row in rows])]).astype(np.int64),
    )


def workload(*rows: Request, history: Sequence[Request] = ()) -> Workload:
    """Return a workload of these rows."""
    return Workload("test", tuple(rows), "0" * 64, history=tuple(history))


def evenly(count: int, gap: float, *, input_len: int = 40, output_len: int = 5) -> Workload:
    """Return rows of one shape, `gap` seconds apart."""
    return workload(*(Request(i * gap, input_len, output_len) for i in range(count)))


def event(made: int | None, text: str = " a", *, newline: str = "\n") -> bytes:
    """Return a completion event after which the server has made so many tokens; None: it does not say."""
    payload: dict[str, object] = {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
    if made is not None:
        payload["usage"] = {"prompt_tokens": 7, "total_tokens": 7 + made, "completion_tokens": made}
    return f"data: {json.dumps(payload, ensure_ascii=False)}{newline * 2}".encode()


def closing(made: int, *, newline: str = "\n") -> bytes:
    """Return the event after the last token, with usage and without choices."""
    usage = {"prompt_tokens": 7, "total_tokens": 7 + made, "completion_tokens": made}
    return f'data: {{"choices": [], "usage": {json.dumps(usage)}}}{newline * 2}'.encode()


def read(*parts: bytes) -> Completion:
    """Return a completion that read these parts at 0, 1, 2, ..."""
    completion = Completion()
    for now, part in enumerate(parts):
        completion.feed(part, float(now))
    return completion


@dataclass(frozen=True)
class FakeServer:
    """A running fake_vllm.py."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> list[dict[str, Any]]:
        """Return what it noted about each finished request, in order of arrival."""
        entries = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        return sorted(entries, key=lambda entry: entry["request"])


@contextmanager
def serving(
    directory: Path,
    behaviour: dict[str, Any] | None = None,
    *flags: str,
    env: Mapping[str, str] | None = None,
    start_timeout: float = 20,
) -> Iterator[FakeServer]:
    """Run a fake server until the block is left."""
    port = free_port()
    log_path = directory / "fake.jsonl"
    said = json.dumps({"log": str(log_path), "start_delay": 0, **(behaviour or {})})
    environment = os.environ | {"FAKE_VLLM": said} | dict(env or {})
    command = [sys.executable, str(FAKE_VLLM), "serve", "m", "--port", str(port), *flags]
    with (directory / "server.log").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, start_timeout)
        yield FakeServer(f"http://127.0.0.1:{port}", process, log_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], timeout: float = 20) -> None:
    """Wait until a server says 200."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise AssertionError(f"no answer from {url}")


def play(server: FakeServer | str, what: Workload, *, salt: str = "a", **more: Any) -> Replay:
    """Replay a workload against a fake server, or against a URL without metrics."""
    url = server if isinstance(server, str) else server.url
    members = [] if isinstance(server, str) else [Member(Role.ANY, url)]
    more = {"drain_timeout": 10.0, **more}
    return run.replay(url, "m", what, salt=salt, vocab_size=VOCAB_SIZE, members=members, **more)


def errors(replay: Replay) -> list[str]:
    """Return what became of each request."""
    return [str(error) for error in replay.records.error]
