"""Wake up at a moment, to some ten microseconds.

uvloop's timers, like epoll's, count whole milliseconds; to wait out the rest by turning the loop costs more CPU
than reading the answers does (docs/decisions.md, "The replay client"). Linux has timers that are files.
"""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Self

_CLOCK_MONOTONIC = 1  # what time.perf_counter reads on Linux
_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 0o4000, 0o2000000, 1


class _Itimerspec(ctypes.Structure):
    """The C struct: two timespecs, the interval and the moment."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Alarm:
    """A timer of the running loop for any number of moments; without timerfd, the loop's own timers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count()

    def __enter__(self) -> Self:
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    def at(self, moment: float, then: Callable[[], object]) -> None:
        """Call `then` at this moment of `time.perf_counter`, in a turn of the loop of its own."""
        call = (moment, next(self._number), then)
        heappush(self._calls, call)
        if self._calls[0] is call:
            self._set(moment)

    async def until(self, moment: float) -> None:
        """Return at this moment; one that is over gets one turn of the loop."""
        if moment <= time.perf_counter():
            await asyncio.sleep(0)
            return
        rung = self._loop.create_future()
        self.at(moment, partial(_release, rung))
        await rung

    def _set(self, moment: float) -> None:
        if self._fd < 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(max(0.0, moment - time.perf_counter()), self._ring)
            return
        seconds, nanoseconds = divmod(round(moment * 1e9), 10**9)
        when = _Itimerspec(0, 0, seconds, nanoseconds)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(when), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        """Make the first call, if it is due: a timer of the loop's may be early. The next has a turn of its own."""
        if self._fd >= 0:
            with suppress(BlockingIOError):  # set anew in this very turn
                os.read(self._fd, 8)
        is_due = bool(self._calls) and self._calls[0][0] <= time.perf_counter()
        then = heappop(self._calls)[2] if is_due else None
        if self._calls:
            self._set(self._calls[0][0])
        if then is not None:
            then()


def _release(rung: asyncio.Future[None]) -> None:
    if not rung.done():
        rung.set_result(None)
