"""What a study found, in words: the sentences a user reads first."""

import dataclasses
import io

import pytest
from rich.console import Console
from study_data import X, Y, budgets, failed, study, trial

from tuner.errors import FailureKind
from tuner.results import Repeat, TrialResult
from tuner.sinks import verdict as words
from tuner.sinks.verdict import TrialRow, verdict
from tuner.sinks.words import metric_name

NO_SLO = study(slo=())


def without_slos(results: list[TrialResult]) -> list[TrialResult]:
    return [dataclasses.replace(r, slos_met=None, excess={}) for r in results]


def test_met() -> None:
    """How many trials met it, which is best, by which arguments, at what price."""
    answer, failures = verdict(study(), budgets()).splitlines()

    assert answer == (
        "SLO met by 1 of 8 trials. Best: trial 4 (max_num_batched_tokens 256): ITL p99 -75 % (101 ms), "
        "TTFT p50 long +25 % (589 ms) against the default"
    )
    assert failures == "1 trial failed (1 oom)."


def test_not_met() -> None:
    """The closest trial, the number it reached and how far over the limit that is."""
    near = [r for r in budgets() if r.number in {0, 2, 6}]

    assert verdict(study(), near) == (
        "SLO not met: closest is trial 6 (max_num_batched_tokens 128): ttft_p50.long 709 ms, 18 % over 600 ms"
    )


def test_a_lower_bound_is_missed_from_below() -> None:
    """A rate falls short, it is not over anything."""
    spec = study(slo=("request_throughput=2/s",))
    low = dataclasses.replace(
        trial(3, metrics={"request_throughput": 1.5}), excess={"request_throughput": 0.25}, slos_met=False
    )

    assert "request_throughput 1.5/s, 25 % under 2/s" in verdict(spec, [low])


def test_no_slo() -> None:
    """Without a promise the front is the result."""
    first = verdict(NO_SLO, without_slos(budgets())).splitlines()[0]

    assert first == (
        "Pareto front of 5 configurations out of 7 measured. Best: trial 3 (max_num_batched_tokens 512): "
        "ITL p99 -58 % (167 ms), TTFT p50 long +9 % (512 ms) against the default"
    )


def test_the_default_that_already_meets_the_slo_is_said() -> None:
    """Nobody should change a server that was fine."""
    limits = {X: 1.0, Y: 1.0}
    default = trial(0, 0.9, 0.9, limits=limits, label="default")
    better = trial(1, 0.5, 0.5, limits=limits, args={"max_num_seqs": 8})

    assert "The default (trial 0) already meets the SLO." in verdict(study(), [default, better])
    assert "Best: trial 0 (the default itself): ITL p99 900 ms" in verdict(study(), [default])


def test_nothing_measured() -> None:
    """The kinds of failure, and what the last one said."""
    results = [failed(0), failed(1), failed(2, FailureKind.CRASH, "exit code 1\n\x1b[31mboom")]

    assert verdict(study(), results) == (
        "Nothing could be measured: 3 trials failed (2 oom, 1 crash). Trial 2: exit code 1  [31mboom"
    )
    assert verdict(study(), []) == "No trial has been measured yet."


def test_an_slo_that_cannot_be_measured_is_named_with_its_reason() -> None:
    """A missing number counts as missed, and the reader is told why."""
    spec = study(slo=("ttft_p99=1s",))
    miss = dataclasses.replace(trial(0), slos_met=False)
    lines = verdict(spec, [miss]).splitlines()

    assert lines[0] == "SLO not met: none of its metrics could be measured in 1 trial."
    assert lines[1].startswith("ttft_p99 could not be measured in 1 of 1 trial, which counts as missed")


def test_a_relative_limit_without_its_default_is_said() -> None:
    """0.33x of nothing is no limit."""
    lost = dataclasses.replace(trial(1, limits={X: 0.6}), slos_met=False)
    text = verdict(study(), [failed(0, label="default"), lost])

    assert "itl_p99=0.33x: no limit in numbers, it is relative to the default, which was not measured." in text


def test_notes_of_the_shown_trials_are_passed_on_once() -> None:
    """Too few requests for a percentile is part of the answer."""
    note = "73 requests: too few for p99, p90 is the highest estimable"
    results = [trial(0, label="default", repeats=(Repeat({X: 1.0, Y: 1.0}, notes=(note,)),) * 2)]

    assert verdict(NO_SLO, results).splitlines()[1:] == [f"Note: {note}"]


def test_objectives_that_nobody_measured_are_named() -> None:
    """A study whose objective has no numbers says which."""
    text = verdict(study(slo=(), objectives={"ttft": "ttft_p50.long", "itl": "itl_p50"}), [trial(0)])

    assert text.startswith("No front: ITL p50 could not be measured")


def test_host_faults_do_not_count_as_trials() -> None:
    """A port that was taken says nothing about a configuration."""
    text = verdict(study(), [*budgets(), failed(9, FailureKind.PORT, "port taken")])

    assert text.startswith("SLO met by 1 of 8 trials.")
    assert "2 trials failed (1 oom, 1 port)." in text


def test_table_rows() -> None:
    """A row a trial that ran, with its marks, differences, objectives and each SLO's state."""
    rows = words.trial_table(study(), budgets())

    assert [row.number for row in rows] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert rows[0].marks == ("front", "default")
    assert rows[4] == TrialRow(
        4, ("front", "recommended"), "max_num_batched_tokens 256", 0.589, 0.101, ("met", "met"), None
    )
    assert rows[5] == TrialRow(5, (), "max_num_batched_tokens 65536", None, None, ("", ""), "oom")
    assert rows[6].slo == ("missed by 18 %", "met")


def test_the_table_for_a_terminal_shows_resolved_limits_and_failures() -> None:
    """A relative limit stands there in milliseconds, a failure with its kind, outside text as text."""
    out = io.StringIO()
    results = [*budgets(), trial(9, args={"model_impl": "[red]x[/red]"})]
    Console(file=out, width=170).print(words.render_trials(study(), results))
    text = out.getvalue()

    assert "<= 133 ms (0.33x)" in text
    assert "failed: oom" in text
    assert "model_impl [red]x[/red]" in text
    assert "* recommended" in text


def test_a_part_of_the_table_is_judged_among_all() -> None:
    """Picking rows changes no mark."""
    out = io.StringIO()
    Console(file=out, width=170).print(words.render_trials(study(), budgets(), only={2, 6}))

    assert [line.split()[0] for line in out.getvalue().splitlines()[1:]] == ["trial", "2", "6", "*"]
    assert "recommended" not in out.getvalue()


@pytest.mark.parametrize("width", [1, 20, 60])
def test_the_table_fits_narrow_terminals(width: int) -> None:
    """However narrow, it is drawn."""
    out = io.StringIO()
    Console(file=out, width=width).print(words.render_trials(study(), budgets()))

    assert out.getvalue()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("ttft_p50.long", "TTFT p50 long"),
        ("itl_p99_9", "ITL p99.9"),
        ("slo_attainment", "SLO attainment"),
        ("request_throughput", "request throughput"),
        ("max_stall_max", "longest stall max"),
        ("itl_first_gap_p95", "second token gap p95"),
        ("kv_transfer_time_mean", "KV transfer time mean"),
    ],
)
def test_metric_names(key: str, name: str) -> None:
    """Keys become the field's words."""
    assert metric_name(key) == name
