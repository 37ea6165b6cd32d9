"""Start one program of a deployment, a vLLM server or the front of a group, and watch it.

What is started is in the hands of a `Stopping` and of the guardian before there is a process; when and in what
order programs start is for launcher.py to say.
"""

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.deployment import failures
from tuner.deployment.family import MARKER, Family, exit_code
from tuner.errors import FailureKind, HostError, ServerDied, StartError
from tuner.outside import SECRET
from tuner.serving import Role

POLL = 0.2
HEALTH_TIMEOUT = 2.0
ALONE, FRONT = "the server", "the front"


@dataclass(frozen=True, slots=True)
class Server:
    """One program that is up.

    Attributes:
        name: what an error calls it: "the server", "decoder 1", "the front".
        role: what a server of vLLM does; None for the front.
        pid: the process tune started; vLLM's own children are in its session.
        create_time: when it started, by the process table; with `pid` it names the process for good.
        marker: the value of TUNE_DEPLOYMENT in its environment.
        argv: the exact command.
        ranks: its tensor-parallel size.
    """

    name: str
    role: Role | None
    pid: int
    create_time: float
    marker: str
    host: str
    port: int
    log: Path
    argv: tuple[str, ...]
    ranks: int = 1

    @property
    def url(self) -> str:
        """Where it answers."""
        return url_of(self.host, self.port)

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
        raise ServerDied(why.kind, f"{self.name} ended while in use ({how}): {why.message}", hint=why.hint, log=why.log)

    def check_start(self) -> None:
        """Raise StartError when it has ended."""
        code = exit_code(self.pid)
        if code is not None:
            why = failures.diagnose(failures.read_tail(self.log), code)
            raise StartError(why.kind, self._say(why.message), hint=why.hint, log=why.log)

    def is_ready(self, family: Family, *, is_ours: bool = True) -> bool:
        """Whether it answers; `is_ours` asks for proof that it is this program which does.

        Raises:
            StartError: somebody else answers on its port.
        """
        if not _is_healthy(self.host, self.port):
            return False
        if is_ours and not family.listens(self.port):
            raise StartError(
                FailureKind.PORT,
                self._say(f"port {self.port}: another process answers there"),
                hint="leave the port out: tune picks a free one",
            )
        return True

    def check_ports(self) -> None:
        """Raise StartError when it says that a port of its own is taken.

        VLLM ends when its HTTP port is taken, but goes on without a word to its clients when NIXL's side channel is
        (0.26: the engine waits for a listener that has died).
        """
        why = failures.diagnose(failures.read_tail(self.log), None)
        if why.kind is FailureKind.PORT:
            raise StartError(why.kind, self._say(why.message), hint=why.hint, log=why.log)

    def too_late(self, timeout: float) -> StartError:
        """Return the error of a program that was not ready in time."""
        lines = [failures.read_line(line) for line in failures.read_tail(self.log).splitlines()]
        return StartError(
            FailureKind.TIMEOUT,
            self._say(f"not ready after {timeout:g} s"),
            hint="a first start may download or compile; raise start_timeout if it only needs longer",
            log=failures.tail(lines),
        )

    def _say(self, message: str) -> str:
        return message if self.name == ALONE else f"{self.name}: {message}"


def settings(env: Mapping[str, str], *, cache: Path | None = None, gpus: Sequence[int] = ()) -> dict[str, str]:
    """Return what is set for a server beside what it inherits; the user's own wish always wins.

    Args:
        env: the configuration's own.
        cache: where vLLM keeps compiled code between trials.
        gpus: indices by nvidia-smi; none are not looked at.
    """
    cache = cache or default_cache()
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        # Without it a renamed child shows no environment, and so no marker.
        "SPT_NOENV": "1",
    }
    found = {name: value for name, value in ours.items() if name not in os.environ}
    if gpus:
        # nvidia-smi counts by bus; CUDA by default counts the fastest first.
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return found | dict(env)


def environment(settings: Mapping[str, str], marker: str) -> dict[str, str]:
    """Return the environment of a server: inherited, plus settings, plus the marker of its family."""
    # Without byte code on disk each start compiles torch, transformers and vLLM again: 36 CPU seconds.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | dict(settings) | {MARKER: marker}


def default_cache() -> Path:
    """Return where compiled code is kept between trials and studies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tune" / "vllm"


def write_command(path: Path, argv: Sequence[str], settings: Mapping[str, str], title: str | None = None) -> None:
    """Add a command line that starts the same program; a secret is left to the reader's environment."""
    words = ["env"]
    for name, value in sorted(settings.items()):
        words.append(f'{name}="${name}"' if SECRET.search(name) else f"{name}={shlex.quote(value)}")
    line = " ".join([*words, shlex.join(argv)])
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n" if title is None else f"# {title}\n{line}\n")


def spawn(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, its output in the log."""
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


def _is_healthy(host: str, port: int) -> bool:
    """Whether GET /health is answered 200, all of it within HEALTH_TIMEOUT; no proxy has a business in between."""
    until = time.monotonic() + HEALTH_TIMEOUT
    said = b""
    try:
        with socket.create_connection((_reachable(host), port), HEALTH_TIMEOUT) as there:
            there.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while b"\r\n" not in said and (left := until - time.monotonic()) > 0:
                there.settimeout(left)
                if not (part := there.recv(4096)):
                    break
                said += part
    except OSError:  # refused, timed out, reset
        return False
    return said.startswith(b"HTTP/") and said.split()[1:2] == [b"200"]


def url_of(host: str, port: int) -> str:
    """Return where a program that listens on `host` is reached from here."""
    host = _reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (recognised, not bound)
