"""A tracking server's runs of one study, found by key tags and added to so that doing it twice changes nothing.

Runs are found by what they are (the study's uid, a trial's number) and never by an id that was remembered; only
what is missing is sent; timestamps and steps are fixed.
"""

import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

# In force unless the user set them. With MLflow's own values one call to a dead server blocks for 247 s.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)

# ruff: noqa: E402 (imported after its environment is set)
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    Experiment,
    InputTag,
    LifecycleStage,
    Metric,
    Param,
    Run,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tuner.sinks import pages
from tuner.sinks.words import plain

LOG = logging.getLogger(__name__)
SQLITE = "sqlite:///"
PARENT = "mlflow.parentRunId"
AT_ONCE = 90  # of params, tags or metrics in one call; MLflow takes 100 params and tags

T = TypeVar("T")
Surrounding = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True)
class Known:
    """A run as MLflow has it, so that only what is new is sent."""

    run_id: str
    tags: dict[str, str]
    params: set[str]
    status: str


@dataclass(frozen=True, slots=True)
class _Paced:
    """An MLflow client each of whose calls is surrounded by something."""

    client: MlflowClient
    surrounding: Surrounding

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)

        def call(*args: Any, **more: Any) -> Any:
            with self.surrounding():
                return method(*args, **more)

        return call


