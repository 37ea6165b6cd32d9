"""Ideal hits of a prefix cache, held against the tokens that are really sent."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_data import VOCAB_SIZE

from tuner.replay.prompts import Prompts
from tuner.reuse import ideal_hits
from tuner.workload import Request

PROMPTS = Prompts("salt", VOCAB_SIZE)


def row(*blocks: int, size: int = 16, last: int | None = None) -> Request:
    input_len = size * (len(blocks) - 1) + (size if last is None else last)
    return Request(0.0, input_len, 5, block_ids=blocks, block_size=size)


def hits(*rows: Request, block_size: int = 16, before: tuple[Request, ...] = ()) -> list[int]:
    return [int(tokens) for tokens in ideal_hits(rows, block_size, before)]


def longest_common(one: list[int], two: list[int]) -> int:
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


# Below the vocabulary's span, where the first token of a block tells its id: no two blocks begin alike by chance.
ROWS = st.lists(
    st.builds(
        lambda blocks, size, last: row(*blocks, size=size, last=min(size, last)),
        st.lists(st.integers(0, 3), min_size=1, max_size=4),
        st.sampled_from([3, 5, 16]),
        st.integers(1, 16),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(ROWS, ROWS, st.integers(1, 20))
def test_hits_are_those_of_the_longest_common_prefix_of_tokens(
    rows: list[Request], before: list[Request], block_size: int
) -> None:
    """By brute force over the prompts as they are sent: whole blocks, and never the last token."""
    seen = [PROMPTS.token_ids(r, 0).tolist() for r in before]
    expected = []
    for request in rows:
        prompt = PROMPTS.token_ids(request, 0).tolist()
        common = max((longest_common(prompt, other) for other in seen), default=0)
        expected.append(min(common, len(prompt) - 1) // block_size * block_size)
        seen.append(prompt)

    assert ideal_hits(rows, block_size, before).tolist() == expected


def test_a_cut_block_is_shared_as_far_as_the_shorter_goes() -> None:
    """Eight of sixteen tokens were cached: two blocks of four, whatever the longer block goes on with."""
    assert hits(row(1, 2, last=8), row(1, 2, 3), block_size=4) == [0, 24]
    assert hits(row(1, 2, 3), row(1, 2, last=8), block_size=4) == [0, 20]


def test_the_same_prompt_again_computes_its_last_block() -> None:
    """Of 32 tokens in two blocks the second is not whole without the last token, which is always computed."""
    assert hits(row(1, 2), row(1, 2)) == [0, 16]


def test_rows_without_ids_hit_nothing_and_leave_nothing() -> None:
    """Their prompts are their own."""
    assert hits(Request(0.0, 100, 5), row(1, 2), Request(1.0, 100, 5), row(1, 3)) == [0, 0, 0, 16]
    assert ideal_hits([], 16).tolist() == []


def test_what_came_before_is_hit_and_not_counted() -> None:
    """Warm, the first row hits as well."""
    assert hits(row(1, 2, 3), row(1, 2, 4), before=(row(1, 2),)) == [32, 32]


@pytest.mark.timing
def test_a_trace_of_an_hour_takes_a_moment() -> None:
    """12,000 rows of 24 ids, in a chain each from a thousand beginnings: well under two seconds."""
    rng = np.random.default_rng(1)
    rows = [row(*(int(start) * 24 + i for i in range(24)), size=512) for start in rng.integers(0, 1000, 12_000)]

    started = time.process_time()
    found = ideal_hits(rows, 16)

    assert time.process_time() - started < 2
    assert (found > 0).sum() == 12_000 - len({r.block_ids for r in rows})
