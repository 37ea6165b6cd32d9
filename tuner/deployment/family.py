"""A server and everything it started: how to find them all, and how to end them.

A process belongs to the family when it is the leader, is in the leader's session, carries the family's marker
in its environment, is a child of a member, or was a member before. One sign alone is not enough: vLLM's
EngineCore and Worker rename themselves (setproctitle), which wipes the environment one reads in /proc, and a
child may leave the session.

Only members are ever signalled, each through psutil, which compares the start time and so never hits a
stranger who got a dead member's process id. The leader must not be reaped while the family lives: its zombie
keeps the session's number from being given away.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

MARKER = "TUNE_DEPLOYMENT"
START_TIME_TOLERANCE = 1.0  # two readings of one start time differ when the clock is stepped
TRACKER_GRACE = 1.0
POLL = 0.05


class Family:
    """The processes of one server, known by a marker and, once it runs, by its leader."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.leader: psutil.Process | None = None
        self._known: set[psutil.Process] = set()

    def lead(self, pid: int, create_time: float | None = None) -> None:
        """Take `pid` as the leader; with `create_time`, only if that is still the same process."""
        process = _process(pid)
        if process is None or (create_time is not None and not is_same(process, create_time)):
            return
        self.leader = process
        self._known.add(process)

    def remember(self, members: Iterable[tuple[int, float]]) -> None:
        """Take processes somebody else saw in the family, if they are still the same."""
        for pid, create_time in members:
            process = _process(pid)
            if process is not None and is_same(process, create_time):
                self._known.add(process)

    def members(self) -> list[psutil.Process]:
        """Return every living process of the family; ended ones that nobody reaped yet do not count."""
        alive = {process.pid: process for process in map(_process, psutil.pids()) if process is not None}
        found = {pid for pid, process in alive.items() if self._has(process)}
        parents = {pid: parent for pid, process in alive.items() if (parent := _parent(process)) is not None}
        while new := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= new
        self._known |= {alive[pid] for pid in found}
        return [process for pid in sorted(found) if not _has_ended(process := alive[pid])]

    def identities(self) -> list[tuple[int, float]]:
        """Return process id and start time of each member, for somebody else to remember."""
        return [(member.pid, born) for member in self.members() if (born := _create_time(member)) > 0]

    def listens(self, port: int) -> bool:
        """Whether a member is the one that listens on a port."""
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for member in self.members()
            for connection in _connections(member)
        )

    def _has(self, process: psutil.Process) -> bool:
        if process in self._known:
            return True
        if self.leader is not None:
            # Nothing of ours is older than the leader; this spares reading the environments of all others.
            if _create_time(process) < _create_time(self.leader) - START_TIME_TOLERANCE:
                return False
            if _session(process.pid) == self.leader.pid and self._session_is_ours():
                return True
        return _marker(process) == self.marker

    def _session_is_ours(self) -> bool:
        """Whether nobody else has the leader's process id by now."""
        holder = _process(self.leader.pid) if self.leader else None
        return holder is None or holder == self.leader

    def end(
        self, patience: float, *, kill_patience: float = 10.0, is_hurried: Callable[[], bool] = lambda: False
    ) -> list[psutil.Process]:
        """Ask all members to end, after `patience` seconds make them; return the survivors, if any."""
        self._press(signal.SIGTERM, time.monotonic() + patience, is_hurried)
        self._press(signal.SIGKILL, time.monotonic() + kill_patience, lambda: False)
        return self.members()

    def _press(self, number: signal.Signals, deadline: float, is_hurried: Callable[[], bool]) -> None:
        """Signal each member once, newcomers too, until none is left."""
        signalled: set[psutil.Process] = set()
        began = time.monotonic()
        while (members := self.members()) and time.monotonic() < deadline and not is_hurried():
            for process in members:
                # A killed resource tracker leaves semaphores and shared memory behind; by itself it ends
                # as soon as those it works for are gone.
                is_spared = time.monotonic() - began < TRACKER_GRACE and _is_resource_tracker(process)
                if process not in signalled and not is_spared:
                    signalled.add(process)
                    _send(process, number)
            time.sleep(POLL)


def is_same(process: psutil.Process, create_time: float) -> bool:
    """Whether a process is the one that started at `create_time`."""
    return abs(_create_time(process) - create_time) < START_TIME_TOLERANCE


def exit_code(pid: int) -> int | None:
    """Return how a child ended, a signal as a negative number, or None while it runs; it is not reaped."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _create_time(process: psutil.Process) -> float:
    """Return when a process started; for one that is gone, a time that is nobody's."""
    try:
        return float(process.create_time())
    except psutil.Error:
        return -math.inf


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections(kind="tcp"))
    except psutil.Error:
        return []


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _marker(process: psutil.Process) -> str | None:
    try:
        value = process.environ().get(MARKER)
    except (psutil.Error, OSError):  # another user's, or gone
        return None
    return None if value is None else str(value)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
    except psutil.Error:
        return True


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:  # gone in between; a process we may not signal shows up among the survivors
        return
