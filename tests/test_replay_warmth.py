"""Warming a prefix cache: with what, up to how much, and what can be hit then."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_data import VOCAB_SIZE, play, serving, workload

from tuner.replay import run
from tuner.replay.client import finish
from tuner.replay.prompts import Prompts
from tuner.replay.warmth import Cache, look, measured, read_cache, warm_prefixes, warmth
from tuner.reuse import ideal_hits
from tuner.seams import Member, Tally
from tuner.serving import Role
from tuner.workload import Request


def row(*blocks: int, size: int = 16, last: int | None = None, arrival: float = 0.0) -> Request:
    input_len = size * (len(blocks) - 1) + (size if last is None else last)
    return Request(arrival, input_len, 5, block_ids=blocks, block_size=size)


def shapes(rows: tuple[Request, ...]) -> list[tuple[tuple[int, ...] | None, int]]:
    return [(r.block_ids, r.input_len) for r in rows]


# --- What is sent ahead -----------------------------------------------------------------------------------


def test_the_prefix_to_warm_is_what_the_window_will_hit() -> None:
    """As far as a row of the window shares it, in whole blocks; the beginning of a later prefix is left out."""
    window = [row(0, 1, 2, 3), row(0, 7, last=4)]
    history = [row(0, 1, 9), row(0, 1, 2, 8), row(5, 6), row(0, 7, last=4), row(1, 0)]
    warmed = warm_prefixes(workload(*window, history=history))

    assert shapes(warmed) == [((0, 1, 2), 48), ((0,), 16)]
    assert {r.output_len for r in warmed} == {1}
    prompts = Prompts("salt", VOCAB_SIZE)
    assert prompts.token_ids(warmed[0], 0).tolist() == prompts.token_ids(window[0], 0)[:48].tolist()


def test_the_servers_blocks_decide_where_a_prefix_is_cut() -> None:
    """Twenty tokens are shared: of a server's blocks of four all, of eight sixteen, of thirty-two none."""
    what = workload(row(0, 7, last=6), history=[row(0, 7, last=4)])

    assert shapes(warm_prefixes(what, block_size=4)) == [((0, 7), 20)]
    assert shapes(warm_prefixes(what, block_size=8)) == [((0,), 16)]
    assert shapes(warm_prefixes(what, block_size=32)) == []


def test_the_latest_use_comes_last_and_the_oldest_is_left_out() -> None:
    """History is in order of arrival: what the cache cannot hold would only push out what came later."""
    window = [row(1), row(2), row(3), row(4, 5)]
    history = [row(3, arrival=1), row(2, arrival=2), row(1, arrival=3)]

    assert shapes(warm_prefixes(workload(*window, history=history))) == [((3,), 16), ((2,), 16), ((1,), 16)]
    assert shapes(warm_prefixes(workload(*window, history=history), 32)) == [((2,), 16), ((1,), 16)]
    assert shapes(warm_prefixes(workload(*window, history=history), 0)) == []


def test_blocks_that_prefixes_share_are_counted_once() -> None:
    """Three prefixes of two blocks with one in common take four."""
    window = [row(0, 1), row(0, 2), row(0, 3)]

    assert len(warm_prefixes(workload(*window, history=window), 64)) == 3
    assert len(warm_prefixes(workload(*window, history=window), 63)) == 2


def test_what_was_used_often_is_sent_as_often_where_a_front_deals_it_out() -> None:
    """Three uses of a prefix may have left it in three replicas; one cache has it from the last."""
    what = workload(row(1, 2), history=[row(1, 3), row(1, 2), row(1, 4), row(9)])

    assert shapes(warmth(what, Cache(16, 32)).rows) == [((1, 2), 32), ((1,), 16)]
    assert shapes(warmth(what, Cache(16, 32, parts=3)).rows) == [((1,), 16), ((1, 2), 32), ((1,), 16)]


def test_a_recorded_prompt_is_cut_as_its_blocks_are() -> None:
    """Token ids are; text cannot be, and goes as it is."""
    ids = tuple(range(100, 132))
    known = Request(0, 32, 5, block_ids=(1, 2), block_size=16, prompt=ids)
    text = Request(0, 32, 5, block_ids=(3, 4), block_size=16, prompt="as recorded")
    window = [Request(0, 32, 5, block_ids=(1, 9), block_size=16), Request(0, 32, 5, block_ids=(3, 9), block_size=16)]

    assert [r.prompt for r in warm_prefixes(workload(*window, history=[known, text]))] == [ids[:16], "as recorded"]


