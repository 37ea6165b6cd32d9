"""The tap of `tune record` is not there: what it passes on is what came, both ways, whatever that is."""

import gzip
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from record_data import (
    HOLD,
    RESET,
    Got,
    Recorder,
    Upstream,
    ask,
    chunk,
    event,
    post,
    posting,
    receive,
    recording,
    send,
    stream_head,
    until,
    upstream,
    whole,
)

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
OF_A_CONNECTION = {"connection", "transfer-encoding"}


@dataclass
class Pair:
    """A scripted upstream and a recorder in front of it."""

    upstream: Upstream
    recorder: Recorder

    def both(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[Got, Got]:
        """Return what a client sees straight and through the tap."""
        straight = ask(self.upstream.url, method, path, body, headers)
        return straight, ask(self.recorder.url, method, path, body, headers)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with upstream() as server, recording(tmp_path_factory.mktemp("passing") / "w", server.url) as recorder:
        yield Pair(server, recorder)


def end_to_end(got: Got) -> list[tuple[str, str]]:
    return [(name, value) for name, value in got.headers if name.lower() not in OF_A_CONNECTION]


# --- Bytes ------------------------------------------------------------------------------------------------


ODD = '{"choices": [{"text": "\N{GRINNING FACE} é\u2028"}],  "usage":null }'.encode()


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, ODD), (201, b""), (400, b'{"error": {"message": "too long"}}'), (404, b"not JSON"), (429, b"slow down"),
     (500, b"\x00\xff\xfe"), (503, b"{}")],
)  # fmt: skip
def test_an_answer_is_passed_byte_for_byte(pair: Pair, status: int, body: bytes) -> None:
    """Status, reason, headers (repeated ones too, in order) and body are the server's, whatever the status."""
    more = ("X-Request-Id: 7", "Set-Cookie: a=1", "Set-Cookie: b=2", "x-lower: Ü".encode().decode("latin-1"))
    pair.upstream.answers[CHAT] = [whole(status, body, *more, reason="As It Is")]
    straight, tapped = pair.both("POST", CHAT, b"{}")

    assert (tapped.status, tapped.reason, tapped.body) == (straight.status, straight.reason, straight.body)
    assert end_to_end(tapped) == end_to_end(straight)
    assert ("Set-Cookie", "b=2") in tapped.headers


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_passed_wherever_it_is_cut(pair: Pair, size: int) -> None:
    """Parts that end within a line, a UTF-8 character or the half of a CRLF arrive as the same bytes."""
    said = event({"choices": [{"delta": {"content": "né\N{GRINNING FACE}"}}]}).replace(b"\n", b"\r\n") + event("[DONE]")
    parts = [chunk(said[start : start + size]) for start in range(0, len(said), size)]
    pair.upstream.answers[CHAT] = [stream_head(), *parts, chunk(b"")]
    straight, tapped = pair.both("POST", CHAT, b'{"stream": true}')

    assert tapped.body == straight.body == said
    assert end_to_end(tapped) == end_to_end(straight)


def test_a_request_is_passed_byte_for_byte(pair: Pair) -> None:
    """Method, path with its query and escapes, headers and body reach the server as they were sent."""
    pair.upstream.answers[TEXT] = [whole(200, b"{}")]
    body = b'{"prompt" :  "\\u00e9 \xc3\xa9", "n": 1.0}'
    headers = {"Authorization": "Bearer sk-1", "X-Odd": "a,b ; c", "Accept-Encoding": "br;q=0.5", "User-Agent": "me/1"}
    pair.both("POST", f"{TEXT}?a=%2F+%20&b=", body, **headers, **{"x-SPELT-so": "1"})
    straight, tapped = [one for one in pair.upstream.heard if one.line.split(" ")[1].startswith(TEXT)][-2:]

    assert (tapped.line, tapped.body) == (straight.line, straight.body)
    assert "%2F+%20" in tapped.line
    assert sorted(tapped.head.split(b"\r\n")[1:]) == sorted(straight.head.split(b"\r\n")[1:])


def test_nothing_is_added_to_a_request(pair: Pair) -> None:
    """A client that says nothing of itself is passed on as one that says nothing."""
    pair.upstream.answers["/bare"] = [whole(200, b"ok")]
    with send(pair.recorder.url, b"GET /bare HTTP/1.1\r\nHost: elsewhere\r\n\r\n") as sock:
        assert receive(sock, b"ok")
    names = [line.split(b":")[0].lower() for line in pair.upstream.last("/bare").head.split(b"\r\n")[1:]]

    assert names == [b"host"]
    assert pair.upstream.last("/bare").header("Host") == pair.upstream.url.removeprefix("http://")


