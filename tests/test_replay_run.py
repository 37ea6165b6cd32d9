"""Replays against a fake server whose timing and faults are known."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_data import VOCAB_SIZE, errors, evenly, free_port, play, serving, workload

from tuner import metrics
from tuner.errors import FailureKind, InvalidReplay, ServerDied
from tuner.replay import run
from tuner.replay.client import allow_open_files
from tuner.replay.gate import judge
from tuner.workload import Request, Workload

# --- What a replay sees -----------------------------------------------------------------------------------


@pytest.mark.timing
def test_a_replay_sends_every_row_and_notes_every_token(tmp_path: Path) -> None:
    """Lengths as asked, one stamp a token, within a few ms of what the server says it wrote."""
    with serving(tmp_path) as server:
        replay = play(server, evenly(30, 0.02))
        log = server.log()

    got = replay.records
    assert set(errors(replay)) == {""}
    assert (got.prompt_tokens == 40).all()
    assert (got.completion_tokens == 5).all()
    assert len(got.chunk_time) == 150
    assert replay.window == pytest.approx(29 * 0.02)
    written = np.array([at for entry in log for at, _ in entry["writes"]])
    first = written - got.chunk_time  # both clocks are the machine's monotonic one; the anchor is the difference
    assert np.median(np.abs(first - np.median(first))) < 0.005


def test_server_counters_are_read_around_the_window(tmp_path: Path) -> None:
    """The difference is this replay's tokens, warm-up excluded."""
    with serving(tmp_path) as server:
        run.warm_up(server.url, "m", evenly(5, 0.05), duration=0.2, seed=1, vocab_size=VOCAB_SIZE)
        replay = play(server, evenly(4, 0.01))

    before, after = replay.counters_before, replay.counters_after
    assert before["vllm:generation_tokens_total"] >= 20
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 20
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 160


@pytest.mark.timeout(60)
def test_a_warm_up_does_not_wait_for_ever(tmp_path: Path) -> None:
    """A server that answers nothing is waited for as long as it is told."""
    with serving(tmp_path, {"silence": 1}) as server:
        run.warm_up(
            server.url, "m", evenly(5, 0.05), duration=0.2, seed=1, vocab_size=VOCAB_SIZE, drain_timeout=0.5
        )  # fmt: skip


def test_repeats_without_block_ids_find_nothing_in_the_cache(tmp_path: Path) -> None:
    """Two repeats of one trace, and a warm-up before: no hit (report 6)."""
    with serving(tmp_path) as server:
        trace = evenly(5, 0.01, input_len=200)
        run.warm_up(server.url, "m", trace, duration=0.1, seed=1, vocab_size=VOCAB_SIZE)
        play(server, trace, salt="repeat 1")
        replay = play(server, trace, salt="repeat 2")

    assert replay.counters_after["vllm:prefix_cache_queries_total"] > 2000
    assert replay.counters_after["vllm:prefix_cache_hits_total"] == 0


def test_shared_blocks_hit_and_a_warmed_history_hits_more(tmp_path: Path) -> None:
    """Rows with the same leading ids share a cache; what the history leaves there is hit by the first row."""
    rows = [Request(i * 0.1, 160, 3, block_ids=(7, 8, 10 + i), block_size=64) for i in range(4)]
    history = [Request(5.0, 128, 3, block_ids=(7, 8), block_size=64)]
    with serving(tmp_path) as server:
        play(server, workload(*rows), salt="cold")
        warmed = run.warm_prefix(server.url, "m", workload(*rows, history=history), salt="warm", vocab_size=VOCAB_SIZE)
        play(server, workload(*rows), salt="warm")
        cached = [entry["cached"] for entry in server.log()]

    assert [(r.input_len, r.output_len) for r in warmed.rows] == [(128, 1)]
    assert cached[:4] == [0, 128, 128, 128]
    assert cached[5:] == [128] * 4


def test_a_silent_server_leaves_lengths_unchecked(tmp_path: Path) -> None:
    """Without usage per chunk the totals come from the last event, and chunks that match it are tokens."""
    with serving(tmp_path, {"no_usage": True}) as server:
        replay = play(server, evenly(3, 0.02))

    assert replay.records.completion_tokens.tolist() == [5.0] * 3
    assert "itl_p50" in metrics.summarise(replay.records, window=replay.window)


# --- Failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ({"http_status": {"every": 3, "status": 503}}, "http_503"),
        ({"in_band_error": {"every": 3, "after": 2}}, "in_band_error"),
        ({"reset": {"every": 3, "after": 2}}, "reset"),
        ({"early_close": {"every": 3, "after": 2}}, "reset"),
        ({"short_output": {"every": 3, "tokens": 2}}, "short"),
        ({"silence": {"every": 3}}, "timeout"),
    ],
)
def test_every_third_request_fails_in_its_own_way(tmp_path: Path, behaviour: dict[str, Any], error: str) -> None:
    """Kinds are told apart, the others complete, and attainment pays."""
    with serving(tmp_path, behaviour) as server:
        replay = play(server, evenly(9, 0.05), drain_timeout=1.0)

    assert errors(replay) == ["", "", error] * 3
    assert any(error in note for note in replay.notes)
    values = metrics.summarise(replay.records, window=replay.window)
    assert values[f"failed.{error}"] == 3
    assert "ttft_p90" not in values


def test_a_stream_without_done_is_not_complete(tmp_path: Path) -> None:
    """All tokens came, but nobody said that it was over."""
    with serving(tmp_path, {"no_done": True}) as server:
        assert errors(play(server, evenly(2, 0.05))) == ["no_done"] * 2