ROWS = st.lists(
    st.builds(
        lambda blocks, last: row(*blocks, size=6, last=last),
        st.lists(st.integers(0, 3), min_size=1, max_size=4),
        st.integers(1, 6),
    ),
    max_size=8,
)


@given(ROWS, ROWS, st.integers(1, 9))
def test_the_warmed_prefixes_are_as_good_as_the_whole_history(
    window: list[Request], history: list[Request], block_size: int
) -> None:
    """A row of the window could hit as much after them as after all of it."""
    warmed = warm_prefixes(workload(*window, history=history), None, block_size)

    assert ideal_hits(window, block_size, warmed).tolist() == ideal_hits(window, block_size, history).tolist()


# --- What a server says of its cache ----------------------------------------------------------------------

# As vLLM 0.26.0 and 0.32.0 write it, less some labels: they are the fields of CacheConfig, "None" without a value.
SAID = (
    'vllm:cache_config_info{{block_size="128",enable_prefix_caching="{on}",engine="{engine}",kv_cache_size_tokens="{tokens}"'
    ',mamba_block_size="None",num_gpu_blocks="{blocks}",num_gpu_blocks_override="None",prefix_match_unit="None",'
    'user_specified_block_size="False"}} 1.0\n'
)


def said(engine: int = 0, *, on: bool = True, tokens: int | None = 32768, blocks: int | None = 256) -> str:
    return "# TYPE vllm:cache_config_info gauge\n" + SAID.format(engine=engine, on=on, tokens=tokens, blocks=blocks)


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        (said(), Cache(128, 32768)),
        (said(tokens=None), Cache(128, 32768)),
        (said(0, blocks=512) + said(1, blocks=512), Cache(128, 65536, 2)),  # data parallel: tokens are of one engine
        (said(0, tokens=None, blocks=512) + said(1, tokens=None, blocks=512), Cache(128, 65536, 2)),  # blocks of all
        (said(tokens=None, blocks=None), Cache(128, None)),
        (said(on=False), Cache(128, 0)),
        (said().replace('prefix_match_unit="None"', 'prefix_match_unit="16"'), Cache(16, 32768)),
        (said().replace("prefix_match", 'cache_hit_alignment_tokens="64",prefix_match'), Cache(64, 32768)),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0', Cache(16, 160)),
        ('vllm:cache_config_info{block_size="None"} 1.0', None),
        ("vllm:prompt_tokens_total 5.0", None),
        ("", None),
    ],
)
def test_a_cache_is_read_from_the_servers_own_metrics(text: str, cache: Cache | None) -> None:
    """Its block size, and its tokens over all engines; what is not said is not known."""
    assert read_cache(text) == cache


