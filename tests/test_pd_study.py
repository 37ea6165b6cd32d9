"""Studies over topologies on fake servers behind the real vllm-router: sabotage, and what the user is told."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from front_data import ROUTER, needs_router
from test_cli import STUDY, Project, servers_of

pytestmark = [needs_router, pytest.mark.once]
FORGETFUL = f"{sys.executable} {Path(__file__).parent / 'data' / 'forgetful_front.py'}"
SPACE = "search_space: {max_num_batched_tokens: [256, 1024]}\n"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A folder in which nothing is left running."""
    yield Project(tmp_path)
    assert servers_of(tmp_path) == []


def study(project: Project, topologies: str, *, front: str = str(ROUTER)) -> None:
    """Write a study over topologies; the prompts are longer than a block, so all of them must be transferred."""
    rows = [{"arrival_s": i * 0.05, "input_len": 40 + 20 * (i % 3), "output_len": 6} for i in range(20)]
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head, _, tail = STUDY.partition("search_space:")
    rest = tail[tail.index("workload:") :]
    project.write_study(f"{head}{SPACE}topologies: {topologies}\nfront: {{command: '{front}'}}\n{rest}")


def own(project: Project) -> list[Mapping[str, Any]]:
    """Return the trials that were run."""
    return [r for r in project.results() if r["same_as"] is None]


def topology(result: Mapping[str, Any]) -> str:
    return str(result["config"]["topology"])


def test_replicas_and_a_pair_are_compared(project: Project) -> None:
    """Both are measured behind the router; the pair's transfers are metrics of their own, chunks are counted."""
    study(project, "[2x, 1p1d]")
    done = project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "4")
    by_kind: dict[str, list[Mapping[str, Any]]] = {"2x": [], "1p1d": []}
    for result in own(project):
        by_kind[topology(result)].append(result)

    assert done.returncode == 0, done.stderr
    assert all(r["failure"] is None for r in own(project)), done.stderr
    assert all(r["metrics"]["kv_transfer_share"] == 1 for r in by_kind["1p1d"])
    assert all(r["metrics"]["kv_transfer_bytes_mean"] > 0 for r in by_kind["1p1d"])
    assert not any("kv_transfer_share" in r["metrics"] for r in by_kind["2x"])
    assert all(r["metrics"]["tokens_per_chunk_mean"] == 1 for r in own(project))
    assert by_kind["1p1d"]
    assert "Best of each topology at 2 GPUs" in done.stdout
    assert "PD " in done.stdout


def test_a_front_that_forgets_gives_no_pd_trial(project: Project) -> None:
    """All requests are answered, and no trial has a number; the verdict says why."""
    study(project, "[1p1d]", front=FORGETFUL)
    done = project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "2")

    assert {r["failure"]["kind"] for r in own(project)} == {"no_transfer"}
    assert all("this was not PD" in r["failure"]["message"] for r in own(project))
    assert all(r["metrics"] == {} for r in own(project))
    assert done.returncode == 3
    assert done.stdout.startswith("Nothing could be measured: 2 trials failed (2 no_transfer).")


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        ({"side_channel_shift": 1, "transfer_patience": 0.2}, "decoder 0 cannot fetch from prefiller 0"),
        ({"ignore_kv": True}, "this was not PD: the decoders computed"),
        ({"die_after": 3}, "ended while in use"),
    ],
)
def test_each_sabotage_is_a_failed_trial_of_its_kind(
    project: Project,
    sabotage: dict[str, object],
    words: str,
) -> None:
    """The trial fails with what happened, in the time of a trial, and nothing of it is left (the fixture looks)."""
    study(project, "[1p1d]")
    project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1", FAKE_VLLM=json.dumps(sabotage))
    (result,) = own(project)

    assert words in result["failure"]["message"]
    assert result["metrics"] == {}


def test_after_a_pair_that_failed_the_next_is_clean(project: Project) -> None:
    """A side channel that is not there costs the trial that met it; resumed without, the study measures."""
    study(project, "[1p1d]")
    words = ("--mlflow", "off", "--trials", "1")
    project.tune("run", "s.yaml", *words, FAKE_VLLM=json.dumps({"side_channel_shift": 1, "transfer_patience": 0.2}))
    assert servers_of(project.folder) == []
    done = project.tune("run", "--resume", "runs/fake", "--mlflow", "off", "--trials", "2")

    assert [r["failure"] and r["failure"]["kind"] for r in own(project)] == ["no_transfer", None], done.stderr
    assert own(project)[1]["metrics"]["kv_transfer_share"] == 1


def test_the_servers_key_reaches_the_front_and_no_file(project: Project) -> None:
    """With VLLM_API_KEY exported a pair is measured, and neither run folder nor export holds the key."""
    study(project, "[1p1d]")
    done = project.tune("run", "s.yaml", "--mlflow", "off", "--trials", "1", VLLM_API_KEY="canary-1234")

    assert own(project)[0]["failure"] is None, done.stderr
    files = [file for file in (project.folder / "runs").rglob("*") if file.is_file()]
    assert len(files) > 10
    assert not [file for file in files if b"canary-1234" in file.read_bytes()]
    assert "canary-1234" not in done.stdout + done.stderr
