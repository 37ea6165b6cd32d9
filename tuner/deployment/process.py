"""Start one vLLM server on this host, watch it, and end it so that provably nothing is left.

launcher = LocalLauncher()
with launcher.launch(config, directory) as deployment:
    ...  # requests to deployment.url
"""

import http.client
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tuner.deployment import failures, gpu, journal, ports, program
from tuner.deployment.family import MARKER, Family, exit_code
from tuner.deployment.guardian import Guardian
from tuner.deployment.stopping import Stopping, interrupts_held_back
from tuner.errors import FailureKind, HostError, ServerDied, SpecError, StartError
from tuner.seams import Member
from tuner.serving import SECRET_ARGUMENTS, Json, Role, ServingConfig, to_argv

POLL = 0.2
HEALTH_TIMEOUT = 2.0
PORT_TRIES = 3

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")

# Health is asked of this host; a proxy that the environment names has no business in between.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Server:
    """One server that is up.

    Attributes:
        pid: the process tune started; vLLM's own children are in its session.
        create_time: when it started, by the process table; with `pid` it names the process for good.
        marker: the value of TUNE_DEPLOYMENT in its environment.
        argv: the exact command.
    """

    role: Role
    pid: int
    create_time: float
    marker: str
    host: str
    port: int
    log: Path
    argv: tuple[str, ...]

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{_reachable(self.host)}:{self.port}"

    def check_alive(self) -> None:
        """Raise ServerDied when it has ended."""
        try:
            code = exit_code(self.pid)
        except ChildProcessError:  # reaped: its context has been left
            code = 0
        if code is None:
            return
        why = failures.diagnose(failures.read_tail(self.log), code, otherwise=FailureKind.DIED)
        how = failures.describe_exit(code)
        raise ServerDied(why.kind, f"the server ended while in use ({how}): {why.message}", hint=why.hint, log=why.log)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Servers that are up; leaving the launcher's context ends them."""

    servers: tuple[Server, ...]

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.servers[0].url

    @property
    def port(self) -> int:
        """The port of `url`."""
        return self.servers[0].port

    @property
    def members(self) -> tuple[Member, ...]:
        """The servers."""
        return tuple(Member(server.role, server.url) for server in self.servers)

    def check_alive(self) -> None:
        """Raise ServerDied when a server has ended."""
        for server in self.servers:
            server.check_alive()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLauncher:
    """Starts servers as processes of this host.

    Attributes:
        host: the address servers listen on; an argument `host` goes before it.
        port: fixed by the user; None lets the system pick. An argument `port` goes before it.
        gpus: indices by nvidia-smi; they must be free and become CUDA_VISIBLE_DEVICES. None: not looked at.
        start_timeout: seconds until the server must be ready.
        stop_patience: seconds between asking a server to end and killing it.
        cache_directory: where vLLM keeps compiled code between trials, unless the environment says.
        stop_command: what ends a container that the configuration's command starts.
        journal: the run's `processes.jsonl`.
        measuring: arguments that make the server say more of what it does; a configuration's own go before them.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    gpus: tuple[int, ...] = ()
    start_timeout: float = 600.0
    stop_patience: float = 30.0
    cache_directory: Path | None = None
    stop_command: tuple[str, ...] = ()
    journal: Path | None = None
    measuring: Mapping[str, Json] = field(default_factory=dict)

    @contextmanager
    def launch(self, config: ServingConfig, directory: Path) -> Iterator[Deployment]:
        """Start the server of a configuration, its log and command line in `directory`; ready when entered.

        Raises:
            StartError: it did not come up; everything started is gone again.
            SpecError: the configuration cannot be started here as it is written.
            HostError: no such program, a busy GPU or port; on leaving, something was left over.
        """
        self._check(config)
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            guardian = stack.enter_context(Guardian())
            yield Deployment((self._on_some_port(stack, config, directory, guardian),))

    def _check(self, config: ServingConfig) -> None:
        if config.topology.n_servers != 1:
            raise SpecError(f"topology {config.topology}: needs a group of servers, not one")
        for name, variable in SECRET_ARGUMENTS.items():
            if name in config.for_role(Role.ANY):
                raise SpecError(
                    f"{name}: a secret does not belong on a command line, which ends up in logs and results",
                    hint=f"leave it out and export {variable} instead",
                )
        if program.starts_container(config.command) and not self.stop_command:
            raise SpecError(
                f"command: {shlex.join(config.command)} starts a container, which tune could not end",
                hint="give the container a --name and write stop_command: [docker, stop, NAME]",
            )

    def _on_some_port(self, stack: ExitStack, config: ServingConfig, directory: Path, guardian: Guardian) -> Server:
        """Start the server, again on another port when somebody was faster."""
        fixed = config.args.get("port", self.port)
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                return stack.enter_context(self._server(config, directory, guardian, fixed))
            except StartError as error:
                if error.kind != FailureKind.PORT or fixed is not None or not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _server(self, config: ServingConfig, directory: Path, guardian: Guardian, fixed_port: Any) -> Iterator[Server]:
        host = str(config.args.get("host", self.host))
        gpus = gpu.choose(gpu.list_gpus(), len(self.gpus), self.gpus) if self.gpus else ()
        gpu.require_free(gpus)
        with ExitStack() as stack:
            reservation = stack.enter_context(ports.reserved(host, fixed_port))
            family = Family(uuid.uuid4().hex)
            settings = self.settings(config.env)
            env = environment(settings, family.marker)
            argv = to_argv(config, Role.ANY, **self._measuring(config), host=host, port=reservation.port)
            argv = program.locate(argv, env)
            log = directory / f"server-{Role.ANY}-0.log"
            write_command(directory / "command.txt", argv, settings)
            # Before there is a process: from its first instruction on it is guarded and will be ended.
            guardian.watch(family, stop_command=list(self.stop_command), directory=str(Path.cwd()), journal=self._path)
            stopping = Stopping(family, host, reservation.port, gpus, self.stop_command, self.stop_patience)
            stack.callback(self._stop, stopping, guardian)
            reservation.hand_over()
            stopping.process = _spawn(argv, env, log)
            family.lead(stopping.process.pid)
            guardian.watch(family)
            server = _describe(family, host, reservation.port, log, argv)
            self._write_down(server)
            self._await_ready(server, family)
            guardian.watch(family, members=family.identities())
            yield server

    def _measuring(self, config: ServingConfig) -> dict[str, Json]:
        given = config.for_role(Role.ANY)
        # vLLM keeps no times of requests without its statistics, and refuses the two together.
        if given.get("disable_log_stats"):
            return {}
        return {name: value for name, value in self.measuring.items() if name not in given}

    @property
    def _path(self) -> str | None:
        return None if self.journal is None else str(self.journal.absolute())

    def settings(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return what is set for the server beside what it inherits; the user's own wish always wins."""
        cache = self.cache_directory or default_cache()
        ours = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            # Without it a renamed child shows no environment, and so no marker.
            "SPT_NOENV": "1",
        }
        settings = {name: value for name, value in ours.items() if name not in os.environ}
        if self.gpus:
            # nvidia-smi counts by bus; CUDA by default counts the fastest first.
            settings["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return settings | dict(env)

    def _await_ready(self, server: Server, family: Family) -> None:
        deadline = time.monotonic() + self.start_timeout
        while True:
            code = exit_code(server.pid)
            if code is not None:
                why = failures.diagnose(failures.read_tail(server.log), code)
                raise StartError(why.kind, why.message, hint=why.hint, log=why.log)
            if _is_healthy(server.url):
                break
            if time.monotonic() > deadline:
                lines = [failures.read_line(line) for line in failures.read_tail(server.log).splitlines()]
                raise StartError(
                    FailureKind.TIMEOUT,
                    f"not ready after {self.start_timeout:g} s",
                    hint="a first start may download or compile; raise start_timeout if it only needs longer",
                    log=failures.tail(lines),
                )
            time.sleep(POLL)
        if not self.stop_command and not _listens(family, server.port):
            raise StartError(
                FailureKind.PORT,
                f"port {server.port}: another process answers there",
                hint="leave the port out: tune picks a free one",
            )

    def _write_down(self, server: Server) -> None:
        if self.journal is not None:
            entry = {name: getattr(server, name) for name in ("role", "pid", "create_time", "marker", "host", "port")}
            journal.append(self.journal, event="started", **entry, log=str(server.log), argv=list(server.argv))

    def _stop(self, stopping: Stopping, guardian: Guardian) -> None:
        with interrupts_held_back() as interrupts:
            left = stopping.end(interrupts)
            if self.journal is not None and stopping.process is not None:
                code, marker = stopping.exit_code, stopping.family.marker
                journal.append(self.journal, event="ended", marker=marker, by="tune", exit_code=code, left=list(left))
            if left:
                # The guardian keeps it and tries once more when its pipe closes.
                raise HostError(
                    f"the server could not be ended completely: {'; '.join(left)}",
                    hint="end what is named here by hand, then run the same command again: it resumes",
                )
            guardian.release(stopping.family)


def environment(settings: Mapping[str, str], marker: str) -> dict[str, str]:
    """Return the environment of a server: inherited, plus settings, plus the marker of its family."""
    # Without byte code on disk each start compiles torch, transformers and vLLM again: 36 CPU seconds.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | dict(settings) | {MARKER: marker}


def default_cache() -> Path:
    """Return where compiled code is kept between trials and studies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tune" / "vllm"


def write_command(path: Path, argv: Sequence[str], settings: Mapping[str, str]) -> None:
    """Write a command line that starts the same server; a secret is left to the reader's environment."""
    words = ["env"]
    for name, value in sorted(settings.items()):
        is_secret = any(word in name.upper() for word in SECRET_WORDS)
        words.append(f'{name}="${name}"' if is_secret else f"{name}={shlex.quote(value)}")
    path.write_text(" ".join([*words, shlex.join(argv)]) + "\n", encoding="utf-8")


def _spawn(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    try:
        with log.open("wb") as output:
            return subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for tune, which then ends the server in its own way
            )
    except OSError as error:
        raise HostError(f"{argv[0]}: {error.strerror or error}") from error


def _describe(family: Family, host: str, port: int, log: Path, argv: Sequence[str]) -> Server:
    assert family.leader is not None  # noqa: S101 (our own child, not yet reaped)
    leader = family.leader
    return Server(Role.ANY, leader.pid, leader.create_time(), family.marker, host, port, log, tuple(argv))


def _is_healthy(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=HEALTH_TIMEOUT) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):  # refused, timed out, 503, no HTTP
        return False


def _listens(family: Family, port: int) -> bool:
    """Whether a member of the family is the one that listens."""
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for member in family.members()
        for connection in _connections(member)
    )


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections(kind="tcp"))
    except psutil.Error:
        return []


def _reachable(host: str) -> str:
    """Return the address under which a server that listens on `host` is reached from here."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (recognised, not bound)
    return f"[{host}]" if ":" in host else host
