"""`tune run` on a real vLLM where no latency is looked at: one trial on a newer version, and what is refused."""

import subprocess
from pathlib import Path

import pytest

from tests.live.test_main_job_live import folder, tune  # noqa: F401 (a fixture)
from tests.test_cli import servers_of
from tuner.sinks.runfolder import RunFolder

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_a_newer_vllm_is_probed_and_measured(folder: Path, vllm_next: str) -> None:
    """One live trial on 0.32: the same study, the same workload, another version recorded."""
    words = tune(folder, vllm_next, "--trials", "1", "--name", "next", "--mlflow", "off", "--slo", "ttft=60s")
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)

    (measured,) = (r for r in RunFolder(folder / "runs/next").read_all() if r.is_measured)
    assert done.returncode == 0, done.stderr
    assert str(measured.vllm_version).startswith("0.32")
    assert servers_of(folder) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--set", "engine_args.no_such_flag=1"], 2, "has no such argument"),
        (["--set", "engine_args.scheduling_policy=lifo"], 2, "vLLM 0.26.0 refuses it"),
        (["--set", "model=/no/such/model"], 2, "/no/such/model"),
        (["--set", "engine_args.max_model_len=1024"], 2, "rows are too long"),
        (["--gpus", "0"], 4, "this host has none"),
    ],
)
def test_what_a_real_vllm_refuses_is_one_clear_line(
    folder: Path, vllm: str, words: list[str], code: int, message: str
) -> None:
    """Before any server starts, with the right exit code, and nothing left behind."""
    done = subprocess.run(
        tune(folder, vllm, "--name", "refused", *words),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs" / "refused").exists()
