"""Servers start, are watched and end, and nothing of them is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from deployment_data import (
    COMMAND,
    executable,
    first_on_path,
    is_alive,
    launcher,
    little,
    marked,
    wait_until,
)

from tuner.deployment import failures, journal, ports, process, stopping
from tuner.deployment.family import Family
from tuner.errors import FailureKind, HostError, ServerDied, SpecError, StartError
from tuner.serving import ServingConfig

pytestmark = pytest.mark.once


def get(url: str, path: str) -> int:
    """Return the status of an answer."""
    with urllib.request.urlopen(url + path, timeout=5) as answer:
        return int(answer.status)


def test_a_server_is_ready_when_entered_and_gone_when_left(tmp_path: Path) -> None:
    """Inside the context it answers under the url; after it neither process nor port is left."""
    with launcher().launch(little(), tmp_path) as deployment:
        (server,) = deployment.servers
        assert get(deployment.url, "/health") == 200
        assert [m.metrics_url for m in deployment.members] == [f"{deployment.url}/metrics"]
        assert marked(server.marker) == {server.pid}
        deployment.check_alive()

    assert marked(server.marker) == set()
    assert not is_alive(server.pid)
    assert ports.is_free("127.0.0.1", deployment.port)


def test_the_exact_command_is_written_without_secrets(tmp_path: Path) -> None:
    """command.txt repeats the start; a secret stays a reference to the reader's environment."""
    config = little(args={"max_num_seqs": 8}, env={"VLLM_API_KEY": "hunter2"})
    with pytest.raises(StartError), launcher().launch(config, tmp_path):
        pass  # the little server knows no --max-num-seqs

    text = (tmp_path / "command.txt").read_text()
    assert text.startswith("env ")
    assert "LITTLE=serve" in text
    assert 'VLLM_API_KEY="$VLLM_API_KEY"' in text
    assert "hunter2" not in text
    assert "--max-num-seqs 8 --host 127.0.0.1 --port " in text


def test_the_environment_is_inherited_except_what_slows_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte code is kept, usage reports are off, compile caches survive trials; the user's own caches win."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/mine")
    settings = process.settings({"EXTRA": "yes"}, cache=Path("/cache"), gpus=(1, 3))
    env = process.environment(settings, "m")

    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["VLLM_CACHE_ROOT"] == "/mine"
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/cache/inductor"
    assert env["VLLM_NO_USAGE_STATS"] == "1"
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("1,3", "PCI_BUS_ID")
    assert (env["EXTRA"], env["TUNE_DEPLOYMENT"]) == ("yes", "m")


def test_a_crash_at_start_tells_the_cause_and_leaves_nothing(tmp_path: Path) -> None:
    """The error holds the Worker's line, not the API server's last one."""
    record = tmp_path / "processes.jsonl"
    with pytest.raises(StartError) as caught, launcher(journal=record).launch(little("crash"), tmp_path):
        pass

    assert caught.value.kind == FailureKind.CRASH
    assert caught.value.log == ("ValueError: the cause",)
    started, ended = map(json.loads, record.read_text().splitlines())
    assert (ended["marker"], ended["exit_code"], ended["left"]) == (started["marker"], 1, [])
    assert marked(started["marker"]) == set()


def test_a_hang_at_start_ends_at_the_deadline(tmp_path: Path) -> None:
    """A server that is never ready is ended with its children; the error shows the last lines."""
    record = tmp_path / "processes.jsonl"
    launching = launcher(start_timeout=1.0, journal=record)
    with pytest.raises(StartError) as caught, launching.launch(little("hang"), tmp_path):
        pass

    assert caught.value.kind == FailureKind.TIMEOUT
    assert caught.value.log == ("INFO loading",)
    assert marked(json.loads(record.read_text().splitlines()[0])["marker"]) == set()


def test_a_server_deaf_to_term_is_killed(tmp_path: Path) -> None:
    """Patience runs out, then SIGKILL ends it."""
    with launcher(stop_patience=0.5).launch(little("deaf"), tmp_path) as deployment:
        (server,) = deployment.servers

    assert marked(server.marker) == set()


def test_children_that_escaped_are_found(tmp_path: Path) -> None:
    """A child in another session is found by its marker, one without environment by the session."""
    with launcher(stop_patience=0.5).launch(little("escape"), tmp_path) as deployment:
        (server,) = deployment.servers
        children = [child.pid for child in psutil.Process(server.pid).children()]
        assert len(children) == 2

    assert not any(is_alive(pid) for pid in children)


