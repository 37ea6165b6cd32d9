"""Groups start side by side, each server with what is its own, and end whole."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from deployment_data import COMMAND, executable, is_alive, launcher, little_group, marked, wait_until
from test_deployment_gpu import NVIDIA_SMI

from tuner.deployment import launcher as launching
from tuner.deployment import ports, process
from tuner.errors import FailureKind, HostError, ServerDied, SpecError, StartError
from tuner.serving import Front, Role

pytestmark = pytest.mark.once

FOUR = "".join(f"{i}, GPU-{i}, NVIDIA GeForce RTX 4090, 24564, 24100\n" for i in range(4))


def environment(pid: int, name: str) -> str | None:
    """Return a variable of a running process."""
    return psutil.Process(pid).environ().get(name)


def markers(record: Path) -> list[str]:
    """Return the marker of everything a journal shows as started."""
    entries = map(json.loads, record.read_text().splitlines())
    return [entry["marker"] for entry in entries if entry["event"] == "started"]


def test_a_group_answers_at_its_front_and_leaves_nothing(tmp_path: Path) -> None:
    """Two prefillers, a decoder and the front: each up under its own port, the url the front's, then all gone."""
    record = tmp_path / "processes.jsonl"
    with launcher(journal=record).launch(little_group("2p1d"), tmp_path) as deployment:
        assert deployment.front is not None
        assert deployment.url == deployment.front.url
        assert [member.role for member in deployment.members] == [Role.PREFILLER, Role.PREFILLER, Role.DECODER]
        everybody = [*deployment.servers, deployment.front]
        assert len({server.port for server in everybody}) == 4
        for server in everybody:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
                assert answer.status == 200
        deployment.check_alive()

    assert len(markers(record)) == 4
    assert not any(marked(marker) for marker in markers(record))
    assert all(ports.is_free("127.0.0.1", server.port) for server in everybody)


def test_each_server_has_a_side_channel_of_its_own(tmp_path: Path) -> None:
    """Prefillers and decoders name a port each, on this host; a front and replicas name none."""
    with launcher(plugin=Path("/plugin")).launch(little_group("1p2d"), tmp_path) as deployment:
        channels = [environment(s.pid, "VLLM_NIXL_SIDE_CHANNEL_PORT") for s in deployment.servers]
        hosts = {environment(s.pid, "VLLM_NIXL_SIDE_CHANNEL_HOST") for s in deployment.servers}
        paths = [environment(s.pid, "PYTHONPATH") or "" for s in deployment.servers]
        assert deployment.front is not None
        assert environment(deployment.front.pid, "VLLM_NIXL_SIDE_CHANNEL_PORT") is None
    with launcher(plugin=Path("/plugin")).launch(little_group("2x"), tmp_path / "2x") as deployment:
        assert {environment(s.pid, "VLLM_NIXL_SIDE_CHANNEL_PORT") for s in deployment.servers} == {None}

    assert None not in channels
    assert len(set(channels)) == 3
    assert hosts == {"127.0.0.1"}
    assert all(path.split(os.pathsep)[0] == "/plugin" for path in paths)


def test_data_parallel_ranks_get_side_channels_in_a_row(tmp_path: Path) -> None:
    """VLLM adds the rank to the port (nixl/base_scheduler.py): as many ports in a row as ranks."""
    with ports.ExitStack() as stack:
        found = [one.port for one in ports.reserve_in_a_row(stack, "127.0.0.1", 3)]
        assert found == [found[0], found[0] + 1, found[0] + 2]
        with pytest.raises(HostError, match="in use"), ports.reserved("127.0.0.1", found[2]):
            pass


def test_the_commands_of_a_group_are_written_by_name(tmp_path: Path) -> None:
    """command.txt has a line for each program, the front's with the addresses of all servers."""
    with launcher().launch(little_group("1p1d"), tmp_path) as deployment:
        urls = [server.url for server in deployment.servers]
    lines = (tmp_path / "command.txt").read_text().splitlines()

    assert lines[::2] == ["# prefiller 0", "# decoder 0", "# the front"]
    assert '"kv_role": "kv_producer"' in lines[1]
    assert '"kv_role": "kv_consumer"' in lines[3]
    assert f"--vllm-pd-disaggregation --prefill {urls[0]} --decode {urls[1]} --policy round_robin" in lines[5]
    assert (tmp_path / "front.log").exists()
    assert (tmp_path / "server-decoder-0.log").exists()


def test_a_fixed_port_is_the_fronts(tmp_path: Path) -> None:
    """Requests go to the front, so the port that a user fixed is there."""
    with ports.reserved("127.0.0.1") as free:
        fixed = free.port
    with launcher(port=fixed).launch(little_group("2x"), tmp_path) as deployment:
        assert deployment.port == fixed


@pytest.mark.parametrize("behaviour", ["crash", "hang"])
def test_a_group_that_comes_up_partly_is_ended_whole(tmp_path: Path, behaviour: str) -> None:
    """One decoder of two cannot: the error names it, and its healthy companions are gone."""
    record = tmp_path / "processes.jsonl"
    config = little_group("1p1d", {Role.DECODER: {"behave": behaviour}})
    began = time.monotonic()
    with pytest.raises(StartError) as caught, launcher(start_timeout=3, journal=record).launch(config, tmp_path):
        pass

    kind = {"crash": FailureKind.CRASH, "hang": FailureKind.TIMEOUT}[behaviour]
    assert (caught.value.kind, caught.value.message.split(":")[0]) == (kind, "decoder 0")
    assert time.monotonic() - began < 15
    assert len(markers(record)) == 2
    assert not any(marked(marker) for marker in markers(record))


