"""Prompts of exact length that share what the recorded ones shared, and schedules."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_data import VOCAB_SIZE, evenly, workload

from tuner.replay.prompts import Prompts, ordinary_tokens, to_json
from tuner.replay.schedule import schedule, warm_up_rows
from tuner.workload import Request

PROMPTS = Prompts("salt", VOCAB_SIZE)


def row(*blocks: int, size: int = 16, last: int | None = None, arrival: float = 0.0) -> Request:
    input_len = size * (len(blocks) - 1) + (size if last is None else last)
    return Request(arrival, input_len, 5, block_ids=blocks, block_size=size)


def ids(request: Request, number: int = 0, prompts: Prompts = PROMPTS) -> list[int]:
    return [int(token) for token in prompts.token_ids(request, number)]


def test_tokens_are_the_documented_function_of_salt_and_id() -> None:
    """Rebuilt here in plain integers, as the module's docstring says (report 33)."""
    mask, tokens = (1 << 64) - 1, ordinary_tokens(VOCAB_SIZE)

    def key(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def splitmix64(start: int, i: int) -> int:
        z = (start + i * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    span = len(tokens)
    rest = [tokens.start + splitmix64(key("salt/block/1234"), i + 1) % span for i in range(2, 16)]
    first = [tokens.start + (part + key("salt")) % span for part in (1234 % span, 1234 // span)]

    assert ids(row(1234)) == first + rest


def test_another_process_makes_the_same_bytes() -> None:
    """Python's string hash differs from process to process; prompts do not."""
    code = (
        "from tuner.replay.prompts import Prompts; from tuner.workload import Request;"
        "print(Prompts('salt', 1024).body('m', Request(0, 40, 5, (1, 2, 3), 16), 0).decode())"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]

    assert made[0] == made[1]
    assert json.loads(made[0])["prompt"] == ids(row(1, 2, 3, last=8))


BLOCKS = st.lists(st.integers(0, 700), min_size=1, max_size=5)


@settings(deadline=None)
@given(BLOCKS, BLOCKS, st.integers(1, 16))
def test_rows_share_tokens_as_far_as_ids(first: list[int], second: list[int], last: int) -> None:
    """Common blocks are common tokens, and the first block that differs does so from its first token on."""
    one, two = ids(row(*first, last=last)), ids(row(*second, last=last))
    blocks = zip(first, second, strict=False)
    shared = next((i for i, (a, b) in enumerate(blocks) if a != b), min(len(first), len(second)))
    length = min(16 * shared, len(one), len(two))

    assert (len(one), len(two)) == (16 * (len(first) - 1) + last, 16 * (len(second) - 1) + last)
    assert one[:length] == two[:length]
    if shared < min(len(first), len(second)):
        assert one[16 * shared] != two[16 * shared]


HASHES = st.lists(st.integers(-(2**63), 2**63), min_size=1, max_size=4)


@settings(deadline=None)
@given(HASHES, st.lists(st.sampled_from([0, 1, 768, 768**2, 768**3, 2**53]), min_size=1, max_size=4))
def test_ids_of_any_size_share_blocks_as_far_as_they_are_equal(first: list[int], steps: list[int]) -> None:
    """Also those that both encoded tokens cannot tell apart: 768 ordinary tokens are the base here."""
    second = [block + step for block, step in zip(first, steps, strict=False)]
    one, two = ids(row(*first)), ids(row(*second))
    blocks = zip(first, second, strict=False)
    shared = next((i for i, (a, b) in enumerate(blocks) if a != b), len(second))

    assert [one[i : i + 16] == two[i : i + 16] for i in range(0, 16 * shared, 16)] == [True] * shared
    if shared < len(second):
        assert one[16 * shared : 16 * shared + 16] != two[16 * shared : 16 * shared + 16]


def test_rows_without_ids_are_unique_per_row_and_per_salt() -> None:
    """No two of 200 prompts begin alike, nor do the repeats of one (report 6)."""
    plain = Request(0.0, 40, 5)
    firsts = {ids(plain, number)[0] for number in range(200)}

    assert len(firsts) == 200
    assert ids(plain, 0)[:16] != ids(plain, 0, Prompts("other", VOCAB_SIZE))[:16]
    assert ids(plain, 0) == ids(plain, 0)


@pytest.mark.parametrize(("vocab_size", "first_special"), [(1024, 1021), (151_936, 151_643), (129_280, 128_000)])
def test_special_tokens_are_not_used(vocab_size: int, first_special: int) -> None:
    """Neither the first ids nor the last: checked for the tiny model, Qwen2.5 and DeepSeek-V3."""
    made = Prompts("x", vocab_size).token_ids(Request(0.0, 20_000, 1), 3)

    assert made.min() >= min(1000, vocab_size // 8)
    assert made.max() < first_special


def test_a_prompt_in_the_row_is_sent_as_it_is() -> None:
    """Text stays text, ids stay ids."""
    text = json.loads(PROMPTS.body("m", Request(0, 3, 5, prompt='say "hi"\n'), 0))
    tokens = json.loads(PROMPTS.body("m", Request(0, 3, 5, prompt=(5, 600, 7)), 0))

    assert (text["prompt"], tokens["prompt"]) == ('say "hi"\n', [5, 600, 7])


def test_the_body_forces_length_and_asks_for_counts() -> None:
    """Greedy, no stop at EOS, usage with every chunk."""
    body = json.loads(PROMPTS.body("m", Request(0, 8, 5), 0))
    body.pop("prompt")

    assert body == {
        "model": "m", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.integers(0, 200_000) | st.integers(0, 2**62), max_size=50))
def test_ids_in_json_are_the_ids(numbers: list[int]) -> None:
    """Padding is whitespace to a JSON parser."""
    assert json.loads(to_json(np.array(numbers, dtype=np.int64))) == numbers


def test_due_times_count_from_the_first_row() -> None:
    """Epoch stamps are rebased in doubles, ties keep their order."""
    rows = tuple(Request(1.7e9 + at, n, 1) for at, n in [(0.5, 1), (0.0, 2), (0.5, 3)])
    plan = schedule(rows)

    assert plan.due.tolist() == [0.0, 0.5, 0.5]
    assert [r.input_len for r in plan.rows] == [2, 1, 3]
    assert plan.window == 0.5


def test_warm_up_looks_like_the_workload_and_shares_nothing() -> None:
    """Lengths from the rows, the longest first, the workload's rate, no block ids, no prompts."""
    rows = [Request(i / 10, 20 + i, 3, block_ids=(1, 2), block_size=16 + i, prompt="x") for i in range(50)]
    warm = warm_up_rows(workload(*rows), duration=2.0, seed=1)

    assert len(warm) == pytest.approx(20, abs=1)
    assert warm[0].input_len == 69
    assert {r.input_len for r in warm} <= {r.input_len for r in rows}
    assert all(r.block_ids is None and r.prompt is None and 0 <= r.arrival < 2 for r in warm)
    assert warm == warm_up_rows(workload(*rows), duration=2.0, seed=1)


def test_a_single_burst_can_be_warmed_up_for() -> None:
    """Rows at one moment have no rate; a handful are sent."""
    assert len(warm_up_rows(evenly(3, 0.0), duration=1.0, seed=1)) == 4
