"""Traces of conversations: who belongs to whom, what prompts share, and what was waited for."""

import json
import re
import time
from datetime import UTC, datetime
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_data import BAILIAN, TRACELAB, jsonl, read, written

from tuner.errors import SpecError
from tuner.readers.blocks import Blocks, Run
from tuner.readers.format import Options
from tuner.replay.prompts import Prompts
from tuner.workload import Request


def shared(one: Request, other: Request) -> int:
    """Return how many leading block ids two prompts share."""
    pairs = zip(one.block_ids or (), other.block_ids or (), strict=False)
    return sum(takewhile(bool, (a == b for a, b in pairs)))


# --- Bailian ----------------------------------------------------------------------------------------------


def test_a_chats_turns_are_a_session_named_by_its_root(tmp_path: Path) -> None:
    """Parents are followed to the first turn, whichever line they stand on; ids and parents keep their names."""
    parents = {7: -1, 9: 7, 12: 9, 3: -1}
    turns = [{**BAILIAN[0], "chat_id": n, "parent_chat_id": parent} for n, parent in parents.items()]

    for lines in (turns, turns[::-1]):
        rows, _ = read(written(tmp_path, jsonl(*lines)))
        assert {(row.id, row.parent, row.session) for row in rows} == {
            ("7", None, "7"), ("9", "7", "7"), ("12", "9", "7"), ("3", None, "3"),
        }  # fmt: skip


def test_turns_of_a_chat_that_began_earlier_are_one_session(tmp_path: Path) -> None:
    """A parent that the file does not have is the earliest turn that is known, for all its children."""
    turns = [{**BAILIAN[0], "chat_id": n, "parent_chat_id": parent} for n, parent in [(9, 7), (10, 7), (11, 10)]]
    rows, _ = read(written(tmp_path, jsonl(*turns)))

    assert [(row.session, row.parent) for row in rows] == [("7", "7"), ("7", "7"), ("7", "10")]


def test_parents_in_a_circle_end(tmp_path: Path) -> None:
    """Damaged parents do not hang the reader."""
    turns = [{**BAILIAN[0], "chat_id": n, "parent_chat_id": parent} for n, parent in [(1, 2), (2, 1), (5, 5)]]

    assert len(read(written(tmp_path, jsonl(*turns)))[0]) == 3


def test_a_very_long_chat_takes_no_longer_a_turn(tmp_path: Path) -> None:
    """Every turn asks for its first one: 30,000 turns would be walked 450 million times, for minutes."""
    turns = [{**BAILIAN[0], "chat_id": n + 1, "parent_chat_id": n or -1} for n in range(30_000)]
    began = time.process_time()
    rows, _ = read(written(tmp_path, jsonl(*turns)))

    assert {row.session for row in rows} == {"1"}
    assert time.process_time() - began < 10


def test_bailians_clock_and_blocks_are_taken_as_they_are(tmp_path: Path) -> None:
    """Seconds and ids of 16 tokens; nothing is known of how long somebody thought, so nothing is said of it."""
    rows, tally = read(written(tmp_path, jsonl(*BAILIAN)))

    assert [(r.arrival, r.input_len, r.output_len, r.block_ids, r.block_size) for r in rows] == [
        (0.5, 40, 9, (1, 2, 3), 16), (61.114, 64, 5, (1, 2, 4, 5), 16),
    ]  # fmt: skip
    assert {row.think_time for row in rows} == {None}
    assert dict(tally.dropped) == {"no output tokens": 1}


def test_a_tail_without_an_id_is_shared_with_nobody(tmp_path: Path) -> None:
    """Where only whole blocks have ids, the tail gets one of its own, and the file is said to be so."""
    row = {**BAILIAN[0], "hash_ids": [1, 2]}
    rows, tally = read(written(tmp_path, jsonl(row, {**row, "chat_id": 8})))

    assert [len(r.block_ids or ()) for r in rows] == [3, 3]
    assert shared(rows[0], rows[1]) == 2
    (note,) = tally.noted
    assert "no block id for the partial last block" in note
    assert "2x, first on line 1" in note


@pytest.mark.parametrize("ids", [[1], [1, 2, 3, 4]])
def test_other_counts_of_ids_are_refused(tmp_path: Path, ids: list[int]) -> None:
    """40 tokens are three blocks of 16; one id or four are damage."""
    path = written(tmp_path, jsonl({**BAILIAN[0], "hash_ids": ids}))

    with pytest.raises(SpecError, match=re.escape(f"{path}:1: {len(ids)} block ids for 40 tokens")):
        read(path)


def test_bailians_ids_become_tokens_by_a_documented_rule(tmp_path: Path) -> None:
    """Report 33 (qwen-bailian issue#4): equal ids are 16 equal tokens; the rule itself is tested with the prompts."""
    rows, _ = read(written(tmp_path, jsonl(*BAILIAN)))
    prompts = [[int(token) for token in Prompts("salt", 32_000).token_ids(row, n)] for n, row in enumerate(rows)]

    assert [len(prompt) for prompt in prompts] == [40, 64]
    assert prompts[0][:32] == prompts[1][:32]
    assert prompts[0][32] != prompts[1][32]


