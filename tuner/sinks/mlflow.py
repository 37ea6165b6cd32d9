"""MLflow as a mirror of a study: one parent run, a child run a trial, the front and the answer on the parent.

The run folder is the truth; everything here can be rebuilt from it at any time. Runs are found by key
tags, timestamps and steps are fixed, and a commit mark is written last, so publishing twice changes
nothing and a killed process leaves nothing that the next one does not complete. An MLflow that does not
answer costs a warning and a few seconds a trial, never the study.
"""

import hashlib
import json
import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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

from tuner import spec as specs
from tuner.results import TrialResult, default_of, limits, recommend, to_json
from tuner.serving import Role, ServingConfig
from tuner.sinks import notes, pages, plots, view
from tuner.sinks.pages import WorkloadFacts
from tuner.sinks.verdict import verdict
from tuner.sinks.words import plain
from tuner.spec import StudySpec

LOG = logging.getLogger(__name__)
LOG_TAIL = 64 * 1024
AT_ONCE = 90  # of params, tags or metrics in one call; MLflow takes 100 params and tags
VIEW_PREFIX = "mlflow.sharedViewState."

T = TypeVar("T")


def embedded(runs: Path) -> tuple[str, Path]:
    """Return tracking URI and artifact root of the store in a folder of runs: no server needed."""
    folder = runs.resolve()
    return f"sqlite:///{folder / 'mlflow.db'}", folder / "artifacts"


@dataclass(slots=True)
class _Known:
    """A run as MLflow has it, so that only what is new is sent."""

    run_id: str
    tags: dict[str, str]
    params: set[str]
    status: str


@dataclass(slots=True)
class _Mirror:
    """An MLflow that answered, and what was found or made there."""

    client: MlflowClient
    experiment_id: str
    parent: _Known
    children: dict[str, _Known]

    def tag(self, run: _Known, tags: Mapping[str, str]) -> None:
        changed = {key: value for key, value in tags.items() if run.tags.get(key) != value}
        for some in _chunks(list(changed.items())):
            self.client.log_batch(run.run_id, tags=[RunTag(key, value) for key, value in some])
        run.tags |= changed

    def add_params(self, run: _Known, params: Mapping[str, str]) -> None:
        """Log what the run lacks: a param of MLflow cannot change."""
        missing = {key: value for key, value in params.items() if key not in run.params}
        for some in _chunks(list(missing.items())):
            self.client.log_batch(run.run_id, params=[Param(key, value) for key, value in some])
        run.params |= set(missing)

    def add_metrics(self, run: _Known, metrics: Sequence[Metric]) -> None:
        for some in _chunks(metrics):
            self.client.log_batch(run.run_id, metrics=some)

    def end(self, run: _Known, status: str, ended: float | None) -> None:
        self.client.set_terminated(run.run_id, status, end_time=_stamp_or_now(ended))
        run.status = status


