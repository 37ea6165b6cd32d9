"""Connections: opened ahead, one request at a time, every ending told apart."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from replay_data import VOCAB_SIZE, evenly, free_port, serving, workload

from tuner.replay import run
from tuner.replay.client import Driver, Seen, finish
from tuner.replay.connection import Connection, Exchange, Pool, Target, clock
from tuner.replay.load import Load
from tuner.replay.spool import Spool
from tuner.replay.stream import Completion
from tuner.replay.tape import Tape
from tuner.workload import Request

EVENT = b'data: {"choices":[{"text":" a"}],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
STREAM = EVENT + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


@contextmanager
def answering(answer: bytes, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Answer one request with these bytes, whatever is asked, and close."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection if tls is None else tls.wrap_socket(connection, server_side=True) as connection:
                connection.settimeout(10)
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def send(url: str, *, rows: int = 1) -> Seen:
    """Send requests for one token, all at once."""

    async def begin() -> float:
        return clock()

    with asking(url, rows) as load:
        return finish(Driver(load).drive(begin))


@contextmanager
def asking(url: str, rows: int) -> Iterator[Load]:
    """Lay out requests of seven tokens for one."""
    target = Target(url)
    with Spool() as requests:
        for _ in range(rows):
            requests.add(target.request(b"{}"))
        yield Load(target, requests, np.zeros(rows), [7] * rows, [1] * rows, request_timeout=60.0, drain_timeout=5.0)


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("http://127.0.0.1:8000", "POST /v1/completions HTTP/1.1", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "POST /v1/completions HTTP/1.1", "127.0.0.1:8000"),
        ("http://[::1]:8000", "POST /v1/completions HTTP/1.1", "[::1]:8000"),
        ("https://name:secret@llm.example/team a/v1", "POST /team%20a/v1/completions HTTP/1.1", "llm.example"),
    ],
)
def test_a_request_names_its_host_and_path(url: str, line: str, host: str) -> None:
    """With or without /v1, behind a prefix, with an IPv6 address; credentials of a URL are not sent on."""
    head = Target(url).request(b"{}").decode().split("\r\n")

    assert (head[0], head[1]) == (line, f"Host: {host}")
    assert head[-3:] == ["Content-Length: 2", "", "{}"]


def test_ports_follow_the_scheme() -> None:
    """Without a port it is 80 or 443."""
    assert (Target("http://a").port, Target("https://a").port, Target("https://a:81").port) == (80, 443, 81)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM), ""),
        (HEAD + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM, ""),
        (HEAD + b"\r\n" + STREAM, ""),  # ends with its connection
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM), ""),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM)[:-5], "reset"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENT), "no_done"),
        (HEAD + b"\r\n" + EVENT, "no_done"),
        (b"", "reset"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "broken"),
        (b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n\r\nbusy", "http_503"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM) + b"garbage", ""),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", "reset"),  # and nothing more
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "broken"),
        (b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", "http_307"),
    ],
)
def test_an_answer_may_end_in_many_ways(answer: bytes, error: str) -> None:
    """Framed by chunks, by a length or by the connection; cut, refused, or no HTTP at all."""
    with answering(answer) as url:
        seen = send(url)

    assert seen.records.error.tolist() == [error]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_an_https_server_that_the_system_trusts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its certificate among the system's own, a stream over TLS is like any other."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with answering(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(STREAM), server) as url:
        assert send(url).records.error.tolist() == [""]


def test_what_the_server_said_is_kept() -> None:
    """The message of an error status is there for the reader."""
    body = b'{"error": {"message": "too long"}}'
    with answering(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)) as url:
        assert send(url).messages == {"http_400": "too long"}


def test_the_first_byte_is_noted() -> None:
    """Between the send and the first token lies the answer's head."""
    with answering(HEAD + b"\r\n" + STREAM) as url:
        got = send(url).records

    assert got.sent[0] <= got.first_byte[0] <= got.chunk_time[0]


def test_every_request_of_a_burst_has_its_connection_before_the_clock(tmp_path: Path) -> None:
    """100 rows at one moment: 100 connections are open, and none is waited for."""
    with serving(tmp_path) as server:
        seen = run.replay(server.url, "m", evenly(100, 0.0), salt="a", vocab_size=VOCAB_SIZE)

    assert seen.client["connections_opened"] == 100
    assert seen.client["connections_awaited"] == 0
    assert seen.records.connect_wait.tolist() == [0.0] * 100


