"""When tune is killed, the guardian ends its servers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deployment_data import is_alive, marked, wait_until

from tuner.deployment.family import Family
from tuner.deployment.guardian import Guardian, Ward

pytestmark = pytest.mark.once

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from deployment_data import launcher, little
with launcher(start_timeout=60, journal=Path({journal!r})).launch(little({behaviour!r}), Path({directory!r})):
    print("up", flush=True)
    time.sleep(600)
"""


def kill_tune(behaviour: str, directory: Path, *, when_up: bool) -> tuple[str, float]:
    """Kill a deploying process the hard way; return the marker and the time of death."""
    record = directory / "processes.jsonl"
    tests = str(Path(__file__).parent)
    text = SCRIPT.format(tests=tests, journal=str(record), behaviour=behaviour, directory=str(directory))
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as tune:
        assert tune.stdout is not None
        if when_up:
            assert tune.stdout.readline() == b"up\n"
        else:
            assert wait_until(record.exists)
        marker = json.loads(record.read_text().splitlines()[0])["marker"]
        assert marked(marker)
        tune.kill()
    return marker, time.monotonic()


@pytest.mark.parametrize(("behaviour", "when_up"), [("serve", True), ("escape", True), ("deaf", True), ("hang", False)])
def test_kill_9_leaves_no_server(tmp_path: Path, behaviour: str, when_up: bool) -> None:  # noqa: FBT001
    """Within ten seconds nothing is left of a server that is up, starting, deaf or in several sessions."""
    marker, died = kill_tune(behaviour, tmp_path, when_up=when_up)

    assert wait_until(lambda: not marked(marker), timeout=10)
    assert time.monotonic() - died < 10
    assert wait_until(lambda: '"guardian"' in (tmp_path / "processes.jsonl").read_text())


def test_a_server_is_guarded_from_before_it_exists() -> None:
    """A process of which the guardian knows nothing but the marker is ended too."""
    family = Family("known-by-marker-only")
    with Guardian() as guardian:
        guardian.watch(family)
        orphan = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env=os.environ | {"TUNE_DEPLOYMENT": family.marker},
            start_new_session=True,
        )
        wait_until(lambda: marked(family.marker))

    assert orphan.wait(10) == -signal.SIGTERM


def test_what_was_released_is_left_alone_and_the_guardian_ends() -> None:
    """A family that is gone is no longer looked for."""
    family = Family("released")
    with Guardian() as guardian:
        guardian.watch(family)
        guardian.release(family)
        bystander = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env=os.environ | {"TUNE_DEPLOYMENT": family.marker},
        )
        pid = guardian.pid
    try:
        assert bystander.poll() is None
        assert not is_alive(pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_the_guardian_outlives_the_terminal() -> None:
    """Ctrl-C, hang-up and a polite end do not reach it; it has a session of its own."""
    with Guardian() as guardian:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(guardian.pid, number)
        assert os.getsid(guardian.pid) == guardian.pid
        assert not wait_until(lambda: not is_alive(guardian.pid), timeout=0.3)


def test_a_server_does_not_hold_the_pipe_open() -> None:
    """The pipe's end belongs to tune alone; otherwise its death would go unnoticed."""
    with Guardian() as guardian:
        server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            pipe = Path(f"/proc/{guardian.pid}/fd/0").readlink()
            links = {path.readlink() for path in Path(f"/proc/{server.pid}/fd").iterdir()}
            assert pipe not in links
        finally:
            server.kill()
            server.wait()


def test_the_stop_command_runs_after_tunes_death(tmp_path: Path) -> None:
    """A container is ended by its own command."""
    family = Family("contained")
    with Guardian() as guardian:
        guardian.watch(family, stop_command=["touch", "stopped"], directory=str(tmp_path))

    assert (tmp_path / "stopped").exists()


def test_the_stop_command_runs_though_the_disk_is_full(tmp_path: Path) -> None:
    """What cannot be written down is done all the same; a folder in the file's place stands for the full disk."""
    stop = ["touch", str(tmp_path / "stopped")]
    Ward(Family("contained"), stop_command=stop, directory=str(tmp_path), journal=str(tmp_path)).end()

    assert (tmp_path / "stopped").exists()
