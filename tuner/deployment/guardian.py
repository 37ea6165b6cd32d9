"""Ends our servers when tune itself is gone, even after `kill -9`.

The guardian is a small process of its own (`python -m tuner.deployment.guardian PARENT`), started before the
server and told which family to watch before there is one. It reads a pipe whose other end only tune holds.
When the pipe closes, or tune is no longer its parent, it ends what it still watches and then itself.

One JSON object a line: {"watch": MARKER, "pid":, "create_time":, "members": [[pid, create_time], ...],
"stop_command": [...], "directory":, "journal":, "log":} tells more about a family each time; {"release": MARKER} says
that nothing is left of it.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tuner.deployment import journal
from tuner.deployment.family import Family
from tuner.errors import HostError
from tuner.outside import blot_file

READY = b"ready\n"
READY_DEADLINE = 30.0
# TERM and KILL together stay within the ten seconds that the README promises.
TERM_PATIENCE = 4.0
KILL_PATIENCE = 4.0
STOP_COMMAND_DEADLINE = 60.0
PARENT_POLL = 1.0
# The guardian must import this very `tuner`, whatever the user's directory holds.
IMPORT_ROOT = Path(__file__).resolve().parent.parent.parent


class Guardian(AbstractContextManager["Guardian"]):
    """Tune's end of the pipe; when it closes, the guardian ends what it still watches and then itself."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tuner.deployment.guardian", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=IMPORT_ROOT,
            start_new_session=True,  # Ctrl-C and the terminal's hang-up are not meant for it
        )
        with ExitStack() as unless_ready:
            unless_ready.callback(self._close)
            self._await_ready()
            unless_ready.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def pid(self) -> int:
        """The guardian's process id."""
        return self._process.pid

    def watch(self, family: Family, **more: Any) -> None:
        """Tell what is known about a family now.

        Raises:
            HostError: the guardian is gone; nothing should run unguarded.
        """
        message: dict[str, Any] = {"watch": family.marker, **more}
        if family.leader is not None:
            message |= {"pid": family.leader.pid, "create_time": family.leader.create_time()}
        try:
            self._tell(message)
        except OSError as error:
            raise HostError("the guardian process, which ends servers when tune dies, is gone") from error

    def release(self, family: Family) -> None:
        """Tell that nothing is left of a family."""
        try:
            self._tell({"release": family.marker})
        except OSError:  # the guardian is gone, and so is what it had to watch
            return

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101 (it was opened as a pipe)
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _await_ready(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 (it was opened as a pipe)
        with self._process.stdout as output:
            is_there, _, _ = select.select([output], [], [], READY_DEADLINE)
            if not is_there or output.readline() != READY:
                raise HostError(
                    "the guardian process, which ends servers when tune dies, did not start",
                    hint=f"see what `{sys.executable} -m tuner.deployment.guardian 1 < /dev/null` says",
                )

    def _close(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 (it was opened as a pipe)
        with contextlib.suppress(OSError):  # what was left in the buffer had no reader
            self._process.stdin.close()
        try:
            self._process.wait(TERM_PATIENCE + KILL_PATIENCE + STOP_COMMAND_DEADLINE + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class Ward:
    """A family under watch and what it takes to end it."""

    family: Family
    stop_command: list[str] | None = None
    directory: str | None = None
    journal: str | None = None
    log: str | None = None

    def hear(self, message: dict[str, Any]) -> None:
        """Take in what tune tells about this family."""
        if "pid" in message:
            self.family.lead(message["pid"], message["create_time"])
        self.family.remember(message.get("members", ()))
        self.stop_command = message.get("stop_command", self.stop_command)
        self.directory = message.get("directory", self.directory)
        self.journal = message.get("journal", self.journal)
        self.log = message.get("log", self.log)

    def end(self) -> None:
        """End the family, write it down, and run its stop command; no secret stays in its log."""
        survivors = self.family.end(TERM_PATIENCE, kill_patience=KILL_PATIENCE)
        if self.log is not None:
            blot_file(Path(self.log))
        if self.journal is not None:
            pids = [process.pid for process in survivors]
            with contextlib.suppress(OSError):  # a full disk keeps no container alive
                journal.append(Path(self.journal), event="ended", marker=self.family.marker, by="guardian", left=pids)
        if self.stop_command:
            run_stop_command(self.stop_command, STOP_COMMAND_DEADLINE, self.directory)


def run_stop_command(command: list[str], deadline: float, directory: str | None = None) -> str | None:
    """Run what ends a container; return why that did not work, or None."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"


def guard(parent: int, wards: dict[str, Ward]) -> None:
    """Follow what tune tells until it is gone."""
    pending = b""
    while True:
        is_there, _, _ = select.select([sys.stdin], [], [], PARENT_POLL)
        if not is_there:
            # A process that tune forked may hold the pipe's other end too, hence the look at the parent.
            if os.getppid() != parent:
                return
            continue
        data = os.read(sys.stdin.fileno(), 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            _hear(json.loads(line), wards)


def _hear(message: dict[str, Any], wards: dict[str, Ward]) -> None:
    if "release" in message:
        wards.pop(message["release"], None)
        return
    marker = message["watch"]
    wards.setdefault(marker, Ward(Family(marker))).hear(message)


def main() -> None:
    """Watch until tune is gone, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The pipe's reader may be gone by now; standard output is not for anything else.
    os.write(sys.stdout.fileno(), READY)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    wards: dict[str, Ward] = {}
    guard(int(sys.argv[1]), wards)
    if wards:
        with ThreadPoolExecutor(len(wards)) as pool:  # the promised ten seconds hold for all of them together
            list(pool.map(Ward.end, wards.values()))


if __name__ == "__main__":
    main()
