"""Calls at moments: in order, each in a turn of its own, however they are asked for."""

import asyncio
import time

import pytest

from tuner.replay.alarm import Alarm
from tuner.replay.client import finish

pytestmark = pytest.mark.timing


@pytest.fixture(params=["timerfd", "the loop's timers"])
def alarm_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return which timer there is: that of Linux, or none."""
    if request.param != "timerfd":
        monkeypatch.setattr("tuner.replay.alarm.sys.platform", "other")
    return str(request.param)


def test_calls_come_in_the_order_of_their_moments(alarm_of: str) -> None:
    """None early, also when a sooner one is asked for after a later one; what is over comes at once."""
    heard: list[tuple[str, float]] = []

    async def wait() -> None:
        start = time.perf_counter()
        with Alarm() as alarm:
            for name, after in (("last", 0.09), ("first", 0.03), ("over", -1.0), ("second", 0.06), ("with it", 0.06)):
                alarm.at(start + after, lambda name=name: heard.append((name, time.perf_counter() - start)))
            await alarm.until(start + 0.07)
            heard.append(("until", time.perf_counter() - start))
            await asyncio.sleep(0.1)

    finish(wait())

    assert [name for name, _ in heard] == ["over", "first", "second", "with it", "until", "last"]
    assert all(at >= due for (_, at), due in zip(heard, (0, 0.03, 0.06, 0.06, 0.07, 0.09), strict=True))
    if alarm_of == "timerfd":
        assert heard[1][1] < 0.06


def test_a_moment_that_is_over_costs_one_turn() -> None:
    """What else is ready runs in between."""
    heard = []

    async def wait() -> None:
        with Alarm() as alarm:
            asyncio.get_running_loop().call_soon(heard.append, "other")
            await alarm.until(time.perf_counter() - 1)
            heard.append("over")

    finish(wait())
    assert heard == ["other", "over"]


def test_what_was_not_reached_is_not_called() -> None:
    """Leaving the alarm forgets it."""
    heard: list[str] = []

    async def wait() -> None:
        with Alarm() as alarm:
            alarm.at(time.perf_counter() + 0.02, lambda: heard.append("late"))
        await asyncio.sleep(0.05)

    finish(wait())
    assert heard == []
