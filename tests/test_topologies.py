"""The best of each topology, and whether PD pays: a sentence a case, PD may lose."""

import dataclasses
import re
from typing import Any

import pytest
from study_data import GROUPS, X, Y, config, failed, groups, study, trial

from tuner.errors import FailureKind
from tuner.results import TrialResult
from tuner.serving import Topology
from tuner.sinks import topologies
from tuner.sinks.topologies import Outcome, compared, judge, match, pays
from tuner.sinks.verdict import verdict

NO_SLO = study(slo=(), topologies=("4x", "1p3d"))
KEYS = (X, Y)
LIMITS = {X: 0.600, Y: 0.060}


def replicas(x: float = 0.400, y: float = 0.060, number: int = 0, **more: Any) -> TrialResult:
    return trial(number, x, y, topology="4x", **more)


def pd(x: float = 0.400, y: float = 0.060, number: int = 1, moved: float | None = 0.012, **more: Any) -> TrialResult:
    """A PD trial whose KV cache took `moved` seconds a request."""
    metrics = ({} if moved is None else {"kv_transfer_time_mean": moved}) | more.pop("metrics", {})
    return trial(number, x, y, topology=more.pop("topology", "1p3d"), metrics=metrics, **more)


def said(*results: TrialResult, spec: Any = NO_SLO) -> str:
    (only,) = pays(spec, results)
    return only


def test_pd_that_is_better_pays() -> None:
    """ITL falls, TTFT stays: both numbers of both sides, the tail that was removed, what transfer costs."""
    assert said(replicas(0.400, 0.100), pd(0.404, 0.040)) == (
        "PD pays here at 4 GPUs, 1p3d (trial 1, its only one) against 4x "
        "(trial 0, its only one): ITL p99 -60 % (40.0 ms against 100 ms), "
        "TTFT p50 long +1 % (404 ms against 400 ms); why: ITL p99 is 60.0 ms shorter where no prefill runs beside "
        "decoding, KV transfer costs 12.0 ms a request, which TTFT p50 long does not show."
    )


def test_pd_that_is_worse_does_not_pay() -> None:
    """TTFT rises by 200 ms, 150 ms of them transfer, and ITL gains nothing."""
    assert said(replicas(0.400, 0.060), pd(0.600, 0.0605, moved=0.150)) == (
        "PD does not pay here at 4 GPUs, 1p3d (trial 1, its only one) against 4x "
        "(trial 0, its only one): ITL p99 +1 % (60.5 ms against 60.0 ms), "
        "TTFT p50 long +50 % (600 ms against 400 ms); why: ITL p99 shows no interference that PD removed, KV transfer "
        "costs 150 ms a request, 75 % of the 200 ms that TTFT p50 long rises by (1 of 4 servers prefill)."
    )


def test_a_trade_names_what_is_won_and_what_is_lost() -> None:
    """Neither side wins both objectives."""
    assert said(replicas(0.400, 0.100), pd(0.500, 0.050)).startswith(
        "PD is a trade here at 4 GPUs (better ITL p99, worse TTFT p50 long), 1p3d (trial 1, its only one) against "
        "4x (trial 0, its only one): "
    )
    assert "(better TTFT p50 long, worse ITL p99)" in said(replicas(0.500, 0.050), pd(0.400, 0.100))


def test_differences_within_noise_are_none() -> None:
    """Two measurements of one configuration differ by 2 %."""
    assert said(replicas(0.400, 0.060), pd(0.406, 0.0592)).startswith("PD makes no difference beyond noise here")


@pytest.mark.parametrize(
    ("x", "y", "outcome"),
    [
        (1.0, 1.0, Outcome.SAME),
        (1.019, 0.981, Outcome.SAME),
        (0.97, 1.0, Outcome.BETTER),
        (0.97, 0.97, Outcome.BETTER),
        (1.03, 1.0, Outcome.WORSE),
        (1.03, 1.03, Outcome.WORSE),
        (0.97, 1.03, Outcome.TRADE),
        (1.03, 0.97, Outcome.TRADE),
    ],
)
def test_objectives_decide_outside_noise(x: float, y: float, outcome: Outcome) -> None:
    """Better in one and not worse in the other is better."""
    assert judge(pd(x, y), replicas(1.0, 1.0), KEYS) is outcome


