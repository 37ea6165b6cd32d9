"""Other load clients, each in an environment of its own: how they are installed, called and read.

All three replay the very schedule that tune's client gets: each reads a Mooncake trace.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.replay.load import Load, Seen
from benchmarks.replay.server import MODEL

# What this benchmark was written for; the rest of an environment is what pip resolves. vLLM is not installed here.
PINS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm==0.26.0",),
    "guidellm": ("guidellm==0.8.1", "httpx==0.28.1", "uvloop==0.23.0", "transformers==5.24.0"),
    "aiperf": ("aiperf==0.13.0", "aiohttp==3.14.5", "orjson==3.11.9", "uvloop==0.23.0", "transformers==5.24.0"),
}
INSTALL_TIMEOUT = 1800.0
VERSION_TIMEOUT = 120.0

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
HUB_NAME, HUB_REVISION = "x/tok", "0123456789abcdef"


class AbsentError(Exception):
    """A client that cannot be measured, with the reason."""


@dataclass(frozen=True, slots=True)
class Client:
    """A program that sends a load.

    Attributes:
        name: in the tables.
        command: what to run, given the load, the server's URL and a folder of its own.
        read: what it saw, from that folder.
        env: what to add to the environment, given that folder.
        version: of the program.
    """

    name: str
    command: Callable[[Load, str, Path], list[str]]
    read: Callable[[Path], Seen]
    env: Callable[[Path], Mapping[str, str]] = field(default=lambda _: {})
    version: str | None = None


def find(name: str, directory: Path, vllm: Path, tokenizer: Path) -> Client:
    """Return a peer that is ready to run, installing it when it is not there.

    Raises:
        AbsentError: it is not there and cannot be installed.
    """
    if name == "vllm":
        return vllm_bench(_vllm(vllm), tokenizer)
    program = installed(name, directory)
    return guidellm(program, tokenizer) if name == "guidellm" else aiperf(program, tokenizer)


# --- vllm bench serve -------------------------------------------------------------------------------------


def vllm_bench(program: Path, tokenizer: Path) -> Client:
    """Return `vllm bench serve`."""

    def command(load: Load, url: str, out: Path) -> list[str]:
        return [
            str(program), "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
            "--model", MODEL, "--tokenizer", str(tokenizer), "--num-prompts", str(len(load.due)),
            "--dataset-name", "timed_trace", "--dataset-path", str(load.write_trace(out / "trace.jsonl")),
            "--ready-check-timeout-sec", "0", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--save-result", "--save-detailed", "--result-dir", str(out), "--result-filename", "result.json",
        ]  # fmt: skip

    return Client("vllm bench", command, read_vllm, lambda _: QUIET, _version(program, "vllm"))


def read_vllm(out: Path) -> Seen:
    """Read the detailed result; a failed request has an error and is left out."""
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    good = [not error for error in result["errors"]]
    gaps = [gap for ok, gaps in zip(good, result["itls"], strict=True) if ok for gap in gaps]
    return Seen(ttft=np.array([t for ok, t in zip(good, result["ttfts"], strict=True) if ok]), gaps=np.array(gaps))


def _vllm(given: Path) -> Path:
    found = shutil.which(str(given))
    if found is None:
        raise AbsentError(f"no vllm at {given}: name one with --vllm")
    return Path(found).absolute()


# --- aiperf -----------------------------------------------------------------------------------------------


def aiperf(program: Path, tokenizer: Path) -> Client:
    """Return `aiperf profile`, which takes no path for a tokenizer when it is offline: it gets a hub's cache."""

    def command(load: Load, url: str, out: Path) -> list[str]:
        return [
            str(program), "profile", "-m", MODEL, "--url", url, "--endpoint-type", "completions", "--streaming",
            "--tokenizer", HUB_NAME, "--custom-dataset-type", "mooncake_trace", "--fixed-schedule",
            "--input-file", str(load.write_trace(out / "trace.jsonl", unit=1e-3)),
            "--use-legacy-max-tokens", "--extra-inputs", "ignore_eos:true", "--random-seed", "0",
            "--ui", "none", "--artifact-dir", str(out),
        ]  # fmt: skip

    def env(out: Path) -> Mapping[str, str]:
        return QUIET | {"HF_HOME": str(_hub_cache(out / "hub", tokenizer))}

    return Client("aiperf", command, read_aiperf, env, _version(program, "aiperf"))


