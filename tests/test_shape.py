"""The shape of rows: against small cases for the head, published figures, and other code that counts the same."""

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tuner import workload
from tuner.shape import LIMITS, Steps, describe, figures
from tuner.workload import Request
from workloads import derive

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "tests" / "traces"
MOONCAKE = "mooncake_conversation/conversation_first2000.jsonl"
LATER = "mooncake_conversation/conversation_t1200s_t1500s.jsonl"
SYNTHETIC = "mooncake_synthetic/synthetic_first1000.jsonl"
CODE = "azure_llm_2023/AzureLLMInferenceTrace_code_first2000.csv"
LAST = "azure_llm_2023/AzureLLMInferenceTrace_code_last300.csv"
CONVERSATION = "azure_llm_2023/AzureLLMInferenceTrace_conv_first3000.csv"


def at(*arrivals: float, **fields: Any) -> list[Request]:
    return [Request(arrival, 10, 2, **fields) for arrival in arrivals]


def published(name: str) -> list[Request]:
    """Return the rows of a trace, read here by the simplest means."""
    return list(_json_rows(TRACES / name) if name.endswith(".jsonl") else _csv_rows(TRACES / name))


def _json_rows(file: Path) -> Iterator[Request]:
    for row in map(json.loads, file.read_text().splitlines()):
        yield Request(row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row["hash_ids"]), 512)


