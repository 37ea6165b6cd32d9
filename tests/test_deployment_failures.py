"""Why a server ended is read from its log; the excerpts in data/logs/ are what real servers wrote."""

from pathlib import Path

import pytest

from tuner.deployment import failures
from tuner.errors import FailureKind

LOGS = Path(__file__).parent / "data" / "logs"

REAL = [
    # excerpt, exit code, kind, words of the message, words of the hint
    ("unknown_flag-0.26", 2, "bad_argument", "unrecognized arguments: --no-such-flag", None),
    ("not_int-0.26", 2, "bad_argument", "argument --max-num-seqs: invalid int value: 'many'", None),
    (
        "chunked_off-0.26",
        1,
        "bad_argument",
        "SchedulerConfig: max_num_batched_tokens (2048) is smaller",
        None,
    ),
    (
        "chunked_off-0.32",
        1,
        "bad_argument",
        "SchedulerConfig: max_num_batched_tokens (2048) is smaller",
        None,
    ),
    ("partial-0.26", 1, "bad_argument", "Concurrent Partial Prefill is not supported", None),
    ("no_model-0.26", 1, "bad_argument", "/no/such/model", "give a folder"),
    ("no_model-0.32", 1, "bad_argument", "/no/such/model", "give a folder"),
    ("hub_model-0.26", 1, "bad_argument", "outgoing traffic has been disabled", "HF_HUB_OFFLINE"),
    ("kv_small-0.26", 1, "oom", "To serve at least one request", "max_model_len"),
    ("kv_small-0.32", 1, "oom", "To serve at least one request", "max_model_len"),
    ("kv_space-0.26", 1, "oom", "less than requested memory for kv (64.0 GiB)", "VLLM_CPU_KVCACHE_SPACE"),
    ("kv_space-0.32", 1, "oom", "less than requested memory for kv (64.0 GiB)", "VLLM_CPU_KVCACHE_SPACE"),
    ("port-0.26", 1, "port", "Address already in use", None),
    ("port-0.32", 1, "port", "Address already in use", None),
    ("fp8_on_cpu-0.26", 1, "crash", "dynamic_scaled_fp8_quant", None),
]


@pytest.mark.parametrize(("name", "code", "kind", "says", "hint"), REAL, ids=[row[0] for row in REAL])
def test_real_logs_are_told_apart(name: str, code: int, kind: str, says: str, hint: str | None) -> None:
    """Kind, cause and hint of what real servers of two versions wrote."""
    why = failures.diagnose((LOGS / f"{name}.log").read_text(), code)

    assert why.kind == kind
    assert says in why.message
    assert says.removeprefix("SchedulerConfig: ") in " ".join(why.log)
    assert (hint is None) == (why.hint is None)
    assert (hint or "") in (why.hint or "")


# What vLLM and torch write on GPUs, by their source: there is no GPU where these tests are made.
ON_GPUS = [
    "(EngineCore_DP0 pid=7) ERROR 11-29 20:41:34 [core.py:1330] torch.OutOfMemoryError: CUDA out of memory.",
    "(EngineCore pid=7) ValueError: No available memory for the cache blocks. Try increasing",
    "(Worker_TP0 pid=7) ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization",
    "(EngineCore pid=7) RuntimeError: CUDA out of memory occurred when warming up sampler",
    "(APIServer pid=3) RuntimeError: Engine core initialization failed. Failed core proc(s): {'Engine': -9}",
]


@pytest.mark.parametrize("line", ON_GPUS)
def test_running_out_of_gpu_memory(line: str) -> None:
    """Every way to say it is kind oom with a way out."""
    last = "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above."
    why = failures.diagnose(f"INFO fine\n{line}\n{last}\n", 1)

    assert why.kind == FailureKind.OOM
    assert why.hint is not None


def test_killed_without_a_word_is_memory() -> None:
    """The kernel's out-of-memory killer leaves no line in the log."""
    why = failures.diagnose("INFO loading\n", -9)

    assert (why.kind, why.log) == (FailureKind.OOM, ("INFO loading",))
    assert "SIGKILL" in why.message


def test_an_engine_core_that_was_killed_is_named() -> None:
    """The API server outlives its engine for a moment and says no more than that it is gone."""
    log = "(APIServer pid=3) WARNING 11-29 20:41:34 [core_client.py:703] MPClient: engine core exited unexpectedly\n"
    why = failures.diagnose(log, 0, otherwise=FailureKind.DIED)

    assert why.kind is FailureKind.DIED
    assert "engine core was gone" in why.message
    assert why.hint is not None


def test_the_workers_error_goes_before_the_last_one() -> None:
    """The cause is the deepest process's own line, without prefix and colour."""
    log = (
        "(EngineCore pid=1) RuntimeError: Worker failed with error 'no good'\n"
        "\x1b[0;36m(Worker_TP1 pid=2)\x1b[0;0m ERROR 11-29 20:41:34 [w.py:9] KeyError: 'no good'\n"
        "(APIServer pid=3) RuntimeError: something later\n"
    )

    assert failures.diagnose(log, 1).log == ("KeyError: 'no good'",)


def test_a_warning_that_mentions_an_error_is_none() -> None:
    """Only a line that is an error counts; here nothing tells, so the last lines are shown."""
    log = "WARNING 11-29 20:41:34 [s.py:1] This can cause errors like `OSError: Too many files`\nbye\n"
    why = failures.diagnose(log, 3)

    assert (why.kind, why.message, why.log[-1]) == (FailureKind.CRASH, "ended with exit code 3", "bye")


def test_a_log_that_is_not_there_tells_nothing(tmp_path: Path) -> None:
    """A missing file reads as empty."""
    assert failures.read_tail(tmp_path / "no.log") == ""
    assert failures.diagnose("", 1).log == ()


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    """A server that logged for hours costs no memory."""
    path = tmp_path / "long.log"
    path.write_text("x" * 1000 + "end")

    assert failures.read_tail(path, size=3) == "end"
