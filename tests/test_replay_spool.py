"""Requests laid out before the clock: few in memory, many on disk, never all of a long trace in memory."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_data import VOCAB_SIZE, errors, evenly, play, serving

from tuner.errors import HostError
from tuner.replay import crew, spool
from tuner.replay.connection import Target
from tuner.replay.load import Job
from tuner.replay.prompts import Prompts
from tuner.replay.schedule import schedule
from tuner.replay.spool import Spool
from tuner.workload import Request

REPO = Path(__file__).resolve().parents[1]


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 200))
def test_what_was_laid_down_is_taken_wherever_it_lies(requests: list[bytes], most: int) -> None:
    """Row by row, in any order, from memory or from disk."""
    with pytest.MonkeyPatch.context() as patch, Spool() as laid:
        patch.setattr(spool, "MOST_IN_MEMORY", most)
        for request in requests:
            laid.add(request)
        laid.expect(0, len(requests))

        assert laid.is_on_disk == (sum(map(len, requests)) > most)
        assert [laid.take(row) for row in reversed(range(len(laid)))] == requests[::-1]


def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has no name while it is used, so that not even kill -9 leaves it behind; TMPDIR says where it is."""
    monkeypatch.setattr(spool, "MOST_IN_MEMORY", 0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with Spool() as laid:
        laid.add(b"x" * 4096)

        opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert any(name.startswith(str(tmp_path)) for name in opened)
        assert list(tmp_path.iterdir()) == []


def test_what_the_disk_does_not_give_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of the host, which ends a replay: an OSError would pass for one of the network's."""
    monkeypatch.setattr(spool, "MOST_IN_MEMORY", 0)
    with Spool() as laid:
        laid.add(b"x" * 4096)
        with Path("/dev/null").open("wb") as unreadable:  # in place of a disk that fails
            os.dup2(unreadable.fileno(), laid._file.fileno())  # type: ignore[union-attr]

        with pytest.raises(HostError, match="the replay's requests cannot be read back: Bad file descriptor"):
            laid.take(0)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file become larger, in this process and in its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def job(rows: int, tokens: int) -> Job:
    """Return the job of sending prompts of so many tokens, a second apart, to nobody."""
    plan = schedule([Request(float(i), tokens, 1) for i in range(rows)])
    return Job(Target("http://127.0.0.1:9"), "m", Prompts("a", VOCAB_SIZE), plan, np.arange(rows))


def test_a_full_disk_is_said_before_the_clock_starts() -> None:
    """With where, how much there was, and what to do."""
    message = r"no room .* 3\d MiB so far: File too large"
    with files_of_at_most(1 << 20), pytest.raises(HostError, match=message) as caught, job(20, 500_000)():
        pass
    assert "TMPDIR" in (caught.value.hint or "")


@pytest.mark.timing
def test_a_full_disk_is_heard_from_a_process_of_the_crew() -> None:
    """The process that had no room says so itself."""
    with files_of_at_most(1 << 20), pytest.raises(HostError, match=r"no room .* File too large") as caught:
        crew.drive([job(20, 500_000)], lambda _: None, every=0.05)
    assert "TMPDIR" in (caught.value.hint or "")


@pytest.mark.timing
def test_prompts_from_disk_are_those_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is sent as it would have been."""
    trace = evenly(12, 0.03, input_len=700)
    with serving(tmp_path, {"log_prompts": True}) as server:
        play(server, trace)
        monkeypatch.setattr(spool, "MOST_IN_MEMORY", 0)
        replay = play(server, trace)
        sent = [tuple(entry["prompt"]) for entry in server.log()]

    assert errors(replay) == [""] * 12
    assert len(set(sent[:12])) == 12
    assert set(sent[:12]) == set(sent[12:])


MEASURE = """
import json, resource
import numpy as np
from tuner.replay.connection import Target
from tuner.replay.load import Job
from tuner.replay.prompts import Prompts
from tuner.replay.schedule import schedule
from tuner.workload import Request

def job(rows):
    plan = schedule([Request(float(i), 12_000, 300, tuple(range(24)), 512) for i in range(rows)])
    return Job(Target("http://127.0.0.1:9"), "m", Prompts("a", 151_936), plan, np.arange(rows))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

with job(10)():
    before = peak()
with job(2000)() as load:
    size = sum(len(load.requests.take(row)) for row in range(2000)) >> 20
    print(json.dumps({"size": size, "grown": peak() - before}))
"""


@pytest.mark.timing
def test_a_long_trace_never_sits_in_memory() -> None:
    """2,000 prompts of 12,000 tokens are 160 MiB; the process grows by what is kept in memory and one prompt's work."""
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)

    assert found["size"] > 150
    assert found["grown"] < (spool.MOST_IN_MEMORY >> 20) + 24
