"""Reading rows, refusing what cannot be replayed, and changing the rate without breaking reuse."""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from replay_data import workload

from tuner.errors import SpecError
from tuner.reuse import ideal_hits
from tuner.workload import (
    Fingerprint,
    Request,
    Workload,
    check_fits,
    encoded,
    load,
    moved,
    scale_rate,
    to_jsonl,
    trusted,
)

ROW = {"arrival_s": 0.5, "input_len": 20, "output_len": 3}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_sorted_by_arrival_and_ties_keep_the_files_order(tmp_path: Path) -> None:
    """Logs are written at completion, so the file's order is not the order of arrival."""
    rows = [{**ROW, "arrival_s": at, "input_len": n} for at, n in [(2.0, 1), (1.0, 2), (1.0, 3)]]
    loaded = load(written(tmp_path / "w.jsonl", *rows))

    assert [r.input_len for r in loaded.requests] == [2, 3, 1]
    assert (loaded.name, loaded.span, loaded.longest) == ("w", 1.0, 6)


def test_a_folder_has_a_window_and_what_is_beside_it(tmp_path: Path) -> None:
    """workload.jsonl is the window; history and confirm are optional."""
    written(tmp_path / "workload.jsonl", ROW)
    written(tmp_path / "history.jsonl", ROW, ROW)
    loaded = load(tmp_path)

    assert (len(loaded.requests), len(loaded.history), len(loaded.confirm)) == (1, 2, 0)
    assert loaded.name == tmp_path.name


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**ROW, "arrival_s": -1}, "arrival_s must be"),
        ({**ROW, "arrival_s": "0"}, "arrival_s must be"),
        ({**ROW, "arrival_s": float("nan")}, "not JSON"),
        ({**ROW, "arrival_s": 10**400}, "arrival_s must be"),
        ({"input_len": 1, "output_len": 1}, "arrival_s must be"),
        ({**ROW, "input_len": 0}, "input_len must be"),
        ({**ROW, "input_len": 1.5}, "input_len must be"),
        ({**ROW, "output_len": 0}, "output_len must be"),
        ({**ROW, "output_len": True}, "output_len must be"),
        ({**ROW, "speed": 1}, "unknown field `speed`"),
        ({**ROW, "session.id": "x"}, "Object contains unknown field `session.id`"),
        ({**ROW, "block_ids": [1, 2]}, "block_ids need a block_size"),
        ({**ROW, "block_ids": [1], "block_size": 16}, "1 block ids for 20 tokens, which are 2 blocks of 16"),
        ({**ROW, "block_ids": [1, "2"], "block_size": 16}, "list of whole numbers"),
        ({**ROW, "prompt": 5}, "text or a list of token ids"),
        ({**ROW, "prompt": ["a"] * 20}, "text or a list of token ids"),
        ({**ROW, "prompt": [5, 6]}, "has 2 token ids, input_len says 20"),
        ({**ROW, "prompt": [5, 6], "block_ids": [1, 2], "block_size": 16}, "has 2 token ids, input_len says 20"),
        ({**ROW, "session": 5}, "session must be text"),
        ({**ROW, "source_line": "5"}, "source_line must be a whole number"),
        ({**ROW, "think_time_s": -1}, "think_time_s must be a number of seconds, zero or more"),
        ([1], "not a row: Expected `object`, got `array`"),
    ],
)
def test_a_row_that_cannot_be_replayed_is_named_by_its_line(tmp_path: Path, row: Any, says: str) -> None:
    """The second line is wrong, and the message says so."""
    with pytest.raises(SpecError, match=says) as caught:
        load(written(tmp_path / "w.jsonl", ROW, row))

    assert caught.value.message.startswith(f"{tmp_path}/w.jsonl:2: ")


def test_text_that_is_no_json_is_named_by_its_line(tmp_path: Path) -> None:
    """A CSV is not read as something else."""
    (tmp_path / "w.jsonl").write_text("TIMESTAMP,ContextTokens\n")

    with pytest.raises(SpecError, match=r"w\.jsonl:1: not JSON"):
        load(tmp_path / "w.jsonl")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_no_rows_are_refused(tmp_path: Path, content: str) -> None:
    """An empty file is no workload."""
    (tmp_path / "w.jsonl").write_text(content)

    with pytest.raises(SpecError, match="no rows"):
        load(tmp_path / "w.jsonl")


def test_a_missing_workload_is_refused(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(SpecError, match="no workload here"):
        load(tmp_path / "nothing")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
BLOCKS = st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=4).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    blocks = draw(BLOCKS)
    size = draw(st.integers(1, 64)) if blocks else None
    input_len = len(blocks) * (size or 0) if blocks else draw(st.integers(1, 5000))
    return Request(
        arrival=draw(st.floats(0, 1e9)),
        input_len=input_len,
        output_len=draw(st.integers(1, 5000)),
        block_ids=blocks,
        block_size=size,
        session=draw(st.none() | TEXT),
        prompt=draw(st.none() | TEXT),
        think_time=draw(st.none() | st.floats(0, 100)),
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(requests(), min_size=1, max_size=4))
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Request]) -> None:
    """Every field survives a file, whatever characters a prompt has (U+2028 ends no row)."""
    path = tmp_path_factory.mktemp("w") / "w.jsonl"
    path.write_text(to_jsonl(rows), encoding="utf-8")

    assert load(path).requests == tuple(sorted(rows, key=lambda row: row.arrival))


