"""The benchmark of the recorder's tap: it runs from end to end, and its differences are of what they say."""

import json
import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.record import __main__ as benchmark
from benchmarks.record.measure import Line, Rounds, request
from benchmarks.replay.load import Load
from benchmarks.replay.measure import serving
from benchmarks.replay.server import HEAD, MODEL

pytestmark = [pytest.mark.timing, pytest.mark.once]


def test_it_measures_and_says_so_in_its_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few rounds: a table, where what ran, numbers in the last line and every row in the file."""
    out = tmp_path / "rows.json"
    asked = ["--rounds", "6", "--streams", "4", "--pairs", "1", "--seconds", "1", "--vllm", "", "--json", str(out)]

    assert benchmark.main(asked) == 0

    lines = capsys.readouterr().out.splitlines()
    name, *said = lines[-1].split()
    names = ["added_ttft_p50_ms", "added_ttft_p99_ms", "relay_ttft_p50_ms"]
    assert (name, [word.partition("=")[0] for word in said]) == ("RESULT", names)
    assert all(np.isfinite(float(word.partition("=")[2])) for word in said)
    one, many = json.loads(out.read_text())["rows"]
    assert (one["server"], one["rounds"], many["server"]) == ("known timing", 6, "4 streams")
    assert 20 < one["direct_ttft_p50"] < 40
    assert many["us_per_token"] > 0


def test_the_head_of_an_answer_comes_before_the_first_token() -> None:
    """As vLLM sends it: alone, and long before."""
    timing = Load("", (0.0,), output_tokens=2, ttft=0.5, itl=0.005)
    with (
        serving(timing, min(os.sched_getaffinity(0)), head_at_once=True) as url,
        closing(Line(url, MODEL)) as line,
    ):
        began = time.perf_counter()
        line.sock.sendall(request(MODEL, [7, 8], 2))
        head, at = line.sock.recv(1 << 16), time.perf_counter() - began

    assert head == HEAD
    assert at < 0.4


def test_the_difference_is_taken_round_by_round() -> None:
    """A server that drifts is in all of a round; a tap that adds 1 ms to each shows as 1 ms."""
    drift = np.linspace(0.02, 0.5, 101)
    row = benchmark.row("x", Rounds(drift, drift + 0.0004, drift + 0.001))

    assert (row["ttft_p50"], row["ttft_p99"], row["relay_ttft_p50"]) == pytest.approx((1.0, 1.0, 0.4))
    assert row["direct_ttft_p50"] == pytest.approx(260)
