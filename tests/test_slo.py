"""One grammar, and messages that show the right spelling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import slo
from tuner.errors import SpecError
from tuner.slo import Slo


@pytest.mark.parametrize(
    ("text", "metric", "limit"),
    [
        ("ttft=500ms", "ttft_p99", 0.5),
        ("ttft_p99<=500ms", "ttft_p99", 0.5),
        ("itl_p95 < 50 ms", "itl_p95", 0.05),
        ("ttft_p90.long=0.8s", "ttft_p90.long", 0.8),
        ("ttft_p99_9=2s", "ttft_p99_9", 2.0),
        ("max_stall_p99_9=2s", "max_stall_p99_9", 2.0),
        ("max_stall=1s", "max_stall_p99", 1.0),
        ("tpot_mean==40ms", "tpot_mean", 0.04),
        ("attainment=0.99", "slo_attainment", 0.99),
        ("slo_attainment>=99%", "slo_attainment", 0.99),
        ("request_throughput=2/s", "request_throughput", 2.0),
        ("goodput>=1.5 / s", "request_goodput", 1.5),
    ],
)
def test_slos_are_read(text: str, metric: str, limit: float) -> None:
    """A bare latency means its p99; direction belongs to the metric."""
    parsed = slo.parse(text)

    assert (parsed.metric, parsed.relative, parsed.text) == (metric, None, text)
    assert parsed.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft", "METRIC=LIMIT"),
        ("ttft=500", "500 of what"),
        ("ttft<5", "5 of what"),
        ("tfft=500ms", "unknown metric"),
        ("ttft_p=500ms", "not a statistic"),
        ("ttft_p0=500ms", "not a statistic"),
        ("ttft_median=500ms", "not a statistic"),
        ("ttft>=500ms", "other side"),
        ("attainment<=0.9", "other side"),
        ("attainment=1.5", "not a share"),
        ("attainment=0", "not a share"),
        ("request_throughput=2", "not a rate"),
        ("request_throughput=500ms", "not a rate"),
        ("ttft=0ms", "above zero"),
        ("ttft=0x", "above zero"),
        ("ttft.huge=5s", "no class"),
        ("attainment.long=0.9", "has no classes"),
        ("ttft=__import__('os')", "not a duration"),
    ],
)
def test_mistakes_are_named_and_mended(text: str, says: str) -> None:
    """The message starts with what was written, and there is a hint."""
    with pytest.raises(SpecError, match=says) as caught:
        slo.parse(text)

    assert caught.value.message.startswith(f"--slo {text}: ")
    assert caught.value.hint


@pytest.mark.parametrize("text", ["ttft=5", "ttft<5", "ttft<=5"])
def test_a_bare_number_is_answered_with_both_units(text: str) -> None:
    """The hint can be copied, whichever sign was used."""
    with pytest.raises(SpecError) as caught:
        slo.parse(text)

    assert caught.value.hint == "write ttft_p99=5ms or ttft_p99=5s"


def test_a_misspelt_metric_is_guessed() -> None:
    """The nearest metric is offered."""
    with pytest.raises(SpecError) as caught:
        slo.parse("tfft=500ms")

    assert caught.value.hint == "did you mean 'ttft'?"


METRICS = st.builds(
    lambda name, statistic: f"{name}_{statistic}",
    st.sampled_from(slo.LATENCIES),
    st.sampled_from(["p50", "p90", "p99", "p99_9", "p5", "mean", "max"]),
)


@settings(deadline=None)
@given(
    METRICS,
    st.sampled_from(["", ".short", ".long"]),
    st.integers(1, 10**7),
    st.sampled_from(["=", "<=", "<", " = "]),
)
def test_what_is_written_is_what_is_read(metric: str, scope: str, ms: int, sign: str) -> None:
    """Any metric, class and limit in milliseconds come back as they were."""
    parsed = slo.parse(f"{metric}{scope}{sign}{ms}ms")

    assert parsed.metric == metric + scope
    assert parsed.limit == pytest.approx(ms / 1000)
    assert not parsed.is_lower_bound


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_an_slo_or_a_spec_error(text: str) -> None:
    """No text brings anything but these two."""
    try:
        parsed = slo.parse(text)
    except SpecError as error:
        assert error.hint  # noqa: PT017 (either outcome is right)
    else:
        assert parsed.limit or parsed.relative


@pytest.mark.parametrize(("value", "excess"), [(0.6, 0.2), (0.5, 0.0), (0.25, -0.5)])
def test_excess_of_a_latency_is_how_far_it_is_above(value: float, excess: float) -> None:
    """Zero or less is met."""
    assert slo.parse("ttft=500ms").excess({"ttft_p99": value}) == pytest.approx(excess)


def test_excess_of_a_lower_bound_is_negated() -> None:
    """0.9 of a wanted 1.0 is 10 % short; more than wanted is below zero."""
    wanted = slo.parse("request_throughput=1/s")

    assert wanted.excess({"request_throughput": 0.9}) == pytest.approx(0.1)
    assert wanted.excess({"request_throughput": 1.5}) == pytest.approx(-0.5)


def test_what_was_not_measured_has_no_excess() -> None:
    """A missing key is None, not zero and not infinity."""
    assert slo.parse("ttft=1s").excess({}) is None


def test_a_relative_limit_waits_for_the_default() -> None:
    """0.33x has no limit until the default is known, and stays relative while its metric is missing."""
    relative = slo.parse("itl_p99=0.5x")

    assert (relative.limit, relative.relative) == (None, 0.5)
    assert relative.excess({"itl_p99": 1.0}) is None
    assert relative.against({}).limit is None
    assert relative.against({"itl_p99": 0.4}).limit == pytest.approx(0.2)
    assert relative.describe_limit() == "0.5x of the default"


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("ttft_p99", 0.0613, "61.3 ms"),
        ("slo_attainment", 0.972, "97.2 %"),
        ("request_throughput", 1.84, "1.84/s"),
    ],
)
def test_values_are_shown_with_their_unit(metric: str, value: float, text: str) -> None:
    """A table needs no legend."""
    assert slo.describe(metric, value) == text
    assert Slo(metric, value).describe_limit() == text