def test_a_trial_that_meets_the_slo_beats_one_that_does_not() -> None:
    """However much faster the other is: a promise comes before objectives, on either side."""
    slow, fast = {"limits": LIMITS, "x": 0.590, "y": 0.059}, {"limits": LIMITS, "x": 0.100, "y": 0.075}

    assert "1p3d meets the SLO and 4x does not (itl_p99 missed by 25 %)" in said(
        replicas(**fast), pd(**slow), spec=GROUPS
    )
    text = said(replicas(**slow), pd(**fast), spec=GROUPS)
    assert text.startswith("PD does not pay here at 4 GPUs")
    assert "4x meets the SLO and 1p3d does not (itl_p99 missed by 25 %)" in text


def test_a_miss_within_noise_is_called_so() -> None:
    """60.6 ms is over 60 ms, yet by less than two measurements differ."""
    text = said(replicas(0.4, 0.0606, limits=LIMITS), pd(0.4, 0.0598, limits=LIMITS), spec=GROUPS)

    assert "4x does not (itl_p99 missed by 1.0 %, within noise)" in text


def test_when_neither_meets_the_slo_objectives_decide() -> None:
    """The closest of each side are compared, and that both miss is said."""
    text = said(replicas(0.4, 0.120, limits=LIMITS), pd(0.4, 0.090, limits=LIMITS), spec=GROUPS)

    assert text.startswith("PD pays here")
    assert ": neither meets the SLO, ITL p99 -25 %" in text


def test_fronts_that_bend_elsewhere_are_no_trade() -> None:
    """PD's knee costs TTFT, but another of its trials beats the replicas' best in both: that one is shown."""
    only, knee, dominating = replicas(0.500, 0.060), pd(0.600, 0.020), pd(0.450, 0.055, number=2)

    assert match([knee], [only], KEYS) == (knee, only)
    assert match([knee, dominating], [only], KEYS) == (dominating, only)
    assert said(only, knee, dominating).startswith(
        "PD pays here at 4 GPUs, 1p3d (trial 2, best of 2) against 4x (trial 0, "
    )


def test_the_same_holds_for_the_replicas() -> None:
    """Their knee costs TTFT, another of their trials beats PD's best."""
    only, knee, dominating = pd(0.500, 0.060), replicas(0.600, 0.020), replicas(0.450, 0.055, number=2)

    assert said(only, knee, dominating).startswith(
        "PD does not pay here at 4 GPUs, 1p3d (trial 1, its only one) against 4x (trial 2, best of 2)"
    )


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        (
            [replicas(), *(failed(n, FailureKind.NO_TRANSFER, topology="1p3d") for n in (1, 2)),
             failed(3, topology="2p2d")],
            "all 3 PD trials failed (2 no_transfer, 1 oom)",
        ),
        ([replicas(), failed(1, FailureKind.NO_TRANSFER, topology="1p3d")], "the only PD trial failed (1 no_transfer)"),
        ([pd(), failed(0, topology="4x")], "the only aggregated trial failed (1 oom)"),
        ([pd()], "no aggregated trial was run"),
        ([pd(), trial(0, topology="2x")], "no aggregated trial was run"),
        (
            [failed(0, topology="4x"), failed(1, topology="1p3d")],
            "the only PD trial failed (1 oom), and the only aggregated trial failed (1 oom)",
        ),
        (
            [replicas(), dataclasses.replace(pd(), metrics={X: 0.4}), failed(2, topology="1p3d")],
            "ITL p99 could not be measured in any PD trial, 1 other failed (1 oom)",
        ),
    ],
)  # fmt: skip
def test_a_side_without_numbers_is_said_with_its_reason(results: list[TrialResult], reason: str) -> None:
    """Absent is absent: nothing is concluded from half a comparison, or from unequal GPUs."""
    assert said(*results) == f"Whether PD pays here at 4 GPUs is not known: {reason}."


