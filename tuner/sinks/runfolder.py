"""The run folder: what was measured, complete on disk before anybody is told.

    runs/NAME/{study.yaml, plan.json, workload/{workload.jsonl, history.jsonl, card.md, card.png}, optuna.db,
               processes.jsonl, trials/0007/{result.json, config.yaml, command.txt,
               repeat-1/{metrics.json, records.npz, counters.json}, server-any-0.log}}

Files appear whole or not at all: they are written beside their place, flushed, and renamed into it.
"""

import fcntl
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ruamel.yaml import YAML

from tuner import origin
from tuner.errors import HostError, SpecError
from tuner.origin import Origin
from tuner.results import TrialResult, from_json, to_json
from tuner.serving import to_config
from tuner.spec import StudySpec, dump, load
from tuner.workload import Workload, to_jsonl


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, text or bytes, that is there whole or not at all.

    Raises:
        HostError: the disk is full or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
            _sync(path.parent)
        finally:
            Path(name).unlink(missing_ok=True)  # it has its own name now, unless something went wrong
    except OSError as error:
        raise HostError(
            f"{path}: cannot be written: {error.strerror}", hint="is the disk full or read-only?"
        ) from error


def _sync(folder: Path) -> None:
    """Let a rename survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder that may be there already.

    Raises:
        HostError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unmakeable(path, error) from error
    if not os.access(path, os.W_OK):
        raise HostError(f"{path}: cannot be written", hint="give another folder")


def _unmakeable(path: Path, error: OSError) -> HostError:
    return HostError(
        f"{path}: cannot be made: {error.strerror}", hint="is the disk full or read-only? Else give another folder"
    )


class RunFolder:
    """A study's folder on disk; answers for `seams.Archive`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs: Path, spec: StudySpec) -> "RunFolder":
        """Make a new run folder named after the study; a number is added to a name that is taken."""
        make_folder(runs)
        for name in (spec.name, *(f"{spec.name}-{n}" for n in range(2, 10_000))):
            try:
                (runs / name).mkdir()  # of two tunes that begin at once one makes it
            except FileExistsError:
                continue
            except OSError as error:
                raise _unmakeable(runs / name, error) from error
            write_atomically(runs / name / "study.yaml", dump(spec))
            return cls(runs / name)
        raise HostError(f"{runs}: has ten thousand runs of {spec.name}", hint="take another --name or --runs")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open an existing run folder.

        Raises:
            SpecError: no run folder there.
        """
        path = path if path.name not in {"", ".."} else path.resolve()  # its own name is told, and MLflow is beside it
        if not (path / "study.yaml").is_file():
            near = {path.parent, Path("runs")}
            names = sorted(str(p.parent) for folder in near for p in folder.glob("*/study.yaml"))
            raise SpecError(f"{path}: not a run folder", hint=f"there are: {', '.join(names) or 'none yet'}")
        if (link := _link_in(path)) is not None:
            raise SpecError(
                f"{link}: a link inside a run folder: what is read, published or written there may be anything",
                hint="put the file itself there, or remove the link",
            )
        return cls(path)

    @property
    def spec(self) -> StudySpec:
        """The study as it was resolved when the run began."""
        return load(self.path / "study.yaml")

    @property
    def origin(self) -> Origin:
        """What the run began with.

        Raises:
            SpecError: that is not there or damaged.
        """
        file = self.path / "plan.json"
        try:
            return origin.from_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SpecError(
                f"{file}: cannot be read: {error}", hint="this run cannot be continued; start a new one"
            ) from error

    def keep_rows(self, workload: Workload) -> str:
        """Write the rows as they are replayed; return their digest."""
        for name, rows in (("workload", workload.requests), ("history", workload.history)):
            if rows:
                write_atomically(self.path / "workload" / f"{name}.jsonl", to_jsonl(rows))
        return self.digest_of_rows()

    def digest_of_rows(self) -> str:
        """Return what identifies the rows as they are on disk now."""
        try:
            return origin.digest_of_rows({p.name: p.read_bytes() for p in (self.path / "workload").glob("*.jsonl")})
        except OSError as error:
            raise SpecError(f"{self.path / 'workload'}: cannot be read: {error}") from error

    @property
    def storage(self) -> str:
        """The Optuna storage of this run unless another is given."""
        return f"sqlite:///{(self.path / 'optuna.db').resolve()}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other tune off this folder; the lock goes with the process, however it ends.

        Raises:
            HostError: another tune is at work here.
        """
        with ExitStack() as stack:
            try:
                file = stack.enter_context((self.path / "lock").open("a", encoding="utf-8"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HostError(f"{self.path}: another tune is at work here", hint="wait for it or stop it") from error
            except OSError as error:
                raise HostError(
                    f"{self.path / 'lock'}: {error.strerror}", hint="is the disk full or read-only?"
                ) from error
            yield

    def directory(self, number: int) -> Path:
        """Return the trial's folder, made if it is not there.

        Raises:
            HostError: it cannot be made.
        """
        folder = self.path / "trials" / f"{number:04d}"
        make_folder(folder)
        return folder

    def write(self, result: TrialResult) -> None:
        """Keep a result: its configuration as vLLM reads it, then `result.json`, which makes it complete."""
        folder = self.directory(result.number)
        for role in result.config.topology.roles:
            name = "config.yaml" if len(result.config.topology.roles) == 1 else f"config-{role}.yaml"
            text = io.StringIO()
            YAML().dump(to_config(result.config, role), text)
            write_atomically(folder / name, text.getvalue())
        write_atomically(folder / "result.json", to_json(result))

    def read(self, number: int) -> TrialResult | None:
        """Return the result of a trial, or None when it was never completed.

        Raises:
            SpecError: the file is there but damaged.
        """
        file = self.path / "trials" / f"{number:04d}" / "result.json"
        if not file.is_file():
            return None
        try:
            result = from_json(file.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SpecError(
                f"{file}: damaged: {error}", hint="tune run --resume keeps it apart and measures the trial again"
            ) from error
        if result.number != number:
            raise SpecError(f"{file}: it is of trial {result.number}", hint="put it back where it was")
        return result

    def set_damaged_aside(self) -> list[Path]:
        """Move away results that cannot be read, so that their trials are measured again; return where they were."""
        damaged = []
        for number in self._numbers():
            try:
                self.read(number)
            except SpecError:
                file = self.path / "trials" / f"{number:04d}" / "result.json"
                file.replace(file.with_name("result.json.damaged"))
                damaged.append(file)
        return damaged

    def _numbers(self) -> list[int]:
        return sorted(int(p.name) for p in self.path.glob("trials/*") if re.fullmatch(r"\d{4}|[1-9]\d{4,}", p.name))

    def read_all(self) -> list[TrialResult]:
        """Return every kept result by number."""
        return [r for n in self._numbers() if (r := self.read(n)) is not None]


def _link_in(folder: Path) -> Path | None:
    """Return a symbolic link inside a folder: tune writes none."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if (found := Path(parent, name)).is_symlink():
                return found
    return None


def write_json(path: Path, data: object) -> None:
    """Write plain data as JSON, atomically; numbers that are not finite are an error."""
    write_atomically(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
