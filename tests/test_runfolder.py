"""The run folder: whole or not at all."""

import math
from pathlib import Path

import pytest

from tuner import spec as specs
from tuner.errors import FailureKind, HostError, SpecError
from tuner.results import Failure, Repeat, TrialResult
from tuner.serving import ServingConfig
from tuner.sinks.runfolder import RunFolder, write_atomically

SPEC = specs.parse("name: s\nmodel: m\nworkload: w\n", "s.yaml")


def test_a_result_reads_back_as_it_was(tmp_path: Path) -> None:
    """Numbers, failure, counters, labels: nothing is lost on disk, durations are milliseconds there."""
    run = RunFolder.create(tmp_path, SPEC)
    result = TrialResult(
        7, ServingConfig("m", {"max_num_seqs": 8}, {"A": "1"}), {"max_num_seqs": 8}, "baseline",
        (Repeat({"ttft_p99": 0.25, "slo_attainment": 0.5}, {"c": 1.0}, ("note",)),), {"ttft_p99": 0.25},
        {"ttft_p99": -0.5}, True, None, {"max_num_seqs": 8}, {"start": 3.0}, None, "0.26.0", 1.0, 2.0,
    )  # fmt: skip
    failed = TrialResult(8, ServingConfig("m"), failure=Failure(FailureKind.OOM, "no memory", ("line",)))
    run.write(result)
    run.write(failed)

    assert run.read_all() == [result, failed]
    assert '"ttft_p99_ms": 250.0' in (tmp_path / "s" / "trials" / "0007" / "result.json").read_text()
    assert "max-num-seqs: 8" in (tmp_path / "s" / "trials" / "0007" / "config.yaml").read_text()


def test_names_that_are_taken_get_a_number(tmp_path: Path) -> None:
    """A second run of a study does not touch the first."""
    assert [RunFolder.create(tmp_path, SPEC).path.name for _ in range(3)] == ["s", "s-2", "s-3"]


def test_no_number_is_written_that_is_none(tmp_path: Path) -> None:
    """Infinity and NaN are refused on the way to disk."""
    run = RunFolder.create(tmp_path, SPEC)
    with pytest.raises(ValueError, match="JSON compliant"):
        run.write(TrialResult(0, ServingConfig("m"), metrics={"ttft_p99": math.inf}))
    assert run.read(0) is None


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    """Half a file is an error that says which and what to do, not a trial without numbers."""
    run = RunFolder.create(tmp_path, SPEC)
    (run.directory(0) / "result.json").write_text('{"number": 0')
    with pytest.raises(SpecError, match="damaged"):
        run.read_all()


def test_what_is_no_run_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lists the runs there are, beside it and in the present folder's `runs`."""
    monkeypatch.chdir(tmp_path)
    RunFolder.create(tmp_path / "elsewhere", SPEC)
    RunFolder.create(Path("runs"), SPEC)
    with pytest.raises(SpecError, match="not a run folder") as caught:
        RunFolder.open(tmp_path / "elsewhere" / "other")
    assert caught.value.hint == f"there are: {tmp_path / 'elsewhere' / 's'}, runs/s"


def test_a_folder_that_cannot_be_written_is_a_host_error(tmp_path: Path) -> None:
    """A file in the way stands for a full or read-only disk (root ignores permissions)."""
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "x", "text")
