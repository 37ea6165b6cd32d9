"""End a server so that provably nothing of it is left: processes, port, GPU memory, and what an earlier run left."""

import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from tuner.deployment import gpu, journal, ports
from tuner.deployment.family import Family, exit_code
from tuner.deployment.guardian import run_stop_command
from tuner.errors import HostError

POLL = 0.2
# Once all processes are gone the kernel and, for a container, its proxy need a moment.
PORT_PATIENCE = 5.0
GPU_PATIENCE = 15.0
REAP_PATIENCE = 5.0


@dataclass(slots=True)
class Stopping:
    """What must be gone when a server has ended."""

    family: Family
    host: str
    port: int
    gpus: Sequence[gpu.Gpu]
    stop_command: Sequence[str]
    patience: float
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None

    def end(self, interrupts: "Interrupts") -> tuple[str, ...]:
        """End the server and everything it started; return what is left, in words."""
        pids = {member.pid for member in self.family.members()}
        # Somebody who was faster at the port keeps it: that is why this server did not start. A container's port is
        # held by no process of ours.
        is_port_ours = bool(self.stop_command) or self.family.listens(self.port)
        complaint = self._run_stop_command()
        survivors = self.family.end(self.patience, is_hurried=lambda: interrupts.has_come)
        left = [f"process {_name(member)} does not end" for member in survivors]
        left += [complaint] if complaint else []
        left += self._what_is_held(pids, is_port_ours=is_port_ours)
        self._reap()
        return tuple(left)

    def _run_stop_command(self) -> str | None:
        if not self.stop_command:
            return None
        was_running = self.process is not None and exit_code(self.process.pid) is None
        complaint = run_stop_command(list(self.stop_command), self.patience)
        # A container that ended by itself cannot be stopped once more.
        return f"{shlex.join(self.stop_command)}: {complaint}" if complaint and was_running else None

    def _what_is_held(self, pids: set[int], *, is_port_ours: bool) -> list[str]:
        """Wait until port and GPUs are given back; return what is not."""
        left = []
        deadline = time.monotonic() + PORT_PATIENCE
        is_free = not is_port_ours
        while not (is_free := is_free or ports.is_free(self.host, self.port)) and time.monotonic() < deadline:
            time.sleep(POLL)
        if not is_free and self.process is not None:
            left.append(f"something listens on port {self.port}")
        if self.gpus:
            left += gpu.await_release(self.gpus, pids, GPU_PATIENCE)
        return left

    def _reap(self) -> None:
        """Let the leader's zombie go; until now it kept its number from being given to somebody else."""
        if self.process is None:
            return
        try:
            self.exit_code = self.process.wait(REAP_PATIENCE)
        except subprocess.TimeoutExpired:  # it is among what is left
            return


class Interrupts:
    """Whether Ctrl-C came while it was held back."""

    has_come = False

    def note(self, _number: int, _frame: FrameType | None) -> None:
        """Take note instead of raising."""
        self.has_come = True


@contextmanager
def interrupts_held_back() -> Iterator[Interrupts]:
    """Let no Ctrl-C in; one that came is delivered when the context is left."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts  # only the main thread is interrupted
        return
    before = signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
        if interrupts.has_come:
            signal.raise_signal(signal.SIGINT)


def end_leftovers(path: Path) -> tuple[int, ...]:
    """End servers that a run's journal shows as started and not ended; return the pids found alive.

    For the case that tune and its guardian were both killed. Only what carries the recorded marker is touched, and
    what belongs to such a process: a journal may come from elsewhere and name any process of this host.

    Raises:
        HostError: one of them does not end.
    """
    found: list[int] = []
    for entry in journal.unended(path):
        family = Family(entry["marker"])
        pid = entry.get("pid")
        if isinstance(pid, int) and pid in [member.pid for member in family.members()]:
            family.lead(pid)
        found += [member.pid for member in family.members()]
        survivors = family.end(patience=10.0)
        if survivors:
            names = ", ".join(map(_name, survivors))
            raise HostError(f"left over from an earlier run and not to be ended: {names}", hint="end it by hand")
        journal.append(path, event="ended", marker=entry["marker"], by="resume")
    return tuple(found)


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.name()})"
    except psutil.Error:
        return str(process.pid)
