"""`tune run --resume` and `tune show --sync` on the fake server: what is remembered, refused, repaired and sent."""

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from test_cli import FAKE, Project, measured, project  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.usefixtures("project"), pytest.mark.once]
TAGS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
print(json.dumps({r.data.tags.get("tune.trial", "study"): [r.info.status, r.data.metrics] for r in runs}))
"""


def in_mlflow(folder: Path, uri: str = "sqlite:///runs/mlflow.db") -> dict[str, list[object]]:
    """Return status and metrics of each run by its trial's number."""
    done = subprocess.run(
        [sys.executable, "-c", TAGS, uri], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return dict(json.loads(done.stdout))


def test_a_run_goes_on_where_its_storage_and_mlflow_are(project: Project, tmp_path: Path) -> None:
    """Both addresses are remembered, relative ones too; the resumed run is continued from another folder."""
    project.tune("run", "s.yaml", "--storage", "sqlite:///o.db", "--mlflow", "sqlite:///m.db", "--trials", "1")
    (tmp_path / "elsewhere").mkdir()
    other = Project(tmp_path / "elsewhere")
    done = other.tune("run", "--resume", "../runs/fake", "--trials", "2")

    study = optuna.load_study(study_name="fake", storage=f"sqlite:///{tmp_path / 'o.db'}")
    assert done.returncode == 0, done.stderr
    assert len(measured(project)) == 2
    assert len(study.trials) == len(project.results())
    assert set(in_mlflow(tmp_path, f"sqlite:///{tmp_path / 'm.db'}")) == {"study", *map(str, range(len(study.trials)))}
    assert not (tmp_path / "runs/fake/optuna.db").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_baseline_is_measured_once_and_remembered(project: Project) -> None:
    """What the user runs today is trial 1, also of the run that goes on, which takes no baseline of its own."""
    words = ["--baseline", "vllm serve m --max-num-seqs 8", "--mlflow", "off"]
    begun = project.tune("run", "s.yaml", "--trials", "2", *words)
    done = project.tune("run", "--resume", "runs/fake", "--trials", "3")

    assert (begun.returncode, done.returncode) == (0, 0), begun.stderr + done.stderr
    assert [r["label"] for r in measured(project)] == ["default", "baseline", ""]


def test_the_environment_does_not_go_before_what_a_run_remembers(project: Project) -> None:
    """A run that was begun without MLflow stays so, wherever it is resumed from, and its storage stays its own."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1")
    here = Project(project.folder / "runs/fake")
    done = here.tune("run", "--resume", ".", "--trials", "2", TUNE_MLFLOW="sqlite:///m.db", TUNE_STORAGE="o.journal")

    assert done.returncode == 0, done.stderr
    assert len(measured(project)) == 2
    assert not [name for name in ("m.db", "mlflow.db", "o.journal") if (project.folder / "runs/fake" / name).exists()]


def test_a_password_is_not_written_down_and_asked_for_again(project: Project) -> None:
    """The storage's address is in plan.json without it; resuming says what to give, also by environment."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1")
    file = project.folder / "runs/fake/plan.json"
    plan = json.loads(file.read_text())
    plan["storage"] = {"text": "postgresql://***@h/db", "lacks_password": True}
    file.write_text(json.dumps(plan))
    refused = project.tune("run", "--resume", "runs/fake", "--trials", "2")
    given = project.tune("run", "--resume", "runs/fake", "--trials", "2", TUNE_STORAGE="sqlite:///runs/fake/optuna.db")

    assert refused.returncode == 2
    assert "postgresql://***@h/db, whose password was not written down" in refused.stderr
    assert "TUNE_STORAGE" in refused.stderr
    assert given.returncode == 0, given.stderr


def test_two_runs_of_one_name_share_a_storage_apart(project: Project) -> None:
    """In one folder of runs each gets a name of its own; from another folder the name is refused, nothing is mixed."""
    words = ["run", "s.yaml", "--storage", "sqlite:///o.db", "--mlflow", "off", "--trials", "1"]
    first, second = project.tune(*words), project.tune(*words)
    third = project.tune(*words, "--runs", "others")

    assert (first.returncode, second.returncode, third.returncode) == (0, 0, 4)
    assert "that is not this run's" in third.stderr
    assert "--name" in third.stderr
    names = optuna.get_all_study_names(f"sqlite:///{project.folder / 'o.db'}")
    assert sorted(names) == ["fake", "fake-2"]


def test_a_damaged_result_is_kept_apart_and_measured_again(project: Project) -> None:
    """Half a result.json: `show` names it, the resumed run says what it did and ends with as many trials."""
    project.tune("run", "s.yaml", "--trials", "2")
    file = project.folder / "runs/fake/trials/0001/result.json"
    half = file.read_text()[:100]
    file.write_text(half)
    shown = project.tune("show", "runs/fake")
    done = project.tune("run", "--resume", "runs/fake")

    assert shown.returncode == 2
    assert "0001/result.json: damaged" in shown.stderr
    assert done.returncode == 0, done.stderr
    assert "its trial is measured again" in done.stderr
    assert file.with_name("result.json.damaged").read_text() == half
    assert len(measured(project)) == 2
    runs = in_mlflow(project.folder)
    assert {int(key) for key in runs if key != "study"} == {0, 1, *(r["number"] for r in project.results())}


def test_rows_that_were_changed_are_refused(project: Project) -> None:
    """The run folder's own copy of the workload is what counts; the user's file may change as it likes."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1")
    (project.folder / "rows.jsonl").write_text("")
    goes_on = project.tune("run", "--resume", "runs/fake", "--trials", "2")
    file = project.folder / "runs/fake/workload/workload.jsonl"
    file.write_text(file.read_text().replace('"output_len":8', '"output_len":9', 1))
    refused = project.tune("run", "--resume", "runs/fake", "--trials", "3")

    assert (goes_on.returncode, refused.returncode) == (0, 2), goes_on.stderr
    assert "workload: was changed since the run began" in refused.stderr
    assert len(measured(project)) == 2


def test_the_card_of_a_run_says_where_its_rows_came_from(project: Project) -> None:
    """A run of scaled rows is not shown as one of those that were recorded."""
    made = project.folder / "workloads" / "small"
    made.mkdir(parents=True)
    (project.folder / "rows.jsonl").rename(made / "workload.jsonl")
    (made / "source.json").write_text('{"source": "trace.csv", "transforms": ["SCALED: outputs divided by 4"]}')
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1", "--workload", "small")

    page = (project.folder / "runs/fake/workload/card.md").read_text()
    assert "SCALED: outputs divided by 4" in page
    assert "source: trace.csv" in page


def test_a_card_that_was_cut_off_is_written_again(project: Project) -> None:
    """The page comes after its picture; the resumed run tells the same of the rows, under their own name."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1")
    page = project.folder / "runs/fake/workload/card.md"
    before = page.read_text()
    page.unlink()
    project.tune("run", "--resume", "runs/fake", "--trials", "1")

    assert before.startswith("# rows\n")
    assert page.read_text() == before


