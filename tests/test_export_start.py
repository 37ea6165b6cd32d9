"""`start.sh`, run: a group comes up behind its front, and nothing of it is left, whatever happens."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from deployment_data import marked, wait_until

from tuner import export
from tuner import spec as specs
from tuner.results import TrialResult
from tuner.serving import Front, Role, ServingConfig, Topology

pytestmark = pytest.mark.once

FAKE = Path(__file__).parent / "fake_vllm.py"
SPEC = specs.parse("name: s\nmodel: m\nworkload: w\n", "s.yaml")
ROUTER = shutil.which("vllm-router", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
SHELLS = [shell for shell in ("sh", "bash") if shutil.which(shell)]
needs_router = pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed")


def free_ports(n: int) -> int:
    """Return the first of n free ports that follow each other."""
    for first in range(20000 + os.getpid() % 500 * 20, 60000, 20):
        try:
            for port in range(first, first + n):
                with socket.socket() as held:
                    held.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def exported(out: Path, topology: str, behaviour: dict[str, Any], **more: Any) -> Path:
    """Export a group of fake servers behind the real router and return its script."""
    config = ServingConfig(
        "m", {"max_num_seqs": 8}, {"FAKE_VLLM": json.dumps(behaviour), "ODD": "a b"}, Topology.parse(topology),
        command=(sys.executable, str(FAKE), "serve"), **({"front": Front((ROUTER or "vllm-router",))} | more),
    )  # fmt: skip
    export.write(TrialResult(1, config, ended=1.0, slos_met=False), SPEC, [], out, {})
    return out / "start.sh"


@contextmanager
def started(script: Path, shell: str = "sh", **env: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Run a script; yield its process, its marker and the first of its ports."""
    port, marker = free_ports(6), uuid.uuid4().hex
    own = {"PORT": str(port), "PROMETHEUS_PORT": str(port + 1), "SERVER_PORT": str(port + 2), "STOP_TIMEOUT": "5"}
    with subprocess.Popen(
        [shell, str(script)], env=os.environ | own | {"TUNE_DEPLOYMENT": marker} | env,
        stderr=subprocess.PIPE, text=True, cwd="/",
    ) as process:  # fmt: skip
        try:
            yield process, marker, port
        finally:
            process.terminate()
            process.wait(20)
            for pid in marked(marker):
                os.kill(pid, signal.SIGKILL)


