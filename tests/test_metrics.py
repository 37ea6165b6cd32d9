"""Metrics against numpy, and cases small enough for the head."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_data import Row, failed, records, steady

from tuner import metrics, slo
from tuner.metrics import Sample, highest_estimable, is_good, summarise, warnings, why_absent
from tuner.records import Records
from tuner.slo import Slo


def good(seen: Records, slos: list[Slo]) -> list[bool]:
    passed = is_good(seen, slos)
    assert passed is not None
    return [bool(one) for one in passed]


def parse(*texts: str) -> list[Slo]:
    return [slo.parse(text) for text in texts]


# --- Definitions ------------------------------------------------------------------------------------------


def test_e2el_counts_from_the_send() -> None:
    """End-to-end latency is last token minus actual send."""
    assert summarise(records(Row([6.0, 8.0], sent=5.0)), window=1)["e2el_p50"] == 3.0


def test_a_single_token_has_ttft_only() -> None:
    """One token: no ITL and no TPOT, and nothing that stands in for them."""
    values = summarise(records(Row([1.0])), window=1)

    assert "ttft_p50" in values
    assert not [key for key in values if key.startswith(("itl", "tpot", "icl", "max_stall"))]


def test_itl_is_pooled_over_requests() -> None:
    """A stall in one request shows in the pooled tail and leaves the median alone."""
    values = summarise(records(Row([1, 2, 3]), Row([1, 2, 9])), window=1)

    assert {"itl_p50": 1, "itl_max": 7}.items() <= values.items()


def test_the_first_gap_is_shown_apart() -> None:
    """Gap 1 to 2, where a KV transfer hides from a pooled p99."""
    values = summarise(records(Row([1.0, 1.5, *np.arange(1.51, 3, 0.01)])), window=1)

    assert values["itl_first_gap_p50"] == pytest.approx(0.5)
    assert values["itl_p95"] == pytest.approx(0.01)


def test_classes_split_by_prompt_length() -> None:
    """1,023 tokens are short, 1,024 are long; each class has its own keys."""
    values = summarise(records(Row([1.0], input_len=1023), Row([3.0], input_len=1024)), window=1)

    assert (values["ttft_p50"], values["ttft_p50.short"], values["ttft_p50.long"]) == (2.0, 1.0, 3.0)


def test_rates_count_completed_requests_over_the_window() -> None:
    """Throughput is per second of the schedule, however long the tail took."""
    values = summarise(records(steady(10), steady(10, due=50.0), failed()), window=10)

    assert values["request_throughput"] == 0.2
    assert values["output_throughput"] == 2.0
    assert values["total_token_throughput"] == 4.0


# --- Unknown tokens ---------------------------------------------------------------------------------------


def test_unknown_tokens_make_no_itl() -> None:
    """Chunks that are not tokens, by a server that does not say how many: ICL, no ITL, and the reason."""
    seen = records(Row([1.0, 1.1], tokens=[np.nan, np.nan], output_len=8, usage=False))
    values = summarise(seen, window=1)

    assert "icl_p50" in values
    assert not {"itl_p50", "tpot_p50"} & set(values)
    assert "did not say how many tokens" in why_absent(seen)["itl"]


def test_as_many_chunks_as_tokens_are_tokens() -> None:
    """A silent server whose chunks are as many as the tokens sends one a chunk."""
    seen = records(Row([1.0, 1.1, 1.2], tokens=[np.nan] * 3, output_len=3, usage=False))

    assert summarise(seen, window=1)["itl_p50"] == pytest.approx(0.1)


# --- Failures ---------------------------------------------------------------------------------------------


def test_failures_reach_gaps_by_the_tokens_they_owe() -> None:
    """A failed request owes 10 gaps of 1,000: the pooled p99 touches them, the p95 does not."""
    seen = records(*[steady(11)] * 99, failed(11))
    values = summarise(seen, window=1)

    assert "itl_p99" in summarise(records(*[steady(11)] * 999, failed(11)), window=1)
    assert "itl_p99" not in values
    assert values["itl_p95"] == pytest.approx(0.01)
    words = "10 of 1000 gaps are owed by failed requests: percentiles above p98 are absent"
    assert why_absent(seen)["itl"] == words


def test_without_a_success_there_is_no_percentile() -> None:
    """Nothing completed: no latency at all, and never a zero."""
    seen = records(failed(), failed())
    values = summarise(seen, window=1, slos=parse("ttft=1s"))

    assert not [key for key in values if key.startswith(metrics.LATENCIES)]
    assert values["slo_attainment"] == 0
    assert why_absent(seen)["ttft"] == "none of 2 requests completed"


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=60),
    st.integers(0, 10),
    st.sampled_from(["p1", "p50", "p75", "p90", "p95", "p99", "p99_9"]),
)
def test_percentiles_are_numpys_with_failures_as_infinity(values: list[float], missing: int, name: str) -> None:
    """Present exactly when numpy's two neighbours are finite, and then the same number."""
    q = metrics.percentile_of(name)
    everything = np.sort([*values, *[np.inf] * missing])
    upper = np.percentile(everything, q, method="higher")
    got = Sample(np.array(values), missing).statistic(name)

    if np.isinf(upper):
        assert got is None
    else:
        # Beside an infinity numpy's own interpolation gives nan even where its weight is zero.
        assert got == np.percentile(np.where(np.isinf(everything), upper, everything), q)


