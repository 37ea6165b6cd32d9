"""Ask a server the same thing straight and through the tap of `tune record`, in turns."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from benchmarks.replay import measure as replaying
from benchmarks.replay.measure import ROOT, on_core
from tuner import tiny_model
from tuner.deployment.launcher import LocalLauncher
from tuner.serving import ServingConfig

Floats = npt.NDArray[np.float64]

START_TIMEOUT, STOP_TIMEOUT, ANSWER_TIMEOUT = 60.0, 60.0, 60.0
PAUSE = 0.01  # between two requests: what the tap does after an answer is part of its cost, but not of the next TTFT
VOCABULARY = 1000
END = b"0\r\n\r\n"
# As studies/cpu-quickstart.yaml has it.
ON_CPU = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


@contextmanager
def tap(url: str, core: int | None, work: Path) -> Iterator[tuple[str, int]]:
    """Run `tune record` in front of a server while the block runs; give its URL and its pid."""
    command = [sys.executable, "-m", "tuner", "record", "--upstream", url, "--port", "0", "-o", str(work / "recorded")]
    log = work / "tap.log"
    with log.open("wb") as output, on_core(core) if core is not None else closing(socket.socket()):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=output)
    try:
        yield _listening(process, log), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT)


def _listening(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.perf_counter() + START_TIMEOUT
    while time.perf_counter() < deadline and process.poll() is None:
        if (found := re.search(r"recording at (http://\S+)", log.read_text(encoding="utf-8"))) is not None:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the tap did not start: {log.read_text(encoding='utf-8')}")


@contextmanager
def real_vllm(program: str, work: Path) -> Iterator[tuple[str, str]]:
    """Serve the tiny model with a real vLLM on a CPU; give its URL and the model's name."""
    model = str(tiny_model.ensure())
    args = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 32, "distributed_executor_backend": "uni"}
    config = ServingConfig(model=model, command=(program, "serve"), args=args, env=ON_CPU)
    with LocalLauncher().launch(config, work / "vllm") as deployment:
        yield deployment.url, model


class Line:
    """A connection that is kept, and asks for a stream again and again."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self.model = model
        self.sock = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=ANSWER_TIMEOUT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()

    def ttft(self, prompt: list[int], tokens: int) -> float:
        """Return the seconds from a send to the first event, and read the rest.

        Raises:
            RuntimeError: the answer is not a stream, or it broke off.
        """
        asked = request(self.model, prompt, tokens)
        began = time.perf_counter()
        self.sock.sendall(asked)
        data, first = b"", None
        while not data.endswith(END):
            if not (part := self.sock.recv(1 << 16)):
                raise RuntimeError(f"broke off: {data[-200:]!r}")
            data += part
            if first is None and b"data: " in data:
                first = time.perf_counter()
        if first is None or b"[DONE]" not in data:
            raise RuntimeError(f"not a stream: {data[:200]!r}")
        return first - began


def request(model: str, prompt: list[int], tokens: int) -> bytes:
    """Return a request for a stream as bytes."""
    body = json.dumps({
        "model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass(frozen=True, slots=True)
class Rounds:
    """TTFT of the same kind of request each way, in seconds, one round an element."""

    direct: Floats
    relayed: Floats
    tapped: Floats

    @property
    def added(self) -> Floats:
        """What the tap added, round by round."""
        difference: Floats = self.tapped - self.direct
        return difference

    @property
    def least(self) -> Floats:
        """What a relay that looks at nothing added."""
        difference: Floats = self.relayed - self.direct
        return difference


@contextmanager
def relay(url: str, core: int | None) -> Iterator[str]:
    """Run the relay in front of a server while the block runs; give its URL."""
    with replaying.listening("benchmarks.record.relay", ["--port", str(urlsplit(url).port)], core) as relayed:
        yield relayed


def rounds(
    direct: str, relayed: str, tapped: str, model: str, count: int, *, prompt_tokens: int, tokens: int, seed: int = 0
) -> Rounds:
    """Ask each way in turns, in every other round backwards; every prompt is new to the server's cache."""
    rng = np.random.default_rng(seed)
    with ExitStack() as stack:
        lines = [stack.enter_context(closing(Line(url, model))) for url in (direct, relayed, tapped)]
        found: list[list[float]] = [[] for _ in lines]
        for number in range(-WARM_ROUNDS, count):
            for line, times in list(zip(lines, found, strict=True))[:: -1 if number % 2 else 1]:
                prompt = [int(token) for token in rng.integers(3, VOCABULARY, prompt_tokens)]
                times.append(line.ttft(prompt, tokens))
                time.sleep(PAUSE)
    return Rounds(*(np.array(times[WARM_ROUNDS:]) for times in found))


WARM_ROUNDS = 5


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
