"""Wake up at a moment, to some ten microseconds.

uvloop's timers, like epoll's, count whole milliseconds; to wait out the rest by turning the loop costs more CPU
than reading the answers does (docs/decisions.md, "The replay client"). Linux has timers that are files.
"""

import asyncio
import ctypes
import os
import sys
import time
from typing import Self

_CLOCK_MONOTONIC = 1  # what time.perf_counter reads on Linux
_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 0o4000, 0o2000000, 1


class _Itimerspec(ctypes.Structure):
    """The C struct: two timespecs, the interval and the moment."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Alarm:
    """A timer of the running loop; without timerfd, the loop's own timers and turns."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        self._rung: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    async def until(self, moment: float) -> None:
        """Return at this moment of `time.perf_counter`; one that is over gets one turn of the loop."""
        if self._fd < 0 or moment <= time.perf_counter():
            await asyncio.sleep(moment - time.perf_counter())
            while (wait := moment - time.perf_counter()) > 0:  # noqa: ASYNC110 (the loop's timer may be early)
                await asyncio.sleep(wait)
            return
        seconds, nanoseconds = divmod(round(moment * 1e9), 10**9)
        when = _Itimerspec(0, 0, seconds, nanoseconds)
        self._rung = self._loop.create_future()
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(when), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._rung

    def _ring(self) -> None:
        os.read(self._fd, 8)
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)
