"""The same claims against a real vLLM; the CPU build is enough.

The `vllm` beside this Python or on PATH, or the one that TUNE_TEST_VLLM names; a second version, if there is
one, is named by TUNE_TEST_VLLM_NEXT.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tuner import tiny_model
from tuner.deployment import ports, probe
from tuner.deployment.launcher import LocalLauncher
from tuner.errors import FailureKind, StartError
from tuner.results import config_to_json
from tuner.serving import Json, ServingConfig

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

ON_CPU = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Takes a quarter off a start; with the engine in the server's own process, as in studies/cpu-quickstart.yaml, half.
NOTHING_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
ONE_PROCESS = NOTHING_COMPILED | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)
SMALL: dict[str, Json] = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 32}


def installed(variable: str) -> str | None:
    """Return the `vllm` to test with."""
    beside = shutil.which("vllm", path=str(Path(sys.executable).parent))
    return os.environ.get(variable) or (variable == "TUNE_TEST_VLLM" and (beside or shutil.which("vllm"))) or None


@pytest.fixture(scope="module", params=["TUNE_TEST_VLLM", "TUNE_TEST_VLLM_NEXT"])
def command(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the command of each vLLM under test."""
    found = installed(request.param)
    if found is None:
        pytest.skip(f"no vLLM: install one, or let {request.param} name its executable")
    return (found, "serve")


@pytest.fixture(scope="session")
def model() -> str:
    """Return the folder of the tiny model."""
    return str(tiny_model.ensure())


def configuration(
    command: tuple[str, ...], model: str, env: dict[str, str] | None = None, **args: Json
) -> ServingConfig:
    """Return a small configuration for CPU hosts."""
    return ServingConfig(model=model, command=command, args=SMALL | args, env=ON_CPU | (env or {}))


def in_one_process(command: tuple[str, ...], model: str, **args: Json) -> ServingConfig:
    """Return the same for a server that is up soonest."""
    return configuration(command, model, ONE_PROCESS, distributed_executor_backend="uni", **args)