def completion(port: int) -> dict[str, Any]:
    body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 3}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def is_healthy(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False


def served(port: int, host: str = "127.0.0.1") -> float:
    """Return how many requests a server has answered."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
        rows = [
            row.split() for row in answer.read().decode().splitlines() if row.startswith("vllm:request_success_total")
        ]
    return sum(float(row[-1]) for row in rows)


def line(process: subprocess.Popen[str], part: str) -> str:
    """Return the first line of the script's that has this part."""
    assert process.stderr is not None
    return next((said for said in process.stderr if part in said), "")


@needs_router
@pytest.mark.parametrize("shell", SHELLS)
def test_replicas_answer_through_the_front_and_end_with_the_script(tmp_path: Path, shell: str) -> None:
    """Both servers take a share of the requests; TERM ends servers, their children and the front."""
    script = exported(tmp_path / "be st", "2x", {"engine_child": True})
    with started(script, shell) as (process, marker, port):
        assert f"ready at http://127.0.0.1:{port}" in line(process, "ready at")
        assert [completion(port)["choices"][0]["finish_reason"] for _ in range(4)] == ["length"] * 4
        assert [served(port + 2), served(port + 3)] == [2, 2]
        process.terminate()
        assert process.wait(20) == 143
        assert wait_until(lambda: not marked(marker))


def test_a_server_that_fails_ends_the_script_at_once(tmp_path: Path) -> None:
    """The prefiller that was on its way ends too; the message names the server and its log."""
    behaviour = {"hang_at_start": True, "when": [{"if": {"max_num_seqs": 9}, "then": {"fail_at_start": "crash"}}]}
    script = exported(tmp_path, "1p1d", behaviour, role_args={Role.DECODER: {"max_num_seqs": 9}})
    with started(script) as (process, marker, _):
        assert "decoder-0 ended: see" in line(process, "ended")
        assert process.wait(30) == 1
        assert wait_until(lambda: not marked(marker))
    assert "illegal memory access" in (tmp_path / "logs" / "decoder-0.log").read_text()


@pytest.mark.timing
def test_servers_that_are_never_ready_end_at_the_deadline(tmp_path: Path) -> None:
    """START_TIMEOUT is the servers' to be ready in, together; one that ignores TERM is killed."""
    script = exported(tmp_path, "2x", {"hang_at_start": True, "ignore_term": True})
    begun = time.monotonic()
    with started(script, START_TIMEOUT="2", STOP_TIMEOUT="1") as (process, marker, _):
        assert "serve-0 is not ready after 2 s" in line(process, "not ready")
        assert process.wait(30) == 1
        assert wait_until(lambda: not marked(marker))
    assert 2 <= time.monotonic() - begun < 20


def test_a_front_that_fails_ends_the_servers(tmp_path: Path) -> None:
    """Its exit code is told."""
    script = exported(tmp_path, "2x", {}, front=Front(("false",)))
    with started(script) as (process, marker, _):
        assert "the front ended with 1" in line(process, "front ended")
        assert process.wait(30) == 1
        assert wait_until(lambda: not marked(marker))


def test_a_port_that_answers_already_is_not_taken_for_a_server(tmp_path: Path) -> None:
    """Another vLLM at the port would look like a ready server of ours."""
    script = exported(tmp_path, "2x", {})
    port = free_ports(8)
    other = [sys.executable, str(FAKE), "serve", "m", "--host", "127.0.0.1", "--port", str(port + 7)]
    with subprocess.Popen(other, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as taken:
        try:
            assert wait_until(lambda: is_healthy(port + 7))
            with started(script, SERVER_PORT=str(port + 6)) as (process, marker, _):
                assert f"port {port + 7} is taken: set SERVER_PORT" in line(process, "taken")
                assert process.wait(30) == 1
                assert wait_until(lambda: not marked(marker))
        finally:
            taken.kill()


def test_each_server_has_the_environment_and_the_gpus_of_its_own(tmp_path: Path) -> None:
    """A program that tells what it was given: shared variables, side channel, GPUs, path of the plugin."""
    tell = tmp_path / "tell.sh"
    tell.write_text('echo "$ODD|$CUDA_VISIBLE_DEVICES|$VLLM_NIXL_SIDE_CHANNEL_HOST:$VLLM_NIXL_SIDE_CHANNEL_PORT|'
                    '${PYTHONPATH%%:*}|$*"; sleep 600\n')  # fmt: skip
    (tmp_path / "from").mkdir()
    config = ServingConfig("m", env={"ODD": "a b"}, topology=Topology.parse("1p2d"), command=("sh", str(tell)),
                           role_args={Role.DECODER: {"tensor_parallel_size": 2}})  # fmt: skip
    out = tmp_path / "out"
    export.write(TrialResult(1, config, ended=1.0, slos_met=False), SPEC, [], out, {},
                 gpus=True, plugin=tmp_path / "from")  # fmt: skip
    with started(out / "start.sh", GPUS="3,4,6,7,5", SIDE_CHANNEL_PORT="7000") as (_, _, port):
        told = {}
        for name in ("prefiller-0", "decoder-0", "decoder-1"):
            log = out / "logs" / f"{name}.log"
            told[name] = wait_until(lambda log=log: log.exists() and log.read_text()).strip()

    def said(role: str, number: int, gpus: str, side_channel: int) -> str:
        argv = f"--config {out}/{role}.yaml --host 127.0.0.1 --port {port + 2 + number}"
        return f"a b|{gpus}|127.0.0.1:{side_channel}|{out}/plugin|{argv}"

    assert told == {
        "prefiller-0": said("prefiller", 0, "3", 7000),
        "decoder-0": said("decoder", 1, "4,6", 7002),
        "decoder-1": said("decoder", 2, "7,5", 7004),
    }


def test_too_few_gpus_are_refused(tmp_path: Path) -> None:
    """Before anything starts."""
    config = ServingConfig("m", topology=Topology.parse("2x"))
    export.write(TrialResult(1, config, ended=1.0, slos_met=False), SPEC, [], tmp_path, {}, gpus=True)
    with started(tmp_path / "start.sh", GPUS="0") as (process, _, _):
        assert "2 GPUs are needed, and GPUS=0 names fewer" in line(process, "GPUs")
        assert process.wait(10) == 1
