"""Turns of a conversation: none before its answer, and everything else as before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_data import errors, evenly, play, serving, workload

from tuner import metrics
from tuner.replay import crew
from tuner.replay.schedule import Turn, schedule, turn_facts
from tuner.workload import Request, Workload

# --- Who waits for whom -----------------------------------------------------------------------------------


def row(arrival: float, think_time: float | None = None, **more: Any) -> Request:
    return Request(arrival, 40, 5, think_time=think_time, **more)


def test_a_turn_waits_for_its_parent_else_for_the_row_before_it_in_its_session() -> None:
    """The row that has the parent's id; without a parent the latest of the session; only where think time is known."""
    plan = schedule(
        [
            row(0, id="root", session="s"),
            row(1, 0.5, session="s"),
            row(2, 0.1, session="s", parent="root"),
            row(3, session="s"),
            row(4, 0.2, session="s"),
            row(5, 0.3, session="t"),
        ],
        follow=True,
    )

    assert plan.turns == {1: Turn(0, 0.5), 2: Turn(0, 0.1), 4: Turn(3, 0.2)}


def test_a_parent_that_is_not_in_the_window_is_not_waited_for() -> None:
    """Nor is another row of the session taken for it, nor one that comes later."""
    rows = [row(0, 0.1, parent="later"), row(1, session="s"), row(2, 0.1, session="s", parent="gone")]

    assert schedule([*rows, row(3, id="later")], follow=True).turns == {}


def test_recorded_times_have_no_turns() -> None:
    """Unless sessions are followed, rows go when they were recorded."""
    assert schedule([row(0, session="s"), row(1, 0.1, session="s")]).turns == {}


NAMES = st.sampled_from(["a", "b", "c", None])
CONVERSATIONS = st.lists(
    st.builds(row, st.integers(0, 9), st.sampled_from([None, 0.0, 0.5]), id=NAMES, session=NAMES, parent=NAMES),
    min_size=1,
    max_size=30,
)


@given(CONVERSATIONS, st.integers(1, 4))
def test_conversations_stay_together_and_nothing_waits_for_ever(rows: list[Request], processes: int) -> None:
    """A turn waits for a row before it, which the same process sends; every row is sent by one process."""
    plan = schedule(rows, follow=True)
    cut = crew.shards(plan, processes)

    assert sorted(np.concatenate(cut).tolist()) == list(range(len(rows)))
    assert all(turn.after < place for place, turn in plan.turns.items())
    parts = [plan.part(own) for own in cut]
    assert sum(len(part.turns) for part in parts) == len(plan.turns)
    for part, own in zip(parts, cut, strict=True):
        for place, turn in part.turns.items():
            assert plan.turns[own[place]] == Turn(own[turn.after], turn.think)


def test_what_turns_were_late_by_is_counted_over_those_that_were() -> None:
    """Of three turns two were due later, by 1 and 3 s."""
    plan = schedule([row(0, session="s"), *(row(i, 0.1, session="s") for i in (1, 2, 3))], follow=True)

    assert turn_facts(plan, np.array([0.0, 2.0, 2.0, 6.0])) == {
        "turns_followed": 3, "turns_delayed": 2, "turn_delay_p50": 2.0, "turn_delay_max": 3.0,
    }  # fmt: skip
    assert turn_facts(plan, plan.due) == {"turns_followed": 3, "turns_delayed": 0}


# --- On a server of known timing --------------------------------------------------------------------------

# Five tokens, the last one 180 ms after the request was read.
ANSWERS = {"first_token": 0.1, "gap": 0.02}
timing = pytest.mark.timing


def conversation(*turns: tuple[float, float | None], session: str = "s") -> Workload:
    return workload(*(row(at, think, session=session) for at, think in turns))


@timing
def test_a_turn_is_due_when_its_answer_was_there_and_its_user_had_thought(tmp_path: Path) -> None:
    """Recorded at 50 ms, when the answer takes 180 and the user 100: due at 280; the window stays as recorded."""
    with serving(tmp_path, ANSWERS) as server:
        replay = play(server, conversation((0.0, None), (0.05, 0.1), (1.0, 0.1)))

    seen = replay.records
    assert errors(replay) == [""] * 3
    assert seen.due[1] == pytest.approx(seen.ended[0] + 0.1, abs=1e-6)
    assert 0.28 <= seen.due[1] < 0.6
    assert seen.due[2] == 1.0  # its answer was there long before
    assert (seen.sent - seen.due - seen.connect_wait).max() < 0.2
    assert replay.window == 1.0
    assert (replay.client["turns_followed"], replay.client["turns_delayed"]) == (2, 1)
    assert replay.client["turn_delay_max"] == pytest.approx(seen.due[1] - 0.05)
    assert any("2 turns waited for the answers before them: 1 of them were due later than recorded, by" in note
               for note in replay.notes)  # fmt: skip


