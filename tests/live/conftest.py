"""What the live tests share: where the real vLLM is, and a cache of compiled code."""

import os
import shutil
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def _vllm() -> str | None:
    beside = Path(sys.executable).parent / "vllm"
    return os.environ.get("TUNE_TEST_VLLM") or (str(beside) if beside.exists() else shutil.which("vllm"))


@pytest.fixture(scope="session")
def vllm() -> str:
    """The `vllm` executable the tests run against."""
    found = _vllm()
    if found is None:
        pytest.skip("no vllm beside this Python, on PATH or in TUNE_TEST_VLLM")
    return found


@pytest.fixture(scope="session")
def vllm_next() -> str:
    """A second, newer `vllm`: bootstrap.py test installs it."""
    found = os.environ.get("TUNE_TEST_VLLM_NEXT")
    if found is None:
        pytest.skip("TUNE_TEST_VLLM_NEXT names no second vLLM (python3 bootstrap.py test sets it)")
    return found
