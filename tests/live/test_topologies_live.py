"""Studies over topologies on a real vLLM: what is told, mirrored and exported; a prefiller killed in between."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment_data import is_alive
from tests.replay_data import free_port
from tests.test_cli import servers_of
from tuner.errors import FailureKind
from tuner.results import TrialResult
from tuner.serving import Topology
from tuner.sinks.runfolder import RunFolder

pytestmark = [pytest.mark.live, pytest.mark.timing, pytest.mark.timeout(900)]  # four times as long beside others
REPO = Path(__file__).resolve().parents[2]
SECONDS = 4.0  # twice that on the clock: the study halves the rate
# On two cores three programs and the client share what one server has elsewhere: the client may be late by a share of
# 20 s, and no latency is looked at.
PROMISE = ("--slo", "ttft_p99=20s", "--slo", "itl_p99=5s")
Study = tuple[subprocess.CompletedProcess[str], Path, list[TrialResult]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first seconds of a shipped workload."""
    found = tmp_path_factory.mktemp("topologies")
    lines = (REPO / "workloads/azure-conv-2023-small/workload.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["arrival_s"] < SECONDS]
    (found / "window.jsonl").write_text("\n".join(kept) + "\n")
    return found


def tune(folder: Path, vllm: str, name: str, *words: str) -> list[str]:
    """Return the command of a short study over topologies."""
    return [
        sys.executable, "-m", "tuner", "run", str(REPO / "studies/pd-cpu.yaml"), "--name", name,
        "--set", f"vllm.command={vllm} serve", "--workload", str(folder / "window.jsonl"),
        "--set", "workload.warm_up=1s", "--set", "objectives.ttft=ttft_p50", "--runs", str(folder / "runs"), *PROMISE,
        *words,
    ]  # fmt: skip


class Assassin(threading.Thread):
    """Kills the first prefiller of a run as soon as requests have reached its decoder."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._run = run
        self.over = threading.Event()
        self.victim: int | None = None

    def run(self) -> None:
        """Wait for the front of the first PD group, then for its replay, then kill."""
        while self.victim is None and not self.over.wait(0.1):
            journal = self._run / "processes.jsonl"
            entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
            prefiller = next((e for e in entries if e.get("role") == "prefiller"), None)
            if prefiller is None or not any(e.get("role") == "front" for e in entries[entries.index(prefiller) :]):
                continue
            decoder = next(e for e in entries if e.get("role") == "decoder")
            if self._answered(decoder["port"]) >= 4:
                os.kill(prefiller["pid"], signal.SIGKILL)
                self.victim = prefiller["pid"]

    @staticmethod
    def _answered(port: int) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total")))


@pytest.fixture(scope="module")
def study(folder: Path, vllm: str) -> Iterator[Study]:
    """Replicas, a pair whose prefiller is killed in mid-replay, and another pair, which this seed proposes."""
    words = ["--trials", "3", "--set", "search_space.max_num_batched_tokens=[512,2048]"]
    words += ["--set", "sampler=random", "--seed", "1"]
    assassin = Assassin(folder / "runs" / "live")
    assassin.start()
    command = tune(folder, vllm, "live", *words)
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assassin.over.set()
    assert assassin.victim is not None, done.stderr
    yield done, folder / "runs" / "live", RunFolder(folder / "runs" / "live").read_all()
    assert servers_of(folder) == []


def of(topology: str, results: list[TrialResult]) -> list[TrialResult]:
    """Return the trials of a topology that were run."""
    return [r for r in results if str(r.config.topology) == topology and r.same_as is None]


def test_both_topologies_are_measured_at_the_same_size(study: Study) -> None:
    """The default is two replicas; each pair that was measured moved the KV cache of every prompt."""
    done, _, results = study
    measured = [r for r in of("1p1d", results) if r.is_measured]

    assert done.returncode == 0, done.stderr
    assert (results[0].label, str(results[0].config.topology)) == ("default", "2x")
    assert all(r.is_measured for r in of("2x", results))
    assert len(measured) == 1
    assert measured[0].metrics["kv_transfer_share"] == 1
    assert measured[0].metrics["decoder_computed_tokens"] == 0
    assert measured[0].metrics["kv_transfer_bytes_mean"] > 0
    assert "kv_transfer_share" not in results[0].metrics
    assert {r.config.n_gpus for r in results} == {2}


def test_a_killed_prefiller_costs_one_trial(study: Study) -> None:
    """It is named, the trial has no numbers, and the next pair is measured."""
    (failed,) = [r for r in of("1p1d", study[2]) if r.failure is not None]

    assert failed.failure is not None
    assert str(failed.config.topology) == "1p1d"
    assert failed.failure.kind in {FailureKind.DIED, FailureKind.OOM}
    assert failed.failure.message.startswith("prefiller 0 ended while in use")
    assert failed.metrics == {}


def test_the_servers_counted_what_was_sent(study: Study, folder: Path) -> None:
    """Prompts once, by the prefiller, and output once, by the decoder, though two servers saw each request."""
    rows = [json.loads(line) for line in (study[1] / "workload" / "workload.jsonl").read_text().splitlines()]
    for result in (r for r in study[2] if r.is_measured):
        counters = result.repeats[0].counters
        assert counters["prompt_tokens"] == sum(row["input_len"] for row in rows)
        assert counters["generation_tokens"] == sum(row["output_len"] for row in rows)


def test_each_server_has_its_log_and_its_command(study: Study) -> None:
    """The trial's folder shows how the group was started, by name."""
    number = of("1p1d", study[2])[0].number
    found = study[1] / "trials" / f"{number:04d}"
    titles = [line for line in (found / "command.txt").read_text().splitlines() if line.startswith("# ")]

    assert titles == ["# prefiller 0", "# decoder 0", "# the front"]
    assert {p.name for p in found.glob("*.log")} == {"server-prefiller-0.log", "server-decoder-0.log", "front.log"}


def test_the_verdict_compares_the_topologies(study: Study) -> None:
    """The best of each, and whether PD pays, with the reservation that all shared one machine."""
    text = study[0].stdout

    assert "Best of each topology with 2 servers on one machine" in text
    assert "shared one machine's cores" in text
    assert any(line.split()[:1] == ["1p1d"] for line in text.splitlines())


def test_topology_and_ratio_are_parameters_in_mlflow(study: Study) -> None:
    """Every run tells its topology, its ratio and its kind; the front is on the parent."""
    code = """
import sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}")
runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
parent = next(r for r in runs if r.data.tags["tune.kind"] == "study")
children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
names = ("topology", "pd_ratio", "topology.kind")
print(sorted({tuple(r.data.params[name] for name in names) for r in children}))
print(sorted({r.data.params["topology"] for r in children if "kv_transfer_time_mean_ms" in r.data.metrics}))
print(sorted(a.path for a in client.list_artifacts(parent.info.run_id, "pareto")))
"""
    command = [sys.executable, "-c", code, str(study[1].parent / "mlflow.db")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()

    assert said[0] == "[('1p1d', '1:1', 'pd'), ('2x', 'none', 'aggregated')]"
    assert said[1] == "['1p1d']"
    assert "pareto/pareto.html" in said[2]


def test_the_exported_pair_starts_from_its_files_and_streams(study: Study, folder: Path) -> None:
    """`sh best/start.sh` brings up prefiller, decoder and front; a stream flows, and TERM leaves nothing."""
    number = next(r.number for r in of("1p1d", study[2]) if r.is_measured)
    out = folder / "best"
    command = [sys.executable, "-m", "tuner", "export", str(study[1]), "-o", str(out), "--pick", str(number)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"sh {out}/start.sh" in told
    ports = {name: str(free_port()) for name in ("PORT", "SERVER_PORT", "PROMETHEUS_PORT", "SIDE_CHANNEL_PORT")}
    env = os.environ | ports | {"SERVER_PORT": "21100", "SIDE_CHANNEL_PORT": "21600", "START_TIMEOUT": "200"}
    running = subprocess.Popen(["sh", str(out / "start.sh")], env=env, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    try:
        for line in running.stderr:
            if "ready at" in line:
                break
        model = json.loads((study[1] / "trials" / f"{number:04d}" / "result.json").read_text())["config"]["model"]
        tokens = list(range(300, 600))
        body = {"model": model, "prompt": tokens, "max_tokens": 5, "ignore_eos": True, "stream": True}
        url = f"http://127.0.0.1:{ports['PORT']}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as answer:
            events = [line for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        with urllib.request.urlopen("http://127.0.0.1:21101/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        running.terminate()
        running.communicate(timeout=100)

    assert events[-1] == "data: [DONE]"
    assert len(events) >= 6
    moved = next(line for line in text.splitlines() if 'source="external_kv_transfer"' in line)
    assert float(moved.split()[-1]) == len(tokens)
    logs = [json.loads(f"{line.split('pid=')[1].split(')')[0]}") for log in (out / "logs").glob("*er-0.log")
            for line in log.read_text().splitlines()[:200] if line.startswith("(EngineCore pid=")]  # fmt: skip
    assert logs
    deadline = time.monotonic() + 10
    while any(map(is_alive, set(logs))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, set(logs)))


def test_other_ratios_are_measured(folder: Path, vllm: str) -> None:
    """Two prefillers before one decoder, and one before two: a trial each, every prompt transferred."""
    words = ["--set", "topologies=[2p1d,1p2d]", "--set", "search_space={}", "--trials", "2"]
    command = tune(folder, vllm, "ratios", *words)
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    results = RunFolder(folder / "runs" / "ratios").read_all()
    measured = [r for r in results if r.is_measured and r.same_as is None]

    assert done.returncode == 0, done.stderr
    assert {r.config.topology for r in measured} == {Topology.parse("2p1d"), Topology.parse("1p2d")}
    assert [r.metrics["kv_transfer_share"] for r in measured] == [1, 1]
    assert [r.metrics["decoder_computed_tokens"] for r in measured] == [0, 0]
    assert "Best of each topology with 3 servers on one machine" in done.stdout
    assert (folder / "runs" / "ratios" / "best" / "start.sh").exists()
    assert servers_of(folder) == []
