"""Changing the load of recorded rows: whole groups, turned copies, spread steps, windows like the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.transforms import (
    Columns,
    Selection,
    choose_windows,
    clock_steps,
    dispersion,
    keep_groups,
    scale_rate,
    spread,
)

GROUPS = st.lists(st.integers(0, 9), min_size=1, max_size=60).map(lambda values: np.array(values, dtype=np.int64))


def columns(arrival: list[float], group: list[int] | None = None) -> Columns:
    """Return rows of 100 prompt and 10 output tokens, each in a group of its own unless told otherwise."""
    n = len(arrival)
    lengths = np.full(n, 100), np.full(n, 10)
    return Columns(np.array(arrival, dtype=float), *lengths, np.array(range(n) if group is None else group))


@given(GROUPS, st.floats(0.05, 0.95), st.integers(0, 5))
def test_groups_are_kept_whole_and_about_as_many_rows_as_wanted(group: np.ndarray, share: float, seed: int) -> None:
    """The number of rows is off by no more than half of the largest group."""
    kept = keep_groups(group, share, np.random.default_rng(seed))

    assert not set(group[kept]) & set(group[~kept])
    assert abs(kept.sum() - share * len(group)) <= np.bincount(group).max() / 2


@given(GROUPS, st.integers(0, 5))
def test_what_groups_are_called_decides_nothing(group: np.ndarray, seed: int) -> None:
    """Other numbers for the same groups keep the same rows."""
    kept = [keep_groups(group * factor + 3, 0.5, np.random.default_rng(seed)) for factor in (1, -7)]

    assert np.array_equal(*kept)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30), st.sampled_from([1.0, 2.0, 2.5, 3.0]), st.integers(0, 5))
def test_copies_are_the_recording_turned_around(arrivals: list[float], factor: float, seed: int) -> None:
    """Every copy has each row once, nobody arrives outside the recording, and the order is that of arrival."""
    rows = columns(sorted(arrivals))
    found = scale_rate(rows, factor, np.random.default_rng(seed))

    assert np.all(np.diff(found.arrival) >= 0)
    assert np.all((found.arrival >= rows.arrival[0]) & (found.arrival <= max(rows.arrival[-1], rows.arrival[0] + 1)))
    for copy in range(int(factor)):
        assert sorted(found.row[found.copy == copy]) == list(range(len(rows)))
    assert len(found) == pytest.approx(factor * len(rows), abs=0.5)


def test_a_stray_stamp_costs_no_memory() -> None:
    """One row at zero among wall clocks: the dispersion over half a century is that over all its seconds."""
    rows = columns([0.0, *(1.7e9 + i for i in range(300))])

    assert dispersion(np.array([0.0, 0.5, 3.0]), 1.0, 4.0) == pytest.approx(np.var([2, 0, 0, 1]) / 0.75)
    assert dispersion(rows.arrival, 1.0, rows.span) == pytest.approx(1, abs=1e-6)


def test_the_original_is_not_turned() -> None:
    """Copy 0 keeps the recorded times."""
    found = scale_rate(columns([0.0, 1.0, 5.0]), 2, np.random.default_rng(0))

    assert list(found.arrival[found.copy == 0]) == [0.0, 1.0, 5.0]


@pytest.mark.parametrize(
    ("arrivals", "step"),
    [
        ([0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 12, 12], 3.0),
        ([0, 0, 0, 2.999, 2.999, 6, 6, 6, 6, 15.001, 18, 18], 3.0),
        ([0, 0.1, 0.25, 0.3, 1.7, 2.0], None),
        ([0, 0, 0.001, 0.001, 0.002, 0.002, 0.003, 0.003, 0.004, 0.004], None),  # of milliseconds: decides nothing
        ([0, 0, 1.1, 1.1, 1.7, 1.7, 4.2, 4.2, 5.0, 5.0], None),  # on no grid: the traffic's own bursts
        ([0, 0, 0], None),
    ],
)
def test_a_clock_that_goes_in_steps_is_seen(arrivals: list[float], step: float | None) -> None:
    """Several rows a stamp, and all stamps on one grid."""
    found = clock_steps(np.array(arrivals, dtype=float))

    assert (found and found.step) == (None if step is None else pytest.approx(step, abs=0.002))


def test_spreading_keeps_each_row_in_its_step() -> None:
    """Rows of one stamp end between it and the next, evenly."""
    stamps = np.repeat(np.arange(0.0, 300.0, 3.0), 20)
    found = spread(stamps, 3.0, np.random.default_rng(0))

    assert np.all((found - stamps >= 0) & (found - stamps < 3.0))
    assert np.mean(found - stamps) == pytest.approx(1.5, abs=0.05)


def test_dispersion_is_variance_over_mean_of_whole_bins() -> None:
    """Three bins of 2, 0 and 1 arrivals; the half bin at the end does not count."""
    assert dispersion(np.array([0.1, 0.2, 2.5, 3.1]), 1.0, 3.5) == pytest.approx(np.var([2, 0, 1]) / 1.0)


def test_the_window_that_is_like_the_whole_is_chosen() -> None:
    """Four minutes of one request a second around a minute of three: windows at the whole's 1.4, not at 3."""
    even = [float(at) for at in range(120)] + [float(at) for at in range(180, 300)]
    busy = [120 + at / 3 for at in range(180)]
    rows = columns(sorted(even + busy))
    first, second = choose_windows(rows, 20.0)

    for window in (first, second):
        assert 20 <= window.holds(rows.arrival).sum() <= 36
    assert abs(first.start - second.start) >= 20
    assert first.distance <= second.distance


def test_a_selection_counts_from_where_it_is_told() -> None:
    """From its first row, or from the start of a window."""
    rows = Selection.of(columns([0.0, 1.0, 5.0]))

    assert list(rows.where(np.array([1, 2])).arrival) == [0.0, 4.0]
    assert list(rows.where(np.array([1, 2]), 0.5).arrival) == [0.5, 4.5]
