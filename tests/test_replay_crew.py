"""Several processes on one clock, and how many it takes."""

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_data import VOCAB_SIZE, Row, evenly, records, serving

from tuner import metrics
from tuner.errors import FailureKind, HostError, ServerDied
from tuner.replay import crew, run, selftest
from tuner.replay.client import Seen
from tuner.replay.schedule import schedule
from tuner.seams import Replay
from tuner.workload import Request


def play(url: str, rows: int, *, processes: int | None, check_alive: object = lambda: None) -> Replay:
    what = evenly(rows, 0.02)
    return run.replay(
        url, "m", what, salt="a", vocab_size=VOCAB_SIZE, processes=processes, check_alive=check_alive, drain_timeout=10
    )  # type: ignore[arg-type]


@pytest.mark.timing
def test_two_processes_send_the_same_requests_at_the_same_times(tmp_path: Path) -> None:
    """Every row once, in the schedule's order, with the prompt that one process would have sent."""
    with serving(tmp_path, {"log_prompts": True}) as server:
        alone, both = (play(server.url, 20, processes=n) for n in (1, 2))
        log = server.log()

    assert both.client["client_processes"] == 2
    assert both.records.error.tolist() == [""] * 20
    assert both.records.due.tolist() == alone.records.due.tolist()
    assert np.abs(both.records.sent - both.records.due).max() < 0.2
    assert {tuple(e["prompt"]) for e in log[:20]} == {tuple(e["prompt"]) for e in log[20:]}
    assert len(both.records.chunk_time) == 100


def test_processes_end_when_the_server_has_died(tmp_path: Path) -> None:
    """What the watch raises ends them all within a moment."""
    with serving(tmp_path) as server:
        asked = iter(range(1000))

        def check_alive() -> None:
            if next(asked) > 20:
                raise ServerDied(FailureKind.DIED, "it died")

        started = time.monotonic()
        with pytest.raises(ServerDied):
            play(server.url, 3000, processes=2, check_alive=check_alive)

    assert time.monotonic() - started < 20
    assert multiprocessing.active_children() == []


class Fails:
    """A job that cannot be done."""

    def __call__(self) -> None:
        raise SystemExit(3)


def test_a_process_that_ends_early_is_an_error() -> None:
    """Nobody waits for one that is gone."""
    with pytest.raises(HostError, match="ended before its replay did"):
        crew.drive([Fails()], lambda _: None, every=0.05)  # type: ignore[list-item]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 5))
def test_what_processes_saw_is_put_in_order(count: int, processes: int) -> None:
    """Chunks stay with their request, whoever sent it."""
    rows = [Row([i + k / 10 for k in range(i % 4)], due=i, error="" if i % 4 else "reset") for i in range(count)]
    plan = schedule([Request(i, 10, 5) for i in range(count)])
    cut = crew.shards(plan, processes)
    parts = [Seen(records(*(rows[i] for i in own)), [0.0], 1.0, 2.0, 3) for own in cut]

    seen = crew.together(parts, cut)

    whole = records(*rows)
    assert seen.records.due.tolist() == whole.due.tolist()
    assert seen.records.chunk_time.tolist() == whole.chunk_time.tolist()
    assert seen.records.chunk_start.tolist() == whole.chunk_start.tolist()
    assert seen.records.error.tolist() == whole.error.tolist()
    n = min(count, processes)
    assert (seen.cpu, seen.opened, len(seen.heartbeat_lag)) == (n, 3 * n, n)
    assert [own.tolist() for own in cut] == [list(range(first, count, processes)) for first in range(n)]
    assert metrics.summarise(seen.records, window=1.0) == metrics.summarise(whole, window=1.0)


@pytest.mark.parametrize(
    ("rate", "cost", "cpus", "processes"),
    [(1_000, 20e-6, 8, 1), (12_000, 20e-6, 8, 1), (13_000, 20e-6, 8, 2), (50_000, 20e-6, 32, 4), (50_000, 20e-6, 2, 1)],
)
def test_one_process_takes_half_a_core_at_twice_the_rate(rate: float, cost: float, cpus: int, processes: int) -> None:
    """12,500 tokens/s at 20 us are a quarter of a core; half of the host is left to the server."""
    assert crew.processes_for(rate, cost, cpus) == processes


@pytest.mark.timing
def test_the_self_test_measures_what_a_token_costs() -> None:
    """More than the bare system calls, less than a client that parses JSON in Python on a slow host."""
    assert 2e-6 < selftest.cost_per_token() < 1e-3


def test_a_heavy_load_is_spread_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told, the load decides; the reader hears why."""
    monkeypatch.setattr(run, "SURELY_CARRIED", 1.0)
    monkeypatch.setattr(selftest, "cost_per_token", lambda: 3e-3)
    monkeypatch.setattr(crew.os, "cpu_count", lambda: 4)
    with serving(tmp_path) as server:
        replay = play(server.url, 20, processes=None)

    assert replay.client["client_processes"] == 2
    assert replay.notes == (
        "about 100 tokens/s are expected, and one costs this client 3000 us of CPU: 2 processes send",
    )
