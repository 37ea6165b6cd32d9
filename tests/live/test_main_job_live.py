"""The main job on a real vLLM: a study, killed in the middle and resumed; mirror, export, serve."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.test_cli import servers_of
from tuner.deployment.launcher import LocalLauncher
from tuner.errors import FailureKind
from tuner.results import TrialResult
from tuner.serving import ServingConfig
from tuner.sinks.runfolder import RunFolder

pytestmark = [pytest.mark.live, pytest.mark.timing, pytest.mark.timeout(900)]
REPO = Path(__file__).resolve().parents[2]
Study = tuple[subprocess.CompletedProcess[str], Path, list[TrialResult]]
SECONDS = 8.0
# Eight blocks of 128 tokens do not hold one request of 4,096.
TOO_SMALL = "--max-model-len 4096 --max-num-seqs 32 --enforce-eager --num-gpu-blocks-override 8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first seconds of a shipped workload."""
    found = tmp_path_factory.mktemp("main-job")
    lines = (REPO / "workloads/azure-conv-2023-small/workload.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["arrival_s"] < SECONDS]
    (found / "window.jsonl").write_text("\n".join(kept) + "\n")
    return found


def tune(folder: Path, vllm: str, *words: str) -> list[str]:
    """Return the command of a short study on the quick start's model."""
    return [
        sys.executable, "-m", "tuner", "run", str(REPO / "studies/cpu-quickstart.yaml"),
        "--set", f"vllm.command={vllm} serve", "--workload", str(folder / "window.jsonl"),
        "--set", "workload.warm_up=1s", "--runs", str(folder / "runs"), *words,
    ]  # fmt: skip


@dataclass(frozen=True)
class Killed:
    """What was there when tune was killed, and ten seconds later: servers by pid, and trials with a result."""

    servers: list[int]
    left: list[int]
    results: list[TrialResult]


@pytest.fixture(scope="module")
def killed(folder: Path, vllm: str) -> Killed:
    """A study of the default, a baseline that runs out of memory and one trial that the sampler chose.

    Tune is killed with kill -9 in the replay of the last.
    """
    words = ["--trials", "3", "--name", "live", "--slo", "itl_p99=0.9x", "--slo", "ttft_p50.long=20x"]
    words += ["--baseline", f"vllm serve {TOO_SMALL}"]
    running = subprocess.Popen(tune(folder, vllm, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for awaited in ("(baseline)", ": replay 1 of 1"):
        assert any(awaited in line for line in running.stderr), f"tune ended (exit {running.wait(60)})"
    time.sleep(2.0)
    servers = servers_of(folder)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    deadline = time.monotonic() + 10
    while (left := servers_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return Killed(servers, left, RunFolder(folder / "runs" / "live").read_all())


@pytest.fixture(scope="module")
def study(folder: Path, killed: Killed) -> Iterator[Study]:
    """The same study, resumed and at its end."""
    run = folder / "runs" / "live"
    command = [sys.executable, "-m", "tuner", "run", "--resume", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    yield done, run, RunFolder(run).read_all()
    assert servers_of(folder) == []


def measured(study: Study) -> list[TrialResult]:
    """Return the trials with numbers of their own."""
    return [r for r in study[2] if r.is_measured and r.same_as is None]


def default(study: Study) -> TrialResult:
    """Return the trial that everything is told against."""
    return next(r for r in measured(study) if r.label == "default")


def test_kill_minus_9_in_mid_replay_leaves_no_server_and_the_run_resumes(killed: Killed, study: Study) -> None:
    """No server of ours is alive 10 s after tune was killed; the run goes on to its end with what it had measured."""
    before, after = ({r.number: r for r in results} for results in (killed.results, study[2]))

    assert killed.servers
    assert killed.left == []
    assert "default" in {r.label for r in before.values() if r.is_measured}
    assert {number: after[number] for number in before} == before
    assert study[0].returncode in {0, 3}, study[0].stderr


def test_a_study_measures_the_default_and_what_the_sampler_chose(study: Study) -> None:
    """Two measured beside the failed one; the values vLLM chose for its default are read back."""
    first = default(study)

    assert len(measured(study)) == 2, study[0].stderr
    assert "max_num_batched_tokens" not in first.config.args
    assert first.effective["max_num_batched_tokens"] == 2048
    assert first.vllm_version is not None
    for result in measured(study):
        assert result.metrics["n_completed"] == result.metrics["n_offered"]
        assert result.metrics["tokens_per_chunk_mean"] >= 1


def test_out_of_memory_at_start_is_a_classified_trial(study: Study) -> None:
    """The baseline's cache is too small for one request: vLLM's own line says so, and the study went on."""
    (failed,) = (r for r in study[2] if r.label == "baseline")

    assert failed.failure is not None
    assert failed.failure.kind is FailureKind.OOM
    assert any("KV cache" in line for line in failed.failure.log)
    assert failed.metrics == {}


def test_the_servers_own_counters_agree_with_what_was_sent(study: Study, folder: Path) -> None:
    """VLLM's token counters over the window equal the workload's: warm-up leaks into nothing."""
    rows = [json.loads(line) for line in (folder / "window.jsonl").read_text().splitlines()]
    counters = default(study).repeats[0].counters

    assert counters["prompt_tokens"] == sum(row["input_len"] for row in rows)
    assert counters["generation_tokens"] == sum(row["output_len"] for row in rows)
    assert counters["prefix_cache_hit_tokens"] == 0


def test_the_client_agrees_with_vllms_own_histogram(study: Study) -> None:
    """Means by vLLM's own clock are the client's within the client's path: a few ms and some percent."""
    for result in measured(study):
        found = result.metrics
        assert 0 <= found["ttft_from_send_mean"] - found["server_ttft_mean"] < 0.02 + 0.15 * found["server_ttft_mean"]
        assert found["itl_mean"] == pytest.approx(found["server_itl_mean"], rel=0.05, abs=0.002)
        assert found["e2el_mean"] == pytest.approx(found["server_e2el_mean"], rel=0.05, abs=0.02)


def test_vllm_times_each_request_itself(study: Study) -> None:
    """Queue and prefill as the scheduler saw them lie within the client's TTFT; the client's facts have limits."""
    found = default(study).metrics
    told = json.loads((study[1] / f"trials/{default(study).number:04d}/repeat-1/client.json").read_text())

    assert 0 < found["server_prefill_p50"] + found["server_queue_p50"] < found["ttft_p50"]
    assert -0.001 < found["client_over_server_ttft_p50"] < 0.05
    assert set(told["limits"]) <= set(told["facts"])


def test_the_study_is_mirrored_with_its_front(study: Study) -> None:
    """One parent, a child a trial, the front as HTML, PNG and table on the parent."""
    code = """
import sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}")
runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
parents = [r for r in runs if r.data.tags["tune.kind"] == "study"]
children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
print(len(parents), len(children), *sorted(a.path for a in client.list_artifacts(parents[0].info.run_id, "pareto")))
print(sum("ttft_p50_ms.long" in r.data.metrics for r in children))
print(all("max_num_batched_tokens" in r.data.params for r in children if r.info.status != "KILLED"))
"""
    command = [sys.executable, "-c", code, str(study[1].parent / "mlflow.db")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()

    own = [r for r in study[2] if r.same_as is None]
    n_children = said[0].split()[1]
    assert said[0].split()[0] == "1"
    assert int(n_children) >= len(own)
    assert {"pareto/pareto.html", "pareto/pareto.png"} <= set(said[0].split()[2:])
    assert said[1:] == ["2", "True"]


@pytest.fixture(scope="module")
def exported(study: Study, folder: Path, vllm: str) -> Iterator[str]:
    """The URL of a server that was started from the study's export."""
    best = study[1] / "best"
    script = f'shift; set -a; . "{best}/serve.env"; exec "{vllm}" serve --config "{best}/serve.yaml" "$@"'
    config = ServingConfig("dropped by shift: the file names the model", command=("sh", "-c", script, "sh"))

    with LocalLauncher().launch(config, folder / "export") as deployment:
        yield deployment.url


def test_the_export_starts_a_real_server_that_answers(exported: str) -> None:
    """`vllm serve --config best/serve.yaml` with its environment serves a completion."""
    with urllib.request.urlopen(f"{exported}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{exported}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)

    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_running_server_is_replayed_at(exported: str, folder: Path, endpoint: str) -> None:
    """`tune replay` sends every row to the URL, and vLLM's own means stand beside the client's."""
    rows = [json.loads(line) for line in (folder / "window.jsonl").read_text().splitlines()]
    # A chat's template takes some tokens: a prompt of four is none.
    kept = [json.dumps(row | {"input_len": max(row["input_len"], 20)}) for row in rows]
    (folder / f"{endpoint}.jsonl").write_text("\n".join(kept) + "\n")
    words = ["replay", str(folder / f"{endpoint}.jsonl"), "--url", exported, "--endpoint", endpoint, "--warm-up", "0s"]
    done = subprocess.run(
        [sys.executable, "-m", "tuner", *words, "--json"], capture_output=True, text=True, timeout=200, check=False
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests"]["completed"] == found["requests"]["offered"] > 0
    server, client = found["server"]["server_ttft_mean_ms"], found["metrics"]["ttft_from_send_mean_ms"]
    assert 0 <= client - server < 20 + 0.15 * server