@pytest.fixture
def shared_memory() -> Iterator[None]:
    """Check that a test leaves no shared memory behind; what a living process has mapped is a neighbour's."""
    before = set(SHARED_MEMORY.iterdir())
    yield
    deadline = time.monotonic() + 10  # a neighbour's may be seen at its end, when nobody has it mapped any more
    while (left := unmapped(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == set()


def unmapped(before: set[Path]) -> set[Path]:
    """Return the shared memory that was not there before and that no living process has mapped."""
    taken = mapped()
    found = {path: number for path in set(SHARED_MEMORY.iterdir()) - before if (number := inode(path))}
    return {path for path, number in found.items() if number not in taken}


def inode(path: Path) -> int | None:
    """Return a file's inode, by which it is mapped: a semaphore is renamed after that."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def mapped() -> set[int]:
    """Return the inodes of the shared memory that living processes have mapped."""
    found: set[int] = set()
    for table in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours to read
            lines = [line.split(maxsplit=5) for line in table.read_text().splitlines() if f"{SHARED_MEMORY}/" in line]
            found |= {int(line[4]) for line in lines}
    return found


def runs(process: psutil.Process) -> bool:
    """Whether a process runs; one that ended and that nobody reaped yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def fetch(url: str, body: bytes | None = None) -> bytes:
    """Return what the server answers."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def test_a_real_server_starts_answers_and_leaves_nothing(
    command: tuple[str, ...], model: str, tmp_path: Path, shared_memory: None
) -> None:
    """Up, serving tokens, every process marked; then no process, no port, no shared memory."""
    record = tmp_path / "processes.jsonl"
    with LocalLauncher(journal=record).launch(configuration(command, model), tmp_path) as deployment:
        (server,) = deployment.servers
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        answer = fetch(f"{deployment.url}/v1/completions", json.dumps(body).encode())
        assert json.loads(answer)["usage"]["completion_tokens"] == 4
        assert b"vllm:num_requests_running" in fetch(deployment.members[0].metrics_url)
        deployment.check_alive()
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert any("EngineCore" in member.name() for member in family)
        # The marker must survive vLLM's renaming of its processes, or an escaped one would not be found.
        assert {member.environ().get("TUNE_DEPLOYMENT") for member in family} == {server.marker}

    assert [member for member in family if runs(member)] == []
    assert ports.is_free(server.host, server.port)
    started, ended = map(json.loads, record.read_text().splitlines())
    assert (started["marker"], ended["marker"], ended["left"]) == (server.marker, server.marker, [])


def test_memory_that_is_not_there_is_told(command: tuple[str, ...], model: str, tmp_path: Path) -> None:
    """A KV cache larger than the host: kind oom, vLLM's own words, a hint, nothing left."""
    config = configuration(command, model, env=NOTHING_COMPILED | {"VLLM_CPU_KVCACHE_SPACE": "4000"})
    with pytest.raises(StartError) as caught, LocalLauncher().launch(config, tmp_path):
        pass

    assert caught.value.kind == FailureKind.OOM
    assert "requested memory for kv" in caught.value.message
    assert "VLLM_CPU_KVCACHE_SPACE" in (caught.value.hint or "")


@pytest.fixture(scope="module")
def probed(command: tuple[str, ...], model: str) -> probe.Probe:
    """What a vLLM says of itself, of two command lines that it takes and of four that it does not."""
    argvs = [
        [model, "--max-model-len", "4096"],
        [model, "--no-such-flag", "1"],
        [model, "--max-model-len", "4096", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"],
        [model, "--max-model-len", "4096", "--no-enable-chunked-prefill"],
        [model, "--max-num-seqs", "many"],
        ["/no/such/model"],
    ]
    return probe.probe(command, argvs, env=ON_CPU)


def test_a_real_vllm_is_probed_in_one_go(probed: probe.Probe) -> None:
    """Version, platform, flags; defaults as the server resolves them; refusals in vLLM's own words."""
    found = probed
    default, unknown, too_small, unchunked, not_a_number, no_model = found.verdicts

    assert probe.version_warning(found.version) is None
    assert found.platform is not None
    assert found.flags["max_num_batched_tokens"].kind == "int"
    assert found.flags["enable_chunked_prefill"].kind == "bool"
    assert found.flags["scheduling_policy"].choices == ("fcfs", "priority")
    assert probe.unknown_arguments(found, ["max_num_batched_token", "kv_transfer_config"]).keys() == {
        "max_num_batched_token"
    }
    assert default.values.items() >= {"enable_chunked_prefill": True, "max_model_len": 4096}.items()
    assert unchunked.values.items() >= {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}.items()
    if found.platform == "cpu":
        expected = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "block_size": 128}
        assert default.values.items() >= expected.items()
    assert unknown.reason == "unrecognized arguments: --no-such-flag 1"
    assert (too_small.reason or "").startswith("SchedulerConfig: max_num_batched_tokens (2048) is smaller than")
    assert not_a_number.reason == "argument --max-num-seqs: invalid int value: 'many'"
    assert "/no/such/model" in (no_model.reason or "")


def test_the_help_text_knows_the_same_flags(command: tuple[str, ...], probed: probe.Probe, tmp_path: Path) -> None:
    """A wrapper around the same vLLM, asked by --help=all, yields the flags that its parser has."""
    wrapper = tmp_path / "wrapped"
    wrapper.write_text(f'#!/bin/sh\nexec {command[0]} "$@"\n')
    wrapper.chmod(0o755)

    by_text = probe.probe((str(wrapper), "serve"))
    assert by_text.flags.keys() == probed.flags.keys()
    assert probe.version_warning(by_text.version) is None


SCRIPT = """
import sys
import time
from pathlib import Path
from tuner.deployment.launcher import LocalLauncher
from tuner.results import config_from_json
import json
config = config_from_json(json.loads(sys.argv[1]))
with LocalLauncher().launch(config, Path(sys.argv[2])) as deployment:
    print(deployment.servers[0].pid, flush=True)
    sys.stdin.read()
"""


def test_a_real_server_does_not_outlive_a_killed_tune(
    command: tuple[str, ...], model: str, tmp_path: Path, shared_memory: None
) -> None:
    """After kill -9 of tune all of vLLM's processes are gone within ten seconds."""
    config = json.dumps(config_to_json(configuration(command, model, NOTHING_COMPILED)))
    argv = [sys.executable, "-c", SCRIPT, config, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tune:
        assert tune.stdout is not None
        leader = psutil.Process(int(tune.stdout.readline()))
        family = [leader, *leader.children(recursive=True)]
        assert len(family) >= 3
        tune.kill()

    deadline = time.monotonic() + 10
    while any(map(runs, family)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [member for member in family if runs(member)] == []
