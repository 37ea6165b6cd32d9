"""What a study's results say: front, knee, recommendation, closest miss; and their form on disk."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna._hypervolume import compute_hypervolume
from study_data import X, Y, budgets, config, failed, trial

from tuner import results
from tuner.results import TrialResult
from tuner.serving import Role, ServingConfig, Topology

COORDINATES = st.integers(1, 12).map(float)
POINTS = st.lists(st.tuples(COORDINATES, COORDINATES), max_size=25)


def trials(points: list[tuple[float, float]]) -> list[TrialResult]:
    return [trial(number, x, y) for number, (x, y) in enumerate(points)]


def numbers(found: list[TrialResult]) -> list[int]:
    return [r.number for r in found]


@given(POINTS)
def test_front_is_what_brute_force_finds(points: list[tuple[float, float]]) -> None:
    """A point is on the front when no other is at least as good in both metrics and better in one."""
    expected = {
        (x, y)
        for x, y in points
        if not any(a <= x and b <= y and (a < x or b < y) for a, b in points)
    }  # fmt: skip
    found = [(r.metrics[X], r.metrics[Y]) for r in results.front(trials(points), X, Y)]

    assert set(found) == expected
    assert len(found) == len(expected), "equal points count once"
    assert found == sorted(found)


@given(POINTS)
def test_hypervolume_agrees_with_optunas(points: list[tuple[float, float]]) -> None:
    """The sweep gives what Optuna's own (private) computation gives."""
    import numpy as np

    reference = (9.5, 10.5)
    inside = np.array([p for p in points if p[0] < reference[0] and p[1] < reference[1]]).reshape(-1, 2)
    expected = compute_hypervolume(inside, np.array(reference)) if len(inside) else 0.0

    assert results.hypervolume(points, reference) == pytest.approx(expected)


def test_a_failed_trial_and_a_repeat_are_never_on_the_front() -> None:
    """Only trials with numbers of their own are points."""
    found = [trial(0, 5, 5), failed(1), trial(2, 1, 1, same_as=0)]

    assert numbers(results.front(found, X, Y)) == [0]


@given(POINTS.filter(bool), st.floats(0.001, 1000), st.floats(0.001, 1000))
def test_the_knee_does_not_depend_on_units(points: list[tuple[float, float]], a: float, b: float) -> None:
    """Seconds or milliseconds, the same trial is the knee."""
    front = results.front(trials(points), X, Y)
    scaled = [trial(r.number, r.metrics[X] * a, r.metrics[Y] * b) for r in front]
    knee, other = results.knee(front, X, Y), results.knee(scaled, X, Y)

    assert knee is not None
    assert other is not None
    assert math.isclose(
        knee.metrics[X] * knee.metrics[Y] * a * b, other.metrics[X] * other.metrics[Y], rel_tol=1e-6
    ) or (knee.number == other.number)


def test_the_knee_is_where_the_next_step_costs_more_than_it_gains() -> None:
    """Of (1, 100), (2, 10) and (100, 9) it is the middle one, which nearly has the best of both."""
    found = results.knee(trials([(1, 100), (2, 10), (100, 9)]), X, Y)

    assert found is not None
    assert found.number == 1


def test_the_knee_of_two_points_is_the_end_that_wins_more() -> None:
    """A sixth of the ITL for half as much TTFT again is the better end; one point is its own knee."""
    found = results.knee(trials([(0.47, 0.402), (0.71, 0.061)]), X, Y)

    assert found is not None
    assert found.number == 1
    assert results.knee([], X, Y) is None
    assert results.knee(trials([(3, 3)]), X, Y) is not None


def test_recommend_takes_only_what_meets_the_slos() -> None:
    """A better knee that misses an SLO is passed over."""
    limits = {X: 0.6}
    found = results.recommend([trial(0, 0.5, 0.4, limits=limits), trial(1, 0.61, 0.05, limits=limits)], X, Y)

    assert found is not None
    assert found.number == 0


