"""Seconds inside, milliseconds outside."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1.5s", 1.5),
        (" 20 min ", 1200),
        ("2h", 7200),
        (".5s", 0.5),
        ("250us", 250e-6),
        ("3m", 180),
    ],
)
def test_durations_with_a_unit_are_read(text: str, seconds: float) -> None:
    """A number and a unit make seconds."""
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["500", "", "ms", "-5ms", "5 parsecs", "1e3ms", "5msx", "1,5s"])
def test_durations_without_a_unit_are_refused(text: str) -> None:
    """A bare number could be anything."""
    with pytest.raises(ValueError, match="is not a duration such as 500ms"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.42 ms"), (0.0613, "61.3 ms"), (0.35, "350 ms"), (1.24, "1,240 ms"), (0, "0.00 ms")],
)
def test_milliseconds_have_three_digits(seconds: float, text: str) -> None:
    """Digits that a person reads, thousands apart."""
    assert units.format_ms(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(42, "42 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (3599.6, "1 h 00 min"), (7620, "2 h 07 min")],
)
def test_elapsed_time_is_rounded_before_it_is_split(seconds: float, text: str) -> None:
    """There is no "60 s" and no "60 min"."""
    assert units.format_elapsed(seconds) == text


@pytest.mark.parametrize(
    ("key", "family", "outside"),
    [
        ("ttft_p99", "ttft", "ttft_p99_ms"),
        ("ttft_p99_9.long", "ttft", "ttft_p99_9_ms.long"),
        ("max_stall_max", "max_stall", "max_stall_max_ms"),
        ("itl_first_gap_mean", "itl_first_gap", "itl_first_gap_mean_ms"),
        ("send_lag_p50", "send_lag", "send_lag_p50_ms"),
        ("request_throughput", "request_throughput", "request_throughput"),
        ("tokens_per_chunk_p99", "tokens_per_chunk", "tokens_per_chunk_p99"),
        ("failed.timeout", "failed", "failed.timeout"),
        ("itl_first_gap_p95.long", "itl_first_gap", "itl_first_gap_p95_ms.long"),
        ("kv_transfer_time_mean", "kv_transfer_time", "kv_transfer_time_mean_ms"),
        ("kv_transfer_bytes_mean", "kv_transfer_bytes", "kv_transfer_bytes_mean"),
        ("kv_transfer_share", "kv_transfer_share", "kv_transfer_share"),
    ],
)
def test_only_durations_change_their_key(key: str, family: str, outside: str) -> None:
    """The class stays last, and `_ms` ends the key before it."""
    assert (units.family(key), units.outside_key(key)) == (family, outside)


KEYS = st.sampled_from(
    [
        "ttft_p99",
        "itl_p50.long",
        "tpot_mean",
        "e2el_max",
        "request_throughput",
        "slo_attainment",
        "failed.short",
        "itl_first_gap_mean",
        "kv_transfer_time_mean",
        "kv_transfer_bytes_mean",
        "kv_transfer_share",
    ]
)


@settings(deadline=None)
@given(st.dictionaries(KEYS, st.floats(0, 1e6)))
def test_what_goes_outside_comes_back(metrics: dict[str, float]) -> None:
    """Reading what was written gives the metrics again."""
    assert units.from_outside(units.to_outside(metrics)) == pytest.approx(metrics)
