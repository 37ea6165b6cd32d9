"""Each prefiller meets each decoder before the clock; what cannot be handed over is told."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tuner.errors import FailureKind, InvalidReplay
from tuner.replay import pairs
from tuner.seams import Member
from tuner.serving import Role

THERE = {"remote_block_ids": [list(range(2000))], "remote_engine_id": "e"}


@contextmanager
def answering(role: Role, answer: Any, seen: list[Any]) -> Iterator[Member]:
    """Run a server that sends its answer in two parts, the second a little later."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[: len(text) // 2])
            self.wfile.flush()
            time.sleep(0.1)
            self.wfile.write(text[len(text) // 2 :])

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Member(role, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def warm(*members: Member) -> None:
    pairs.warm(members, "m", seed=0, vocab_size=1024, check_alive=lambda: None)


def test_what_the_prefiller_answers_goes_to_the_decoder_whole() -> None:
    """An answer that comes in parts is read to its end, and handed over unchanged."""
    asked: list[Any] = []
    got: list[Any] = []
    with answering(Role.PREFILLER, {"kv_transfer_params": THERE}, asked) as p, answering(Role.DECODER, {}, got) as d:
        warm(p, d)

    assert asked[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert got[0]["kv_transfer_params"] == THERE
    assert got[0]["prompt"] == asked[0]["prompt"]


def test_a_prefiller_that_names_nothing_is_no_transfer() -> None:
    """A server without a connector answers as ever, and names no blocks."""
    with (
        answering(Role.PREFILLER, {"choices": []}, []) as p,
        answering(Role.DECODER, {}, []) as d,
        pytest.raises(InvalidReplay, match="decoder 0 cannot fetch from prefiller 0: the prefiller names") as caught,
    ):
        warm(p, d)

    assert caught.value.kind is FailureKind.NO_TRANSFER
