"""What a run began with: on disk without a password, read back as it was, refused when it is something else."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tuner import origin
from tuner import spec as specs
from tuner.errors import SpecError
from tuner.origin import Address, Origin
from tuner.serving import ServingConfig
from tuner.sinks.runfolder import RunFolder, write_json
from tuner.workload import Request, Workload

SPEC = specs.parse("name: s\nmodel: m\nworkload: w\n", "s.yaml")
ROWS = Workload("w", (Request(0.0, 10, 5),), "0" * 64, history=(Request(0.0, 7, 1),))


@pytest.mark.parametrize(
    ("address", "kept", "lacks"),
    [
        (None, None, False),
        ("off", "off", False),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000", False),
        ("http://me:canary@h:5000/x", "http://h:5000/x", True),
        ("https://canary@h", "https://h", True),
        ("postgresql://me@h/db", "postgresql://me@h/db", False),
        ("postgresql+psycopg://me:c@n/ary@h/db", "postgresql+psycopg://h/db", True),
        ("mysql://h/db?password=canary&charset=x", "mysql://h/db?password=***&charset=x", True),
        ("postgresql://u:can ary@h/db", "postgresql://h/db", True),
        ("postgresql://u%3Acanary@h/db", "postgresql://h/db", True),
        ("postgresql://me@h/db?sslmode=require", "postgresql://me@h/db?sslmode=require", False),
        ("mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3Dcanary", "mssql+pyodbc:///?odbc_connect=***", True),
        ("redis://:canary@[::1]:6379/0", "redis://[::1]:6379/0", True),
        ("sqlite:////a/b.db", "sqlite:////a/b.db", False),
        ("grpc://h:13000", "grpc://h:13000", False),
    ],
)  # fmt: skip
def test_an_address_is_kept_without_its_password(address: str | None, kept: str | None, *, lacks: bool) -> None:
    """What is written down can be used again, or says that something is missing."""
    assert Address.of(address) == Address(kept, lacks_password=lacks)


def test_a_relative_database_is_kept_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may go on from another folder."""
    monkeypatch.chdir(tmp_path)

    assert Address.of("sqlite:///x.db").text == f"sqlite:///{tmp_path}/x.db"


def begun(folder: RunFolder) -> Origin:
    return Origin(
        uid=origin.new_uid(), study_name="s", study=origin.digest_of_study(SPEC), source="s.yaml",
        baseline=ServingConfig("m", {"max_num_seqs": 8}), workload=origin.facts_of(ROWS),
        rows=folder.keep_rows(ROWS), vllm_version="0.26.0", host={"max_num_seqs": 128},
        storage=Address("postgresql://h/db", lacks_password=True), mlflow=Address("off"),
    )  # fmt: skip


def test_it_reads_back_as_it_was(tmp_path: Path) -> None:
    """Every field survives the disk, the history of the rows too."""
    folder = RunFolder.create(tmp_path, SPEC)
    made = begun(folder)
    write_json(folder.path / "plan.json", origin.to_json(made))

    assert folder.origin == made
    assert folder.digest_of_rows() == made.rows
    assert (folder.path / "workload" / "history.jsonl").is_file()


@pytest.mark.parametrize(
    "change",
    [{"uid": "' or '1'='1"}, {"uid": 7}, {"storage": "x"}, {"baseline": []}, {"workload": None}, {"workload": {}},
     {"mlflow": {"text": 5, "lacks_password": False}}],
)  # fmt: skip
def test_what_is_something_else_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """A plan.json that was written by somebody else ends in one clear error."""
    folder = RunFolder.create(tmp_path, SPEC)
    data = origin.to_json(begun(folder)) | change
    (folder.path / "plan.json").write_text(json.dumps(data))

    with pytest.raises(SpecError, match=r"plan.json: cannot be read"):
        _ = folder.origin


def test_a_budget_may_be_extended_and_nothing_else(tmp_path: Path) -> None:
    """The study's identity leaves its budget out."""
    longer = specs.parse("name: s\nmodel: m\nworkload: w\nbudget: {trials: 99, time: 3h}\n", "s.yaml")
    other = specs.parse("name: s\nmodel: other\nworkload: w\n", "s.yaml")

    assert origin.digest_of_study(longer) == origin.digest_of_study(SPEC) != origin.digest_of_study(other)


def test_runs_that_begin_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    """Eight at the same moment: eight folders."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunFolder.create(tmp_path / "runs", SPEC).path.name, range(8)))

    assert sorted(made) == sorted(["s", *(f"s-{n}" for n in range(2, 9))])
