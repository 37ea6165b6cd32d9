"""The gate: what the client may be late by, and what is no measurement."""

import numpy as np
import pytest
from replay_data import Row, records

from tuner.errors import InvalidReplay
from tuner.replay.gate import facts, judge, limits
from tuner.seams import Replay


def seen(*rows: Row, heartbeat_lag: tuple[float, ...] = (0.001,), **client: float) -> Replay:
    return Replay(records(*rows), 1.0, {}, {}, heartbeat_lag, client={**facts(records(*rows), heartbeat_lag), **client})


def lagging(lag: float) -> Replay:
    return seen(*[Row([i + 0.9], due=float(i), sent=i + lag) for i in range(10)])


def test_send_lag_gates_the_replay() -> None:
    """10 ms at p99, or 5 % of the TTFT limit if that is more; from half of it on the reader is told."""
    assert judge(lagging(0.004)) == ()
    assert "near its limit: send lag p99 was 6.00 ms (limit 10.0 ms)" in judge(lagging(0.006))[0]
    with pytest.raises(InvalidReplay, match=r"send lag p99 was 20\.0 ms \(limit 10\.0 ms\)"):
        judge(lagging(0.020))
    assert judge(lagging(0.020), ttft_limit=2.0) == ()
    with pytest.raises(InvalidReplay, match="send lag max was 300 ms"):
        judge(lagging(0.300), ttft_limit=100.0)


def test_the_timer_gates_the_replay() -> None:
    """A stall between two sends shows in the heartbeat alone."""
    calm = [0.001] * 999
    rows = [Row([0.5])]

    assert judge(seen(*rows, heartbeat_lag=(*calm, 0.1))) == ()
    assert "timer max was 200 ms" in judge(seen(*rows, heartbeat_lag=(*calm, 0.2)))[0]
    with pytest.raises(InvalidReplay, match="timer max was 300 ms"):
        judge(seen(*rows, heartbeat_lag=(*calm, 0.3)))
    with pytest.raises(InvalidReplay, match="timer p99 was 30"):
        judge(seen(*rows, heartbeat_lag=(0.03,) * 10))


def test_missing_sockets_are_the_clients_fault() -> None:
    """Too many open files is no property of the server."""
    with pytest.raises(InvalidReplay, match="no free socket") as caught:
        judge(seen(Row([0.5]), Row(error="no_socket", output_len=5)))
    assert "ulimit -n" in (caught.value.hint or "")


def test_percentiles_over_few_requests_are_mentioned() -> None:
    """The verdict carries the warning for the metrics that matter."""
    assert "ttft_p99 rests on 1 requests" in judge(seen(Row([0.5])), keys=["ttft_p99"])[0]


def test_limits_follow_from_the_promise() -> None:
    """5 % of a TTFT limit, and for the timer 10 % of an ITL limit, within bounds."""
    assert limits() == {
        "send_lag_p99": 0.010, "send_lag_max": 0.250, "timer_lag_p99": 0.020, "timer_lag_max": 0.250,
        "client_cpu_share": 0.9,
    }  # fmt: skip
    assert (limits(ttft_limit=1.0)["send_lag_p99"], limits(ttft_limit=1.0)["timer_lag_p99"]) == (0.05, 0.05)
    assert [limits(itl_limit=itl)["timer_lag_p99"] for itl in (0.02, 0.08, 1.0)] == [0.005, 0.008, 0.020]


def test_a_tight_itl_needs_a_better_timer() -> None:
    """8 ms are nothing beside an ITL of 100 ms and too much beside one of 30 ms."""
    replay = seen(Row([0.5]), heartbeat_lag=(0.008,) * 10)

    assert judge(replay, itl_limit=0.1)[0].startswith("the client was near its limit")
    with pytest.raises(InvalidReplay, match=r"timer p99 was 8\.00 ms \(limit 5\.00 ms\)"):
        judge(replay, itl_limit=0.03)


def test_a_full_core_is_too_much() -> None:
    """A client that has no CPU left measures itself."""
    assert judge(seen(Row([0.5]), client_cpu_share=0.4)) == ()
    assert "a client process used was 60% (limit 90%)" in judge(seen(Row([0.5]), client_cpu_share=0.6))[0]
    with pytest.raises(InvalidReplay, match="a client process used was 95%"):
        judge(seen(Row([0.5]), client_cpu_share=0.95))


def test_falling_behind_is_mentioned() -> None:
    """A lag that grows from 0 to 8 ms is worse than one of 8 ms throughout."""
    steady = [Row([i + 0.9], due=i, sent=i + 0.004) for i in range(100)]
    growing = [Row([i + 0.9], due=i, sent=i + 0.00008 * i) for i in range(100)]

    assert facts(records(*steady), ())["send_lag_drift"] == pytest.approx(0)
    assert facts(records(*growing), ())["send_lag_drift"] == pytest.approx(0.0072)
    assert any("fell behind" in note for note in judge(seen(*growing)))


def test_a_wait_for_a_connection_is_no_lag_but_is_mentioned() -> None:
    """50 ms without a connection are part of the TTFT from the schedule, and not the client's (report 10)."""
    rows = [Row([1.0], due=0.0, sent=0.052, connect_wait=0.050), Row([1.0], due=0.0)]
    found = facts(records(*rows), ())

    assert found["send_lag_max"] == pytest.approx(0.002)
    assert (found["connect_wait_max"], found["connections_awaited"]) == (0.05, 1)
    assert judge(seen(*rows))[0].startswith("1 requests waited for a connection, up to 50.0 ms")


def test_achieved_gaps_are_held_against_the_recorded_ones() -> None:
    """Three rows a second apart, the middle one 10 ms late: gaps of 1.01 and 0.99 s (report 29)."""
    rows = [Row([9.0], due=0.0), Row([9.0], due=1.0, sent=1.01), Row([9.0], due=2.0)]

    assert facts(records(*rows), ())["send_gap_error_p99"] == pytest.approx(0.01)


def test_what_cannot_be_told_is_not_there() -> None:
    """Nothing was sent: there is no lag, rather than one of 0."""
    found = facts(records(Row(error="refused", sent=np.nan, output_len=3)), ())

    assert set(found) == {"connections_awaited", "connect_wait_max"}
