"""Optuna storages of every kind, real ones: a file, a journal, a gRPC proxy, Redis' protocol, PostgreSQL."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("sqlite", "journal", "grpc", "redis", "postgresql")
running: list[subprocess.Popen[bytes]] = []
PROXY = """
import sys
from optuna.storages import RDBStorage, run_grpc_proxy_server
run_grpc_proxy_server(RDBStorage(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]))
"""


@contextmanager
def storage_url(kind: str, folder: Path) -> Iterator[str]:
    """A storage of this kind, empty, there until left."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'shared.db'}"
    elif kind == "journal":
        yield str(folder / "journal.log")
    else:
        served = {"grpc": _grpc, "redis": _redis, "postgresql": _postgresql}[kind]
        with served(folder) as url:
            yield url


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


@contextmanager
def _running(argv: list[str], port: int, log: Path, user: str | None = None) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, user=user)
    running.append(process)
    try:
        wait_for(lambda: _answers(port))
        yield
    finally:
        running.remove(process)
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server at once; PostgreSQL then lets nobody finish."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(15)


@contextmanager
def _grpc(folder: Path) -> Iterator[str]:
    pytest.importorskip("grpc")
    port = free_port()
    argv = [sys.executable, "-W", "ignore", "-c", PROXY, f"sqlite:///{folder / 'behind.db'}", str(port)]
    with _running(argv, port, folder / "grpc.log"):
        yield f"grpc://127.0.0.1:{port}"


@contextmanager
def _redis(_folder: Path) -> Iterator[str]:
    fakeredis = pytest.importorskip("fakeredis")
    port = free_port()
    server = fakeredis.TcpFakeServer(("127.0.0.1", port), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextmanager
def _postgresql(folder: Path) -> Iterator[str]:
    """A cluster of its own; the server refuses to run as root, so root lends it to nobody."""
    pytest.importorskip("psycopg")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = str(found[-1]) if found else shutil.which("initdb")
    if initdb is None:
        pytest.skip("no PostgreSQL on this machine (Debian: apt-get install postgresql)")
    user = "nobody" if os.geteuid() == 0 else None
    place, port = Path(tempfile.mkdtemp(prefix="tune-pg-")), free_port()
    try:
        if user is not None:
            os.chown(place, pwd.getpwnam(user).pw_uid, -1)
        subprocess.run(
            [initdb, "-D", str(place / "data"), "-U", "tune", "-A", "trust", "--no-sync", "-E", "UTF8"],
            check=True, capture_output=True, user=user, cwd=place, timeout=60,
        )  # fmt: skip
        argv = [str(Path(initdb).with_name("postgres")), "-D", str(place / "data"), "-p", str(port), "-k", str(place),
                "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]  # fmt: skip
        with _running(argv, port, folder / "postgresql.log", user):
            yield f"postgresql://tune:canary@127.0.0.1:{port}/postgres"
    finally:
        shutil.rmtree(place, ignore_errors=True)
