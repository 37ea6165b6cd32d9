"""Export: a chosen trial as YAML, environment and start line, with provenance."""

import os
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tuner import export, slo
from tuner import spec as specs
from tuner.errors import FailureKind, SpecError
from tuner.results import Failure, Repeat, TrialResult
from tuner.serving import ServingConfig

SPEC = specs.parse("name: s\nmodel: m\nworkload: w\nslo: [ttft=500ms, itl=50ms]\n", "s.yaml")


def trial(number: int, ttft: float, itl: float, *, met: bool = False, **args: object) -> TrialResult:
    metrics = {"ttft_p99": ttft, "itl_p99": itl}
    excess = {"ttft_p99": ttft / 0.5 - 1, "itl_p99": itl / 0.05 - 1}
    config = ServingConfig("m", args, {"OMP_NUM_THREADS": "1", "ODD": "a b"})  # type: ignore[arg-type]
    return TrialResult(number, config, repeats=(Repeat(metrics),), metrics=metrics, excess=excess, slos_met=met,
                       label="" if number else "default", ended=1.0, vllm_version="0.26.0")  # fmt: skip


RESULTS = [
    trial(0, 0.3, 0.2),
    trial(1, 0.4, 0.04, met=True, max_num_batched_tokens=256, enable_chunked_prefill=False),
    trial(2, 0.6, 0.02, max_num_batched_tokens=128),
    TrialResult(3, ServingConfig("m"), failure=Failure(FailureKind.OOM, "no memory"), slos_met=False),
]


@pytest.mark.parametrize(("choice", "number"), [("best", 1), ("ttft", 0), ("itl", 2), ("2", 2), ("knee", 1)])
def test_a_trial_is_picked_by_word_or_number(choice: str, number: int) -> None:
    """Best is the recommended one, ttft and itl are the ends of the front."""
    assert export.pick(RESULTS, SPEC, choice).number == number


def test_best_is_the_closest_when_none_met_the_slo() -> None:
    """Smallest worst excess: trial 2 misses by 20 %, trial 0 by 300 %."""
    assert export.pick([RESULTS[0], RESULTS[2]], SPEC, "best").number == 2


@pytest.mark.parametrize(("choice", "message"), [("3", "failed"), ("9", "no such trial"), ("fast", "unknown")])
def test_what_cannot_be_picked_says_why(choice: str, message: str) -> None:
    """A failed trial is no configuration to run."""
    with pytest.raises(SpecError, match=message):
        export.pick(RESULTS, SPEC, choice)


def test_the_yaml_says_where_it_comes_from(tmp_path: Path) -> None:
    """Comments hold study, trial, vLLM, what was measured and how the SLOs stand."""
    limits = [slo.parse("ttft=500ms"), slo.parse("itl=50ms")]
    export.write(RESULTS[2], SPEC, limits, tmp_path, {"Workload": "w, sha256 abc\ninjected: true"})
    text = (tmp_path / "serve.yaml").read_text()

    assert "trial 2 of study s" in text
    assert "vLLM 0.26.0" in text
    assert "# SLO ttft_p99 <= 500 ms: NOT met, 20 % beyond" in text
    assert YAML(typ="safe").load(text) == {"model": "m", "max-num-batched-tokens": 128}


def test_the_environment_and_start_line_work_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sourcing serve.env as the start line does gives the server its variables."""
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS|$ODD|$*"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "be st"
    exported = export.write(RESULTS[1], SPEC, [], out, {})

    said = subprocess.run(["sh", "-c", exported.start_line], capture_output=True, text=True, check=True, timeout=10)

    assert said.stdout.strip() == f"1|a b|serve --config {out / 'serve.yaml'}"
