"""Leave a prefix cache as the workload's history would have, and say what could be hit in it.

What a cache holds, its server tells: vLLM's `cache_config_info` names block size, blocks (of all engines of a server
together) and tokens (of each). Requests for the history go where the window's go, to the front of a group: it deals
them out as it would have, and each replica is left with its share of them, not with all.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tuner.replay.counters import fetch
from tuner.reuse import Prefixes, ideal_hits
from tuner.seams import Member, Tally
from tuner.serving import Role
from tuner.shape import SERVER_BLOCK
from tuner.workload import Request, Workload

_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}\s", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Where hits may end, the first that is told: 0.32 has the first and the third, "None" where they are not set.
_BLOCK_SIZES = ("cache_hit_alignment_tokens", "prefix_match_unit", "effective_attention_block_size", "block_size")
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Cache:
    """The prefix cache of a server, or of all servers that take prompts.

    Attributes:
        block_size: tokens that are hit or missed together.
        capacity: tokens that it holds, None where it is not said; 0 where nothing is cached.
        parts: of how many engines it is; what one has cached, another has not.
    """

    block_size: int
    capacity: int | None
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Warmth:
    """What is sent ahead of a replay, and what the replay can hit.

    Attributes:
        rows: one request each, for one token; the latest used last.
        numbers: shares of the window's prompt tokens that a cache which never forgets would hit:
            "prefix_hit_ideal_cold_share" and, after a history, "prefix_hit_ideal_warm_share".
        notes: what a reader must know of them.
    """

    rows: tuple[Request, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


async def look(members: Sequence[Member]) -> Cache | None:
    """Return the prefix cache of the members that take prompts, None where they do not tell, or differ."""
    asked = [member.metrics_url for member in members if member.role is not Role.DECODER]
    found = [read_cache(text) for text in await fetch(asked)]
    told = [cache for cache in found if cache is not None]
    if not told or len(told) < len(asked) or len({cache.block_size for cache in told}) > 1:
        return None
    capacities = [cache.capacity for cache in told if cache.capacity is not None]
    capacity = sum(capacities) if len(capacities) == len(told) else None
    return Cache(told[0].block_size, capacity, sum(cache.parts for cache in told))


def read_cache(text: str) -> Cache | None:
    """Return the cache that a text in Prometheus' form tells of, one line an engine, None where it tells of none."""
    engines = [dict(_LABEL.findall(labels)) for labels in _INFO.findall(text)]
    if not engines:
        return None
    said = engines[-1]
    block_size = next((size for name in _BLOCK_SIZES if (size := _whole(said.get(name)))), None)
    if block_size is None:
        return None
    if said.get("enable_prefix_caching") == "False":
        return Cache(block_size, 0, len(engines))
    tokens, blocks = _whole(said.get("kv_cache_size_tokens")), _whole(said.get("num_gpu_blocks"))
    if tokens is not None:
        return Cache(block_size, tokens * len(engines), len(engines))
    return Cache(block_size, None if blocks is None else blocks * block_size, len(engines))


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def warmth(workload: Workload, cache: Cache | None) -> Warmth:
    """Return what to send ahead for a cache, and what it could hit then; None: nothing is known of it."""
    capacity, block_size = (None, None) if cache is None else (cache.capacity, cache.block_size)
    rows = warm_prefixes(workload, capacity, block_size, every_use=_is_dealt_out(cache))
    numbers = {} if block_size is None else _ideal(workload, rows, block_size)
    return Warmth(rows, numbers, tuple(_notes(workload, cache, rows)))


def _is_dealt_out(cache: Cache | None) -> bool:
    return cache is not None and cache.parts > 1


def warm_prefixes(
    workload: Workload, capacity: int | None = None, block_size: int | None = None, *, every_use: bool = False
) -> tuple[Request, ...]:
    """Return rows that leave in the cache what the window's rows will hit of the history, latest use last.

    Each row is the beginning of a history row that a row of the window shares, for one output token. What is the
    beginning of a later one is left out, and so is, from the latest back, what `capacity` does not hold any more.

    Args:
        workload: with `history`, in order.
        capacity: tokens, None without limit.
        block_size: of the server; beginnings are cut to whole blocks of it, or of the trace's where it is unknown.
        every_use: leave out no use of a prefix: where a front deals them out, what was used often is in many caches.
    """
    window, warmed = Prefixes(), Prefixes()
    for row in workload.requests:
        window.add(row)
    kept: list[Request] = []
    left = capacity
    for row in reversed(workload.history):
        tokens = window.shared(row)
        size = block_size or row.block_size or 1
        prefix = _beginning(row, tokens // size * size)
        new = prefix.input_len - warmed.shared(prefix)
        if left is not None and new > left:
            break
        if new or (every_use and prefix.input_len):
            left = None if left is None else left - new
            warmed.add(prefix)
            kept.append(prefix)
    return tuple(reversed(kept))


def _beginning(row: Request, tokens: int) -> Request:
    """Return a request for the first tokens of a row's prompt; text of its own cannot be cut, and goes as it is."""
    prompt = row.prompt[:tokens] if isinstance(row.prompt, tuple) else row.prompt
    blocks = (row.block_ids or ())[: -(-tokens // (row.block_size or 1))]
    return replace(
        row, input_len=tokens, output_len=1, block_ids=blocks, prompt=prompt, session=None, parent=None, think_time=None
    )


def _ideal(workload: Workload, warmed: Sequence[Request], block_size: int) -> dict[str, float]:
    """Return the ideal hits as shares of all prompt tokens."""
    rows = workload.requests
    asked = sum(row.input_len for row in rows)
    found = {"prefix_hit_ideal_cold_share": ideal_hits(rows, block_size).sum() / asked}
    if workload.history:
        found["prefix_hit_ideal_warm_share"] = ideal_hits(rows, block_size, warmed).sum() / asked
    return {name: float(share) for name, share in found.items()}


def _notes(workload: Workload, cache: Cache | None, rows: Sequence[Request]) -> Iterator[str]:
    if cache is not None and cache.block_size != SERVER_BLOCK:
        yield (
            f"prefix hits are counted in this server's blocks of {cache.block_size} tokens (a workload's card: in "
            f"blocks of {SERVER_BLOCK}): what is shared of less than a block cannot be hit"
        )
    if not workload.history:
        return
    if cache is None or cache.capacity is None:
        yield "the prefix cache was warmed with all of the history that the window hits: how much it holds is not known"
        return
    if not cache.capacity:
        yield "the prefix cache was not warmed: the server caches none"
        return
    everything = warm_prefixes(workload, None, cache.block_size, every_use=_is_dealt_out(cache))
    if len(rows) < len(everything):
        yield (
            f"the prefix cache holds {cache.capacity:,} tokens: {len(everything) - len(rows)} of the history's "
            f"{len(everything)} prefixes that the window hits were left out, the oldest"
        )
    if rows and cache.parts > 1:
        yield (
            f"the history was dealt out among {cache.parts} caches, each is warm with its share only: the ideal hits "
            "are those of one cache"
        )


def measured(tallies: Sequence[Tally]) -> dict[str, float]:
    """Return the share of prompt tokens that was found in caches, where servers count it: "prefix_hit_share"."""
    grown = [tally.grown for tally in tallies if tally.member.role is not Role.DECODER]
    asked = sum(one.get(_QUERIES, 0.0) for one in grown)
    return {"prefix_hit_share": sum(one.get(_HITS, 0.0) for one in grown) / asked} if asked else {}
