"""A study killed before a step that reaches the disk is, resumed, the study that was left alone: a sample of all."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", [["--sample", "16"], ["--sample", "6", "--twice"], ["--sample", "5", "--mlflow"]])
def test_a_killed_study_loses_and_doubles_nothing(words: list[str]) -> None:
    """Storage, run folder and MLflow agree, and the trials are those of the undisturbed study."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_points", *words, "--seed", "5"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"RESULT points={words[1]} clean={words[1]}"
