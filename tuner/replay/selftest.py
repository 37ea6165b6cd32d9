"""Find out in a fifth of a second what reading a token costs on this host."""

import socket
import threading
import time
from contextlib import ExitStack, suppress

import numpy as np

from tuner.replay.client import Driver, finish
from tuner.replay.connection import Target, clock
from tuner.replay.load import Load
from tuner.replay.spool import Spool

STREAMS, TOKENS, GAP, DEADLINE = 20, 60, 0.002, 10.0
_ASKED = b'{"max_tokens":60}'


def cost_per_token() -> float:
    """Return the seconds of CPU that the client spends on a token, measured over loopback with real streams.

    Raises:
        OSError: no loopback connection could be made.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS) as listener:
        listener.settimeout(DEADLINE)
        player = threading.Thread(target=_play, args=(listener,), daemon=True)
        player.start()
        cpu, made = finish(_drive(listener.getsockname()[1]))
        player.join(DEADLINE)
    if not made:
        raise OSError("the self-test of the client received nothing")
    return cpu / made


async def _drive(port: int) -> tuple[float, int]:
    target = Target(f"http://127.0.0.1:{port}")
    started = [0.0]

    async def begin() -> float:
        started[0] = time.thread_time()
        return clock()

    with Spool() as requests:
        for _ in range(STREAMS):
            requests.add(target.request(_ASKED))
        load = Load(target, requests, np.zeros(STREAMS), [1] * STREAMS, [TOKENS] * STREAMS, drain_timeout=DEADLINE)
        seen = await Driver(load).drive(begin)
    # Of this thread alone: the player's CPU is not the client's.
    return time.thread_time() - started[0], len(seen.records.chunk_time)


def _play(listener: socket.socket) -> None:
    """Answer every connection with the same stream, all in step, until the client has enough."""
    with ExitStack() as stack, suppress(OSError):
        streams = []
        for _ in range(STREAMS):
            stream, _address = listener.accept()
            stream.settimeout(DEADLINE)
            streams.append(stack.enter_context(stream))
        for stream in streams:
            stream.recv(65536)
            stream.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for made in range(1, TOKENS + 1):
            time.sleep(GAP)
            event = _framed(
                b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m",'
                b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}],'
                b'"usage":{"prompt_tokens":1,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (made + 1, made)
            )
            for stream in streams:
                stream.sendall(event)
        for stream in streams:
            stream.sendall(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