def test_pd_that_was_not_tried_yet() -> None:
    """The topology stands in the study, its trials are to come."""
    assert said(replicas()) == "Whether PD pays here is not known: no PD trial has been run."


def test_a_study_without_pd_asks_no_such_question() -> None:
    """Replicas alone have a table and no sentence; one topology has neither."""
    spec = study(slo=(), topologies=("4x",))
    table = compared(spec, [replicas(), trial(1, topology="2x")])

    assert pays(spec, [replicas()]) == []
    assert table is not None
    assert table.columns == (
        "topology", "GPUs", "trials", "best", "TTFT p50 long", "ITL p99", "differs from the default by",
    )  # fmt: skip
    assert compared(study(slo=()), [trial(0)]) is None
    assert compared(NO_SLO, []) is None


def test_each_number_of_gpus_is_compared_by_itself() -> None:
    """Two GPUs against two, four against four."""
    results = [trial(0, 1.0, topology="2x"), pd(0.9, topology="1p1d"), replicas(0.4, number=2), pd(0.5, number=3)]

    assert [re.findall(r"at \d GPUs|trial \d", text) for text in pays(NO_SLO, results)] == [
        ["at 2 GPUs", "trial 1", "trial 0"],
        ["at 4 GPUs", "trial 3", "trial 2"],
    ]


@pytest.mark.parametrize(
    ("x", "moved", "words"),
    [
        (0.400, 0.012, "costs 12.0 ms a request, which TTFT p50 long does not show"),
        (0.300, 0.012, "costs 12.0 ms a request, and yet TTFT p50 long is 100 ms shorter"),
        (0.480, 0.020, "25 % of the 80.0 ms that TTFT p50 long rises by (1 of 4 servers prefill)"),
        (0.480, 0.150, "costs 150 ms a request, no less than the 80.0 ms that TTFT p50 long rises by"),
        (0.500, None, "what KV transfer costs was not measured"),
    ],
)
def test_transfer_is_held_against_the_ttft(x: float, moved: float | None, words: str) -> None:
    """What it costs, as a part of what TTFT rose by, when it rose."""
    assert words in said(replicas(0.400), pd(x, moved=moved))


def test_a_mean_is_held_against_a_mean() -> None:
    """Transfer is known as a mean, so the mean TTFT counts where both sides have it."""
    text = said(replicas(metrics={"ttft_mean": 1.0}), pd(metrics={"ttft_mean": 1.1}, moved=0.050))

    assert "50 % of the 100 ms that TTFT mean rises by" in text


def test_an_objective_that_is_no_tail_does_not_stand_for_interference() -> None:
    """A stall of a prefill shows in the tail, not in the median."""
    spec = study(slo=(), topologies=("4x", "1p3d"), objectives={"ttft": X, "itl": "itl_p50"})
    text = said(replicas(y=0.100, metrics={"itl_p50": 0.02}), pd(y=0.040, metrics={"itl_p50": 0.02}), spec=spec)

    assert "ITL p50 unchanged" in text
    assert "ITL p99 is 60.0 ms shorter where no prefill runs beside decoding" in text


def test_requests_whose_cache_was_not_transferred_are_named() -> None:
    """A share below one qualifies the cost."""
    assert "a request (92 % of the requests had one)" in said(replicas(), pd(metrics={"kv_transfer_share": 0.92}))
    assert "eligible" not in said(replicas(), pd(metrics={"kv_transfer_share": 1.0}))


def test_a_later_second_token_is_part_of_the_reason() -> None:
    """Some connectors move the cache after the first token, where TTFT cannot show it."""
    text = said(replicas(metrics={"itl_first_gap_mean": 0.020}), pd(metrics={"itl_first_gap_mean": 0.050}))

    assert text.endswith("the second token follows the first 30.0 ms later than with 4x (second token gap mean).")
    assert "second token" not in said(
        replicas(metrics={"itl_first_gap_mean": 0.02}), pd(metrics={"itl_first_gap_mean": 0.02})
    )
    assert "second token" not in said(replicas(), pd(metrics={"itl_first_gap_mean": 0.02}))