def _csv_rows(file: Path) -> Iterator[Request]:
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00").timestamp()
            yield Request(stamp, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def test_a_case_for_the_head() -> None:
    """Five rows a second apart: counts, span, rate, totals, and nothing that they do not say."""
    shape = describe(at(0, 1, 2, 3, 4))

    assert (shape.rows, shape.span, shape.rate) == (5, 4.0, 1.25)
    assert (shape.input_len.total, shape.output_len.max, shape.input_len.p50) == (50, 2, 10)
    assert (shape.dispersion, shape.reuse, shape.sessions, shape.steps, shape.single) == ({}, None, None, None, 0)


def test_one_row_has_no_rate_and_rows_at_once_have_none() -> None:
    """A rate needs time to pass."""
    alone, together = figures(describe(at(7))), figures(describe(at(3, 3, 3)))

    assert {"span_s", "request_rate", "dispersion_1s"} & set(alone) == set()
    assert (together["span_s"], "request_rate" in together) == (0, False)


def test_no_rows_have_no_shape() -> None:
    """An empty file is for the caller to refuse."""
    with pytest.raises(ValueError, match="no rows"):
        describe([])


def test_dispersion_is_variance_over_mean_of_full_bins() -> None:
    """Ten bins of 0 and 2 rows in turn: mean 1, variance 1; the row that begins the eleventh bin is in none."""
    rows = at(*(t for second in range(0, 10, 2) for t in (second, second + 0.5)), 10)

    assert describe(rows).dispersion == {1: 1.0}
    assert describe(at(*range(101))).dispersion == {1: 0.0, 10: 0.0}
    assert describe(at(*range(10))).dispersion == {}, "nine full bins"


def test_a_clock_gone_wrong_costs_no_memory() -> None:
    """Two rows thirty thousand years apart: nearly all bins are empty, so that the rows are their own variance."""
    assert describe(at(0, 0, 1e12)).dispersion == {1: pytest.approx(2.0), 10: pytest.approx(2.0)}


# rows, span, rate, input p50 / p95 / max, output p50 / p95 / max, dispersion at 1 s and at 10 s
PUBLISHED = {
    MOONCAKE: (2000, 669.0, 2.99, 7965, 47626, 123192, 363, 689, 2000, 7.07, 1.99),
    LATER: (1007, 294.0, 3.43, 7733, 39994, 121301, 346, 707, 2000, 8.12, 1.68),
    SYNTHETIC: (1000, 272.7, 3.67, 2912, 41106, 134773, 170, 574, 842, 1.10),
    CODE: (2000, 853.1, 2.34, 1338, 6606, 7437, 13, 91, 1899, 13.5, 79),
    LAST: (300, 86.0, 3.49, 1296, 7434, 7436, 14, 128, 824, 13.7),
    CONVERSATION: (3000, 628.7, 4.77, 1041, 4080, 7930, 217, 498, 1000, 1.18, 2.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_traces_have_the_figures_measured_on_them_before(name: str) -> None:
    """Measured by other code, whose last bin was cut short: that shows at 10 s, by an eighth at most."""
    shape = describe(published(name))
    rows, span, rate, *lengths, one_second, ten_seconds = (*PUBLISHED[name], None)[:11]

    assert (shape.rows, shape.span, shape.rate) == (rows, pytest.approx(span, abs=0.06), pytest.approx(rate, abs=0.006))
    found = [getattr(side, q) for side in (shape.input_len, shape.output_len) for q in ("p50", "p95", "max")]
    assert found == pytest.approx(lengths, abs=1)
    assert shape.dispersion[1] == pytest.approx(one_second, rel=0.015)
    assert (10 in shape.dispersion) is (span >= 100)
    if ten_seconds is not None:
        assert shape.dispersion[10] == pytest.approx(ten_seconds, rel=0.125)


@pytest.mark.parametrize(("name", "hit"), [(MOONCAKE, 0.294), (LATER, 0.202), (SYNTHETIC, 0.173)])
def test_the_ideal_prefix_hit_is_the_published_one(name: str, hit: float) -> None:
    """Counted there in blocks of 512 and here in vLLM's 16; tails of these traces are never shared."""
    reuse = describe(published(name)).reuse

    assert reuse is not None
    assert reuse.cold == pytest.approx(hit, abs=0.0006)
    assert (reuse.after_history, reuse.block_size, reuse.recorded, reuse.rows) == (None, 16, (512,), 1.0)


@pytest.mark.parametrize(
    ("name", "percents"),
    [
        (MOONCAKE, (70.8, 50.8, 27.3, 8.8, 3.6)),
        (SYNTHETIC, (48.8, 45.5, 33.7, 11.4, 0.2)),
        (CODE, (13.9, 0, 0, 0, 0)),
        (CONVERSATION, (7.2, 0, 0, 0, 0)),
    ],
)
def test_the_share_of_rows_above_a_limit_is_the_published_one(name: str, percents: tuple[float, ...]) -> None:
    """Input and output together, limits in powers of two."""
    above = describe(published(name)).above

    assert [100 * one.rows for one in above[:5]] == pytest.approx(percents, abs=0.051)
    assert [one.limit for one in above] == list(LIMITS.values())


@pytest.mark.parametrize("name", ["azure-conv-2023", "azure-conv-2023-small", "mooncake-conv-small"])
def test_the_workloads_that_come_along_have_the_shape_their_profiles_say(name: str) -> None:
    """`workloads/derive.py` counts with code of its own."""
    loaded = workload.load(ROOT / "workloads" / name)
    files = {"workload": loaded.requests, "confirm": loaded.confirm, "history": loaded.history}
    for file, rows in files.items():
        if rows:
            known = derive.observe(_as_derived(rows), "", _as_derived(loaded.history if file == "workload" else ()))
            shape = describe(rows, loaded.history if file == "workload" else ())
            assert (shape.rows, shape.input_len.total, shape.output_len.total) == (
                known["rows"], known["total_input"], known["total_output"],
            )  # fmt: skip
            assert shape.dispersion[1] == pytest.approx(known["iod_1s"], abs=0.0051)
            assert [shape.input_len.max, shape.output_len.max] == [
                known[of]["max"] for of in ("input_len", "output_len")
            ]
            assert (shape.reuse.cold if shape.reuse else 0) == pytest.approx(known["ideal_prefix_hit"], abs=0.0001)
            warm = shape.reuse.after_history if shape.reuse else None
            assert warm == pytest.approx(known.get("ideal_prefix_hit_after_history"), abs=0.0001)


def _as_derived(rows: tuple[Request, ...]) -> list[derive.Row]:
    return [
        derive.Row(r.arrival - rows[0].arrival, r.input_len, r.output_len, n, r.block_ids or (), r.block_size)
        for n, r in enumerate(rows)
    ]


STAMPS = st.lists(st.integers(0, 10**10), min_size=1, max_size=60, unique=True)
LENGTHS = st.integers(1, 200_000)


@st.composite
def some_rows(draw: st.DrawFn) -> list[Request]:
    """Rows with stamps of their own, some with shared prefixes, some in sessions."""
    rows = []
    for stamp in draw(STAMPS):
        size = draw(LENGTHS)
        ids = draw(st.none() | st.integers(0, 2))
        blocks = None if ids is None else tuple(range(1000 * ids, 1000 * ids + -(-size // 512)))
        session, think = draw(st.sampled_from([None, "a", "b"])), draw(st.sampled_from([None, 1.0]))
        rows.append(Request(stamp / 1e6, size, draw(LENGTHS), blocks, blocks and 512, session=session,
                            think_time=think))  # fmt: skip
    return rows


@settings(deadline=None)
@given(some_rows(), st.randoms(use_true_random=False))
def test_the_order_in_the_file_changes_nothing(rows: list[Request], random: Any) -> None:
    """Where no two rows share a stamp, arrivals alone decide."""
    mixed = list(rows)
    random.shuffle(mixed)

    assert describe(mixed) == describe(rows)


@settings(deadline=None)
@given(some_rows(), st.integers(0, 10**9))
def test_a_clock_that_began_earlier_changes_nothing(rows: list[Request], shift: int) -> None:
    """A window out of the middle of a trace need not be rebased; seconds since 1970 are as good."""
    moved = [replace(row, arrival=row.arrival + shift) for row in rows]

    assert describe(moved) == describe(rows)


@settings(deadline=None)
@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=40))
def test_shares_above_a_limit_are_counted_one_by_one(lengths: list[tuple[int, int]]) -> None:
    """Of rows, and of the tokens in all."""
    shape = describe([Request(0.0, a, b) for a, b in lengths])

    assert describe([Request(0.0, 4000, 96)]).above[0].rows == 0, "what fits is not above"
    for one in shape.above:
        long = [a + b for a, b in lengths if a + b > one.limit]
        assert one.rows == pytest.approx(len(long) / len(lengths))
        assert one.tokens == pytest.approx(sum(long) / sum(a + b for a, b in lengths))


@settings(deadline=None)
@given(st.lists(st.integers(0, 50_000_000), min_size=2, max_size=300))
def test_dispersion_agrees_with_a_count_by_hand(stamps: list[int]) -> None:
    """Whole microseconds, so that a row on a border is in the bin that begins there."""
    first = min(stamps)
    n = (max(stamps) - first) // 1_000_000
    counts = [sum((s - first) // 1_000_000 == i for s in stamps) for i in range(n)]
    found = describe(at(*(s / 1e6 for s in stamps))).dispersion

    assert (1 in found) is (n >= 10)
    if 1 in found:
        assert found[1] == pytest.approx(np.var(counts) / np.mean(counts))


def test_a_clock_in_steps_is_found_in_mooncakes_conversations() -> None:
    """Steps of 2999 to 3001 ms; the synthetic trace has none, nor has a clock of a hundred nanoseconds."""
    assert describe(published(MOONCAKE)).steps == Steps(pytest.approx(3.0, abs=0.001), 224, 19)
    assert describe(published(LATER)).steps == Steps(pytest.approx(3.0, abs=0.001), 99, 23)
    assert [describe(published(name)).steps for name in (SYNTHETIC, CODE, CONVERSATION)] == [None] * 3


def test_steps_need_ties_a_grid_and_a_step_that_matters() -> None:
    """Bursts at odd times are the traffic's own, a tie now and then is chance, and milliseconds decide nothing."""
    whole_seconds = [float(t) for t in (0, 1, 2, 4, 7, 8, 12) for _ in range(3)]
    odd = [t for t in (0, 1.1, 3.7, 4.2, 9.9, 12.3) for _ in range(3)]
    milliseconds = [t / 1000 for t in range(100) for _ in range(3)]

    assert describe(at(*whole_seconds)).steps == Steps(pytest.approx(1.0), 7, 3)
    assert describe(at(*odd)).steps is None
    assert describe(at(*range(20), 3, 9)).steps is None
    assert describe(at(*milliseconds)).steps is None


def test_sessions_are_counted_with_their_turns() -> None:
    """Three conversations of 3, 1 and 1 turns; of two later turns one knows its think time."""
    rows = [*at(0, 1, 2, session="a"), *at(3, session="b", think_time=9.0), *at(4, session="c"), *at(5)]
    rows[2] = replace(rows[2], think_time=0.5)
    found = describe(rows).sessions

    assert found is not None
    assert (found.count, found.rows, found.turns_p50, found.turns_max, found.timed) == (3, 5, 1, 3, 0.5)
    alone = figures(describe(at(0, session="a")))
    assert (alone["sessions"], "turns_with_think_time" in alone) == (1, False)


def test_rows_without_ids_count_as_unlike_any_other() -> None:
    """Half of the prompts are one prompt of 64 tokens, of which the second time 48 are a hit, in whole blocks."""
    shared = [Request(t, 64, 1, (7, 8), 32) for t in (0.0, 1.0)]
    found = describe([*shared, *(Request(t, 64, 1) for t in (2.0, 3.0))])

    assert found.reuse is not None
    assert (found.reuse.cold, found.reuse.rows, found.single) == (48 / 256, 0.5, 4)
    warm = describe(shared[1:], history=shared[:1]).reuse
    assert warm is not None
    assert (warm.cold, warm.after_history) == (0, 48 / 64)


def test_figures_are_numbers_under_the_names_they_had() -> None:
    """What MLflow and files have known before keeps its name; what is not known has none."""
    told = figures(describe(published(MOONCAKE)))

    lengths = {f"{side}_len_{of}" for side in ("input", "output") for of in ("p50", "p95", "max", "total")}
    assert {"requests", "span_s", "request_rate", "dispersion_1s"} | lengths <= set(told)
    assert (told["clock_step_ms"], told["single_token_answers"], told["rows_above_4k"]) == (3000.0, 11, 0.708)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert "sessions" not in told