def test_one_request_may_have_its_own_deadline(tmp_path: Path) -> None:
    """A request past its limit is a timeout, at the limit and not at the drain's end."""
    with serving(tmp_path, {"silence": 1}) as server:
        replay = play(server, evenly(2, 0.05), request_timeout=0.2)

    assert errors(replay) == ["timeout"] * 2
    assert (replay.records.ended - replay.records.due).max() < 3


def test_nobody_there_is_refused() -> None:
    """Nothing listens: every request is refused, nothing is raised but the verdict."""
    replay = play(f"http://127.0.0.1:{free_port()}", evenly(3, 0.01))

    assert errors(replay) == ["refused"] * 3
    assert np.isnan(replay.records.sent).all()
    with pytest.raises(InvalidReplay, match="none of 3 requests completed: 3 refused") as caught:
        judge(replay)
    assert caught.value.kind is FailureKind.NOTHING_COMPLETED


def test_the_wrong_model_is_in_the_hint(tmp_path: Path) -> None:
    """What the server said is what the user reads."""
    with serving(tmp_path) as server:
        replay = run.replay(server.url, "other", evenly(2, 0.01), salt="a", vocab_size=VOCAB_SIZE)

    with pytest.raises(InvalidReplay) as caught:
        judge(replay)
    assert "The model `other` does not exist" in (caught.value.hint or "")


@pytest.mark.timing
def test_a_dead_server_ends_the_replay(tmp_path: Path) -> None:
    """ServerDied comes through within a moment, long before the schedule ends."""
    with serving(tmp_path, {"crash_after": 3}) as server:

        def check_alive() -> None:
            if server.process.poll() is not None:
                raise ServerDied(FailureKind.DIED, "it died")

        started = time.monotonic()
        with pytest.raises(ServerDied):
            play(server, evenly(100, 0.1), check_alive=check_alive)

    assert time.monotonic() - started < 5


def test_a_key_from_the_environment_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server behind a key answers when VLLM_API_KEY is set, and 401 otherwise."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(tmp_path, {}, "--api-key", "secret") as server:
        assert errors(play(server, evenly(1, 0.1))) == ["http_401"]
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        assert errors(play(server, evenly(1, 0.1))) == [""]


def test_proxies_of_the_environment_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Localhost through a proxy would be another server."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with serving(tmp_path) as server:
        assert errors(play(f"{server.url}/v1/", evenly(1, 0.1))) == [""]


def test_progress_is_told(tmp_path: Path) -> None:
    """The last word is that all have ended."""
    told: list[tuple[int, int]] = []
    with serving(tmp_path) as server:
        play(server, evenly(15, 0.05), on_progress=lambda ended, offered: told.append((ended, offered)))

    assert told[-1] == (15, 15)
    assert len(told) >= 2


# --- The verdict ------------------------------------------------------------------------------------------


def test_other_prompt_lengths_are_no_measurement(tmp_path: Path) -> None:
    """usage.prompt_tokens must be the recorded length, for all rows (report 5)."""
    with serving(tmp_path, {"prompt_drift": 3}) as server:
        replay = play(server, evenly(2, 0.05))

    with pytest.raises(InvalidReplay, match=r"2 of 2 .* another prompt length .* 43 tokens, not 40") as caught:
        judge(replay)
    assert caught.value.kind is FailureKind.LENGTHS_OFF


def test_the_limit_of_open_files_is_raised_where_it_may_be() -> None:
    """What is allowed already is left alone; what nobody allows is said."""
    assert allow_open_files(1)
    assert not allow_open_files(2**62) or allow_open_files(10)


# --- The fake server --------------------------------------------------------------------------------------


def stall_and_ttft(directory: Path, trace: Workload, *flags: str) -> tuple[float, float]:
    directory.mkdir()
    with serving(directory, {"step": 0.004, "prefill_token": 3e-5}, *flags) as server:
        replay = play(server, trace)
    values = metrics.summarise(replay.records, window=replay.window)
    return values["max_stall_p75.short"], values["ttft_p50.long"]


@pytest.mark.timing
def test_the_fake_server_trades_ttft_for_itl(tmp_path: Path) -> None:
    """A lower budget and a threshold of the same size smooth the stream and delay long prompts."""
    short = [Request(i * 0.025, 30, 40) for i in range(40)]
    long = [Request(0.05 + i * 0.2, 1800, 2) for i in range(5)]
    trace = workload(*sorted([*short, *long], key=lambda row: row.arrival))
    whole = stall_and_ttft(tmp_path / "a", trace, "--max-num-batched-tokens", "2048")
    pieces = stall_and_ttft(tmp_path / "b", trace, "--max-num-batched-tokens", "128")
    capped = stall_and_ttft(tmp_path / "c", trace, "--long-prefill-token-threshold", "100")

    assert pieces[0] < whole[0] / 2
    assert capped[0] < whole[0] / 2
    assert pieces[1] > whole[1] * 1.2
    assert capped[1] > whole[1] * 1.2


@pytest.mark.timing
def test_sigterm_ends_a_replay_wherever_it_comes(tmp_path: Path) -> None:
    """Also inside a transport's callback, where an exception would be lost: ten replays, ten interrupts."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with serving(tmp_path) as server:
            for i in range(10):
                threading.Timer(0.2 + i / 50, os.kill, (os.getpid(), signal.SIGTERM)).start()
                with pytest.raises(KeyboardInterrupt):
                    play(server, evenly(4000, 0.002), salt=str(i))
        assert signal.getsignal(signal.SIGTERM) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)