def test_servers_that_shared_a_machine_say_nothing_about_separate_gpus() -> None:
    """On CPUs and on shared GPUs the sentence and the table say so, and count servers."""
    on_cpu = dataclasses.replace(pd(), config=config("1p3d", env={"VLLM_CPU_KVCACHE_SPACE": "1"}))
    by_version = dataclasses.replace(pd(), vllm_version="0.26.0+cpu")
    shared = NO_SLO.model_copy()
    object.__setattr__(shared, "share_devices", True)

    end = "; the servers shared {}, so this says nothing about separate GPUs."
    for results, spec, what in (
        ([replicas(), on_cpu], NO_SLO, "one machine's cores"),
        ([replicas(), by_version], NO_SLO, "one machine's cores"),
        ([replicas(), pd()], shared, "GPUs of one machine"),
    ):
        text, table = said(*results, spec=spec), compared(spec, results)
        assert text.endswith(end.format(what))
        assert "here with 4 servers on one machine, 1p3d" in text
        assert table is not None
        assert table.heading == "Best of each topology with 4 servers on one machine:"
    assert said(on_cpu) == (
        "Whether PD pays here with 4 servers on one machine is not known: no aggregated trial was run."
    )


def test_the_best_of_each_topology() -> None:
    """A row a topology in the study's order; the closest where none meets the SLO; failures by kind."""
    table = compared(GROUPS, groups())

    assert table is not None
    assert table.heading == "Best of each topology at 4 GPUs:"
    assert table.rows == (
        ("4x", "2", "trial 1", "470 ms", "74.0 ms", "itl_p99 missed by 23 %", "", "max_num_batched_tokens 512"),
        ("2p2d", "1", "trial 3", "395 ms", "66.0 ms", "itl_p99 missed by 10 %", "12.0 ms",
         "prefiller.max_num_batched_tokens 8192"),
        ("1p3d", "2", "trial 5", "560 ms", "38.0 ms", "met", "12.0 ms",
         "prefiller.max_num_batched_tokens 4096, decoder.max_num_seqs 32"),
        ("3p1d", "0", "-", "", "", "", "", "failed: 1 no_transfer"),
    )  # fmt: skip


def test_what_a_row_lacks_is_said() -> None:
    """Not tried, no numbers, no transfer time: words, never a zero."""
    spec = study(slo=(), topologies=("4x", "1p3d", "2p2d"))
    table = compared(spec, [replicas(), pd(moved=None)])

    assert table is not None
    assert [row[-2:] for row in table.rows] == [
        ("", "max_model_len 4096"),
        ("not measured", "max_model_len 4096"),
        ("", "not tried"),
    ]


def test_columns_stand_under_each_other() -> None:
    """A pipe gets what a terminal gets."""
    table = compared(GROUPS, groups())
    assert table is not None
    heading, names, *rows = table.lines()

    assert heading == "Best of each topology at 4 GPUs:"
    assert {row.index(trial) for row, trial in zip(rows, ["trial 1", "trial 3", "trial 5", "-"], strict=True)} >= {
        names.index("best")
    }
    assert not any(line.endswith(" ") for line in rows)


def test_the_verdict_has_the_sentence_second_and_the_table_last() -> None:
    """The answer stays first; one topology changes nothing."""
    lines = verdict(GROUPS, groups()).splitlines()

    assert lines[0].startswith("SLO met by 2 of 6 trials. Best: trial 5 (topology 1p3d, prefiller.max_num_batched")
    assert lines[1].startswith(
        "PD pays here at 4 GPUs, 1p3d (trial 5, best of 3) against 4x (trial 1, best of 2): 1p3d meets the SLO"
    )
    assert lines[3] == "Best of each topology at 4 GPUs:"
    assert len(lines) == 9


def test_a_repeat_of_a_trial_is_no_trial() -> None:
    """What shares a measurement is not counted again."""
    again = dataclasses.replace(pd(number=2), same_as=1)

    assert topologies.topologies_of(NO_SLO, []) == [Topology.parse("4x"), Topology.parse("1p3d")]
    assert said(replicas(), pd(), again) == said(replicas(), pd())
