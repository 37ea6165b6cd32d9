"""The table of faults: name, family, how it is injected, and what it needs of the machine."""

import logging
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient

from tests.faults import clock, disk, files, processes, real, servers, storage, tracking
from tests.faults.checks import Verdict
from tests.faults.project import TRIALS, Project
from tests.faults.shims import missing_compiler


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: for the command line.
        family: kinds of one family share their means; the tests run one of each.
        inject: makes a study, injects the fault, and holds what follows against the claims.
        needs: returns what this machine lacks, if anything.
    """

    name: str
    family: str
    inject: Callable[[Project, Verdict], None]
    needs: Callable[[], str] = lambda: ""

    @property
    def is_real(self) -> bool:
        """Whether it is about a real vLLM."""
        return self.family == "real"

    @contextmanager
    def project(self, folder: Path, rng: random.Random, trials: int = TRIALS) -> Iterator[Project]:
        """Make the study that suffers; a real one has two trials."""
        project = real.project(folder, rng) if self.is_real else Project(folder, rng, trials=trials)
        if self.family != "tracking":
            project.runs.mkdir()
            shutil.copy(_empty_mlflow(), project.runs / "mlflow.db")
        yield project


_MAKING = threading.Lock()
_MADE: list[Path] = []


def _empty_mlflow() -> Path:
    """Return an MLflow store with its tables made, which takes five seconds, once."""
    with _MAKING:
        if not _MADE:
            for name in ("mlflow", "alembic"):
                logging.getLogger(name).setLevel(logging.WARNING)
            file = Path(tempfile.mkdtemp(prefix="tune-faults-store-")) / "mlflow.db"
            MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
            _MADE.append(file)
        return _MADE[0]


KINDS = (
    Kind("kill-tune", "processes", processes.kill_tune),
    Kind("kill-tune-early", "processes", processes.kill_tune_early),
    Kind("kill-tune-and-guardian", "processes", processes.kill_tune_and_guardian),
    Kind("kill-guardian", "processes", processes.kill_guardian),
    Kind("kill-server", "processes", processes.kill_server),
    Kind("kill-engine", "processes", processes.kill_engine),
    Kind("sigint-once", "processes", processes.sigint_once),
    Kind("sigint-twice", "processes", processes.sigint_twice),
    Kind("hangs-at-start", "servers", servers.hangs_at_start),
    Kind("hangs-at-stop", "servers", servers.hangs_at_stop),
    Kind("hangs-in-mid-stream", "servers", servers.hangs_in_mid_stream),
    Kind("oom-at-start", "servers", servers.out_of_memory_at_start),
    Kind("oom-under-load", "servers", servers.out_of_memory_under_load),
    Kind("port-taken", "servers", servers.port_taken),
    Kind("disk-full", "disk", disk.full, missing_compiler),
    Kind("disk-read-only", "disk", disk.read_only, missing_compiler),
    Kind("disk-full-at-start", "disk", disk.full_at_start, missing_compiler),
    Kind("mlflow-down-at-start", "tracking", tracking.down_at_start, tracking.missing),
    Kind("mlflow-goes-away", "tracking", tracking.goes_away, tracking.missing),
    Kind("mlflow-slow", "tracking", tracking.slow, tracking.missing),
    Kind("mlflow-500", "tracking", tracking.answers_500, tracking.missing),
    Kind("storage-locked", "storage", storage.locked_for_a_moment),
    Kind("storage-stays-locked", "storage", storage.stays_locked),
    Kind("storage-lost", "storage", storage.lost_between),
    Kind("storage-lost-while-running", "storage", storage.lost_while_running),
    Kind("storage-damaged", "storage", storage.damaged),
    Kind("clock-stepped", "clock", clock.stepped, clock.missing),
    Kind("truncated-result", "files", files.truncated_result),
    Kind("truncated-journal", "files", files.truncated_journal),
    Kind("truncated-plan", "files", files.truncated_plan),
    Kind("truncated-measurements", "files", files.truncated_measurements),
    Kind("two-resumes", "files", files.two_resumes),
    Kind("workload-changed", "files", files.workload_changed),
    Kind("workload-copy-changed", "files", files.copy_changed),
    Kind("another-vllm", "files", files.another_vllm),
)
REAL = (
    Kind("real-kill-tune", "real", real.kill_tune, real.missing),
    Kind("real-kill-server", "real", real.kill_server, real.missing),
    Kind("real-kill-engine", "real", real.kill_engine, real.missing),
    Kind("real-sigint-once", "real", real.sigint_once, real.missing),
    Kind("real-sigint-twice", "real", real.sigint_twice, real.missing),
    Kind("real-hangs-at-start", "real", real.hangs_at_start, real.missing),
    Kind("real-hangs-in-mid-stream", "real", real.hangs_in_mid_stream, real.missing),
    Kind("real-hangs-at-stop", "real", real.hangs_at_stop, real.missing),
    Kind("real-oom-at-start", "real", real.out_of_memory_at_start, real.missing),
    Kind("real-oom-under-load", "real", real.out_of_memory_under_load, real.missing),
    Kind("real-port-taken", "real", real.port_taken, real.missing),
)


def missing(kind: Kind) -> str:
    """Return what this machine lacks for a kind; nothing when it can be injected."""
    return kind.needs()
