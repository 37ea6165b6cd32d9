"""The command line on the fake server: exit codes, words, what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tuner.deployment.family import MARKER

FAKE = Path(__file__).parent / "fake_vllm.py"
STUDY = f"""\
name: fake
model: m
vllm: {{command: ["{FAKE}", serve], start_timeout: 20s, stop_timeout: 5s}}
engine_args: {{max_model_len: 4096, max_num_seqs: 32}}
search_space:
  max_num_batched_tokens: [64, 256, 1024]
workload: {{path: rows.jsonl, warm_up: 0.1s}}
slo: [itl_p99=10s, ttft=10s]
budget: {{trials: 3}}
"""


@dataclass
class Project:
    """A folder with a study and a workload, and tune run in it."""

    folder: Path

    def tune(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tuner", *words],
            cwd=self.folder, env=os.environ | env, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tuner", *words],
            cwd=self.folder, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def write_study(self, text: str = STUDY) -> None:
        (self.folder / "s.yaml").write_text(text)

    def results(self, run: str = "fake") -> list[Mapping[str, object]]:
        files = sorted((self.folder / "runs" / run / "trials").glob("*/result.json"))
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    rows = [{"arrival_s": i * 0.02, "input_len": 20 + 40 * (i % 3), "output_len": 8} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Project(tmp_path)
    found.write_study()
    yield found
    assert servers_of(tmp_path) == []


def servers_of(folder: Path) -> list[int]:
    """Return the pids of servers that a run in this folder started and that are alive."""
    markers = set()
    for journal in folder.glob("runs/*/processes.jsonl"):
        markers |= {json.loads(line).get("marker") for line in journal.read_text().splitlines()}
    return [p.pid for p in psutil.process_iter() if _marker(p) in markers - {None}]


def _marker(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARKER)
    except psutil.Error:
        return None


def test_a_study_ends_with_verdict_front_and_next_commands(project: Project) -> None:
    """Exit 0, results on stdout, progress on stderr, an export that names its trial."""
    done = project.tune("run", "s.yaml", "--mlflow", "off")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SLO met by ")
    assert "Pareto front" in done.stdout
    assert "tune show runs/fake" in done.stdout
    assert "trial 0" in done.stderr
    assert "trial" in (project.folder / "runs/fake/best/serve.yaml").read_text()
    assert len(measured(project)) == 3


@pytest.mark.parametrize("sessions", ["follow", "absolute"])
def test_a_trial_tells_what_its_cache_could_hit_and_how_turns_went(project: Project, sessions: str) -> None:
    """Shares of the prompt tokens, cold, after the history, and as counted; the choice for sessions is noted."""
    row = {"output_len": 4, "block_size": 16, "input_len": 40}
    turns = [{"session": f"{i % 5}", "think_time_s": 0.05} for i in range(20)]
    window = [row | {"arrival_s": i * 0.02, "block_ids": [1, 2 + i % 4, 100 + i]} | turns[i] for i in range(20)]
    folder = project.folder / "chats"
    folder.mkdir()
    history = [row | {"arrival_s": i, "block_ids": [1, 2 + i, 50 + i]} for i in range(3)]
    for name, rows in (("workload", window), ("history", history)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    words = ("--workload", "chats", "--sessions", sessions, "--trials", "1", "--mlflow", "off")
    done = project.tune("run", "s.yaml", *words)

    assert done.returncode == 0, done.stderr
    (result,) = measured(project)
    found, notes = result["metrics"], result["repeats"][0]["notes"]  # type: ignore[index]
    assert found["prefix_hit_ideal_cold_share"] == pytest.approx((19 * 16 + 16 * 16) / 800)  # type: ignore[index]
    assert found["prefix_hit_ideal_warm_share"] == pytest.approx((20 * 16 + 19 * 16) / 800)  # type: ignore[index]
    assert found["prefix_hit_share"] == pytest.approx(found["prefix_hit_ideal_warm_share"], abs=0.1)  # type: ignore[index]
    assert ("turns_followed" in found) == (sessions == "follow")  # type: ignore[operator]
    assert any(("waited" if sessions == "follow" else "at recorded times") in note for note in notes)


def test_a_way_to_send_sessions_that_there_is_not_is_refused(project: Project) -> None:
    """By the flag's name, with what it takes."""
    done = project.tune("run", "s.yaml", "--sessions", "backwards", "--mlflow", "off")

    assert done.returncode == 2
    assert "--sessions: workload.sessions: input should be 'follow' or 'absolute'" in done.stderr


def measured(project: Project) -> list[Mapping[str, object]]:
    """Return the trials with numbers of their own; repeated proposals and replays lost to noise come beside them."""
    return [r for r in project.results() if r["failure"] is None and r["same_as"] is None]


