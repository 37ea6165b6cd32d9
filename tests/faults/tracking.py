"""Faults of MLflow: a real server, shared by all, behind a gate of each project's own that can misbehave."""

import atexit
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.faults.checks import BrokenError, Verdict, ended, nothing_left, nothing_lost
from tests.faults.processes import goes_on
from tests.faults.project import Project

STARTS_WITHIN = 120.0
WARNING = r"MLflow at http://127\.0\.0\.1:\d+ cannot be used"
ANSWER = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\nconnection: close\r\n\r\nbroken"


class Gate:
    """A port before the shared MLflow that passes requests on, slowly or not, answers 500, or is closed."""

    def __init__(self, backend: int) -> None:
        self.backend = backend
        self.delay, self.fails = 0.0, False
        self.refused = 0
        self._port = 0
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Be there, on the same port as before."""
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(64)
        self._port, self._listener = listener.getsockname()[1], listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Be gone, in the middle of whatever goes on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.backend), 10) as server:
            self._open |= {client, server}
            answers = threading.Thread(target=self._pass_back, args=(server, client), daemon=True)
            answers.start()
            while data := client.recv(65536):
                if self.fails:
                    self.refused += 1
                    client.sendall(ANSWER)
                    break
                if self.delay:
                    self.refused += 1
                    time.sleep(self.delay)
                server.sendall(data)
            for one in (client, server):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            answers.join()
            self._open -= {client, server}

    @staticmethod
    def _pass_back(server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)


def missing() -> str:
    """Return what this machine lacks to run an MLflow server, if anything."""
    return "" if importlib.util.find_spec("flask") else "no mlflow server (pip install mlflow)"


_STARTING = threading.Lock()
_PORTS: list[int] = []


def _backend() -> int:
    """Return the port of the shared MLflow server, which is started once and ends with the harness."""
    with _STARTING:
        if not _PORTS:
            _PORTS.append(_start_backend())
        return _PORTS[0]


def _start_backend() -> int:
    folder = Path(tempfile.mkdtemp(prefix="tune-faults-mlflow-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--serve-artifacts"]
    stores = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/artifacts"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words, *stores],
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    atexit.register(_end_backend, server)
    deadline = time.monotonic() + STARTS_WITHIN
    while not _is_up(port):
        if server.poll() is not None or time.monotonic() > deadline:
            raise BrokenError(f"the harness's own MLflow did not start: {(folder / 'server.log').read_text()[-500:]}")
        time.sleep(0.2)
    return port


def _end_backend(server: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(10)


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def down_at_start(project: Project, verdict: Verdict) -> None:
    """Nobody answers from the beginning: the study runs to its end and says so; MLflow gets it all later."""
    gate = _behind_gate(project)
    gate.close()
    verdict.moment = "before tune was started"
    tune = project.run()
    ended(tune, 0, says=WARNING)
    _mirrored_later(project, verdict, gate)


def goes_away(project: Project, verdict: Verdict) -> None:
    """MLflow goes away in mid-study, and comes back or not: the study goes on, MLflow gets it all later."""
    gate = _behind_gate(project)
    tune = project.run()
    verdict.moment = project.moment(tune, "starting", "warm-up", "replay", "stopping")
    gate.close()
    if project.rng.random() < 0.5:
        seconds = project.rng.uniform(0.5, 4)
        verdict.moment += f", for {seconds:.1f} s"
        time.sleep(seconds)
        gate.open()
        ended(tune, 0)
        _mirrored_later(project, verdict, gate)
        return
    ended(tune, 0, says=WARNING)
    _mirrored_later(project, verdict, gate)


def slow(project: Project, verdict: Verdict) -> None:
    """A slow MLflow slows no measurement down and loses nothing."""
    gate = _behind_gate(project)
    gate.delay = project.rng.uniform(0.05, 1.0)
    verdict.moment = f"{gate.delay * 1000:.0f} ms for each request"
    ended(project.run(), 0, patience=300)
    if not gate.refused:
        raise BrokenError("MLflow was never asked")
    _mirrored_later(project, verdict, gate)


def answers_500(project: Project, verdict: Verdict) -> None:
    """MLflow answers 500, from the beginning or a moment on: the study goes on, MLflow gets it all later."""
    gate = _behind_gate(project)
    if project.rng.random() < 0.5:
        gate.fails = True
        verdict.moment = "before tune was started"
        tune = project.run()
    else:
        tune = project.run()
        verdict.moment = project.moment(tune, "starting", "warm-up", "replay", "stopping")
        gate.fails = True
    ended(tune, 0, says=WARNING)
    if not gate.refused:
        raise BrokenError("MLflow was never asked")
    _mirrored_later(project, verdict, gate)


def _behind_gate(project: Project) -> Gate:
    gate = Gate(_backend())
    project.mlflow = gate.url
    return gate


def _mirrored_later(project: Project, verdict: Verdict, gate: Gate) -> None:
    """MLflow is well again; what it lacks is sent by resuming, as tune said."""
    nothing_left(project, verdict)
    gate.delay, gate.fails = 0.0, False
    gate.open()
    goes_on(project, verdict)
    nothing_lost(project, verdict)
    gate.close()