def test_another_vllm_is_refused(project: Project) -> None:
    """A run begun with one version does not go on with another; the error names both and what to do."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1")
    file = project.folder / "runs/fake/plan.json"
    file.write_text(file.read_text().replace('"vllm_version": "0.26.0"', '"vllm_version": "0.32.0"'))
    refused = project.tune("run", "--resume", "runs/fake", "--trials", "2")
    dry = project.tune("run", "--resume", "runs/fake", "--dry-run")

    assert dry.returncode == 2
    assert "--dry-run goes with a new run" in dry.stderr
    assert refused.returncode == 4
    assert "begun with vLLM 0.32.0, here is 0.26.0" in refused.stderr
    assert "go on where vLLM 0.32.0 is" in refused.stderr


def test_sync_sends_what_mlflow_lacks_and_nothing_twice(project: Project) -> None:
    """A run without MLflow is sent later; sent again, nothing changes; a file that is no database is an error."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "2")
    refused = project.tune("show", "--sync", "runs/fake")
    first = project.tune("show", "--sync", "runs/fake", "--mlflow", "sqlite:///m.db")
    before = in_mlflow(project.folder, "sqlite:///m.db")
    again = project.tune("show", "runs/fake", "--sync", "--mlflow", "sqlite:///m.db")
    (project.folder / "text").write_text("no database at all, and long enough to be read as one" * 99)
    broken = project.tune("show", "runs/fake", "--sync", "--mlflow", "sqlite:///text")

    assert refused.returncode == 2
    assert "--mlflow URI" in refused.stderr
    assert (first.returncode, again.returncode) == (0, 0), first.stderr
    assert f"MLflow has all {len(project.results())} trials of runs/fake" in first.stdout
    assert before["study"][0] == "FINISHED"
    assert set(before) == {"study", *(str(r["number"]) for r in project.results())}
    assert in_mlflow(project.folder, "sqlite:///m.db") == before
    assert (broken.returncode, "Traceback" in broken.stderr) == (4, False)
    assert "MLflow is not up to date" in broken.stderr


def test_a_study_on_a_disk_that_fills_up_ends_with_words(project: Project) -> None:
    """No space left while a trial's files are written: exit 4, what and where, and what to do."""
    fault = project.folder / "sitecustomize.py"
    fault.write_text(FULL)
    done = project.tune("run", "s.yaml", "--mlflow", "off", PYTHONPATH=f"{project.folder}:{FAKE.parents[1]}")

    assert done.returncode == 4
    assert "No space left on device" in done.stderr
    assert "is the disk full" in done.stderr
    assert "Traceback" not in done.stderr


FULL = """
import errno, os, numpy
def full(*_, **__): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
numpy.savez = numpy.savez_compressed = full
"""