@pytest.mark.once
def test_an_slo_out_of_reach_exits_3_and_names_the_closest(project: Project) -> None:
    """The closest configuration is shown and exported with its miss."""
    done = project.tune("run", "s.yaml", "--slo", "ttft=0.01ms", "--trials", "1", "--mlflow", "off")

    assert done.returncode == 3
    assert "SLO not met: closest is trial" in done.stdout
    assert "over" in done.stdout
    assert "NOT met" in (project.folder / "runs/fake/best/serve.yaml").read_text()


def test_out_of_memory_is_a_trial_and_the_study_goes_on(project: Project) -> None:
    """A configuration that does not start is classified; the others are measured."""
    fault = json.dumps({"oom_if": {"max_num_batched_tokens": 4096}})
    space = "search_space.max_num_batched_tokens=[64, 256, 4096]"
    done = project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "4", "--set", space, FAKE_VLLM=fault)

    own = [r for r in project.results() if r["same_as"] is None]
    kinds = [r["failure"] and r["failure"]["kind"] for r in own]  # type: ignore[index]
    assert done.returncode == 0, done.stderr
    assert [kinds.count(kind) for kind in (None, "oom")] == [3, 1]
    assert "failed: oom" in project.tune("show", "runs/fake").stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "missing"], 2, "no study 'missing'"),
        (["run", "s.yaml", "--slo", "ttft=500"], 2, "write ttft_p99=500ms or ttft_p99=500s"),
        (["run", "s.yaml", "--set", "engine_args.max_num_sequences=4"], 2, 'did you mean "max_num_seqs"'),
        (["run", "s.yaml", "--set", "engine_args.max_model_len=60"], 2, "rows are too long"),
        (["run", "s.yaml", "--set", "vllm.command=no-such-vllm serve"], 4, "no-such-vllm: no such program"),
        (["run", "s.yaml", "--set", "engine_args.api_key=canary"], 2, "is a secret"),
        (["run", "s.yaml", "--gpus", "0"], 4, "this host has none"),
        (["run", "s.yaml", "--set", "topologies=[1x, 1p1d]"], 2, "1x takes 1, 1p1d takes 2"),
        (["run", "s.yaml", "--set", "topologies=[2x]", "--set", "front.command=no-router"], 4, "no-router: no such"),
        (
            ["run", "s.yaml", "--set", "engine_args.decoder.max_num_seqs=8"],
            2,
            "no topology of this study has a decoder",
        ),
        (["run", "s.yaml", "--slo", "ttft.long=1s"], 2, "no prompt of class long"),
        (["run", "s.yaml", "--baseline", "vllm serve m --hf-token canary"], 2, "hf_token is a secret"),
        (["run", "s.yaml", "--set", "search_space.api_key=[canary, b]"], 2, "is a secret"),
        (["run", "s.yaml", "--set", "env.MY_AUTH=canary"], 2, "looks like a secret"),
        (["run", "s.yaml", "--set", "search_space.max_num_seqs={low: .nan, high: 5.5}"], 2, "must be finite"),
        (["run", "s.yaml", "--set", "engine_args.dtype=2026-01-01"], 2, "in quotes"),
        (["run", "s.yaml", "--set", "objectives={ttft: foo, itl: itl_p99}"], 2, "objectives.ttft: foo"),
        (["run", "s.yaml", "--name", "mlflow.db"], 2, "is taken by the MLflow store"),
        (["run", "s.yaml", "--trials", "0"], 2, "--trials: budget.trials"),
        (["run", "s.yaml", "--storage", "nonsense://x"], 4, "Optuna storage nonsense://x"),
        (["run", "--resume", "runs/none"], 2, "not a run folder"),
        (["show", "runs/none"], 2, "not a run folder"),
        (["export", "runs/none"], 2, "not a run folder"),
        (["run", "s.yaml", "--workload", "row.jsonl"], 2, "not found"),
    ],
)
def test_a_mistake_is_one_clear_line_before_anything_starts(
    project: Project, words: list[str], code: int, message: str
) -> None:
    """Right exit code, the message says what and where, no server was started, no traceback."""
    done = project.tune(*words, "--mlflow", "off") if words[0] == "run" else project.tune(*words)

    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "canary" not in done.stderr
    assert not list(project.folder.glob("runs/*/processes.jsonl"))


def test_a_server_that_refuses_its_arguments_ends_the_study(project: Project) -> None:
    """A bad_argument in trial 0 is exit 2: every trial would fail alike."""
    fault = json.dumps({"fail_at_start": "bad_argument"})
    done = project.tune("run", "s.yaml", "--mlflow", "off", FAKE_VLLM=fault)

    assert done.returncode == 2
    assert "vLLM refuses the default" in done.stderr