# --- TraceLab ---------------------------------------------------------------------------------------------


def rounds() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TRACELAB.read_text().splitlines()]


def test_a_round_shares_what_was_cached_of_the_round_before() -> None:
    """Ideal reuse of the prompt before is the cached prefix, as far as that prompt had it, in whole blocks."""
    rows, _ = read(TRACELAB)
    found = []
    for (before, row), (was, said) in zip(pairwise(rows), pairwise(rounds()), strict=True):
        if was["session_id"] == said["session_id"]:
            found.append(16 * shared(before, row))
            assert found[-1] == min(said["prefix_tokens"], was["input_tokens_total"]) // 16 * 16
    assert len(found) == 17
    assert sum(found) > 0.9 * sum(said["prefix_tokens"] for said in rounds() if said["round_index"])


def test_sessions_of_agents_share_nothing() -> None:
    """What another session had cached is not known, so no prompt is shared with it; ids fit the lengths."""
    rows, tally = read(TRACELAB)
    by_session = {row.session: set[int]() for row in rows}
    for row in rows:
        by_session[row.session].update(row.block_ids or ())
        assert len(row.block_ids or ()) == -(-row.input_len // 16)

    claude, codex = by_session.values()
    assert not claude & codex
    assert any("counted as new" in note and "first on line 1" in note for note in tally.noted)


def test_a_round_is_sent_at_its_last_input_and_thought_about_from_the_last_output() -> None:
    """Times of the second round by hand: results at 05:40:50.938 after a call at 05:40:31.647."""
    rows, _ = read(TRACELAB)
    second = rows[1]

    assert second.arrival == datetime(2026, 6, 1, 5, 40, 50, 938000, tzinfo=UTC).timestamp()
    assert (second.think_time, second.parent) == (19.291, rows[0].id)
    assert (second.input_len, second.output_len, second.model) == (35740, 1016, "claude-opus-4-8")
    assert [row.think_time is None for row in rows] == [said["round_index"] == 0 for said in rounds()]


def test_rounds_of_one_index_have_names_of_their_own(tmp_path: Path) -> None:
    """Published traces repeat an index: each round can still be named as a parent."""
    rows, _ = read(written(tmp_path, jsonl(*rounds()[:3], *rounds()[:3])))

    assert len({row.id for row in rows}) == 6


def test_rounds_that_differ_in_their_end_only_are_both_read(tmp_path: Path) -> None:
    """A round that was written twice, once without its output events."""
    said = rounds()[0]
    rows, _ = read(written(tmp_path, jsonl(said, {**said, "timing_events": said["timing_events"][:1]})))

    assert [row.source_line for row in rows] == [1, 2]


def test_a_round_without_an_input_event_has_no_arrival(tmp_path: Path) -> None:
    """Nothing tells when it was sent."""
    said = rounds()[0]
    said["timing_events"] = said["timing_events"][1:]
    path = written(tmp_path, jsonl(said))

    with pytest.raises(SpecError, match=re.escape(f"{path}:1: no arrival time")):
        read(path)


def test_blocks_may_be_larger() -> None:
    """With 512 tokens an id, a prompt has as many ids as blocks, and shares whole ones only."""
    rows, _ = read(TRACELAB, Options(block_size=512))

    assert [len(row.block_ids or ()) for row in rows] == [-(-row.input_len // 512) for row in rows]
    assert 512 * shared(rows[0], rows[1]) == 29380 // 512 * 512


# --- Block ids --------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=12), st.integers(1, 5))
def test_equal_leading_ids_are_equal_leading_tokens(prompts: list[list[int]], size: int) -> None:
    """Two prompts share as many ids as they share whole blocks from the start; ids are numbered from 0 on."""
    blocks = Blocks(size)
    ids = [blocks.of(prompt) for prompt in prompts]

    for one, a in zip(prompts, ids, strict=True):
        assert len(a) == -(-len(one) // size)
        for other, b in zip(prompts, ids, strict=True):
            for count in range(1, min(len(a), len(b)) + 1):
                assert (a[:count] == b[:count]) == (one[: count * size] == other[: count * size])
                assert (a[count - 1] == b[count - 1]) == (a[:count] == b[:count])
    appeared = list(dict.fromkeys(i for prompt in ids for i in prompt))
    assert appeared == list(range(len(appeared)))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=20))
def test_runs_are_the_lists_they_stand_for(steps: list[tuple[int, int]]) -> None:
    """A chain of prompts that keep some leading ids and add new ones, beside the same with lists."""
    run, plain, fresh = Run(0, steps[0][1]), list(range(steps[0][1])), steps[0][1]
    for keep, new in steps[1:]:
        kept = min(keep, len(plain))
        run, plain = run.extended(kept, fresh, new), plain[:kept] + list(range(fresh, fresh + new))
        fresh += new
        assert list(run.ids) == plain
