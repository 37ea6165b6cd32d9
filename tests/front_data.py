"""Groups of fake servers and the real vllm-router before them."""

import http.client
import http.server
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import pytest
from replay_data import FakeServer, free_port, serving, wait_for

from tuner.replay.stream import EventParser
from tuner.serving import Front, Role, ServingConfig, Topology, front_argv

BESIDE = Path(sys.executable).with_name("vllm-router")
ROUTER = str(BESIDE) if BESIDE.exists() else shutil.which("vllm-router")
needs_router = pytest.mark.skipif(ROUTER is None, reason="vllm-router is neither beside this Python nor on PATH")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
COUNTED = {"include_usage": True, "continuous_usage_stats": True}
KV_ROLES = {Role.PREFILLER: "kv_producer", Role.DECODER: "kv_consumer"}


def side_channel_port() -> int:
    """Return a free port, the next one free too, below those that the kernel gives to outgoing connections."""
    for port in random.sample(range(20_000, 32_000), 100):
        with ExitStack() as stack, suppress(OSError):
            for number in (port, port + 1):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port
    raise AssertionError("no two free ports")


@contextmanager
def member(
    directory: Path, role: Role, behaviour: Mapping[str, Any] | None = None, *flags: str, lease: float = 30.0
) -> Iterator[FakeServer]:
    """Run one server of a PD group, with a side channel of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": KV_ROLES[role],
        "kv_connector_extra_config": {"kv_lease_duration": lease},
    }
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port())}
    with serving(
        directory, dict(behaviour or {}), "--kv-transfer-config", json.dumps(config), *flags, env=env
    ) as server:
        yield server


@contextmanager
def front(
    directory: Path,
    urls: Mapping[Role, Sequence[str]],
    policy: str = "round_robin",
    *,
    as_shipped: bool = False,
    env: Mapping[str, str] | None = None,
) -> Iterator["Router"]:
    """Run vllm-router before servers, started as `tune` measures with it, or as shipped."""
    assert ROUTER is not None
    replicas, prefillers = len(urls.get(Role.ANY, ())), len(urls.get(Role.PREFILLER, ()))
    topology = Topology(replicas, prefillers, 0 if replicas else len(urls[Role.DECODER]))
    config = ServingConfig("m", topology=topology, front=Front((ROUTER,), policy=policy))
    port = free_port()
    argv = front_argv(config, "127.0.0.1", port, urls, prometheus_port=free_port(), hides_failures=as_shipped)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "router.log").open("wb") as output:
        process = subprocess.Popen(argv, env=os.environ | dict(env or {}), stdout=output, stderr=output)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, timeout=60)
            yield Router(f"http://127.0.0.1:{port}", process)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Router:
    """A running vllm-router."""

    url: str
    process: subprocess.Popen[bytes]


@dataclass(frozen=True)
class Group:
    """Servers and the front before them."""

    front: Router
    servers: Sequence[FakeServer]

    @property
    def url(self) -> str:
        return self.front.url


@contextmanager
def pd_pair(
    directory: Path,
    prefiller: Mapping[str, Any] | None = None,
    decoder: Mapping[str, Any] | None = None,
    *,
    server_flags: Sequence[str] = (),
    as_shipped: bool = False,
) -> Iterator[Group]:
    """Run a prefiller, a decoder and a front."""
    with ExitStack() as stack:
        first = stack.enter_context(member(directory / "prefiller", Role.PREFILLER, prefiller, *server_flags))
        second = stack.enter_context(member(directory / "decoder", Role.DECODER, decoder, *server_flags))
        urls = {Role.PREFILLER: [first.url], Role.DECODER: [second.url]}
        yield Group(stack.enter_context(front(directory, urls, as_shipped=as_shipped)), (first, second))


@contextmanager
def replicas(
    directory: Path,
    *behaviours: Mapping[str, Any],
    policy: str = "round_robin",
    as_shipped: bool = False,
    server_flags: Sequence[str] = (),
) -> Iterator[Group]:
    """Run a server for each behaviour, and a front."""
    with ExitStack() as stack:
        servers = []
        for number, behaviour in enumerate(behaviours):
            (directory / str(number)).mkdir(parents=True, exist_ok=True)
            servers.append(stack.enter_context(serving(directory / str(number), dict(behaviour), *server_flags)))
        urls = {Role.ANY: [server.url for server in servers]}
        yield Group(stack.enter_context(front(directory, urls, policy, as_shipped=as_shipped)), servers)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON of a stream's events, [DONE] left out."""
        return [json.loads(data) for data in EventParser().feed(self.body) if data != b"[DONE]"]

    @property
    def json(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.body)
        return said


def ask(url: str, path: str = TEXT, headers: Mapping[str, str] | None = None, **more: Any) -> Answer:
    """Ask for five tokens on a connection of its own."""
    prompt = {"prompt": [5] * 40} if path == TEXT else {"messages": [{"role": "user", "content": "x" * 40}]}
    body = {"model": "m", **prompt, "max_tokens": 5} | more
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())
    finally:
        connection.close()


def stream(url: str, path: str = TEXT, **more: Any) -> Answer:
    """Ask for a stream of five tokens."""
    return ask(url, path, **{"stream": True, "stream_options": COUNTED, **more})


@dataclass(frozen=True)
class Received:
    """A request as a server got it."""

    headers: Mapping[str, str]
    body: dict[str, Any]


class Canned(http.server.ThreadingHTTPServer):
    """A server that streams the same bytes to all, tells a prefill's blocks, and keeps what it was asked."""

    def __init__(self, said: bytes = b"data: [DONE]\n\n") -> None:
        super().__init__(("127.0.0.1", 0), _CannedHandler)
        self.said, self.received = said, list[Received]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _CannedHandler(http.server.BaseHTTPRequestHandler):
    server: Canned
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(b"{}", "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.received.append(Received({k.lower(): v for k, v in self.headers.items()}, body))
        if body.get("stream"):
            self.answer(self.server.said, "text/event-stream")
            return
        params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e", "unknown": [7]}
        self.answer(json.dumps({"choices": [], "kv_transfer_params": params}).encode(), "application/json")

    def answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def metrics(server: FakeServer) -> dict[str, float]:
    """Return what /metrics says, without "vllm:" and the labels that all have: sums by name and by source."""
    seen: dict[str, float] = {}
    with urlopen(f"{server.url}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("#") or "_bucket" in line or "_created{" in line:
                continue
            name, labels, value = line.removeprefix("vllm:").replace("{", " ", 1).replace("} ", " ", 1).split(" ", 2)
            source = labels.partition('source="')[2].partition('"')[0]
            seen[source or name] = float(value)
    return seen