def test_a_server_that_dies_is_noticed_with_its_cause(tmp_path: Path) -> None:
    """check_alive says what the log says."""
    with launcher().launch(little(), tmp_path) as deployment:
        with pytest.raises(OSError, match=r"closed|reset"):
            get(deployment.url, "/die")
        with pytest.raises(ServerDied) as caught:
            wait_until(deployment.check_alive)

    assert caught.value.kind == FailureKind.OOM
    assert "CUDA out of memory" in caught.value.log[0]


def test_a_server_that_ends_without_a_word_died(tmp_path: Path) -> None:
    """Ended by somebody else's signal: kind died, the signal by name."""
    with launcher().launch(little(), tmp_path) as deployment:
        os.kill(deployment.servers[0].pid, signal.SIGTERM)
        with pytest.raises(ServerDied, match="SIGTERM") as caught:
            wait_until(deployment.check_alive)

    assert caught.value.kind == FailureKind.DIED


def test_a_port_taken_in_between_is_tried_again(tmp_path: Path) -> None:
    """The second try gets another port."""
    record = tmp_path / "processes.jsonl"
    config = little("port_taken_at_first", env={"LITTLE_FILE": str(tmp_path / "first")})
    with launcher(journal=record).launch(config, tmp_path):
        pass

    used = [entry["port"] for entry in map(json.loads, record.read_text().splitlines()) if "port" in entry]
    assert len(used) == 2


def test_a_stranger_keeps_the_port_that_it_was_faster_at() -> None:
    """A server that never listened leaves no port behind, whoever listens there."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as loser, socket.create_server(("", 0)) as stranger:
        family = Family("lost-its-port")
        family.lead(loser.pid)
        port = stranger.getsockname()[1]
        left = stopping.Stopping(family, "127.0.0.1", port, (), (), 5.0, loser).end(stopping.Interrupts())

    assert left == ()


def test_a_port_taken_three_times_is_an_error(tmp_path: Path) -> None:
    """Three tries, then a StartError of kind port."""
    config = little("port_taken", env={"LITTLE_FILE": str(tmp_path / "tries")})
    with pytest.raises(StartError) as caught, launcher().launch(config, tmp_path):
        pass

    assert caught.value.kind == FailureKind.PORT
    assert (tmp_path / "tries").read_text() == "xxx"


def test_a_fixed_port_is_not_exchanged(tmp_path: Path) -> None:
    """A port the user fixed is used, and when it is taken that is the host's error."""
    with ports.reserved("127.0.0.1") as free:
        fixed = free.port
    with launcher(port=fixed).launch(little(), tmp_path) as deployment:
        assert deployment.port == fixed
        with (
            pytest.raises(HostError, match=f"port {fixed} .* in use"),
            launcher(port=fixed).launch(little(), tmp_path),
        ):
            pass


def test_two_launchers_at_once_get_two_ports(tmp_path: Path) -> None:
    """Launchers that race do not meet on a port."""
    both, found = threading.Barrier(2, timeout=20), []

    def start(name: str) -> None:
        with launcher().launch(little(), tmp_path / name) as deployment:
            found.append(deployment.port)
            both.wait()

    threads = [threading.Thread(target=start, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(found)) == 2


def test_a_port_stays_reserved_after_it_was_handed_over() -> None:
    """Between hand-over and the server's bind the socket is free, but no other tune takes the port."""
    with ports.reserved("127.0.0.1") as first:
        first.hand_over()
        with pytest.raises(HostError, match="in use"), ports.reserved("127.0.0.1", first.port):
            pass
    with ports.reserved("127.0.0.1", first.port):
        pass


def test_an_outgoing_connection_does_not_hold_a_port() -> None:
    """A port that a client's connection happens to use is not taken for a server that did not end."""
    with (
        socket.create_server(("127.0.0.1", 0)) as there,
        socket.create_connection(there.getsockname()) as ours,
    ):
        assert ports.is_free("127.0.0.1", ours.getsockname()[1])
        assert not ports.is_free("127.0.0.1", there.getsockname()[1])


def test_secrets_on_the_command_line_are_refused(tmp_path: Path) -> None:
    """An API key as an argument would be written to logs and results."""
    with (
        pytest.raises(SpecError, match="api_key"),
        launcher().launch(little(args={"api_key": "x"}), tmp_path),
    ):
        pass


def test_a_missing_program_is_the_hosts_error(tmp_path: Path) -> None:
    """It names the program."""
    config = ServingConfig(model="m", command=("no-such-vllm", "serve"))
    with pytest.raises(HostError, match="no-such-vllm"), launcher().launch(config, tmp_path):
        pass


def test_a_container_needs_a_stop_command(tmp_path: Path) -> None:
    """Without it nothing is started."""
    config = ServingConfig(model="m", command=("sudo", "docker", "run", "--rm", "vllm/vllm-openai"))
    with pytest.raises(SpecError, match="starts a container"), launcher().launch(config, tmp_path):
        pass

    assert list(tmp_path.iterdir()) == []


# A container engine whose server is nobody's child and has none of our marks.
DOCKER = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = run ]; then
  shift; (setsid env -i sh -c 'echo $$ > "$0"; exec "$@"' "$here/pid" "$@" &) ; exec sleep 600
