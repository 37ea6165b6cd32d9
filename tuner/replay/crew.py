"""Drive a load from several processes when one cannot carry it, all on one clock.

`time.perf_counter` counts from the same moment in every process of a host (CLOCK_MONOTONIC), so one anchor
serves them all. A child ends when its pipe does: it cannot outlive the parent.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import numpy as np

from tuner.errors import HostError
from tuner.records import Ints, Records
from tuner.replay.client import Driver, Seen, cancel, finish
from tuner.replay.connection import clock
from tuner.replay.load import Load
from tuner.replay.schedule import Schedule

# A billion tokens of prompts are made in less than a minute on a host that has time.
READY_TIMEOUT, HEAD_START, TELL_EVERY, END_TIMEOUT = 300.0, 0.05, 0.5, 5.0
SHARE_OF_CORE, HEADROOM = 0.5, 2.0


Job = Callable[[], AbstractContextManager[Load]]
"""Makes the load of one process, in that process, and lets go of it."""


def processes_for(tokens_per_second: float, cost: float, cpus: int | None = None) -> int:
    """Return how many processes keep each under half a core at twice this rate.

    Args:
        tokens_per_second: what the server is expected to send.
        cost: seconds of CPU a token, from `selftest.cost_per_token`.
        cpus: cores of this host; at most half of them are taken, the others are the server's.
    """
    most = max(1, (cpus or os.cpu_count() or 1) // 2)
    return min(most, max(1, int(np.ceil(tokens_per_second * cost * HEADROOM / SHARE_OF_CORE))))


def shards(plan: Schedule, processes: int) -> list[Ints]:
    """Return which rows each process sends: every n-th, so that all see the same traffic.

    A turn goes where the row is that it waits for; so there are no more processes than rows that wait for none.
    """
    owner = np.empty(len(plan.rows), dtype=np.int64)
    n = 0
    for row in range(len(owner)):
        if (turn := plan.turns.get(row)) is not None:
            owner[row] = owner[turn.after]
        else:
            owner[row] = n % processes
            n += 1
    return [np.flatnonzero(owner == process) for process in range(max(1, min(processes, n)))]


def drive(jobs: Sequence[Job], watch: Callable[[int], None], *, every: float) -> list[Seen]:
    """Drive each job in a process of its own; return what each saw, in order.

    Args:
        jobs: what each sends; pickled.
        watch: called every `every` seconds with the number of ended requests; what it raises ends everything.
        every: seconds.

    Raises:
        HostError: a process ended without a result, had no room for its requests, or was not ready in time.
    """
    with _crew(jobs) as pipes:
        _await_ready(pipes, watch, every)
        anchor = clock() + HEAD_START
        for pipe in pipes:
            pipe.send(anchor)
        seen: dict[Connection, Seen] = {}
        finished = dict.fromkeys(pipes, 0)
        while len(seen) < len(pipes):
            for pipe, word in _heard([pipe for pipe in pipes if pipe not in seen], every):
                if isinstance(word, Seen):
                    seen[pipe] = word
                    finished[pipe] = len(word.records)
                else:
                    finished[pipe] = word
            watch(sum(finished.values()))
        return [seen[pipe] for pipe in pipes]


def _await_ready(pipes: Sequence[Connection], watch: Callable[[int], None], every: float) -> None:
    deadline, missing = clock() + READY_TIMEOUT, set(pipes)
    while missing:
        missing -= {pipe for pipe, _ in _heard(list(missing), every)}
        watch(0)
        if clock() > deadline:
            raise HostError(
                f"{len(missing)} client processes were not ready after {READY_TIMEOUT:g} s", hint="is this host busy?"
            )


def _heard(pipes: Sequence[Connection], timeout: float) -> list[tuple[Connection, int | Seen]]:
    """Return what was said within `timeout` seconds, and by whom; an error that was said is raised."""
    speaking = wait(pipes, timeout)
    try:
        words = [(pipe, pipe.recv()) for pipe in pipes if pipe in speaking]
    except (EOFError, ConnectionError):
        hint = "what it said is above, if anything; killed by the system it says nothing: is memory short?"
        raise HostError("a client process ended before its replay did", hint=hint) from None
    for _, word in words:
        if isinstance(word, HostError):
            raise word
    return words


@contextmanager
def _crew(jobs: Sequence[Job]) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(END_TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join(END_TIMEOUT)


def _work(pipe: Connection, job: Job) -> None:
    """What a child process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    try:
        with job() as load:
            finish(_drive_for(pipe, load))
    except HostError as error:
        with suppress(OSError):  # nobody is there to be told
            pipe.send(error)


async def _drive_for(pipe: Connection, load: Load) -> None:
    loop, ourselves = asyncio.get_running_loop(), asyncio.current_task()
    anchor: asyncio.Future[float] = loop.create_future()

    def parent_said() -> None:
        try:
            anchor.set_result(pipe.recv())
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            if ourselves is not None:
                ourselves.cancel()

    async def begin() -> float:
        pipe.send(0)
        return await anchor

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_EVERY)
            pipe.send(driver.finished)

    driver = Driver(load)
    loop.add_reader(pipe.fileno(), parent_said)
    telling = asyncio.ensure_future(tell())
    try:
        seen = await driver.drive(begin)
    except asyncio.CancelledError:  # nobody is there to be told
        return
    finally:
        await cancel([telling])
        loop.remove_reader(pipe.fileno())
    pipe.send(seen)


def together(parts: Sequence[Seen], rows: Sequence[Ints]) -> Seen:
    """Return what processes saw as one: records in the order of the schedule, the CPU of all.

    Args:
        parts: what each saw.
        rows: which rows it sent.
    """
    return Seen(
        records=Records.concatenate([part.records for part in parts]).reorder(np.argsort(np.concatenate(rows))),
        heartbeat_lag=[lag for part in parts for lag in part.heartbeat_lag],
        cpu=sum(part.cpu for part in parts),
        wall=max(part.wall for part in parts),
        opened=sum(part.opened for part in parts),
        messages={kind: text for part in reversed(parts) for kind, text in part.messages.items()},
        enough_files=all(part.enough_files for part in parts),
    )