def read_aiperf(out: Path) -> Seen:
    """Read one record a request; inter_chunk_latency holds the gaps (inter_token_latency is a mean)."""
    with (out / "profile_export.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    good = [record["metrics"] for record in records if not record.get("error")]
    gaps = [gap for metrics in good for gap in metrics["inter_chunk_latency"]["value"]]
    ttft = [metrics["time_to_first_token"]["value"] for metrics in good]
    return Seen(ttft=np.array(ttft) / 1e3, gaps=np.array(gaps) / 1e3)


def _hub_cache(home: Path, tokenizer: Path) -> Path:
    cached = home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True, exist_ok=True)
    (cached / "snapshots").mkdir(exist_ok=True)
    (cached / "refs" / "main").write_text(HUB_REVISION, encoding="utf-8")
    snapshot = cached / "snapshots" / HUB_REVISION
    if not snapshot.exists():
        snapshot.symlink_to(tokenizer.absolute(), target_is_directory=True)
    return home


# --- guidellm ---------------------------------------------------------------------------------------------


def guidellm(program: Path, tokenizer: Path) -> Client:
    """Return `guidellm run` with its replay profile."""

    def command(load: Load, url: str, out: Path) -> list[str]:
        trace = load.write_trace(out / "trace.jsonl")
        return [
            str(program), "run", "--profile", "kind=replay,schedule_turn=timestamp",
            "--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions",
            "--data", f"kind=trace_synthetic,source.kind=json_file,source.path={trace}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", f"kind=json,path={out / 'result.json'}",
            "--disable-console-interactive",
        ]  # fmt: skip

    return Client("guidellm", command, read_guidellm, lambda _: QUIET, _version(program, "guidellm"))


def read_guidellm(out: Path) -> Seen:
    """Read TTFT a request; gaps are absent: its inter_token_latency is a request's mean and hides stalls."""
    (benchmark,) = json.loads((out / "result.json").read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]["successful"]
    return Seen(ttft=np.array([request["time_to_first_token_ms"] for request in requests]) / 1e3)


# --- Environments -----------------------------------------------------------------------------------------


def installed(name: str, directory: Path) -> Path:
    """Return DIR/NAME/bin/NAME, making that environment when it is not there.

    Raises:
        AbsentError: it cannot be installed.
    """
    home = (directory / name).absolute()
    program = home / "bin" / name
    if program.is_file():
        return program
    python = str(home / "bin" / "python")
    uv = shutil.which("uv")
    if uv:
        steps = [[uv, "venv", "--python", sys.executable, str(home)]]
        steps += [[uv, "pip", "install", "--python", python, *PINS[name]]]
    else:
        steps = [[sys.executable, "-m", "venv", str(home)]]
        steps += [[python, "-m", "pip", "install", "--disable-pip-version-check", *PINS[name]]]
    print(f"installing {PINS[name][0]} in {home}", file=sys.stderr)
    for step in steps:
        _run(step, INSTALL_TIMEOUT)
    if not program.is_file():
        raise AbsentError(f"{PINS[name][0]} installed no program {name}")
    return program


def _run(command: list[str], timeout: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except subprocess.CalledProcessError as error:
        raise AbsentError(f"{command[0]} failed: {last_line(error.stderr) or error.returncode}") from error
    except (subprocess.TimeoutExpired, OSError) as error:
        raise AbsentError(f"{command[0]} failed: {error}") from error
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _version(program: Path, package: str) -> str | None:
    """Return the version in the environment of a program, None when its Python does not say."""
    python = program.with_name("python")
    words = f"import importlib.metadata as m; print(m.version({package!r}))"
    if not os.access(python, os.X_OK):
        return None
    try:
        return _run([str(python), "-c", words], VERSION_TIMEOUT).strip()
    except AbsentError:
        return None
