"""Programs that start, are watched and end together: the servers of a deployment and their front."""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tuner.deployment import gpu, journal, process, program
from tuner.deployment.family import Family
from tuner.deployment.guardian import Guardian
from tuner.deployment.ports import Reservation
from tuner.deployment.process import Server
from tuner.deployment.stopping import Stopping, interrupts_held_back
from tuner.errors import HostError
from tuner.outside import blot_file
from tuner.serving import Role

READ_LOGS_EVERY = 2.0


@dataclass(frozen=True, slots=True)
class Start:
    """A program to be started.

    Attributes:
        name: what an error calls it.
        role: of a vLLM server; None for the front.
        argv: the command.
        settings: environment beside what is inherited.
        host: where it listens.
        reservations: the ports it opens; the first is the one it answers on.
        log: where its output goes.
        gpus: that it computes on.
        stop_command: what ends a container that `argv` starts.
        ranks: the tensor-parallel size of a server.
    """

    name: str
    role: Role | None
    argv: Sequence[str]
    settings: dict[str, str]
    host: str
    reservations: Sequence[Reservation]
    log: Path
    gpus: Sequence[gpu.Gpu] = ()
    stop_command: Sequence[str] = ()
    ranks: int = 1


@dataclass(slots=True)
class _Running:
    """A program and what it takes to end it."""

    stopping: Stopping
    server: Server | None = None
    is_ready: bool = False


@dataclass(slots=True)
class Group:
    """Starts programs one by one or side by side, and ends all of them at once.

    Attributes:
        guardian: ends them when tune is gone.
        directory: gets `command.txt`.
        patience: seconds between asking a program to end and killing it.
        journal: the run's `processes.jsonl`.
    """

    guardian: Guardian
    directory: Path
    patience: float
    journal: Path | None = None
    _running: list[_Running] = field(default_factory=list)

    def start(self, what: Start) -> Server:
        """Start a program; it is not ready yet.

        Raises:
            HostError: no such program.
        """
        family = Family(uuid.uuid4().hex)
        env = process.environment(what.settings, family.marker)
        argv = program.locate(what.argv, env)
        port = what.reservations[0].port
        title = None if what.name == process.ALONE else what.name
        process.write_command(self.directory / "command.txt", argv, what.settings, title)
        # Before there is a process: from its first instruction on it is guarded and will be ended.
        self.guardian.watch(
            family,
            stop_command=list(what.stop_command),
            directory=str(Path.cwd()),
            journal=None if self.journal is None else str(self.journal.absolute()),
            log=str(what.log.absolute()),
        )
        stopping = Stopping(family, what.host, port, what.gpus, what.stop_command, self.patience)
        running = _Running(stopping)
        self._running.append(running)
        for reservation in what.reservations:
            reservation.hand_over()
        stopping.process = process.spawn(argv, env, what.log)
        family.lead(stopping.process.pid)
        self.guardian.watch(family)
        assert family.leader is not None  # noqa: S101 (our own child, not yet reaped)
        server = Server(
            what.name, what.role, family.leader.pid, family.leader.create_time(), family.marker, what.host, port,
            what.log, tuple(argv), what.ranks,
        )  # fmt: skip
        running.server = server
        self._write_down(server)
        return server

    def await_ready(self, timeout: float) -> None:
        """Wait until every program that was started answers.

        Raises:
            StartError: one of them has ended or is not ready in time.
        """
        deadline = time.monotonic() + timeout
        logs_read = time.monotonic()
        while waiting := [running for running in self._running if not running.is_ready]:
            for running in self._running:  # those that were ready too: one may push another out
                self._look_at(running)
            late = [running.server for running in waiting if running.server and not running.is_ready]
            if late and time.monotonic() - logs_read > READ_LOGS_EVERY:
                logs_read = time.monotonic()
                for server in late:
                    server.check_ports()
            if late and time.monotonic() > deadline:
                raise late[0].too_late(timeout)
            if late:
                time.sleep(process.POLL)

    def _look_at(self, running: _Running) -> None:
        assert running.server is not None  # noqa: S101 (start has returned)
        running.server.check_start()
        if running.is_ready:
            return
        family = running.stopping.family
        # A container is not among our processes: who listens cannot be told.
        if running.server.is_ready(family, is_ours=not running.stopping.stop_command):
            running.is_ready = True
            self.guardian.watch(family, members=family.identities())

    def end(self) -> None:
        """End all programs at once.

        Raises:
            HostError: something of them is left; names all of it.
        """
        if not self._running:
            return
        with interrupts_held_back() as interrupts:
            stoppings = [running.stopping for running in self._running]
            with ThreadPoolExecutor(len(stoppings)) as pool:
                left = list(pool.map(lambda stopping: stopping.end(interrupts), stoppings))
            for running in self._running:
                if running.server is not None:
                    blot_file(running.server.log)
            for stopping, rest in zip(stoppings, left, strict=True):
                self._settle(stopping, rest)
            if any(left):
                raise HostError(
                    f"the server could not be ended completely: {'; '.join(what for rest in left for what in rest)}",
                    hint="end what is named here by hand, then run the same command again: it resumes",
                )

    def _settle(self, stopping: Stopping, left: Sequence[str]) -> None:
        if self.journal is not None and stopping.process is not None:
            code, marker = stopping.exit_code, stopping.family.marker
            journal.append(self.journal, event="ended", marker=marker, by="tune", exit_code=code, left=list(left))
        if not left:  # else the guardian keeps it and tries once more when its pipe closes
            self.guardian.release(stopping.family)

    def _write_down(self, server: Server) -> None:
        if self.journal is not None:
            entry = {name: getattr(server, name) for name in ("pid", "create_time", "marker", "host", "port")}
            words = {"role": server.role or "front", **entry, "log": str(server.log), "argv": list(server.argv)}
            journal.append(self.journal, event="started", **words)