def test_dry_run_shows_everything_and_starts_nothing(project: Project) -> None:
    """Study, space, the default's exact command, an estimate."""
    done = project.tune("run", "s.yaml", "--dry-run", "--baseline", "vllm serve m --max-num-seqs 8")

    assert done.returncode == 0, done.stderr
    for part in ("max_num_batched_tokens: one of 64, 256, 1024", "serve m --max-model-len 4096 --max-num-seqs 32",
                 "serve m --max-num-seqs 8", "# time: about"):  # fmt: skip
        assert part in done.stdout
    assert not (project.folder / "runs").exists()


def test_kill_minus_9_leaves_no_server(project: Project) -> None:
    """The guardian ends the servers within 10 s when tune is killed; the run says which trial was cut off."""
    running = project.start(
        "run", "s.yaml", "--mlflow", "off", FAKE_VLLM=json.dumps({"freeze_at": 0.1, "freeze_for": 60})
    )
    try:
        wait_for(lambda: servers_of(project.folder), 30)
        time.sleep(1.0)
        os.kill(running.pid, signal.SIGKILL)
        wait_for(lambda: not servers_of(project.folder), 10)
    finally:
        running.kill()
        running.communicate()
    assert "trial 0 was begun and has no result" in project.tune("show", "runs/fake").stdout


@pytest.mark.once
def test_an_interrupt_keeps_what_is_measured_and_resume_goes_on(project: Project) -> None:
    """Ctrl-C: exit 130 with the resume command; the resumed run ends the budget, nothing measured twice."""
    running = project.start(
        "run", "s.yaml", "--mlflow", "off", "--trials", "4", FAKE_VLLM=json.dumps({"start_delay": 1.0})
    )
    wait_for(lambda: len(project.results()) >= 1, 60)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    before = [r["number"] for r in project.results() if r["failure"] is None]

    assert running.returncode == 130
    assert "tune run --resume runs/fake" in said
    done = project.tune("run", "--resume", "runs/fake", "--mlflow", "off")

    budgets = [r["config"]["args"].get("max_num_batched_tokens") for r in measured(project)]  # type: ignore[index]
    assert done.returncode == 0, done.stderr
    assert before
    assert len(budgets) == len(set(budgets)) == 4


def test_an_interrupt_while_the_server_stops_keeps_the_measurement(project: Project) -> None:
    """What is measured when Ctrl-C comes is kept and told, though the server takes long to end."""
    running = project.start("run", "s.yaml", "--mlflow", "off", FAKE_VLLM=json.dumps({"stop_delay": 3.0}))
    assert running.stderr is not None
    while "trial 0: stopping" not in running.stderr.readline():
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)

    assert running.returncode == 130
    assert [(r["label"], r["failure"]) for r in project.results()] == [("default", None)]


@pytest.mark.once
def test_the_default_is_measured_however_often_it_was_interrupted(project: Project) -> None:
    """Four interruptions in trial 0 do not use up its tries; SIGTERM is an interruption like Ctrl-C."""
    words = ["run", "s.yaml"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        running = project.start(*words, "--mlflow", "off", FAKE_VLLM=json.dumps({"start_delay": 20.0}))
        assert running.stderr is not None
        while ": starting" not in running.stderr.readline():
            assert running.poll() is None
        running.send_signal(number)
        _, said = running.communicate(timeout=30)
        assert running.returncode == 130, said
        assert "--resume runs/fake" in said
        words = ["run", "--resume", "runs/fake"]
    done = project.tune(*words, "--trials", "1", "--mlflow", "off")

    assert done.returncode == 0, done.stderr
    assert next(r["label"] for r in project.results() if r["failure"] is None) == "default"


@pytest.mark.once
def test_a_run_folder_has_one_writer(project: Project) -> None:
    """A second tune on the folder is refused and the first goes on."""
    running = project.start("run", "s.yaml", "--mlflow", "off")
    wait_for(lambda: len(project.results()) >= 1, 60)
    second = project.tune("run", "--resume", "runs/fake", "--mlflow", "off")
    running.communicate(timeout=60)

    assert (second.returncode, running.returncode) == (4, 0)
    assert "another tune is at work here" in second.stderr


@pytest.mark.once
def test_a_result_that_was_taken_away_is_measured_again(project: Project) -> None:
    """The hint for a damaged result keeps its promise, for the default as well."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "2")
    for number in (0, 1):
        (project.folder / f"runs/fake/trials/{number:04d}/result.json").unlink()
    done = project.tune("run", "--resume", "runs/fake", "--mlflow", "off")

    labels = [r["label"] for r in measured(project)]
    assert done.returncode == 0, done.stderr
    assert len(labels) == 2
    assert labels.count("default") == 1


@pytest.mark.once
def test_a_lost_storage_or_a_changed_study_is_refused(project: Project) -> None:
    """Numbers are not given away twice, and two studies are not mixed."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1")
    before = project.results()
    file = project.folder / "runs/fake/study.yaml"
    text = file.read_text()
    file.write_text(text.replace("model: m", "model: other"))
    changed = project.tune("run", "--resume", "runs/fake", "--mlflow", "off", "--trials", "2")
    file.write_text(text)
    (project.folder / "runs/fake/optuna.db").unlink()
    lost = project.tune("run", "--resume", "runs/fake", "--mlflow", "off", "--trials", "2")

    assert (changed.returncode, lost.returncode) == (2, 4)
    assert "was changed since the run began" in changed.stderr
    assert "the storage was lost" in lost.stderr
    assert project.results() == before