class MlflowSink:
    """Publishes a study to MLflow; `synced` says whether everything known arrived.

    Args:
        tracking_uri: an MLflow server, or the store of `embedded`.
        artifact_root: folder of the embedded store's artifacts; None when a server decides.
        study_uid: identifies the study for ever; its runs are found by it.
        run_folder: where the trials' files lie.
        workload: what was replayed.
        experiment: MLflow's name for studies that can be compared: one model on one workload.
        vllm_version: of the program that serves, when known.
        warn: is told once when MLflow cannot be used, and at the end when it is not up to date.
    """

    def __init__(
        self,
        *,
        tracking_uri: str,
        artifact_root: Path | None,
        study_uid: str,
        run_folder: Path,
        workload: WorkloadFacts,
        experiment: str,
        vllm_version: str | None = None,
        warn: Callable[[str], None] = LOG.warning,
    ) -> None:
        self._uri = tracking_uri
        self._artifact_root = artifact_root.resolve() if artifact_root is not None else None
        self._uid = study_uid
        self._run_folder = run_folder.resolve()
        self._workload = workload
        self._experiment = experiment
        self._vllm_version = vllm_version
        self._warn = warn
        self._has_warned = False
        self._spec: StudySpec | None = None
        self._mirror: _Mirror | None = None
        self._experiment_id: str | None = None
        self.synced = False

    def study_started(self, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        """Open the parent run and publish what is already measured."""
        self._spec = spec

        def publish(mirror: _Mirror) -> None:
            if mirror.parent.status != "RUNNING":
                mirror.client.update_run(mirror.parent.run_id, status="RUNNING")
                mirror.parent.status = "RUNNING"
            self._publish(mirror, spec, results)

        self._attempt(publish)

    def trial_started(self, number: int, config: ServingConfig, label: str) -> None:
        """Open a child run, so that the UI shows what is being tried."""
        group = [str(config.topology)] if config.topology.is_group else []
        words = label or " ".join([*group, *(str(value) for value in config.args.values())])
        self._attempt(lambda mirror: self._open_child(mirror, number, f"t{number:02d} {words}", None))

    def phase(self, name: str, *, expected: float | None = None) -> None:
        """Say nothing: phases are the console's."""

    def trial_ended(self, result: TrialResult, results: Sequence[TrialResult]) -> None:
        """Publish the trial, and what it changes about the others and the study."""
        known = [r for r in results if r.number != result.number]
        self.reconcile([*known, result])

    def study_ended(self, results: Sequence[TrialResult]) -> None:
        """Publish what is missing and close the parent run."""
        spec = self._spec
        if spec is None:
            return

        def publish(mirror: _Mirror) -> None:
            self._publish(mirror, spec, results)
            mirror.end(mirror.parent, "FINISHED", max((r.ended for r in results), default=None))

        self._attempt(publish)
        if not self.synced:
            self._warn("MLflow is not up to date; the run folder has everything, and resuming the study publishes it")

    def reconcile(self, results: Sequence[TrialResult]) -> bool:
        """Bring MLflow to what `results` say; returns whether that worked. Needs `study_started` before."""
        spec = self._spec
        if spec is not None:
            self._attempt(lambda mirror: self._publish(mirror, spec, results))
        return self.synced

    def url(self, base: str | None = None) -> str | None:
        """Return the address of the study's review page, None while MLflow was never reached."""
        if self._experiment_id is None:
            return None
        base = base or (self._uri if self._uri.startswith("http") else "http://127.0.0.1:5000")
        return view.review_url(pages.without_secret(base), self._experiment_id, self._view_key)

    def hint(self, program: str = "mlflow") -> str:
        """Return what to type, and where to look, to review the study."""
        return view.open_ui_hint(self._uri, self.url(), program)

    @property
    def _view_key(self) -> str:
        return re.sub(r"\W", "", self._uid)

    def _attempt(self, work: Callable[[_Mirror], object]) -> None:
        """Do something with MLflow; what goes wrong there is said once and tried again at the next trial."""
        try:
            if self._mirror is None:
                self._mirror = self._find()
            work(self._mirror)
            self.synced = True
        except Exception as error:  # whatever a tracking server does, the study goes on
            self._mirror, self.synced = None, False
            LOG.debug("MLflow failed", exc_info=True)
            if not self._has_warned:
                self._has_warned = True
                what = pages.without_secret(f"MLflow at {self._uri} cannot be used ({_in_short(error)})")
                self._warn(f"{what}: the study goes on, and MLflow is tried again after each trial")

    def _find(self) -> _Mirror:
        for name in ("mlflow", "alembic"):  # the making of a schema is no news
            logging.getLogger(name).setLevel(logging.WARNING)
        if self._uri.startswith("sqlite:///"):
            _check_writable(Path(self._uri.removeprefix("sqlite:///")))
        client = MlflowClient(tracking_uri=self._uri)
        self._experiment_id = experiment_id = self._find_experiment(client)
        parents = self._search(client, experiment_id, "study")
        return _Mirror(
            client,
            experiment_id,
            parent=next(iter(parents.values()), None) or self._new_parent(client, experiment_id),
            children=self._search(client, experiment_id, "trial"),
        )

    def _find_experiment(self, client: MlflowClient) -> str:
        """Return an experiment of this name whose artifacts go where ours do; the name may get a number."""
        name = plain(self._experiment)
        for n in range(1, 100):
            candidate = name if n == 1 else f"{name} ({n})"
            found = client.get_experiment_by_name(candidate)
            if found is None:
                location = self._artifact_root.as_uri() if self._artifact_root is not None else None
                return str(client.create_experiment(candidate, artifact_location=location))
            if found.lifecycle_stage == LifecycleStage.ACTIVE and self._has_our_artifacts(found):
                return str(found.experiment_id)
        raise MlflowException(f"no experiment named {name!r} can be used: 99 of them are deleted or elsewhere")

    def _has_our_artifacts(self, found: Experiment) -> bool:
        """A store that was copied from elsewhere still points to its old artifacts."""
        return self._artifact_root is None or found.artifact_location == self._artifact_root.as_uri()

    def _search(self, client: MlflowClient, experiment_id: str, kind: str) -> dict[str, _Known]:
        """Return this study's runs by key, oldest first; of two with one key (two writers) the later goes."""
        wanted = f"tags.`tune.study_uid` = '{self._uid}' and tags.`tune.kind` = '{kind}'"
        found: dict[str, _Known] = {}
        for run in _all_runs(client, experiment_id, wanted):
            key = run.data.tags.get("tune.trial_key", self._uid)
            if key in found:
                client.delete_run(run.info.run_id)
            else:
                found[key] = _Known(run.info.run_id, dict(run.data.tags), set(run.data.params), run.info.status)
        return found

    def _new_parent(self, client: MlflowClient, experiment_id: str) -> _Known:
        tags = {"tune.study_uid": self._uid, "tune.kind": "study"}
        name = self._spec.name if self._spec is not None else self._uid
        run = client.create_run(experiment_id, tags=tags, run_name=name)
        return _Known(run.info.run_id, tags, set(), "RUNNING")

    def _key(self, number: int) -> str:
        return f"{self._uid}:{number}"

    def _open_child(self, mirror: _Mirror, number: int, name: str, started: float | None) -> _Known:
        key = self._key(number)
        if key not in mirror.children:
            tags = {
                "tune.study_uid": self._uid,
                "tune.kind": "trial",
                "tune.trial_key": key,
                "tune.trial": str(number),
                "mlflow.parentRunId": mirror.parent.run_id,
            }
            run = mirror.client.create_run(
                mirror.experiment_id, run_name=plain(name)[:250], tags=tags, start_time=_stamp_or_now(started)
            )
            mirror.children[key] = _Known(run.info.run_id, tags, set(), "RUNNING")
        return mirror.children[key]

    def _publish(self, mirror: _Mirror, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        ordered = sorted(results, key=lambda r: r.number)
        for result in ordered:
            self._publish_trial(mirror, spec, result, default_of(ordered))
        params = pages.params_of_all(ordered, share_devices=spec.share_devices)
        for result in ordered:
            child = mirror.children[self._key(result.number)]
            mirror.add_params(child, params[result.number])
            mirror.tag(child, pages.standing(spec, result, ordered))
        self._close_orphans(mirror, ordered)
        self._publish_study(mirror, spec, ordered)

    def _publish_trial(
        self, mirror: _Mirror, spec: StudySpec, result: TrialResult, default: TrialResult | None
    ) -> None:
        """Send what about a trial never changes again; the commit mark comes last."""
        mark = _digest(to_json(result))
        child = self._open_child(mirror, result.number, pages.run_name(result, default), result.started)
        if child.tags.get("tune.synced") == mark:
            return
        stamp = pages.stamp(result.ended)
        mirror.add_metrics(child, [Metric(k, value, stamp, step) for k, value, step in pages.metrics(result)])
        note = {"mlflow.note.content": notes.trial_note(spec, result, default)}
        mirror.tag(child, pages.tags(result, default) | note)
        mirror.client.log_inputs(child.run_id, [self._dataset()])
        self._log_trial_files(mirror, child.run_id, result.number)
        mirror.end(child, pages.status(result), result.ended)
        mirror.tag(child, {"tune.synced": mark})

    def _log_trial_files(self, mirror: _Mirror, run_id: str, number: int) -> None:
        folder = self._run_folder / "trials" / f"{number:04d}"
        for path in sorted(p for p in folder.glob("*") if p.is_file()):
            if path.suffix in {".yaml", ".txt", ".json", ".env"}:
                mirror.client.log_artifact(run_id, str(path))
            elif path.suffix == ".log":
                mirror.client.log_text(run_id, _tail(path), f"{path.stem}.tail.log")
        for path in sorted(folder.glob("repeat-*/metrics.json")):
            mirror.client.log_artifact(run_id, str(path), path.parent.name)

    def _dataset(self) -> DatasetInput:
        data = Dataset(source_type="local", **pages.dataset(self._workload))
        return DatasetInput(data, [InputTag("mlflow.data.context", "replay")])

    def _close_orphans(self, mirror: _Mirror, ordered: Sequence[TrialResult]) -> None:
        """A child that was opened by a process which then died has no result, and never will."""
        known = {self._key(r.number) for r in ordered}
        for key, child in mirror.children.items():
            if key not in known and child.status == "RUNNING":
                mirror.tag(child, {"tune.outcome": "interrupted"})
                mirror.end(child, "KILLED", None)

    def _publish_study(self, mirror: _Mirror, spec: StudySpec, ordered: Sequence[TrialResult]) -> None:
        parent = mirror.parent
        mark = _digest("".join(to_json(r) for r in ordered) + specs.dump(spec))
        if parent.tags.get("tune.synced") == mark:
            return
        mirror.add_params(parent, pages.study_params(spec, self._workload, self._vllm_version))
        progress = pages.progress(spec, ordered)
        mirror.add_metrics(parent, [Metric(k, value, pages.stamp(at), step) for k, value, at, step in progress])
        mirror.client.log_inputs(parent.run_id, [self._dataset()])
        self._log_study_files(mirror, spec, ordered)
        mirror.tag(
            parent,
            pages.study_tags(spec, ordered)
            | {
                "mlflow.note.content": notes.note(spec, ordered, self._links(mirror)),
                "mlflow.loggedArtifacts": json.dumps([{"path": "trials.json", "type": "table"}]),
                "tune.run_folder": plain(self._run_folder),
            },
        )
        self._describe_experiment(mirror, spec, ordered)
        mirror.tag(parent, {"tune.synced": mark})

    def _log_study_files(self, mirror: _Mirror, spec: StudySpec, ordered: Sequence[TrialResult]) -> None:
        client, run_id = mirror.client, mirror.parent.run_id
        x, y = spec.objective_metrics
        asked = limits(spec.slo, ordered)
        words = {
            "title": f"{spec.name}: {pages.short_model(spec.model)} on {self._workload.name}",
            "subtitle": verdict(spec, ordered).splitlines()[0],
        }
        client.log_text(run_id, plots.figure_html(ordered, x, y, asked, **words), "pareto/pareto.html")
        with tempfile.TemporaryDirectory() as folder:
            png = Path(folder, "pareto.png")
            png.write_bytes(plots.figure_png(ordered, x, y, asked, **words))
            client.log_artifact(run_id, str(png), "pareto")
        client.log_dict(run_id, pages.table(spec, ordered), "trials.json")
        client.log_text(run_id, specs.dump(spec), "study.yaml")
        client.log_dict(run_id, dict(self._workload.shape), "workload_summary.json")
        best = recommend(ordered, x, y)
        if best is None:
            return
        texts = {
            "config.yaml" if role is Role.ANY else f"{role}.yaml": pages.config_yaml(best, role)
            for role in best.config.topology.roles
        }
        if {Path(one.path).name for one in client.list_artifacts(run_id, "best")} - set(texts):
            # What an earlier best of another topology left would be deployed beside this one.
            repository: Any = get_artifact_repository(client.get_run(run_id).info.artifact_uri)
            repository.delete_artifacts("best")
        for name, text in texts.items():
            client.log_text(run_id, text, f"best/{name}")

    def _describe_experiment(self, mirror: _Mirror, spec: StudySpec, ordered: Sequence[TrialResult]) -> None:
        """Leave a description and a saved view; the view's format is the UI's own, so it may fail unsaid."""
        link = view.fragment(mirror.experiment_id, self._view_key)
        text = notes.experiment_note(spec, self._workload, link)
        mirror.client.set_experiment_tag(mirror.experiment_id, "mlflow.note.content", text)
        try:
            saved = view.saved_view(spec, ordered, self._uid)
            mirror.client.set_experiment_tag(mirror.experiment_id, VIEW_PREFIX + self._view_key, saved)
        except MlflowException as error:
            LOG.debug("no saved view: %s", error)

    def _links(self, mirror: _Mirror) -> notes.Links:
        trials = {
            int(key.rpartition(":")[2]): f"#/experiments/{mirror.experiment_id}/runs/{child.run_id}"
            for key, child in mirror.children.items()
        }
        return notes.Links(view.fragment(mirror.experiment_id, self._view_key), trials)


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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL))
        return file.read().decode("utf-8", "replace")


def _in_short(error: Exception) -> str:
    text = plain(str(error).partition("\n")[0])[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
