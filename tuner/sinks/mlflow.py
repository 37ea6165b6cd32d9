"""MLflow as a mirror of a study: one parent run, a child run a trial, the front and the answer on the parent.

The run folder is the truth; everything here can be rebuilt from it at any time. Runs are found by key
tags, timestamps and steps are fixed, and a commit mark is written last, so publishing twice changes
nothing and a killed process leaves nothing that the next one does not complete. What goes wrong with MLflow
costs a warning, never the study.
"""

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from tuner import spec as specs
from tuner.outside import blotted, without_secret
from tuner.results import TrialResult, default_of, limits, recommend, to_json
from tuner.serving import Role, ServingConfig
from tuner.sinks import card, notes, pages, plots, view
from tuner.sinks.pages import WorkloadFacts
from tuner.sinks.tracking import Server, Surrounding, Tracked
from tuner.sinks.verdict import verdict
from tuner.sinks.words import plain
from tuner.spec import StudySpec

LOG = logging.getLogger(__name__)
LOG_TAIL = 64 * 1024
VIEW_PREFIX = "mlflow.sharedViewState."


def embedded(runs: Path) -> tuple[str, Path]:
    """Return tracking URI and artifact root of the store in a folder of runs: no server needed."""
    folder = runs.resolve()
    return f"sqlite:///{folder / 'mlflow.db'}", folder / "artifacts"


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
        warn: is told once when MLflow cannot be used.
        surrounding: a context for each call to MLflow.
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
        surrounding: Surrounding = nullcontext,
    ) -> None:
        self._server = Server(tracking_uri, artifact_root.resolve() if artifact_root else None, surrounding)
        self._uid = study_uid
        self._run_folder = run_folder.resolve()
        self._workload = workload
        self._experiment = experiment
        self._vllm_version = vllm_version
        self._warn = warn
        self._has_warned = False
        self._spec: StudySpec | None = None
        self._tracked: Tracked | None = None
        self._experiment_id: str | None = None
        self.synced = False

    def study_started(self, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        """Open the parent run and publish what is already measured."""
        self._spec = spec

        def publish(runs: Tracked) -> None:
            if runs.parent.status != "RUNNING":
                runs.client.update_run(runs.parent.run_id, status="RUNNING")
                runs.parent.status = "RUNNING"
            self._publish(runs, spec, results)

        self._attempt(publish)

    def trial_started(self, number: int, config: ServingConfig, label: str) -> None:
        """Open a child run, so that the UI shows what is being tried."""
        group = [str(config.topology)] if config.topology.is_group else []
        words = label or " ".join([*group, *(str(value) for value in config.args.values())])
        self._attempt(lambda runs: runs.open_child(number, f"t{number:02d} {words}", None))

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

        def publish(runs: Tracked) -> None:
            self._publish(runs, spec, results)
            runs.end(runs.parent, "FINISHED", max((r.ended for r in results), default=None))

        self._tracked = None  # looked for again: a user may have deleted a run meanwhile
        self._attempt(publish)

    def reconcile(self, results: Sequence[TrialResult]) -> bool:
        """Bring MLflow to what `results` say; returns whether that worked. Needs `study_started` before."""
        spec = self._spec
        if spec is not None:
            self._attempt(lambda runs: self._publish(runs, spec, results))
        return self.synced

    def url(self, base: str | None = None) -> str | None:
        """Return the address of the study's review page, None while MLflow was never reached."""
        if self._experiment_id is None:
            return None
        base = base or (self._server.uri if self._server.uri.startswith("http") else "http://127.0.0.1:5000")
        return view.review_url(without_secret(base), self._experiment_id, self._view_key)

    def hint(self, program: str = "mlflow") -> str:
        """Return what to type, and where to look, to review the study."""
        return view.open_ui_hint(self._server.uri, self.url(), program)

    @property
    def _view_key(self) -> str:
        return re.sub(r"\W", "", self._uid)

    def _attempt(self, work: Callable[[Tracked], object]) -> None:
        """Do something with MLflow; what goes wrong there is said once and tried again at the next trial."""
        try:
            if self._tracked is None:
                name = self._spec.name if self._spec is not None else self._uid
                self._tracked = self._server.find(self._uid, self._experiment, name)
                self._experiment_id = self._tracked.experiment_id
            work(self._tracked)
            self.synced = True
        except Exception as error:  # whatever a tracking server does, the study goes on
            self._tracked, self.synced = None, False
            LOG.debug("MLflow failed", exc_info=True)
            if not self._has_warned:
                self._has_warned = True
                what = blotted(f"MLflow at {without_secret(self._server.uri)} cannot be used ({_in_short(error)})")
                self._warn(f"{what}: the study goes on, and MLflow is tried again after each trial")

    def _publish(self, runs: Tracked, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        ordered = sorted(results, key=lambda r: r.number)
        for result in ordered:
            self._publish_trial(runs, spec, result, default_of(ordered))
        params = pages.params_of_all(ordered, share_devices=spec.share_devices)
        for result in ordered:
            child = runs.children[runs.key(result.number)]
            runs.add_params(child, params[result.number])
            runs.tag(child, pages.standing(spec, result, ordered))
        self._close_orphans(runs, ordered)
        self._publish_study(runs, spec, ordered)

    def _publish_trial(self, runs: Tracked, spec: StudySpec, result: TrialResult, default: TrialResult | None) -> None:
        """Send what about a trial never changes again; the commit mark comes last."""
        mark = _digest(to_json(result))
        child = runs.open_child(result.number, pages.run_name(result, default), result.started)
        if child.tags.get("tune.synced") == mark:
            return
        stamp = pages.stamp(result.ended)
        runs.add_metrics(child, [(k, value, stamp, step) for k, value, step in pages.metrics(result)])
        note = {"mlflow.note.content": notes.trial_note(spec, result, default)}
        runs.tag(child, pages.tags(result, default) | note)
        runs.add_dataset(child, pages.dataset(self._workload))
        self._log_trial_files(runs, child.run_id, result.number)
        runs.end(child, pages.status(result), result.ended)
        runs.tag(child, {"tune.synced": mark})

    def _log_trial_files(self, runs: Tracked, run_id: str, number: int) -> None:
        folder = self._run_folder / "trials" / f"{number:04d}"
        for path in sorted(p for p in folder.glob("*") if p.is_file() and not p.is_symlink()):
            if path.suffix in {".yaml", ".txt", ".json", ".env"}:
                runs.client.log_artifact(run_id, str(path))
            elif path.suffix == ".log":
                runs.client.log_text(run_id, _tail(path), f"{path.stem}.tail.log")
        for path in sorted(folder.glob("repeat-*/metrics.json")):
            runs.client.log_artifact(run_id, str(path), path.parent.name)

    def _close_orphans(self, runs: Tracked, ordered: Sequence[TrialResult]) -> None:
        """A child that was opened by a process which then died has no result, and never will.

        Nor has one whose result was damaged later; the trial is measured again under another number.
        """
        known = {runs.key(r.number) for r in ordered}
        for child in (child for key, child in runs.children.items() if key not in known):
            if child.status == "RUNNING":
                runs.tag(child, {"tune.outcome": "interrupted"})
                runs.end(child, "KILLED", None)
            elif child.status != "KILLED":
                stands = {"tune.outcome": "lost", "tune.pareto": "no", "tune.recommended": "no", "tune.synced": ""}
                runs.tag(child, stands)

    def _publish_study(self, runs: Tracked, spec: StudySpec, ordered: Sequence[TrialResult]) -> None:
        parent = runs.parent
        mark = _digest("".join(to_json(r) for r in ordered) + specs.dump(spec))
        if parent.tags.get("tune.synced") == mark:
            return
        runs.add_params(parent, pages.study_params(spec, self._workload, self._vllm_version))
        progress = pages.progress(spec, ordered)
        runs.add_metrics(parent, [(k, value, pages.stamp(at), step) for k, value, at, step in progress])
        runs.add_dataset(parent, pages.dataset(self._workload))
        self._log_study_files(runs, spec, ordered)
        runs.tag(
            parent,
            pages.study_tags(spec, ordered)
            | {
                "mlflow.note.content": notes.note(spec, ordered, self._links(runs)),
                "mlflow.loggedArtifacts": json.dumps([{"path": "trials.json", "type": "table"}]),
                "tune.run_folder": plain(self._run_folder),
            },
        )
        self._describe_experiment(runs, spec, ordered)
        runs.tag(parent, {"tune.synced": mark})

    def _log_study_files(self, runs: Tracked, spec: StudySpec, ordered: Sequence[TrialResult]) -> None:
        client, run_id = runs.client, runs.parent.run_id
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
        self._log_card(runs)
        best = recommend(ordered, x, y)
        if best is None:
            return
        texts = {
            "config.yaml" if role is Role.ANY else f"{role}.yaml": pages.config_yaml(best, role)
            for role in best.config.topology.roles
        }
        # What an earlier best of another topology left would be deployed beside this one.
        runs.clear_folder(runs.parent, "best", wanted=set(texts))
        for name, text in texts.items():
            client.log_text(run_id, text, f"best/{name}")

    def _log_card(self, runs: Tracked) -> None:
        """Send the workload's card from the run folder; a run of earlier days has none."""
        for path in (self._run_folder / "workload" / name for name in (card.PAGE, card.PICTURE)):
            if path.is_file() and not path.is_symlink():
                runs.client.log_artifact(runs.parent.run_id, str(path), "workload")

    def _describe_experiment(self, runs: Tracked, spec: StudySpec, ordered: Sequence[TrialResult]) -> None:
        """Leave a description and a saved view; the view's format is the UI's own, so it may fail unsaid."""
        link = view.fragment(runs.experiment_id, self._view_key)
        text = notes.experiment_note(spec, self._workload, link)
        runs.tag_experiment("mlflow.note.content", text)
        runs.tag_experiment(VIEW_PREFIX + self._view_key, view.saved_view(spec, ordered, self._uid), is_optional=True)

    def _links(self, runs: Tracked) -> notes.Links:
        trials = {
            int(key.rpartition(":")[2]): f"#/experiments/{runs.experiment_id}/runs/{child.run_id}"
            for key, child in runs.children.items()
        }
        return notes.Links(view.fragment(runs.experiment_id, self._view_key), trials)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL))
        return file.read().decode("utf-8", "replace")


def _in_short(error: Exception) -> str:
    text = plain(str(error).partition("\n")[0])[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