def test_recommend_without_slos_takes_the_knee_of_all() -> None:
    """A study without a promise still has a best compromise."""
    found = results.recommend(trials([(1, 100), (2, 10), (100, 9)]), X, Y)

    assert found is not None
    assert found.number == 1


def test_recommend_prefers_fewer_arguments_within_the_noise() -> None:
    """One per cent better with two arguments more is not worth the arguments."""
    default = trial(0, 2.0, 2.0, label="default")
    two = trial(1, 1.00, 1.00, args={"max_num_batched_tokens": 512, "max_num_seqs": 8})
    one = trial(2, 1.01, 1.01, args={"max_num_batched_tokens": 512})
    far = trial(3, 1.03, 1.00)

    assert results.recommend([default, two, one, far], X, Y) is one
    assert results.recommend([default, two, far], X, Y) is two


def test_nothing_feasible_recommends_nothing_and_names_the_closest() -> None:
    """The closest miss is the one whose worst SLO is violated least."""
    limits = {X: 1.0, Y: 1.0}
    found = [trial(0, 0.5, 2.0, limits=limits), trial(1, 1.3, 1.2, limits=limits), failed(2)]
    closest = results.closest(found)

    assert results.recommend(found, X, Y) is None
    assert closest is not None
    assert closest.number == 1


def test_an_slo_that_was_not_measurable_is_no_advantage() -> None:
    """A trial without a value for an SLO is behind those that have one."""
    half = dataclasses.replace(trial(0, 1.1, 5), excess={X: 0.1}, slos_met=False)
    closest = results.closest([half, trial(1, 3.0, 3.0, limits={X: 1.0, Y: 1.0})])

    assert closest is not None
    assert closest.number == 1
    assert results.closest([trial(0), failed(1)]) is None


def test_differences_name_what_an_operator_would_type() -> None:
    """Arguments, roles and topology that differ from the default, and those only the default gives."""
    default = trial(0, label="default")
    pd = ServingConfig(
        "tune/tiny-qwen2",
        {"max_num_seqs": 4},
        {"OMP_NUM_THREADS": "1"},
        Topology.parse("1p2d"),
        {Role.PREFILLER: {"max_num_batched_tokens": 8192}},
    )

    assert results.differences(config(max_num_seqs=4), default) == {"max_num_seqs": 4}
    assert results.differences(pd, default) == {
        "topology": "1p2d",
        "max_num_seqs": 4,
        "prefiller.max_num_batched_tokens": 8192,
        "env.OMP_NUM_THREADS": "1",
        "max_model_len": None,
    }
    assert results.differences(config(), None) == {"max_model_len": 4096}


@pytest.mark.parametrize("result", budgets(), ids=lambda r: f"trial {r.number}")
def test_a_result_survives_the_disk(result: TrialResult) -> None:
    """What is read back equals what was written, up to the last digit of a duration."""
    back = results.from_json(results.to_json(result))

    assert back.metrics == pytest.approx(result.metrics)
    assert [r.metrics for r in back.repeats] == [pytest.approx(r.metrics) for r in result.repeats]
    assert dataclasses.replace(back, metrics=result.metrics, repeats=result.repeats) == result
    assert results.to_json(back) == results.to_json(results.from_json(results.to_json(back)))


def test_durations_on_disk_are_milliseconds() -> None:
    """A person who opens result.json reads `"ttft_p50_ms.long": 471.0`."""
    text = results.to_json(budgets()[0])

    assert '"ttft_p50_ms.long": 471.0' in text
    assert '"itl_p99_ms": 402.0' in text


def test_of_kv_transfer_only_what_can_differ_is_told() -> None:
    """Connector and role go without saying, once the topology is said; the device is told once for both."""
    transfer = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    roles = {
        role: {"kv_transfer_config": transfer | {"kv_role": role.kv_role}} for role in Topology.parse("1p1d").roles
    }
    settled = ServingConfig("m", {"max_num_seqs": 8}, topology=Topology.parse("1p1d"), role_args=roles)

    assert results.flat(settled) == {"topology": "1p1d", "max_num_seqs": 8, "kv_buffer_device": "cpu"}
