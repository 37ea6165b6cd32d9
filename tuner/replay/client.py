"""Send requests when they are due, whatever became of the others, and measure how late this was.

Open loop: request i goes out at anchor + due[i], unless it is a turn, whose user first read an answer. What the client
itself was late by is measured twice, at each send and by a 10 ms timer beside them.
"""

import asyncio
import gc
import resource
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tuner.records import Records
from tuner.replay.alarm import Alarm
from tuner.replay.connection import Exchange, Pool, clock
from tuner.replay.load import Load
from tuner.replay.tape import Tape

try:
    import uvloop
except ImportError:  # not on this platform
    uvloop = None  # type: ignore[assignment]

HEARTBEAT = 0.01
AHEAD, DIAL_EVERY = 0.25, 0.1
SPARE_FILES = 64

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one process saw.

    Attributes:
        records: one row a request, in the order of the load.
        heartbeat_lag: how late each beat of the 10 ms timer was, in seconds.
        cpu: seconds of CPU that this process spent while it drove the load.
        wall: seconds that it drove the load.
        opened: connections that were opened.
        messages: what the server or the network said, by kind of error.
        enough_files: whether so many connections may be open at once as there are requests.
    """

    records: Records
    heartbeat_lag: list[float]
    cpu: float
    wall: float
    opened: int
    messages: dict[str, str] = field(default_factory=dict)
    enough_files: bool = True


class Driver:
    """Drives one load over one pool; `finished` of its requests have ended."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tape = Tape(load.due.copy(), load.input_len, load.output_len)
        self._pool = Pool(load.target)
        self._open: set[Exchange] = set()
        self._timers: dict[Exchange, asyncio.TimerHandle] = {}
        self._turns: dict[int, list[int]] = {}  # which wait for a row
        for row, turn in load.turns.items():
            self._turns.setdefault(turn.after, []).append(row)
        self._coming: dict[int, float] = {}  # turns that are to be sent, and when after the anchor
        self._ended = asyncio.Event()
        self._mistake: BaseException | None = None
        if not len(load.due):
            self._ended.set()

    @property
    def finished(self) -> int:
        """How many requests have ended, one way or the other."""
        return self._tape.finished

    async def drive(self, begin: Callable[[], Awaitable[float]]) -> Seen:
        """Open connections, wait for `begin` to say when the clock starts, send, and wait for the answers."""
        load, tape = self._load, self._tape
        enough_files = allow_open_files(len(load.requests))
        asyncio.get_running_loop().set_exception_handler(self._note_mistake)
        lag: list[float] = []
        try:
            await self._pool.open(int(np.searchsorted(load.due, AHEAD, side="right")))
            with no_garbage_collection():
                tape.anchor = await begin()
                busy = time.process_time()
                dialling = asyncio.ensure_future(self._dial_ahead())
                try:
                    with _heartbeat(lag), Alarm() as self._alarm:
                        await self._send()
                        await self._drain()
                finally:
                    await cancel([dialling])
                cpu, wall = time.process_time() - busy, clock() - tape.anchor
        finally:
            self._turns.clear()  # connections that are closed now end requests, and nobody answers them
            await self._pool.close()
        return Seen(tape.records(), lag, cpu, wall, self._pool.opened, tape.messages, enough_files)

    def _note_mistake(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the replay on an exception in a callback: nobody else would hear of it."""
        exception = context.get("exception")
        if isinstance(exception, OSError):  # the network's, such as a TLS stream cut short: its request hears of it
            return
        loop.default_exception_handler(context)
        if exception is not None:
            self._mistake = self._mistake or exception
            self._ended.set()

    async def in_order(self, streams: int) -> dict[str, str]:
        """Send the requests one after the other, a few at a time; return what failed, and what was said to it."""
        rows = iter(range(len(self._load.requests)))

        async def stream() -> None:
            for row in rows:
                ended = asyncio.get_running_loop().create_future()
                self._submit(row, partial(_set, ended))
                await ended

        try:
            await self._pool.open(min(streams, len(self._load.requests)))
            await asyncio.gather(*(stream() for _ in range(streams)))
        finally:
            await self._pool.close()
        return {error: self._tape.messages.get(error, "") for error in self._tape.error if error}

    async def _send(self) -> None:
        for row, due in enumerate((self._load.due + self._tape.anchor).tolist()):
            if row in self._load.turns:
                continue
            # One turn of the loop at least: what was written goes out then, and what has come is read.
            await self._alarm.until(due)
            if self._mistake is not None:
                raise self._mistake
            self._submit(row, self._forget)

    def _await_turn(self, row: int, answered: float) -> None:
        """Have a turn sent: when it was recorded, but not before its answer's end and the time to think."""
        due = float(max(self._load.due[row], answered - self._tape.anchor + self._load.turns[row].think))
        self._tape.due[row] = self._coming[row] = due
        self._alarm.at(self._tape.anchor + due, partial(self._take_turn, row))

    def _take_turn(self, row: int) -> None:
        del self._coming[row]
        self._submit(row, self._forget)

    def _submit(self, row: int, on_end: Callable[[Exchange], None]) -> None:
        load = self._load
        exchange = Exchange(self._tape, row, load.requests.take(row), on_end)
        self._open.add(exchange)
        if load.request_timeout is not None:
            loop = asyncio.get_running_loop()
            self._timers[exchange] = loop.call_later(load.request_timeout, self._pool.withdraw, exchange)
        self._pool.submit(exchange)

    def _forget(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        if (timer := self._timers.pop(exchange, None)) is not None:
            timer.cancel()
        for row in self._turns.get(exchange.row, ()):
            self._await_turn(row, self._tape.ended[exchange.row])
        if self._tape.finished == len(self._load.due):
            self._ended.set()

    async def _drain(self) -> None:
        """Wait for the answers, and for turns to be sent; what has not come in time is cut off or never sent."""
        rest = max(0.0, self._tape.anchor + self._load.due.max(initial=0.0) - clock())  # turns may be all that is left
        try:
            async with asyncio.timeout(rest + self._load.drain_timeout):
                await self._ended.wait()
            if self._mistake is not None:
                raise self._mistake
        except TimeoutError:
            self._turns.clear()
            for exchange in list(self._open):
                self._pool.withdraw(exchange)

    async def _dial_ahead(self) -> None:
        """Keep as many idle connections as requests will be due in a moment, and their bytes where they are at hand."""
        load = self._load
        without_turns = np.delete(load.due, list(load.turns))
        while True:
            now = clock() - self._tape.anchor
            moment = (now, now + AHEAD + DIAL_EVERY)
            soon = np.searchsorted(without_turns, moment, side="right")
            turns = sum(due <= moment[1] for due in self._coming.values())
            self._pool.reserve(int(soon[1] - soon[0]) + turns)
            if load.requests.is_on_disk:  # the call may wait for the disk
                await asyncio.to_thread(load.requests.expect, *np.searchsorted(load.due, moment, side="right").tolist())
            await asyncio.sleep(DIAL_EVERY)


def _set(ended: asyncio.Future[None], _: Exchange) -> None:
    if not ended.done():
        ended.set_result(None)


@contextmanager
def _heartbeat(lag: list[float]) -> Iterator[None]:
    """Note how late each beat of a 10 ms timer is; beats missed in a stall are one late beat."""
    loop = asyncio.get_running_loop()
    due, timer = clock(), None

    def beat() -> None:
        nonlocal due, timer
        now = clock()
        lag.append(max(now - due, 0.0))
        due = max(due, now) + HEARTBEAT
        timer = loop.call_later(due - now, beat)

    due += HEARTBEAT
    timer = loop.call_later(HEARTBEAT, beat)
    try:
        yield
    finally:
        timer.cancel()


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep collections, which stop the loop for as long as there are objects, out of the window."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def finish(work: Coroutine[None, None, Result]) -> Result:
    """Run a coroutine to its end, on uvloop where there is one.

    Raises:
        KeyboardInterrupt: SIGINT or, where it has a handler, SIGTERM came.
    """
    with asyncio.Runner(loop_factory=None if uvloop is None else uvloop.new_event_loop) as runner:
        return runner.run(_stopped_by_sigterm(work))


async def _stopped_by_sigterm(work: Coroutine[None, None, Result]) -> Result:
    """Await the work; SIGTERM cancels it first, as asyncio has it for SIGINT.

    An exception that a handler raises inside a transport's callback would be lost there.
    """
    handler, ourselves = signal.getsignal(signal.SIGTERM), asyncio.current_task()
    if ourselves is None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        return await work
    came: list[bool] = []

    def cancel_work() -> None:
        came.append(True)
        ourselves.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, cancel_work)
    try:
        return await work
    except asyncio.CancelledError:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, handler)


def allow_open_files(count: int) -> bool:
    """Raise this process's limit of open files to what `count` connections need; False when it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return True
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible >= needed