@pytest.mark.once
def test_what_cannot_be_judged_is_not_met_and_says_so(project: Project) -> None:
    """Every third request fails, so no p99 exists: verdict on stdout, exit 3, nothing exported."""
    fault = json.dumps({"http_status": {"every": 3, "status": 500}})
    done = project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1", FAKE_VLLM=fault)

    assert done.returncode == 3
    assert "not" in done.stdout.splitlines()[0]
    assert not (project.folder / "runs/fake/best").exists()


def test_an_slo_may_name_a_class_of_the_study(project: Project) -> None:
    """Classes of the user's own, split where they like."""
    words = ["--set", "workload.classes={chat: [0, 50], doc: [50, 5000]}", "--slo", "ttft_p90.chat=10s"]
    done = project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1", *words)

    assert done.returncode == 0, done.stderr
    assert "ttft_p90_ms.chat" in project.results()[0]["metrics"]  # type: ignore[operator]


@pytest.mark.once
def test_a_reader_that_has_gone_does_not_change_the_exit_code(project: Project) -> None:
    """`tune run ... | true` ends with what the study found."""
    words = [sys.executable, "-m", "tuner", "run", "s.yaml", "--slo", "ttft=0.01ms", "--trials", "1", "--mlflow", "off"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, cwd=project.folder, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)

    assert done.returncode == 3


@pytest.mark.once
def test_a_finished_run_is_shown_and_exported_again(project: Project) -> None:
    """Show and export read the run folder alone, in which the workload has its card."""
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1")
    shown = project.tune("show", "runs/fake")
    exported = project.tune("export", "runs/fake", "-o", "out", "--pick", "0")

    assert (shown.returncode, exported.returncode) == (0, 0)
    assert "default" in shown.stdout
    assert "| requests | 30 |" in (project.folder / "runs/fake/workload/card.md").read_text()
    assert (project.folder / "runs/fake/workload/card.png").read_bytes().startswith(b"\x89PNG")
    assert "trial 0 written to out/serve.yaml" in exported.stdout
    assert (project.folder / "out" / "serve.env").is_file()


def test_a_study_mirrors_itself_to_mlflow(project: Project) -> None:
    """Without --mlflow: an embedded store beside the run folders, one parent and a child a trial."""
    done = project.tune("run", "s.yaml", "--trials", "2")
    listed = subprocess.run(
        [sys.executable, "-c", COUNT_RUNS, str(project.folder / "runs" / "mlflow.db")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert listed.stdout.split() == ["study", *["trial"] * len(project.results())]


COUNT_RUNS = """
import sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}")
ids = [e.experiment_id for e in client.search_experiments()]
print(*sorted(r.data.tags["tune.kind"] for r in client.search_runs(ids)))
"""


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """--help loads neither optuna nor mlflow nor numpy."""
    code = "import sys; sys.argv=['tune','--help']\nfrom tuner.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print([m for m in ('optuna','mlflow','numpy','torch','vllm','plotly','aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_doctor_says_what_is_ok_and_what_to_mend(project: Project) -> None:
    """Each line is ok or comes with what mends it; the first problem gives the exit code."""
    good = project.tune("doctor", "s.yaml")
    bad = project.tune("doctor", "s.yaml", "--set", "vllm.command=no-such-vllm serve")

    assert "ok    workload: rows: 30 requests" in good.stdout
    assert "ok    plan:" in good.stdout
    assert bad.returncode == 4
    assert "MEND  vLLM: no-such-vllm: no such program" in bad.stdout


def wait_for(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)