else
  kill $(cat "$here/pid")
fi
"""


def test_a_container_is_ended_by_its_stop_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not among our processes is gone too."""
    docker = executable(tmp_path / "bin" / "docker", DOCKER)
    monkeypatch.setenv("PATH", first_on_path(docker.parent))
    config = ServingConfig(model="m", command=("docker", "run", *COMMAND))
    with launcher(stop_command=("docker", "stop", "it")).launch(config, tmp_path) as deployment:
        pid = int((docker.parent / "pid").read_text())
        assert is_alive(pid)

    assert wait_until(lambda: not is_alive(pid))
    assert ports.is_free("127.0.0.1", deployment.port)


def test_what_cannot_be_ended_stops_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop command that does not work leaves a listener: HostError, with port and reason."""
    docker = executable(tmp_path / "bin" / "docker", DOCKER.replace("kill $(cat", "echo cannot >&2; false $(cat"))
    monkeypatch.setenv("PATH", first_on_path(docker.parent))
    monkeypatch.setattr(stopping, "PORT_PATIENCE", 0.2)
    config = ServingConfig(model="m", command=("docker", "run", *COMMAND))
    launching = launcher(stop_command=("docker", "stop", "it")).launch(config, tmp_path)
    with pytest.raises(HostError, match="docker stop it: exit 1: cannot") as caught, launching:
        pass
    os.kill(int((docker.parent / "pid").read_text()), signal.SIGKILL)

    assert "listens on port" in caught.value.message


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from deployment_data import launcher, little
with launcher(stop_patience=60.0).launch(little({behaviour!r}), Path({directory!r})) as deployment:
    print(deployment.servers[0].marker, flush=True)
    time.sleep(600)
"""


def run_tune(behaviour: str, directory: Path) -> subprocess.Popen[str]:
    """Start a process that deploys the little server and then waits."""
    text = SCRIPT.format(tests=str(Path(__file__).parent), behaviour=behaviour, directory=str(directory))
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_twice_leaves_no_server(tmp_path: Path) -> None:
    """The first Ctrl-C ends the server in peace, the second at once; the interrupt still arrives."""
    with run_tune("deaf", tmp_path) as tune:
        assert tune.stdout is not None
        marker = tune.stdout.readline().strip()
        assert marked(marker)
        began = time.monotonic()
        tune.send_signal(signal.SIGINT)
        time.sleep(0.5)
        tune.send_signal(signal.SIGINT)
        _, errors = tune.communicate(timeout=20)

    assert marked(marker) == set()
    assert time.monotonic() - began < 15
    assert "KeyboardInterrupt" in errors


def test_leftovers_of_a_killed_run_are_ended_on_resume(tmp_path: Path) -> None:
    """What the journal shows as not ended is ended, if it is still that process; nobody else is."""
    record = tmp_path / "processes.jsonl"
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(sleep, env=os.environ | {"TUNE_DEPLOYMENT": "left"}, start_new_session=True)
    stranger = subprocess.Popen(sleep, start_new_session=True)
    born = psutil.Process(left.pid).create_time()
    journal.append(record, event="started", marker="left", pid=left.pid, create_time=born)
    journal.append(record, event="started", marker="reused", pid=stranger.pid, create_time=born - 1000)
    try:
        assert stopping.end_leftovers(record) == (left.pid,)
        assert left.wait(5) == -signal.SIGTERM
        assert stranger.poll() is None
        assert list(journal.unended(record)) == []
    finally:
        for running in (left, stranger):
            running.kill()
            running.wait()


def test_strangers_are_never_signalled() -> None:
    """Neither a process with another marker, nor one that got a dead member's number, belongs to a family."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    stranger = subprocess.Popen(sleep, env=os.environ | {"TUNE_DEPLOYMENT": "theirs"}, start_new_session=True)
    try:
        born = psutil.Process(stranger.pid).create_time()
        family = Family("ours")
        family.lead(stranger.pid, born - 1000)
        family.remember([(stranger.pid, born - 1000)])

        assert family.end(patience=0.2, kill_patience=0.2) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize(("code", "words"), [(1, "exit code 1"), (-9, "SIGKILL"), (None, "no exit code")])
def test_exit_codes_in_words(code: int | None, words: str) -> None:
    """A signal is named."""
    assert failures.describe_exit(code) == words
