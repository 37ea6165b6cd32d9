"""The run folder: what was measured, complete on disk before anybody is told.

    runs/NAME/{study.yaml, workload/, optuna.db, processes.jsonl, trials/0007/{result.json, config.yaml, command.txt,
               repeat-1/{metrics.json, records.npz, counters.json}, server-any-0.log}}

Files appear whole or not at all: they are written beside their place, flushed, and renamed into it.
"""

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ruamel.yaml import YAML

from tuner.errors import HostError, SpecError
from tuner.results import TrialResult, from_json, to_json
from tuner.serving import to_config
from tuner.spec import StudySpec, dump, load


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all.

    Raises:
        HostError: the disk is full or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HostError(
            f"{path}: cannot be written: {error.strerror}", hint="is the disk full or read-only?"
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder that may be there already.

    Raises:
        HostError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{path}: cannot be made: {error.strerror}", hint="give another folder") from error
    if not os.access(path, os.W_OK):
        raise HostError(f"{path}: cannot be written", hint="give another folder")


class RunFolder:
    """A study's folder on disk; answers for `seams.Archive`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs: Path, spec: StudySpec) -> "RunFolder":
        """Make a new run folder named after the study; a number is added to a name that is taken."""
        taken = {p.name for p in runs.glob("*")} if runs.is_dir() else set()
        names = [spec.name, *(f"{spec.name}-{n}" for n in range(2, 10_000))]
        folder = cls(runs / next(name for name in names if name not in taken))
        write_atomically(folder.path / "study.yaml", dump(spec))
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open an existing run folder.

        Raises:
            SpecError: no run folder there.
        """
        if not (path / "study.yaml").is_file():
            near = {path.parent, Path("runs")}
            names = sorted(str(p.parent) for folder in near for p in folder.glob("*/study.yaml"))
            raise SpecError(f"{path}: not a run folder", hint=f"there are: {', '.join(names) or 'none yet'}")
        return cls(path)

    @property
    def spec(self) -> StudySpec:
        """The study as it was resolved when the run began."""
        return load(self.path / "study.yaml")

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
        with (self.path / "lock").open("a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise HostError(f"{self.path}: another tune is at work here", hint="wait for it or stop it") from error
            yield

    def directory(self, number: int) -> Path:
        """Return the trial's folder, made if it is not there."""
        folder = self.path / "trials" / f"{number:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write(self, result: TrialResult) -> None:
        """Keep a result: its configuration as vLLM reads it, then `result.json`, which makes it complete."""
        folder = self.directory(result.number)
        for role in result.config.topology.roles:
            name = "config.yaml" if len(result.config.topology.roles) == 1 else f"config-{role}.yaml"
            with (folder / f".{name}").open("w", encoding="utf-8") as file:
                YAML().dump(to_config(result.config, role), file)
            (folder / f".{name}").replace(folder / name)
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
            return from_json(file.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError) as error:
            raise SpecError(
                f"{file}: damaged: {error}", hint="move this file away; the trial will then be measured again"
            ) from error

    def read_all(self) -> list[TrialResult]:
        """Return every kept result by number."""
        numbers = [int(p.name) for p in self.path.glob("trials/*") if re.fullmatch(r"\d{4,}", p.name)]
        return [r for n in sorted(numbers) if (r := self.read(n)) is not None]


def write_json(path: Path, data: object) -> None:
    """Write plain data as JSON, atomically; numbers that are not finite are an error."""
    write_atomically(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