@given(requests())
def test_a_row_of_our_own_is_read_without_its_limits(row: Request) -> None:
    """On a trace's own clock, or longer than anything, it is the same row."""
    for own in (row, changed(row, arrival=1e18, think_time=1e18, input_len=10**9, prompt=(7, 2**40))):
        assert trusted(encoded(own)) == own


@given(requests(), st.floats(-1e12, 1e12))
def test_a_line_is_moved_without_being_read(row: Request, arrival: float) -> None:
    """It is the line of the same row at the other arrival, to the byte."""
    assert moved(encoded(row), arrival) == encoded(changed(row, arrival=arrival))


@given(requests(), st.sampled_from(["model", "endpoint", ',"model":"a"', '","source_line":1']))
def test_a_fingerprint_does_not_know_where_rows_came_from(row: Request, text: str) -> None:
    """Model, endpoint and line change nothing; all else does, also what only looks like them."""

    def fingerprint(row: Request) -> str:
        found = Fingerprint()
        found.add(encoded(row))
        return found.hexdigest()

    own = fingerprint(row)
    assert own == sha256(encoded(row)).hexdigest()
    for origin in ({"model": text}, {"endpoint": text, "source_line": 7}, {"source_line": 7}):
        assert fingerprint(changed(row, **origin)) == own
    for other in ({"session": f"{row.session}{text}"}, {"prompt": f"{row.prompt}{text}", "model": text}):
        assert fingerprint(changed(row, **other)) != own


def test_rows_longer_than_the_model_are_refused_with_their_number() -> None:
    """One limit for all configurations, checked before any of them starts."""
    fits, over = Request(0, 100, 28), Request(1, 100, 29, source_line=7)
    check_fits(workload(fits), 128)

    with pytest.raises(SpecError, match=r"row 2 \(source line 7\): 100 \+ 29 tokens .* 1 of 2 rows"):
        check_fits(workload(fits, over), 128)


def shared(groups: int, size: int) -> list[Request]:
    """Return `groups` prefix groups of `size` rows each, in turn."""
    return [
        Request(float(i), 48, 5, block_ids=(0, 100 + i % groups, 1000 + i), block_size=16) for i in range(groups * size)
    ]


def test_thinning_keeps_or_drops_whole_prefix_groups() -> None:
    """At half the rate a group that is there is there entirely, so reuse inside it survives."""
    rows = shared(groups=20, size=5)
    halved = scale_rate(workload(*rows), 0.5, seed=1)
    kept = {row.block_ids[:2] for row in halved.requests if row.block_ids}

    assert len(halved.requests) == 50
    assert list(halved.requests) == [row for row in rows if row.block_ids and row.block_ids[:2] in kept]
    assert "50 of 100 rows" in halved.transforms[0]


def test_doubling_lays_a_relabelled_copy_over_the_window() -> None:
    """At twice the rate there are twice the rows, no copy shares a block with another, and the span stays."""
    rows = shared(groups=4, size=5)
    doubled = scale_rate(workload(*rows), 2, seed=1)
    blocks = [set(row.block_ids or ()) for row in doubled.requests]
    original = set().union(*(row.block_ids or () for row in rows))

    assert len(doubled.requests) == 40
    assert sum(bool(ids & original) for ids in blocks) == 20
    assert doubled.span <= 19
    assert list(doubled.requests) == sorted(doubled.requests, key=lambda row: row.arrival)


SHARING = tuple(Request(i, 32, 4, block_ids=(7, 10 + i), block_size=16) for i in range(4))


def test_copies_find_of_the_history_what_the_recording_finds() -> None:
    """Each copy has a history of its own, or it would be left with a cold cache."""
    history = (Request(0, 32, 4, block_ids=(7, 9), block_size=16),)
    found = scale_rate(Workload("w", SHARING, "0" * 64, history), 3.0, seed=0)

    assert ideal_hits(found.requests, 16, found.history).tolist() == [16] * 12
    assert (ideal_hits(found.requests, 16) == 0).sum() == 3  # the first row of each copy


def test_copies_find_nothing_of_a_history_that_the_recording_does_not_find() -> None:
    """Ids of copies are none that the history has, which may be larger than those of the window."""
    history = tuple(Request(i, 16, 4, block_ids=(i,), block_size=16) for i in range(14, 200))
    found = scale_rate(Workload("w", SHARING, "0" * 64, history), 3.0, seed=0)

    assert np.array_equal(ideal_hits(found.requests, 16, found.history), ideal_hits(found.requests, 16))


def test_a_workload_that_was_doubled_can_be_doubled_again() -> None:
    """No copy takes the name of one that was made before: rows of two sessions would be taken for one."""
    rows = tuple(Request(i, 10, 4, id=str(i), session="a", parent=str(i - 1) if i else None) for i in range(3))
    twice = scale_rate(Workload("w", rows, "0" * 64), 2.0, seed=0)
    found = scale_rate(twice, 2.0, seed=0).requests

    assert len({row.id for row in found}) == 12
    assert sorted(Counter(row.session for row in found).values()) == [3, 3, 3, 3]


def test_scaling_is_seeded_and_marks_the_workload() -> None:
    """The same seed gives the same rows and fingerprint; another rate is another workload."""
    base = workload(*shared(10, 3))

    assert scale_rate(base, 1, seed=1) is base
    assert scale_rate(base, 0.5, seed=1) == scale_rate(base, 0.5, seed=1)
    assert scale_rate(base, 0.5, seed=1).sha256 != base.sha256


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(factor: float) -> None:
    """Zero, negative and not-a-number are no rates."""
    with pytest.raises(SpecError, match="must be above zero"):
        scale_rate(workload(*shared(2, 2)), factor, seed=1)