@dataclass(slots=True)
class Tracked:
    """A study's runs on an MLflow that answered.

    Attributes:
        client: whose calls are surrounded as was asked.
        uid: the study's.
        experiment_id: where its runs are.
        parent: the study's own run.
        children: a run a trial, by key.
        surrounding: a context for each call.
    """

    client: MlflowClient
    uid: str
    experiment_id: str
    parent: Known
    children: dict[str, Known]
    surrounding: Surrounding = nullcontext

    def tag(self, run: Known, tags: Mapping[str, str]) -> None:
        """Set the tags that are not yet so."""
        changed = {key: value for key, value in tags.items() if run.tags.get(key) != value}
        for some in _chunks(list(changed.items())):
            self.client.log_batch(run.run_id, tags=[RunTag(key, value) for key, value in some])
        run.tags |= changed

    def add_params(self, run: Known, params: Mapping[str, str]) -> None:
        """Log what the run lacks: a param of MLflow cannot change."""
        missing = {key: value for key, value in params.items() if key not in run.params}
        for some in _chunks(list(missing.items())):
            self.client.log_batch(run.run_id, params=[Param(key, value) for key, value in some])
        run.params |= set(missing)

    def add_metrics(self, run: Known, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Log points (name, value, milliseconds since the epoch, step); a point that is there already stays one."""
        for some in _chunks(points):
            self.client.log_batch(run.run_id, metrics=[Metric(*point) for point in some])

    def add_dataset(self, run: Known, fields: Mapping[str, str]) -> None:
        """Say what was replayed."""
        data = Dataset(source_type="local", **fields)
        self.client.log_inputs(run.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "replay")])])

    def clear_folder(self, run: Known, folder: str, *, wanted: set[str]) -> None:
        """Remove a folder of artifacts that holds other files than those that are wanted."""
        if {Path(one.path).name for one in self.client.list_artifacts(run.run_id, folder)} - wanted:
            repository: Any = get_artifact_repository(self.client.get_run(run.run_id).info.artifact_uri)
            with self.surrounding():
                repository.delete_artifacts(folder)

    def tag_experiment(self, name: str, value: str, *, is_optional: bool = False) -> None:
        """Set a tag of the experiment; an optional one may be refused unsaid."""
        try:
            self.client.set_experiment_tag(self.experiment_id, name, value)
        except MlflowException:
            if not is_optional:
                raise
            LOG.debug("no tag %s", name, exc_info=True)

    def end(self, run: Known, status: str, ended: float | None) -> None:
        """Close a run, `ended` in seconds since the epoch or now."""
        self.client.set_terminated(run.run_id, status, end_time=_stamp_or_now(ended))
        run.status = status

    def key(self, number: int) -> str:
        """Return by what a trial's run is found."""
        return f"{self.uid}:{number}"

    def open_child(self, number: int, name: str, started: float | None) -> Known:
        """Return a trial's run, made if it is not there."""
        key = self.key(number)
        if key not in self.children:
            tags = {
                "tune.study_uid": self.uid,
                "tune.kind": "trial",
                "tune.trial_key": key,
                "tune.trial": str(number),
                PARENT: self.parent.run_id,
            }
            run = self.client.create_run(
                self.experiment_id, run_name=plain(name)[:250], tags=tags, start_time=_stamp_or_now(started)
            )
            self.children[key] = Known(run.info.run_id, tags, set(), "RUNNING")
        return self.children[key]


@dataclass(frozen=True, slots=True)
class Server:
    """An MLflow to be asked for the runs of a study.

    Attributes:
        uri: a tracking server, or the SQLite store of a folder.
        artifact_root: folder of that store's artifacts; None when a server decides.
        surrounding: a context for each call.
    """

    uri: str
    artifact_root: Path | None = None
    surrounding: Surrounding = nullcontext

    def find(self, uid: str, experiment: str, name: str) -> Tracked:
        """Return the runs of a study; its experiment and its parent run are made if they are not there."""
        # The making of a schema is no news, nor is each retry; what fails is told in words of our own.
        for noisy in ("mlflow", "alembic", "urllib3", "sqlalchemy"):
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        if self.uri.startswith(SQLITE):
            _check_writable(Path(self.uri.removeprefix(SQLITE)))
        with self.surrounding():  # a database that is away is tried for minutes here
            plain_client = MlflowClient(tracking_uri=self.uri)
        client = cast("MlflowClient", _Paced(plain_client, self.surrounding))
        experiment_id = self._experiment(client, plain(experiment))
        children = _children(client, uid, experiment_id)
        parents = _search(client, uid, experiment_id, "study")
        named = Counter(child.tags.get(PARENT) for child in children.values())
        # Oldest first, and of several (a proxy that asked twice) the one under which trials are shown already.
        parent = max(parents, key=lambda run: named[run.run_id], default=None)
        found = Tracked(client, uid, experiment_id, parent or _new_parent(client, uid, experiment_id, name), children,
                        self.surrounding)  # fmt: skip
        for child in children.values():
            found.tag(child, {PARENT: found.parent.run_id})
        for other in (run for run in parents if run is not parent):
            client.delete_run(other.run_id)
        return found

    def _experiment(self, client: MlflowClient, name: str) -> str:
        """Return an experiment of this name whose artifacts go where ours do; the name may get a number."""
        for n in range(1, 100):
            candidate = name if n == 1 else f"{name} ({n})"
            found = client.get_experiment_by_name(candidate)
            if found is None:
                location = self.artifact_root.as_uri() if self.artifact_root is not None else None
                return str(client.create_experiment(candidate, artifact_location=location))
            if found.lifecycle_stage == LifecycleStage.ACTIVE and self._has_our_artifacts(found):
                return str(found.experiment_id)
        raise MlflowException(f"no experiment named {name!r} can be used: 99 of them are deleted or elsewhere")

    def _has_our_artifacts(self, found: Experiment) -> bool:
        """A store that was copied from elsewhere still points to its old artifacts."""
        return self.artifact_root is None or found.artifact_location == self.artifact_root.as_uri()


def _search(client: MlflowClient, uid: str, experiment_id: str, kind: str) -> list[Known]:
    """Return a study's runs of a kind, oldest first."""
    wanted = f"tags.`tune.study_uid` = '{uid}' and tags.`tune.kind` = '{kind}'"
    return [
        Known(run.info.run_id, dict(run.data.tags), set(run.data.params), run.info.status)
        for run in _all_runs(client, experiment_id, wanted)
    ]


def _children(client: MlflowClient, uid: str, experiment_id: str) -> dict[str, Known]:
    """Return a run a trial by key; of two with one key the one that was published to its end stays, else the first."""
    found: dict[str, Known] = {}
    for run in sorted(_search(client, uid, experiment_id, "trial"), key=lambda run: "tune.synced" not in run.tags):
        if (key := run.tags.get("tune.trial_key", "")) in found:
            client.delete_run(run.run_id)
        else:
            found[key] = run
    return found


def _new_parent(client: MlflowClient, uid: str, experiment_id: str, name: str) -> Known:
    tags = {"tune.study_uid": uid, "tune.kind": "study"}
    run = client.create_run(experiment_id, tags=tags, run_name=name)
    return Known(run.info.run_id, tags, set(), "RUNNING")


def _all_runs(client: MlflowClient, experiment_id: str, wanted: str) -> Iterator[Run]:
    token, oldest_first = None, ["attributes.start_time ASC"]
    while True:
        page = client.search_runs([experiment_id], wanted, ViewType.ACTIVE_ONLY, 1000, oldest_first, token)
        yield from page
        token = page.token
        if not token:
            return


def _check_writable(database: Path) -> None:
    """Fail at once where MLflow would try for minutes to open a database that it cannot."""
    database.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(database, timeout=5)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()


def _stamp_or_now(seconds: float | None) -> int | None:
    """MLflow takes None as now."""
    return pages.stamp(seconds) if seconds else None


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), AT_ONCE):
        yield items[start : start + AT_ONCE]