@timing
def test_absolute_times_are_those_recorded(tmp_path: Path) -> None:
    """Asked for, a turn goes before its answer is there, and the reader is told."""
    with serving(tmp_path, ANSWERS) as server:
        replay = play(server, conversation((0.0, None), (0.05, 0.1)), follow_sessions=False)

    assert replay.records.due.tolist() == [0.0, 0.05]
    assert replay.records.sent[1] < replay.records.ended[0]
    assert "turns_followed" not in replay.client
    assert replay.notes == ("turns were sent at recorded times, whether their answers were there or not",)


@timing
def test_sessions_without_think_times_go_as_recorded_and_say_so(tmp_path: Path) -> None:
    """What a user thought cannot be made up."""
    with serving(tmp_path, ANSWERS) as server:
        replay = play(server, conversation((0.0, None), (0.05, None)))

    assert replay.records.due.tolist() == [0.0, 0.05]
    assert replay.notes == ("turns were sent at recorded times: the workload has sessions, but no think times",)


@timing
@pytest.mark.parametrize("processes", [1, 2])
def test_conversations_side_by_side_do_not_wait_for_each_other(tmp_path: Path, processes: int) -> None:
    """Four at once beside single rows, by one process or two: each turn after its own answer, records in order."""
    turns = [row(0.01 * k + 0.05 * i, 0.05 if i else None, session=f"{k}") for k in range(4) for i in range(3)]
    single = [Request(0.02 * i, 40, 5) for i in range(20)]
    what = workload(*sorted([*turns, *single], key=lambda r: r.arrival))
    with serving(tmp_path, ANSWERS) as server:
        replay = play(server, what, processes=processes)

    seen, plan = replay.records, schedule(what.requests, follow=True)
    assert set(errors(replay)) == {""}
    assert replay.client["client_processes"] == processes
    waits = np.array(sorted(plan.turns))
    before = np.array([plan.turns[place].after for place in waits])
    assert seen.due[waits] == pytest.approx(seen.ended[before] + 0.05, abs=1e-6)
    others = np.setdiff1d(np.arange(len(plan.rows)), waits)
    assert seen.due[others].tolist() == plan.due[others].tolist()
    assert (seen.sent - seen.due - seen.connect_wait).max() < 0.2


@timing
def test_a_failed_answer_is_an_answer(tmp_path: Path) -> None:
    """The first request is answered 500 at once: the next turn comes, after the time to think."""
    with serving(tmp_path, ANSWERS | {"http_status": {"only": [1], "status": 500}}) as server:
        replay = play(server, conversation((0.0, None), (0.01, 0.2)))

    assert errors(replay) == ["http_500", ""]
    assert replay.records.due[1] == pytest.approx(replay.records.ended[0] + 0.2, abs=1e-6)


@timing
@pytest.mark.timeout(60)
def test_a_turn_whose_answer_never_comes_is_never_sent(tmp_path: Path) -> None:
    """It counts as failed when the drain is over, with all that would have followed it; others are not held up."""
    silent = ANSWERS | {"silence": {"only": [1]}}
    what = workload(row(0.0, session="s"), row(0.1, 0.1, session="s"), row(0.2, 0.1, session="s"), row(0.3))
    with serving(tmp_path, silent) as server:
        replay = play(server, what, drain_timeout=1.0)
        asked = len(server.log())

    assert errors(replay) == ["timeout", "never_sent", "never_sent", ""]
    assert asked == 2
    assert replay.records.ended[0] == pytest.approx(1.3, abs=0.5)
    assert metrics.summarise(replay.records, window=replay.window)["failed.never_sent"] == 2


@timing
def test_the_drain_begins_at_the_end_of_the_recorded_window(tmp_path: Path) -> None:
    """A turn recorded 1.5 s after the last other row is sent, though requests may run for half a second only."""
    with serving(tmp_path, ANSWERS) as server:
        replay = play(server, conversation((0.0, None), (1.5, 0.1)), drain_timeout=0.5)

    assert errors(replay) == ["", ""]
    assert replay.records.due[1] == 1.5


@timing
def test_rows_without_sessions_know_nothing_of_turns(tmp_path: Path) -> None:
    """No fact and no note; think times alone are nobody's."""
    with serving(tmp_path) as server:
        replay = play(server, workload(*(Request(r.arrival, 40, 5, think_time=9.0) for r in evenly(3, 0.02).requests)))

    assert errors(replay) == [""] * 3
    assert not [name for name in replay.client if name.startswith("turn")]
    assert replay.notes == ()