def test_a_server_that_dies_while_another_starts_is_named(tmp_path: Path) -> None:
    """Ready is not for good: the one that died is the cause, not the one that was waited for."""
    config = little_group("1p1d", {Role.PREFILLER: {"behave": "serve_and_die"}, Role.DECODER: {"behave": "hang"}})
    launching_it = launcher(start_timeout=60).launch(config, tmp_path)
    with pytest.raises(StartError, match=r"prefiller 0: .*out of memory") as caught, launching_it:
        pass

    assert caught.value.kind is FailureKind.OOM


def test_health_that_trickles_is_no_health(tmp_path: Path) -> None:
    """A byte a second, each in time for itself: the look has a deadline as a whole."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            there, _ = server.accept()
            with there, contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\n\r\n":
                    there.sendall(bytes([byte]))
                    time.sleep(0.5)

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        assert not process._is_healthy("127.0.0.1", server.getsockname()[1])

    assert time.monotonic() - began < 4


def test_a_front_that_does_not_come_up_ends_the_group(tmp_path: Path) -> None:
    """Nobody would reach the servers; the error is the front's."""
    front = Front(command=(sys.executable, "-c", "raise SystemExit('error: no such policy')"))
    launching_it = launcher().launch(little_group("2x", front=front), tmp_path)
    with pytest.raises(StartError, match=r"^the front: ") as caught, launching_it:
        pass

    assert caught.value.log == ("error: no such policy",)


def test_a_missing_front_is_the_hosts_error(tmp_path: Path) -> None:
    """It is named, and no server is left."""
    record = tmp_path / "processes.jsonl"
    config = little_group("2x", front=Front(command=("no-such-router",)))
    with pytest.raises(HostError, match="no-such-router"), launcher(journal=record).launch(config, tmp_path):
        pass

    assert not any(marked(marker) for marker in markers(record))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_whoever_dies_is_named(tmp_path: Path, victim: int) -> None:
    """A prefiller, a decoder and the front are all watched."""
    with launcher().launch(little_group("1p1d"), tmp_path) as deployment:
        assert deployment.front is not None
        everybody = [*deployment.servers, deployment.front]
        os.kill(everybody[victim].pid, signal.SIGKILL)
        with pytest.raises(ServerDied) as caught:
            wait_until(deployment.check_alive)

    name = ("prefiller 0", "decoder 0", "the front")[victim]
    assert caught.value.message.startswith(f"{name} ended while in use (SIGKILL)")
    assert not any(is_alive(server.pid) for server in everybody)


def test_a_port_taken_in_between_restarts_the_group(tmp_path: Path) -> None:
    """All members get other ports."""
    record = tmp_path / "processes.jsonl"
    behaviour = {"LITTLE": "port_taken_at_first", "LITTLE_FILE": str(tmp_path / "first")}
    with launcher(journal=record).launch(little_group("2x", env=behaviour), tmp_path) as deployment:
        used = {server.port for server in deployment.servers}

    assert len(used) == 2
    assert len(markers(record)) > 3


def test_a_taken_side_channel_is_noticed_though_the_server_hangs(tmp_path: Path) -> None:
    """The log says so, and vLLM waits for ever: the group is started again, long before the start is too late."""
    behaviour = {"LITTLE": "side_channel_taken_at_first", "LITTLE_FILE": str(tmp_path / "first")}
    began = time.monotonic()
    with launcher(start_timeout=60).launch(little_group("1p1d", env=behaviour), tmp_path):
        assert time.monotonic() - began < 40


def test_ports_are_none_that_the_kernel_gives_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the range for sockets that ask for no port, above it where there is no room, else the kernel's choice."""
    table = tmp_path / "range"
    monkeypatch.setattr(ports, "EPHEMERAL", table)

    def picked(text: str) -> int:
        table.write_text(text)
        with ports.reserved("127.0.0.1") as one:
            return one.port

    assert 20_000 <= picked("32768\t60999\n") < 32768
    assert picked("1024 60000") > 60000
    assert picked("1024 65535") >= 1024


def test_gpus_are_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server sees its own, as many as its parallel sizes take; the front sees them all, and uses none."""
    executable(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI)
    (tmp_path / "bin" / "gpus").write_text(FOUR)
    (tmp_path / "bin" / "apps").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def seen(config_of: str, **more: object) -> list[str | None]:
        with launcher(**more).launch(little_group(config_of), tmp_path / config_of) as deployment:
            return [environment(server.pid, "CUDA_VISIBLE_DEVICES") for server in deployment.servers]

    assert seen("1p2d", gpus=(0, 2, 3)) == ["0", "2", "3"]
    assert seen("1p1d", gpus=(1,), share_devices=True) == ["1", "1"]
    with pytest.raises(HostError, match="needs 4 GPUs, 2 are given"):
        seen("4x", gpus=(0, 1))


def test_memory_decides_whether_servers_start_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two do not fit the second starts when the first is ready; here it never is."""
    record = tmp_path / "processes.jsonl"
    monkeypatch.setattr(launching.host, "memory", lambda: (3 * launching.GIB, 4 * launching.GIB))
    config = little_group("2x", env={"LITTLE": "hang"})
    with (
        pytest.raises(StartError, match="replica 0"),
        launcher(start_timeout=1, journal=record).launch(config, tmp_path),
    ):
        pass

    assert len(markers(record)) == 1


def test_a_group_of_containers_is_refused(tmp_path: Path) -> None:
    """One command cannot name several containers."""
    config = little_group("2x", command=("docker", "run", *COMMAND))
    with pytest.raises(SpecError, match="2x is a group"), launcher(stop_command=("x",)).launch(config, tmp_path):
        pass
