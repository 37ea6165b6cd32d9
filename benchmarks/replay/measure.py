"""Run a client against a server of known timing: what it costs, and how far its numbers are from the truth."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.load import Floats, Load, Seen
from benchmarks.replay.peers import AbsentError, Client, last_line

ROOT = Path(__file__).parents[2]
POLL = 0.15
RESCAN = 1.0
WARM_REQUESTS = 5  # the window of the CPU cost opens with the arrival after these
SPARE_TIME = 240.0  # for a client's start, its prompts and its report
START_TIMEOUT = 30.0
STOP_TIMEOUT = 10.0
TICK = 1 / os.sysconf("SC_CLK_TCK")
PERCENTILES = (50, 99)


# --- Processes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where."""

    server: int
    client: int
    note: str | None = None


def cores() -> Cores:
    """Return a core for the server and one for the client, the same one on a host that has no other."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) > 1:
        return Cores(usable[0], usable[1])
    return Cores(usable[0], usable[0], "one core only: server and client share it, errors and lag are the host's")


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Start children on one core; an affinity is inherited."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Tree:
    """The processes that descend from one, and their CPU time."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.known: dict[int, int] = {}
        self.members = {root}
        self.scanned = -RESCAN

    def cpu(self) -> float:
        """Return the CPU seconds of all members, with those of children that were reaped."""
        if time.perf_counter() - self.scanned >= RESCAN:
            self._scan()
        return sum(fields[1] for pid in self.members if (fields := _stat(pid)) is not None)

    def _scan(self) -> None:
        """Look for new members; a process is read once, its parent does not change while both live."""
        self.scanned = time.perf_counter()
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (cheap)
        self.known = {pid: parent for pid, parent in self.known.items() if pid in there}
        for pid in there - self.known.keys():
            if (fields := _stat(pid)) is not None:
                self.known[pid] = fields[0]
        grew = True
        while grew:
            new = {pid for pid, parent in self.known.items() if parent in self.members} - self.members
            self.members |= new
            grew = bool(new)


def _stat(pid: int) -> tuple[int, float] | None:
    """Return a process's parent and CPU seconds, None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (pathlib would cost the server's core more)
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), sum(map(int, fields[11:15])) * TICK


@dataclass(frozen=True, slots=True)
class Ran:
    """How a client ran: CPU seconds of its tree by time, and in all."""

    times: Floats
    cpu: Floats
    total: float

    def between(self, start: float, end: float) -> float:
        """Return the CPU seconds of a window, interpolated between samples."""
        low, high = np.interp([start, end], self.times, self.cpu)
        return float(high - low)


def run(command: Sequence[str], env: Mapping[str, str], *, core: int, timeout: float, out: Path) -> Ran:
    """Run a program on one core to its end.

    Raises:
        AbsentError: it failed or took too long; its last words.
    """
    started = time.perf_counter()
    samples: list[tuple[float, float]] = []
    with (out / "log").open("wb") as log:
        with on_core(core):
            process = subprocess.Popen(
                command, env=os.environ | env, cwd=out, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        tree = Tree(process.pid)
        try:
            while True:
                samples.append((time.perf_counter(), tree.cpu()))
                # wait4 and not poll: it also says what the whole tree has used
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    break
                if time.perf_counter() - started > timeout:
                    raise AbsentError(f"still running after {timeout:.0f} s")
                time.sleep(POLL)
        finally:
            _end_group(process)
    if process.returncode:
        said = last_line((out / "log").read_text(encoding="utf-8", errors="replace"))
        raise AbsentError(f"exit code {process.returncode}: {said}")
    # The last sample of a tree that is ending may lack members that were not reaped yet.
    times, cpu = np.array(samples).T
    # wait4 knows nothing of members that the program ended without waiting for them.
    return Ran(times, np.maximum.accumulate(cpu), max(usage.ru_utime + usage.ru_stime, float(cpu.max())))


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a client's own process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        process.wait(STOP_TIMEOUT)


@contextmanager
def serving(load: Load, core: int, *, head_at_once: bool = False) -> Iterator[str]:
    """Serve a load's timing on a free port while the block runs; give the URL."""
    words = [
        "--port", "0", "--ttft", str(load.ttft), "--itl", str(load.itl), "--tokens", str(load.output_tokens),
        "--prompt-tokens", str(load.prompt_tokens), *(["--head-at-once"] if head_at_once else []),
    ]  # fmt: skip
    with listening("benchmarks.replay.server", words, core) as url:
        yield url