def test_nothing_is_added_to_an_answer(pair: Pair) -> None:
    """A server that says neither its name nor the time nor what it sends is passed on like that."""
    pair.upstream.answers["/bare"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: 1\r\nConnection: close\r\n\r\nok"]

    assert ask(pair.recorder.url, "GET", "/bare").headers == [("Content-Length", "2"), ("X-A", "1")]


def test_headers_of_one_connection_end_there(pair: Pair) -> None:
    """Those that RFC 9110 names, and those that Connection names, are not passed on."""
    pair.upstream.answers["/hop"] = [whole(200, b"ok")]
    said = {"Connection": "close, X-Mine", "X-Mine": "1", "Keep-Alive": "timeout=5", "TE": "trailers",
            "Proxy-Authorization": "Basic x", "X-Theirs": "2"}  # fmt: skip
    ask(pair.recorder.url, "GET", "/hop", None, said)
    heard = pair.upstream.last("/hop")

    assert [heard.header(name) for name in ("X-Mine", "Keep-Alive", "TE", "Proxy-Authorization")] == [None] * 4
    assert heard.header("X-Theirs") == "2"


def test_a_body_of_unknown_length_is_passed_as_one(pair: Pair) -> None:
    """A chunked request stays chunked, and a large one passes."""
    pair.upstream.answers["/up"] = [whole(200, b"ok")]
    parts = [bytes([i]) * 100_000 for i in range(30)]
    framed = b"".join(chunk(part) for part in (*parts, b""))
    head = b"POST /up HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with send(pair.recorder.url, head + framed) as sock:
        assert receive(sock, b" 200 ")

    assert pair.upstream.last("/up").body == b"".join(parts)
    assert pair.upstream.last("/up").header("Content-Length") is None


def test_compressed_bodies_stay_as_they_are(pair: Pair) -> None:
    """Neither a compressed request nor a compressed answer is unpacked on the way."""
    packed = gzip.compress(b'{"usage": null}')
    pair.upstream.answers[CHAT] = [whole(200, packed, "Content-Encoding: gzip")]
    request = gzip.compress(b"{}")
    straight, tapped = pair.both("POST", CHAT, request, **{"Content-Encoding": "gzip", "Accept-Encoding": "gzip"})

    assert tapped.body == straight.body == packed
    assert ("Content-Encoding", "gzip") in tapped.headers
    assert pair.upstream.last(CHAT).body == request


def test_methods_without_a_body_have_none(pair: Pair) -> None:
    """HEAD keeps its length and has no body; OPTIONS and DELETE pass; 204 and 304 have no body."""
    pair.upstream.answers["/head"] = [whole(200, b"")[:-4].replace(b"Length: 0", b"Length: 42") + b"\r\n\r\n"]
    pair.upstream.answers["/none"] = [b"HTTP/1.1 204 Nothing\r\nX-A: 1\r\nConnection: close\r\n\r\n"]
    pair.upstream.answers["/same"] = [b'HTTP/1.1 304 Same\r\nETag: "1"\r\nConnection: close\r\n\r\n']
    for method, path in (("HEAD", "/head"), ("OPTIONS", "/none"), ("DELETE", "/none"), ("GET", "/same")):
        straight, tapped = pair.both(method, path)
        assert (tapped.status, tapped.body, end_to_end(tapped)) == (straight.status, b"", end_to_end(straight))


def test_redirects_and_cookies_are_the_clients_business(pair: Pair) -> None:
    """A redirect is answered and not followed, and no cookie of one client is sent for another."""
    pair.upstream.answers["/there"] = [whole(307, b"", "Location: /elsewhere", "Set-Cookie: who=first")]
    _, tapped = pair.both("POST", "/there", b"x")
    ask(pair.recorder.url, "POST", "/there", b"x")

    assert tapped.status == 307
    assert pair.upstream.last("/there").header("Cookie") is None


# --- Time -------------------------------------------------------------------------------------------------


def test_parts_are_passed_when_they_come(pair: Pair) -> None:
    """The first event is there while the server still holds the second back, and headers before any event."""
    first, second = event({"choices": []}), event("[DONE]")
    pair.upstream.answers[CHAT] = [stream_head(), 0.15, chunk(first), 0.3, chunk(second) + chunk(b"")]
    began = time.perf_counter()
    with send(pair.recorder.url, posting(CHAT, {"stream": True})) as sock:
        head = receive(sock, b"\r\n\r\n")
        headed = time.perf_counter() - began
        got = receive(sock, first)
        firsted = time.perf_counter() - began

    assert first not in head
    assert first in got
    assert second not in got
    assert headed < 0.14
    assert firsted < 0.4


def memory(recorder: Recorder) -> int:
    """Return the bytes of memory that a recorder holds."""
    return int(Path(f"/proc/{recorder.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_slow_reader_slows_the_server(pair: Pair) -> None:
    """What a client does not read is not piled up in the tap: of 131 MB it holds a few."""
    part = chunk(b"x" * 65536)
    pair.upstream.answers["/much"] = [stream_head(), *[part] * 2000, chunk(b"")]
    before = memory(pair.recorder)
    with send(pair.recorder.url, b"GET /much HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as sock:
        time.sleep(1.0)
        grown = memory(pair.recorder) - before
        total = sum(iter(lambda: len(sock.recv(1 << 20)), 0))

    assert grown < 16 << 20
    assert total > 2000 * 65536


def test_a_client_that_leaves_takes_its_request_with_it(pair: Pair) -> None:
    """The server's connection is closed at once, before and after the answer began."""
    for steps in ([HOLD], [stream_head(), chunk(event({"choices": []})), HOLD]):
        pair.upstream.answers[CHAT] = steps
        count = len(pair.upstream.heard)
        sock = send(pair.recorder.url, posting(CHAT, {"stream": True}))
        until(lambda count=count: len(pair.upstream.heard) > count)
        if len(steps) > 1:
            receive(sock, b"choices")
        assert not pair.upstream.last(CHAT).client_left.is_set()
        sock.close()
        assert pair.upstream.last(CHAT).client_left.wait(1.0)


# --- What breaks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", RESET])
def test_an_answer_that_breaks_off_breaks_off(pair: Pair, how: str) -> None:
    """A stream or a body that ends too early does so through the tap, after what had come of it."""
    some = event({"choices": []})
    broken = [stream_head(), chunk(some), 0.1, *([RESET] if how == RESET else [])]
    short = [whole(200, b"x" * 100)[:-50], 0.1, *([RESET] if how == RESET else [])]
    for steps in (broken, short):
        pair.upstream.answers[CHAT] = steps
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            post(pair.recorder.url, CHAT, {})


def test_a_server_that_hangs_up_is_a_502(pair: Pair) -> None:
    """An upstream that closes without a word makes a 502 that says whose it is."""
    pair.upstream.answers[CHAT] = [RESET]
    got = post(pair.recorder.url, CHAT, {})

    assert got.status == 502
    assert json.loads(got.body)["error"]["message"].startswith("tune record: no answer from http://127.0.0.1")


def test_websockets_are_refused(pair: Pair) -> None:
    """They get a 501 and not a connection that says nothing."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
               "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    assert ask(pair.recorder.url, "GET", "/v1/realtime", None, upgrade).status == 501


def test_a_request_that_names_no_path_is_refused(pair: Pair) -> None:
    """OPTIONS * is about the server that hears it; there is no URL to ask the upstream by."""
    with send(pair.recorder.url, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n") as sock:
        assert receive(sock, b"\r\n").startswith(b"HTTP/1.1 501 ")


def test_what_is_no_http_is_not_quoted(pair: Pair) -> None:
    """A body longer than its length says is taken for another request: it may be a prompt, or hold a key."""
    body = b'{"prompt": "xylophone-canary-42 and more words"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"
    with send(pair.recorder.url, head + body + b"\r\n\r\n") as sock:
        receive(sock, b"HTTP/1.")
    with send(pair.recorder.url, b"GET / HTTP/1.1\r\nAuthorization sk-canary-key-4242\r\n\r\n") as sock:
        assert b" 400 " in receive(sock, b"\r\n\r\n")

    assert "canary" not in pair.recorder.errors.read_text()


def test_a_connection_carries_one_request_after_the_other(pair: Pair) -> None:
    """Keep-alive between client and tap works although the server closes each connection."""
    pair.upstream.answers[TEXT] = [whole(200, b'{"a": 1}')]
    host = pair.recorder.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=20)
    ports = set()
    for _ in range(5):
        connection.request("POST", TEXT, b"{}")
        assert connection.getresponse().read() == b'{"a": 1}'
        assert isinstance(connection.sock, socket.socket)
        ports.add(connection.sock.getsockname())
    connection.close()

    assert len(ports) == 1


def test_a_client_of_http_1_0_is_served(pair: Pair) -> None:
    """It gets a stream without the framing that it does not know, ended by the end of the connection."""
    said = event({"choices": []})
    pair.upstream.answers[CHAT] = [stream_head(), chunk(said), chunk(b"")]
    with send(pair.recorder.url, posting(CHAT, {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")) as sock:
        got = b"".join(iter(lambda: sock.recv(65536), b""))

    assert got.endswith(b"\r\n\r\n" + said)


def test_a_client_is_told_to_go_on(pair: Pair) -> None:
    """One that waits for 100 Continue before it sends its body gets it."""
    pair.upstream.answers[TEXT] = [whole(200, b"done")]
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    with send(pair.recorder.url, head.encode()) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"{}")
        assert receive(sock, b"done")