@settings(deadline=None)
@given(st.data())
def test_attainment_never_rises_when_a_success_becomes_a_failure(data: st.DataObject) -> None:
    """Failing a request on purpose cannot pay."""
    firsts = data.draw(st.lists(st.floats(0.01, 2), min_size=1, max_size=12))
    victim = data.draw(st.integers(0, len(firsts) - 1))
    rows = [steady(first=first) for first in firsts]
    limits = parse("ttft=1s", "itl=1ms" if data.draw(st.booleans()) else "itl=20ms")
    before = summarise(records(*rows), window=1, slos=limits)["slo_attainment"]
    rows[victim] = failed()

    assert summarise(records(*rows), window=1, slos=limits)["slo_attainment"] <= before


# --- Attainment -------------------------------------------------------------------------------------------


def test_a_request_is_tested_by_its_own_values() -> None:
    """TTFT by its value whatever the statistic, ITL by the same statistic of its own gaps."""
    calm, stalls = steady(), Row([0.5, 0.51, 0.52, 3.0])
    seen = records(calm, stalls, steady(first=2.0))

    assert good(seen, parse("ttft_p50=1s")) == [True, True, False]
    assert good(seen, parse("itl_p99=50ms")) == [True, False, True]
    assert good(seen, parse("itl_p50=50ms")) == [True, True, True]
    assert good(seen, parse("max_stall=1s", "e2el=1s")) == [True, False, False]


def test_a_request_without_a_gap_meets_the_itl() -> None:
    """A single token has no gap that could be too long."""
    assert good(records(Row([0.5])), parse("itl=1ms", "tpot=1ms")) == [True]


def test_an_slo_of_a_class_tests_its_requests_only() -> None:
    """A slow long prompt does not fail the short ones' SLO."""
    seen = records(steady(first=2.0, input_len=2000), steady(first=2.0, input_len=20))

    assert good(seen, parse("ttft_p90.short=1s")) == [True, False]


def test_a_limit_is_met_at_the_limit() -> None:
    """The test is <=."""
    assert summarise(records(Row([0.5])), window=1, slos=parse("ttft=500ms"))["slo_attainment"] == 1


def test_an_open_relative_limit_leaves_attainment_out() -> None:
    """0.33x of a default that is not known yet is no test."""
    values = summarise(records(steady()), window=1, slos=parse("ttft=1s", "itl=0.33x"))

    assert "slo_attainment" not in values
    resolved = [one.against({"itl_p99": 1.0}) for one in parse("ttft=1s", "itl=0.33x")]
    assert summarise(records(steady()), window=1, slos=resolved)["slo_attainment"] == 1


def test_shares_and_rates_test_no_request() -> None:
    """With attainment=0.99 alone, what completed is good."""
    values = summarise(records(steady(), failed()), window=1, slos=parse("attainment=0.99", "request_throughput=2/s"))

    assert values["slo_attainment"] == 0.5


def test_a_statistic_that_an_slo_asks_for_is_computed() -> None:
    """p99.9 and p80 are there when asked for, overall and by class."""
    seen = records(*[steady(first=i / 100) for i in range(1, 101)])
    values = summarise(seen, window=1, slos=parse("ttft_p80.short=1s"), extra=["ttft_p99_9"])
    firsts = np.arange(1, 101) / 100

    assert values["ttft_p99_9"] == pytest.approx(np.percentile(firsts, 99.9))
    assert values["ttft_p80.short"] == pytest.approx(np.percentile(firsts, 80))
    assert "ttft_p80" not in values


# --- Few requests, files ----------------------------------------------------------------------------------


def test_the_highest_estimable_percentile() -> None:
    """p99 from 300 requests on, p95 from 60, p90 from 30, none below."""
    edges = {29: None, 30: "p90", 59: "p90", 60: "p95", 299: "p95", 300: "p99"}

    assert {n: highest_estimable(n) for n in edges} == edges


def test_a_percentile_over_too_few_requests_is_warned_of() -> None:
    """The sentence names the class's count, what is needed and what to read instead."""
    seen = records(*[steady()] * 40, *[steady(input_len=2000)] * 2)
    sentences = warnings(seen, ["ttft_p99", "ttft_p90", "itl_p50.long", "slo_attainment", "ttft_p99"])

    assert sentences == [
        "ttft_p99 rests on 42 requests and needs 300; the highest to trust is p90",
        "itl_p50.long rests on 2 requests and needs 6; the highest to trust is p50 (a tail needs 30)",
    ]


def test_records_survive_a_file(tmp_path: Path) -> None:
    """What is saved is loaded, column by column, and without pickle."""
    seen = records(steady(), failed(), Row([1.0], tokens=[np.nan], usage=False))
    seen.save(tmp_path / "records.npz")
    loaded = Records.load(tmp_path / "records.npz")

    for name in seen.__slots__:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(seen, name))
    np.load(tmp_path / "records.npz", allow_pickle=False).close()


def test_selecting_requests_keeps_their_chunks() -> None:
    """The second of three requests alone has its own chunks."""
    seen = records(Row([1, 2]), Row([3, 4, 5]), Row([6])).select(np.array([False, True, False]))

    assert (list(seen.chunk_time), list(seen.chunk_start)) == ([3, 4, 5], [0, 3])


def test_no_requests_are_no_metrics() -> None:
    """An empty class or an empty replay has counts and nothing else."""
    assert summarise(records(), window=0, slos=parse("ttft=1s")) == {"n_offered": 0, "n_completed": 0}
