"""Ports for our servers, picked so that nobody else takes them before the server does.

They are picked below those that the kernel gives to sockets which ask for none. Two locks hold a port. A bound
TCP socket keeps the operating system from giving the port away; it is let go right before the server is started.
An abstract Unix socket named after the port keeps other tunes off for as long as we use it; it needs no file, no
permission, and vanishes with us. vLLM opens its port with SO_REUSEPORT, so two of its servers on one port would
not fail but share the requests: the locks prevent that.
"""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import HostError

TRIES = 50
LOWEST, LEAST_CHOICE = 20_000, 1000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LISTEN = "0A"  # the state in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Reservation:
    """A port that is ours until the reservation ends."""

    port: int
    _holder: socket.socket

    def hand_over(self) -> None:
        """Let the server have the port."""
        self._holder.close()


@contextmanager
def reserved(host: str, port: int | None = None) -> Iterator[Reservation]:
    """Reserve a free port, or the one the user fixed.

    Raises:
        HostError: the fixed port is taken, or no free one was found.
    """
    with ExitStack() as stack:
        for _ in range(1 if port else TRIES):
            holder = _bind(host, port or _candidate())
            if holder is None:
                continue
            stack.enter_context(closing(holder))
            number = holder.getsockname()[1]
            lock = _lock(number)
            if lock is not None:
                stack.enter_context(closing(lock))
                yield Reservation(number, holder)
                return
        if port:
            raise HostError(
                f"port {port} of {host} is in use",
                hint="end what uses it, or leave the port out: tune picks a free one",
            )
        raise HostError(f"no free port on {host}")


def reserve_in_a_row(stack: ExitStack, host: str, n: int) -> list[Reservation]:
    """Reserve `n` ports that follow each other, for as long as the stack lives.

    Raises:
        HostError: none were found.
    """
    for _ in range(TRIES):
        with ExitStack() as attempt:
            found = [attempt.enter_context(reserved(host))]
            try:
                found += [attempt.enter_context(reserved(host, found[0].port + offset)) for offset in range(1, n)]
            except HostError:
                continue
            stack.push(attempt.pop_all())
            return found
    raise HostError(f"no {n} free ports in a row on {host}")


def _candidate() -> int:
    """Return a port that the kernel gives to nobody who does not ask for it; 0, for the kernel to choose, if none is.

    A server opens its ports up to ten seconds after it started, and by then other sockets, its own among them,
    may have been given a port from the range for such sockets.
    """
    low, high = _ephemeral()
    if low - LOWEST >= LEAST_CHOICE:
        return random.randrange(LOWEST, low)  # noqa: S311 (no secret)
    return random.randrange(high + 1, 65536) if 65535 - high >= LEAST_CHOICE else 0  # noqa: S311


def _ephemeral() -> tuple[int, int]:
    """Return the range from which the kernel gives ports to sockets that do not ask for one."""
    try:
        low, high = EPHEMERAL.read_text(encoding="utf-8").split()
    except (OSError, ValueError):  # not Linux
        return 0, 65535
    return int(low), int(high)


def is_free(host: str, port: int) -> bool:
    """Whether nothing listens on a port; outgoing connections that happen to have its number do not count."""
    holder = _bind(host, port)
    if holder is not None:
        holder.close()
        return True
    return port not in _listening()


def _listening() -> set[int]:
    """Return the ports that this host's sockets listen on, as the kernel lists them."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}


def _bind(host: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    if port:  # connections of an earlier server that are winding down are no obstacle
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        return None
    return holder


def _lock(port: int) -> socket.socket | None:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0tune-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock
