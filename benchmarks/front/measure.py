"""Run the replay client against servers of known timing, directly and through vllm-router, and take the difference."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.replay import measure as replaying
from benchmarks.replay.load import Floats, Load, Seen, poisson
from benchmarks.replay.measure import Truth, on_core, summary
from benchmarks.replay.peers import AbsentError, Client
from tuner.serving import Front, Role, ServingConfig, Topology, front_argv

START_TIMEOUT, STOP_TIMEOUT = 60.0, 10.0
OUTPUT_TOKENS, TTFT, ITL = 100, 0.1, 0.02  # as the servers are started below
DIRECT, THROUGH = "direct", "through"
KEYS = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
MOVED = "gap_moved_p99"

Numbers = dict[str, float]
"""Of one run or one pair, in milliseconds and microseconds."""


@dataclass(frozen=True, slots=True)
class Places:
    """Who runs on which core."""

    server: int
    client: int
    front: int
    note: str | None = None


def places() -> Places:
    """Return a core each for the servers, the client and the front; with less than three the front shares."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) > 2:
        return Places(usable[0], usable[1], usable[2])
    two = replaying.cores()
    shared = "one core only: all share it" if two.note else "two cores only: the front shares the servers'"
    return Places(two.server, two.client, two.server, f"{shared}, and is slower than on one of its own")


def load(streams: int, seconds: float, seed: int, tokens: int = OUTPUT_TOKENS) -> Load:
    """Return Poisson arrivals that keep about so many streams open."""
    lasts = TTFT + (tokens - 1) * ITL
    count = max(2, round(streams / lasts * seconds))
    return Load(f"{streams} streams", poisson(streams / lasts, count, seed), output_tokens=tokens)


# --- The group --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Servers of known timing, and the front before them."""

    servers: Sequence[str]
    front: str
    process: psutil.Process

    def cpu(self) -> float:
        """Return the CPU seconds that the front has used."""
        used = self.process.cpu_times()
        return float(used.user + used.system)

    def url(self, way: str) -> str:
        """Return where a client goes."""
        return self.front if way == THROUGH else self.servers[0]


@contextmanager
def group(router: Sequence[str], policy: str, replicas: int, where: Places, work: Path) -> Iterator[Group]:
    """Serve with so many replicas and a front while the block runs."""
    timing = Load("", (0.0,), output_tokens=OUTPUT_TOKENS, ttft=TTFT, itl=ITL)
    with ExitStack() as stack:
        servers = [stack.enter_context(replaying.serving(timing, where.server)) for _ in range(replicas)]
        url, process = stack.enter_context(_front(router, policy, servers, where.front, work))
        yield Group(servers, url, process)


@contextmanager
def _front(
    router: Sequence[str], policy: str, servers: Sequence[str], core: int, work: Path
) -> Iterator[tuple[str, psutil.Process]]:
    config = ServingConfig("", topology=Topology(replicas=len(servers)), front=Front(tuple(router), policy))
    port, prometheus_port = _free_port(), _free_port()
    argv = front_argv(
        config, "127.0.0.1", port, {Role.ANY: servers}, prometheus_port=prometheus_port, hides_failures=False
    )
    with (work / "front.log").open("wb") as log:
        with on_core(core):
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, process, work / "front.log")
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.perf_counter() + START_TIMEOUT
    while time.perf_counter() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):  # noqa: S310 (our own child)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the front did not start: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


# --- Runs -------------------------------------------------------------------------------------------------


def pair(client: Client, asked: Load, there: Group, where: Places, work: Path, *, front_first: bool) -> dict[str, Any]:
    """Run the same arrivals both ways; return the numbers of each and what the front added.

    Raises:
        AbsentError: a run gave no measurement.
    """
    ways = (THROUGH, DIRECT) if front_first else (DIRECT, THROUGH)
    both = {way: once(client, asked, there, way, where=where, work=work) for way in ways}
    return both | {"added": added(both[DIRECT], both[THROUGH])}


def added(direct: Numbers, through: Numbers) -> Numbers:
    """Return what the front added to each quantile beyond what the servers' own logs say of either run."""
    late = {
        key: (through[key] - through[f"server_{key}"]) - (direct[key] - direct[f"server_{key}"]) for key in KEYS
    }  # fmt: skip
    return late | {MOVED: through[MOVED] - direct[MOVED]}


def once(client: Client, asked: Load, there: Group, way: str, *, where: Places, work: Path) -> Numbers:
    """Run the client once.

    Raises:
        AbsentError: it failed, or not every request was served and reported.
    """
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for url in there.servers:
        _fetch(f"{url}/reset")
    command, env = client.command(asked, there.url(way), out), client.env(out)
    before = there.cpu()
    replaying.run(command, env, core=where.client, timeout=asked.duration + replaying.SPARE_TIME, out=out)
    used = there.cpu() - before
    requests = [request for url in there.servers for request in _fetch(f"{url}/log")["requests"]]
    numbers = judged(client.read(out), Truth.of({"requests": requests}, asked), asked)
    return numbers | (
        {"front_us_per_token": used / (len(requests) * asked.output_tokens) * 1e6} if way == THROUGH else {}
    )


def judged(seen: Seen, truth: Truth, asked: Load) -> Numbers:
    """Return quantiles as the client saw them and as the servers' logs have them, in milliseconds.

    Raises:
        AbsentError: not every request was served and reported whole.
    """
    offered, whole = len(asked.due), (0 if seen.counts is None else int((seen.counts == asked.output_tokens).sum()))
    if seen.offsets is None or not offered == whole == len(truth.arrival):
        raise AbsentError(f"of {offered} requests {len(truth.arrival)} were served and {whole} reported whole")
    gaps: Floats = np.diff(seen.offsets.reshape(offered, asked.output_tokens), axis=1).ravel()
    samples = {"ttft": seen.ttft, "itl": gaps, "server_ttft": truth.ttft, "server_itl": truth.gaps.ravel()}
    found = {f"{name}_{q}": value for name, many in samples.items() for q, value in summary(many).items()}
    moved = replaying.exact(seen, truth)["gap"]["p99"]
    return found | {"server_late_p99": summary(truth.lateness(asked))["p99"], MOVED: moved}


def _fetch(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 (our own child)
        said: dict[str, Any] = json.load(answer)
    return said