@pytest.mark.timing
def test_a_later_burst_finds_its_connections_open(tmp_path: Path) -> None:
    """Dialled ahead while the clock runs, too."""
    rows = [Request(0.0, 40, 5), *(Request(0.8, 40, 5) for _ in range(30))]
    with serving(tmp_path) as server:
        seen = run.replay(server.url, "m", workload(*rows), salt="a", vocab_size=VOCAB_SIZE)

    assert seen.client["connections_awaited"] == 0


@pytest.mark.timing
def test_connections_are_used_again(tmp_path: Path) -> None:
    """One request after the other needs few connections."""
    with serving(tmp_path) as server:
        seen = run.replay(server.url, "m", evenly(30, 0.05), salt="a", vocab_size=VOCAB_SIZE)

    assert seen.client["connections_opened"] < 15


class SlowToDial(Pool):
    """Takes 50 ms more for each connection, as one over TLS from afar."""

    async def _first_that_answers(self) -> Connection:
        await asyncio.sleep(0.05)
        return await super()._first_that_answers()


@pytest.mark.timing
def test_the_wait_for_a_connection_is_shown_apart() -> None:
    """A handshake of 50 ms is neither the client's lag nor hidden (report 10)."""
    tape = Tape(np.zeros(1), [7], [1])

    async def one(url: str) -> None:
        pool, ended = SlowToDial(Target(url)), asyncio.Event()
        await pool.open(0)
        tape.anchor = clock()
        pool.submit(Exchange(tape, 0, Target(url).request(b"{}"), lambda _: ended.set()))
        await asyncio.wait_for(ended.wait(), 5)
        await pool.close()

    with answering(HEAD + b"\r\n" + STREAM) as url:
        finish(one(url))

    got = tape.records()
    # A timer of uvloop may be a little early, and a busy machine takes its time.
    assert 0.045 <= got.connect_wait[0] < 2
    assert got.sent[0] >= 0.045
    assert 0 <= got.send_lag[0] < 0.04


def test_a_name_that_nobody_knows_is_refused() -> None:
    """Where there is no address there is no server."""
    assert send("http://nobody.invalid:1", rows=2).records.error.tolist() == ["refused"] * 2


def test_a_port_that_nobody_listens_at_is_refused() -> None:
    """All of a burst, none twice."""
    seen = send(f"http://127.0.0.1:{free_port()}", rows=5)

    assert seen.records.error.tolist() == ["refused"] * 5
    assert np.isnan(seen.records.sent).all()


@pytest.mark.parametrize("tokens", [61, 62, 63, 64, 127, 128])
def test_the_end_may_come_alone(tokens: int) -> None:
    """However many reads came before: when all were looked at, the terminator brings nothing, and that is fine."""
    tape, ended = Tape(np.zeros(1), [7], [tokens]), []
    exchange = Exchange(tape, 0, b"", ended.append)
    connection = Connection(Pool(Target("http://127.0.0.1:1")))
    connection.connection_made(Mute())
    connection.carry(exchange, was_awaited=False)

    connection.data_received(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for made in range(1, tokens + 1):
        event = EVENT.replace(b'"completion_tokens":1', b'"completion_tokens":%d' % made)
        connection.data_received(b"%x\r\n%s\r\n" % (len(event), event))
    connection.data_received(chunked(b"data: [DONE]\n\n")[:-5])
    connection.data_received(b"0\r\n\r\n")

    assert tape.error == [""]
    assert len(tape.chunks[0][0]) == tokens
    assert ended == [exchange]


class Mute(asyncio.Transport):
    """A transport that goes nowhere."""

    def write(self, data: object) -> None: ...

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...


def test_requests_in_order_end_though_nobody_is_there() -> None:
    """Twelve by four streams to a closed port: refused, each at once."""
    started = clock()

    async def all_of_them(load: Load) -> dict[str, str]:
        return await Driver(load).in_order(4)

    with asking(f"http://127.0.0.1:{free_port()}", 12) as load:
        assert set(finish(all_of_them(load))) == {"refused"}
    assert clock() - started < 10


def test_a_mistake_in_a_callback_ends_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised at once, and nobody waits for a request that will not end."""

    def broken(*_: object) -> None:
        raise LookupError("a mistake of ours")

    monkeypatch.setattr(Completion, "feed_all", broken)
    started = clock()
    with serving(tmp_path) as server, pytest.raises(LookupError, match="a mistake of ours"):
        run.replay(server.url, "m", evenly(3, 0.01), salt="a", vocab_size=VOCAB_SIZE, drain_timeout=60)

    assert clock() - started < 20
