"""One fault of each family, at a seeded moment of a small study: `python -m tests.faults` injects many."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.faults import checks
from tests.faults.__main__ import inject
from tests.faults.checks import Verdict
from tests.faults.kinds import KINDS, missing
from tests.faults.project import SIGN, Project

pytestmark = pytest.mark.once
CHOSEN = (
    "kill-tune", "hangs-at-stop", "disk-full-at-start", "mlflow-500", "storage-lost", "clock-stepped", "two-resumes",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of MLflow's and Optuna's own libraries
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_is_survived(name: str, tmp_path: Path) -> None:
    """Nothing is left, no finished trial is lost, all records agree, and the words say what to do."""
    kind = next(kind for kind in KINDS if kind.name == name)
    if lacks := missing(kind):
        pytest.skip(lacks)
    verdict = inject(kind, 1, tmp_path, trials=2)

    assert verdict is not None, "the fault did not hit"
    assert verdict.complaints() == []


def test_every_family_is_represented() -> None:
    """A new family of faults gets a case here."""
    assert {kind.family for kind in KINDS} == {kind.family for kind in KINDS if kind.name in CHOSEN}


def test_the_harness_sees_a_lost_trial(tmp_path: Path) -> None:
    """A result that was there and is there no more is lost."""
    project, verdict = Project(tmp_path, random.Random(0)), Verdict("none", 0)
    project.finished[0] = "{}"
    checks.nothing_lost(project, verdict)

    assert verdict.lost == {0}
    assert not verdict.survived


def test_the_harness_sees_what_is_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that tune started and that lives on is a leak, and is ended."""
    monkeypatch.setattr(checks, "LEFT_AFTER", 0.2)
    project, verdict = Project(tmp_path, random.Random(0)), Verdict("none", 0)
    with subprocess.Popen(["sleep", "60"], env=os.environ | {SIGN: project.sign}) as process:
        checks.nothing_left(project, verdict)

    assert verdict.leaked == [f"process {process.pid} (sleep)"]
    assert process.returncode < 0