@contextmanager
def listening(module: str, words: Sequence[str], core: int | None) -> Iterator[str]:
    """Run a program that prints the port it listens on, on a core or on any, while the block runs; give its URL."""
    with on_core(core) if core is not None else nullcontext():
        process = subprocess.Popen([sys.executable, "-m", module, *words], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        is_told = select.select([process.stdout], [], [], START_TIMEOUT)[0]
        port = process.stdout.readline().decode().strip() if is_told else ""
        if not port:
            raise RuntimeError(f"{module} did not start in {START_TIMEOUT:.0f} s; exit code {process.poll()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT)
        process.stdout.close()


def fetch_log(url: str) -> dict[str, Any]:
    """Return what the server knows."""
    with urllib.request.urlopen(f"{url}/log", timeout=60) as answer:  # noqa: S310 (our own server)
        log: dict[str, Any] = json.load(answer)
    return log


# --- The truth --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Truth:
    """The server's log of the requests of a load, in order of arrival; a row of `writes` a request."""

    arrival: Floats
    writes: Floats

    @classmethod
    def of(cls, log: Mapping[str, Any], load: Load) -> "Truth":
        """Take the load's requests from a log; probes of another length, or before them, are none of them.

        Raises:
            AbsentError: no request of the load ran to its end.
        """
        whole = [request for request in log["requests"] if request["n"] == load.output_tokens]
        counted = sorted(whole, key=lambda request: request["arrival"])[-len(load.due) :]
        if not counted:
            raise AbsentError("no request ran to its end")
        return cls(np.array([r["arrival"] for r in counted]), np.array([r["writes"] for r in counted]))

    @property
    def ttft(self) -> Floats:
        """From arrival to first write, one a request."""
        ttft: Floats = self.writes[:, 0] - self.arrival
        return ttft

    @property
    def gaps(self) -> Floats:
        """Between writes, a row a request."""
        return np.diff(self.writes, axis=1)

    def lateness(self, load: Load) -> Floats:
        """Return how late each write was against the schedule."""
        late: Floats = self.writes - self.arrival[:, None] - load.ttft - load.itl * np.arange(self.writes.shape[1])
        return late.ravel()

    def lag(self, load: Load) -> Floats:
        """Return how late each arrival was against the earliest one's schedule: a start that is late is no lag."""
        late = self.arrival - np.array(load.due[: len(self.arrival)])
        lag: Floats = late - late.min()
        return lag

    @property
    def window(self) -> tuple[float, float]:
        """From the arrival after the first few to the last write."""
        return float(self.arrival[min(WARM_REQUESTS, len(self.arrival) - 1)]), float(self.writes.max())

    def tokens(self) -> int:
        """Return how many tokens were written in the window."""
        return int((self.writes >= self.window[0]).sum())


Summary = dict[str, float]
"""Milliseconds by "p50", "p99", "max"; empty where there is nothing to summarise."""


def summary(values: Floats | None) -> Summary:
    """Return the median, the 99th percentile and the maximum in milliseconds."""
    if values is None or not len(values):
        return {}
    found = {f"p{q}": float(np.percentile(values, q)) * 1e3 for q in PERCENTILES}
    return found | {"max": float(values.max()) * 1e3}


def error(seen: Floats | None, truth: Floats) -> Summary:
    """Return a client's quantiles less the same quantiles of the server's log, in milliseconds."""
    client, server = summary(seen), summary(truth)
    return {f"p{q}": client[f"p{q}"] - server[f"p{q}"] for q in PERCENTILES if client}


def exact(seen: Seen, truth: Truth) -> dict[str, Summary]:
    """Return errors request by request and chunk by chunk, where a client says what it saw when.

    Requests are paired in order of sending and arrival. Two that are sent within microseconds may change
    places; the error of that is those microseconds.
    """
    if seen.offsets is None or seen.counts is None or seen.lag is None:
        return {}
    if len(seen.counts) != len(truth.arrival) or (seen.counts != truth.writes.shape[1]).any():
        return {}
    offsets = seen.offsets.reshape(truth.writes.shape)
    late = offsets - (truth.writes - truth.arrival[:, None])
    found = {"ttft": summary(late[:, 0]), "chunk": summary(late.ravel())}
    if truth.writes.shape[1] > 1:
        found["gap"] = summary(np.abs(np.diff(offsets, axis=1) - truth.gaps).ravel())
    return found


# --- One run ----------------------------------------------------------------------------------------------


def measure(client: Client, load: Load, where: Cores, out: Path) -> dict[str, Any]:
    """Run a client once; return what it cost and how exact it was.

    Raises:
        AbsentError: there is no measurement, and why.
    """
    out.mkdir(parents=True)
    with serving(load, where.server) as url:
        command, env = client.command(load, url, out), client.env(out)
        ran = run(command, env, core=where.client, timeout=load.duration + SPARE_TIME, out=out)
        truth = Truth.of(fetch_log(url), load)
    try:
        seen = client.read(out)
    except (OSError, KeyError, ValueError, TypeError) as failure:
        raise AbsentError(f"its report cannot be read: {type(failure).__name__}: {failure}") from failure
    return judged(load, ran, truth, seen)


def judged(load: Load, ran: Ran, truth: Truth, seen: Seen) -> dict[str, Any]:
    """Return the numbers of a run; times in milliseconds, CPU per token in microseconds."""
    start, end = truth.window
    busy, tokens = ran.between(start, end), truth.tokens()
    result: dict[str, Any] = {
        "offered": len(load.due),
        "served": len(truth.arrival),
        "reported": len(seen.ttft),
        "tokens_per_s": tokens / (end - start),
        "us_per_token": busy / tokens * 1e6,
        "core_share": busy / (end - start),
        "outside_cpu_s": ran.total - busy,
        "server_late": summary(truth.lateness(load)),
        "ttft": summary(seen.ttft),
        "ttft_error": error(seen.ttft, truth.ttft),
        "itl": summary(seen.gaps),
        "itl_error": error(seen.gaps, truth.gaps.ravel()),
        "lag_by_server": summary(truth.lag(load)),
    }
    said = {
        "lag": summary(seen.lag),
        "lag_first_100": summary(None if seen.lag is None else seen.lag[:100]),
        "lag_last_100": summary(None if seen.lag is None else seen.lag[-100:]),
        "ttft_from_due": summary(seen.ttft_from_due),
        "exact": exact(seen, truth),
    }
    return result | {name: value for name, value in said.items() if value}
