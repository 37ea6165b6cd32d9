"""Trouble that other clients call latency: the gate trips, the schedule holds, or the numbers are right."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from replay_data import VOCAB_SIZE, FakeServer, evenly, serving

from tuner import metrics
from tuner.errors import FailureKind, InvalidReplay
from tuner.records import Records
from tuner.replay import run
from tuner.replay.gate import judge
from tuner.seams import Replay

pytestmark = [pytest.mark.timing, pytest.mark.once]

CLIENT = """
import json, os, sys
from pathlib import Path
from replay_data import evenly
from tuner import metrics
from tuner.errors import InvalidReplay
from tuner.replay import gate, run
os.sched_setaffinity(0, {int(sys.argv[2])})
os.nice(int(sys.argv[3]))
seen = run.replay(sys.argv[1], "m", evenly(150, 0.01), salt="a", vocab_size=1024, drain_timeout=30)
seen.records.save(Path(sys.argv[4]))
try:
    print(json.dumps({"notes": gate.judge(seen, itl_limit=0.02), "client": seen.client}))
except InvalidReplay as error:
    print(json.dumps({"invalid": error.message}))
"""


def errors_of(got: Records, server: FakeServer) -> tuple[np.ndarray, np.ndarray]:
    """Return how far each TTFT from the send, and each gap, is from what the server wrote; seconds."""
    log = server.log()
    # The fake numbers requests as they arrive, which on one host is the order of the sends.
    order = np.argsort(got.sent, kind="stable")
    ttft = metrics.per_request(got, "ttft_from_send")[order]
    true = np.array([entry["writes"][0][0] - entry["arrived"] for entry in log])
    gaps = np.concatenate([np.diff([at for at, _ in entry["writes"]]) for entry in log])
    ordered = got.reorder(order)
    return ttft - true, metrics.gaps(ordered, ordered.chunk_tokens).length - gaps


def is_refused(seen: Replay) -> bool:
    """Return whether the gate finds the client too late for an ITL of 20 ms."""
    try:
        judge(seen, itl_limit=0.02)
    except InvalidReplay as error:
        return error.kind is FailureKind.CLIENT_LAG
    return False


@contextmanager
def hogs(core: int, count: int) -> Iterator[None]:
    """Keep a core busy."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the server needs a core of its own")
@pytest.mark.parametrize("nice", [10])
def test_a_client_without_cpu_is_found_out_or_right(tmp_path: Path, nice: int) -> None:
    """Four busy loops on the client's core, as equals and with the client last in line (report 20)."""
    *_, core = sorted(os.sched_getaffinity(0))
    kept = tmp_path / "records.npz"
    with serving(tmp_path) as server, hogs(core, 4):
        argv = [sys.executable, "-c", CLIENT, server.url, str(core), str(nice), str(kept)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        said = json.loads(subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=100).stdout)
        ttft_error, gap_error = errors_of(Records.load(kept), server)

    if "invalid" in said:
        assert said["invalid"].startswith("the client could not keep the schedule")
    else:
        assert np.percentile(ttft_error, 99) < 0.020
        assert np.percentile(np.abs(gap_error), 99) < 0.010


def test_a_client_that_stood_still_is_found_out(tmp_path: Path) -> None:
    """Stopped for 0.6 s in mid-replay, as by a debugger or a sleeping laptop."""
    with serving(tmp_path) as server:
        pause = f"sleep 1; kill -STOP {os.getpid()}; sleep 0.6; kill -CONT {os.getpid()}"
        stopping = subprocess.Popen(["sh", "-c", pause])
        seen = run.replay(server.url, "m", evenly(150, 0.02), salt="a", vocab_size=VOCAB_SIZE)
        stopping.wait(10)

    with pytest.raises(InvalidReplay, match="could not keep the schedule") as caught:
        judge(seen)
    assert caught.value.kind is FailureKind.CLIENT_LAG
    assert seen.client["timer_lag_max"] > 0.4


def test_a_server_frozen_for_five_seconds_does_not_stop_the_sends(tmp_path: Path) -> None:
    """Coordinated omission: the sends keep their times, and every TTFT of the freeze counts from them (report 15)."""
    with serving(tmp_path, {"freeze_at": 0.2, "freeze_for": 5.0}) as server:
        seen = run.replay(server.url, "m", evenly(100, 0.02), salt="a", vocab_size=VOCAB_SIZE, drain_timeout=30)

    ttft = metrics.per_request(seen.records, "ttft")
    caught_in_it = seen.records.due > 0.3
    assert seen.records.is_completed.all()
    assert np.median(seen.records.send_lag) < 0.05
    # One sent t seconds after the freeze began has its first token 5 - t seconds later, not at once.
    expected = 5.2 - seen.records.due[caught_in_it]
    assert np.median(np.abs(ttft[caught_in_it] - expected)) < 0.3


def test_three_hundred_rows_on_one_stamp(tmp_path: Path) -> None:
    """All go out at once, each with a connection of its own, and what the client was late by is in the TTFT."""
    with serving(tmp_path, {}, "--max-num-seqs", "512") as server:
        seen = run.replay(server.url, "m", evenly(300, 0.0, input_len=16), salt="a", vocab_size=VOCAB_SIZE)
        ttft_error, _ = errors_of(seen.records, server)

    assert seen.records.is_completed.all()
    assert seen.client["connections_awaited"] == 0
    assert np.ptp(seen.records.sent) < 0.25
    scheduled = metrics.per_request(seen.records, "ttft")
    assert (scheduled >= metrics.per_request(seen.records, "ttft_from_send")).all()
    # From the send to when the server had read it: less than the whole burst took.
    assert np.median(ttft_error) < 0.25


def test_a_thread_beside_the_client_is_found_out(tmp_path: Path) -> None:
    """A loop that holds the interpreter leaves the client its turns of 5 ms only: found out, or right."""
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(20_000))

    with serving(tmp_path) as server:
        thread = threading.Thread(target=spin)
        thread.start()
        try:
            seen = run.replay(server.url, "m", evenly(100, 0.01), salt="a", vocab_size=VOCAB_SIZE)
        finally:
            done.set()
            thread.join()
        _, gap_error = errors_of(seen.records, server)

    assert is_refused(seen) or np.percentile(np.abs(gap_error), 99) < 0.010
