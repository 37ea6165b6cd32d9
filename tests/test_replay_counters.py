"""The server's own figures beside the client's."""

from dataclasses import replace

import numpy as np
import pytest
from replay_data import Row, records

from tuner.records import Records
from tuner.replay.counters import compare, parse_counters


def test_counters_are_summed_over_labels() -> None:
    """Counters, sums and counts are read; gauges, buckets and creation times are not."""
    text = (
        "# HELP vllm:prompt_tokens_total x\n"
        'vllm:prompt_tokens_total{engine="0"} 5.0\n'
        'vllm:prompt_tokens_total{engine="1",model_name="a b}"} 2e+00\n'
        "vllm:prompt_tokens_created 1.7e+09\nvllm:num_requests_running 3.0\n"
        'vllm:ttft_seconds_bucket{le="0.1"} 4\nvllm:ttft_seconds_sum{engine="0"} 0.5\n'
    )

    assert list(parse_counters(text)) == [
        ("vllm:prompt_tokens_total", 5.0),
        ("vllm:prompt_tokens_total", 2.0),
        ("vllm:ttft_seconds_sum", 0.5),
    ]


def test_values_that_are_no_numbers_are_left_out() -> None:
    """A server's odd line does not take the others with it."""
    assert list(parse_counters("a_total abc\nb_total NaN\nc_sum +Inf\nd_total 3\n")) == [("d_total", 3.0)]


def both() -> Records:
    """Two requests: TTFT 0.1 and 0.3 s, then gaps of 0.05 s; the last token 0.2 s after the first."""
    ends = ([0.1, 0.15, 0.2, 0.25, 0.3], [1.3, 1.35, 1.4, 1.45, 1.5])
    return records(*(Row(chunks, due=float(i)) for i, chunks in enumerate(ends)))


def counted(ttft: float, itl: float, e2el: float, n: int = 2) -> dict[str, float]:
    """Return vLLM's sums and counts."""
    sums = {"time_to_first_token": (ttft, n), "inter_token_latency": (itl, 4 * n), "e2e_request_latency": (e2el, n)}
    return {f"vllm:{k}_seconds_{part}": pair[i] for k, pair in sums.items() for i, part in enumerate(("sum", "count"))}


def test_means_that_agree_are_kept_beside_the_clients() -> None:
    """Sums over the window by counts: what came before it is taken off."""
    before, after = counted(10, 1, 20, n=5), counted(10.396, 1.4, 20.796, n=7)
    found = compare(both(), before, after)

    assert found.notes == ()
    assert found.numbers == pytest.approx(
        {"server_ttft_mean": 0.198, "server_itl_mean": 0.05, "server_e2el_mean": 0.398}
    )


def test_a_disagreement_beyond_the_margin_is_shown() -> None:
    """5 ms and 5 % for the TTFT, 1 ms and 5 % for the ITL."""
    assert compare(both(), {}, counted(0.372, 0.4, 0.8)).notes == ()
    found = compare(both(), {}, counted(0.360, 0.3, 0.8))

    assert [note.split(",")[0] for note in found.notes] == [
        "ttft mean is 200 ms here and 180 ms by the server's own count",
        "itl mean is 50.0 ms here and 37.5 ms by the server's own count",
    ]


def test_requests_of_others_spoil_the_comparison() -> None:
    """Three were answered, two were ours: nothing is compared, and the reader is told."""
    found = compare(both(), {}, counted(0.4, 0.4, 0.8, n=3))

    assert found.numbers == {}
    assert found.notes[0].startswith("the server answered 3 requests, 1 more than this replay sent")


def test_a_server_without_counters_is_not_compared() -> None:
    """Absent, not 0."""
    assert compare(both(), {}, {}).numbers == {}


def test_per_request_metrics_are_summed_up() -> None:
    """Queue and prefill by the server; what is left of the TTFT is the way to it and the client."""
    seen = replace(both(), server_queue=np.array([0.01, 0.03]), server_prefill=np.array([0.08, 0.26]),
                   server_itl=np.array([0.05, np.nan]))  # fmt: skip
    found = compare(seen, {}, {}).numbers

    assert found["server_queue_p50"] == pytest.approx(0.02)
    assert found["server_prefill_mean"] == pytest.approx(0.17)
    assert found["server_itl_p50"] == 0.05
    assert found["client_over_server_ttft_p50"] == pytest.approx(0.01)