@pytest.mark.timing
def test_the_caches_of_replicas_are_one_and_decoders_have_no_part(tmp_path: Path) -> None:
    """Two servers with the same blocks hold twice as much; with other blocks, or silent ones, nothing is known."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with serving(folders[0], {"kv_tokens": 1600}) as one, serving(folders[1], {"kv_tokens": 800}) as two:
        replicas = [Member(Role.ANY, one.url), Member(Role.ANY, two.url)]
        pair = [Member(Role.PREFILLER, one.url), Member(Role.DECODER, two.url)]

        assert finish(look(replicas)) == Cache(16, 2400, parts=2)
        assert finish(look(pair)) == Cache(16, 1600)
        assert finish(look([*replicas, Member(Role.ANY, "http://127.0.0.1:9")])) is None
        assert finish(look([])) is None


# --- What can be hit --------------------------------------------------------------------------------------


def test_ideal_shares_are_of_all_prompt_tokens_in_the_servers_blocks() -> None:
    """Cold: 32 of 96 tokens, which the second row shares with the first; after the history, both rows."""
    window = [row(1, 2, 3), row(1, 2, 4)]

    found = warmth(workload(*window, history=[row(1, 2, 9)]), Cache(16, 1000)).numbers
    assert found == pytest.approx({"prefix_hit_ideal_cold_share": 32 / 96, "prefix_hit_ideal_warm_share": 64 / 96})
    assert warmth(workload(*window), Cache(16, 1000)).numbers == pytest.approx({"prefix_hit_ideal_cold_share": 32 / 96})
    assert warmth(workload(*window), Cache(64, 1000)).numbers == {"prefix_hit_ideal_cold_share": 0}
    assert warmth(workload(*window), None).numbers == {}


@pytest.mark.parametrize(
    ("cache", "rows", "words"),
    [
        (Cache(16, 1000), 2, []),
        (Cache(16, 16), 1, ["holds 16 tokens: 1 of the history's 2 prefixes that the window hits were left out"]),
        (Cache(16, 0), 0, ["was not warmed: the server caches none"]),
        (Cache(16, None), 2, ["how much it holds is not known"]),
        (None, 2, ["how much it holds is not known"]),
        (Cache(16, 1000, parts=2), 2, ["among 2 caches, each is warm with its share only"]),
    ],
)
def test_what_could_not_be_warmed_is_said(cache: Cache | None, rows: int, words: list[str]) -> None:
    """And what is not known of it."""
    found = warmth(workload(row(1), row(2), history=[row(1), row(2)]), cache)

    assert len(found.rows) == rows
    assert [any(word in note for note in found.notes) for word in words] == [True] * len(words)
    assert len(found.notes) == len(words)


def test_what_was_hit_is_what_servers_that_take_prompts_counted() -> None:
    """Half of 200 tokens over two prefillers; a decoder counts the same prompts once more. No count, no share."""

    def tally(role: Role, hits: float, queries: float) -> Tally:
        grown = {"vllm:prefix_cache_hits_total": hits, "vllm:prefix_cache_queries_total": queries}
        return Tally(Member(role, ""), grown)

    seen = [tally(Role.PREFILLER, 20, 120), tally(Role.PREFILLER, 80, 80), tally(Role.DECODER, 0, 200)]
    assert measured(seen) == {"prefix_hit_share": 0.5}
    assert measured([Tally(Member(Role.ANY, ""), {})]) == {}
    assert measured([]) == {}


# --- On a server ------------------------------------------------------------------------------------------


def play_warm(server: Any, what: Any, salt: str) -> dict[str, float]:
    members = [Member(Role.ANY, server.url)]
    cache = run.warm_prefix(server.url, "m", what, salt=salt, vocab_size=VOCAB_SIZE, members=members)
    replay = play(server, what, salt=salt, cache=cache)
    return {name: value for name, value in replay.server.items() if name.startswith("prefix_hit")}


@pytest.mark.timing
def test_what_a_server_hits_is_the_ideal(tmp_path: Path) -> None:
    """Cold and warm, with trace blocks of 40 tokens on server blocks of 16, and cut tails."""
    rows = [row(0, 1 + i % 3, 20 + i, size=40, last=13, arrival=0.1 * i) for i in range(8)]
    history = [row(0, 2, 90, size=40), row(0, 21, size=40, last=9), row(0, 3, 23, size=40, last=11)]
    with serving(tmp_path) as server:
        cold = play_warm(server, workload(*rows), "cold")
        warm = play_warm(server, workload(*rows, history=history), "warm")

    assert 0 < cold["prefix_hit_share"] == pytest.approx(cold["prefix_hit_ideal_cold_share"])
    assert warm["prefix_hit_share"] == pytest.approx(warm["prefix_hit_ideal_warm_share"])
    assert warm["prefix_hit_ideal_warm_share"] > warm["prefix_hit_ideal_cold_share"] + 0.1


@pytest.mark.timing
def test_a_small_cache_is_warmed_with_the_latest_only(tmp_path: Path) -> None:
    """Of four prefixes the two latest fit: they are hit, the older ones are not even sent."""
    history = [row(i, 50 + i, arrival=i) for i in range(4)]
    window = [row(i, 50 + i, 90 + i, arrival=0.1 * (3 - i)) for i in (3, 2, 1, 0)]
    with serving(tmp_path, {"kv_tokens": 64 + 16}) as server:
        warm = play_warm(server, workload(*window, history=history), "warm")
        sent = len(server.log())

    assert sent == 2 + 4
    assert warm["prefix_hit_share"] == warm["prefix_hit_ideal_warm_share"] == pytest.approx(64 / 192)
