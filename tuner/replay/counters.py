"""What the server counts itself, and whether it agrees with what the client saw.

vLLM's histograms hold sums and counts, so means can be compared exactly; its quantiles are those of buckets.
Server-side TTFT and E2EL begin when the API server has read a request, the client's when it has been written:
the difference is the network's and the client's, and should be small.
"""

import asyncio
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import numpy as np

from tuner import metrics
from tuner.records import Floats, Records
from tuner.replay.connection import authorization
from tuner.seams import Member, Tally
from tuner.serving import Role
from tuner.units import format_ms

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT = 5.0
# How far the client's mean may be from the server's: so many seconds and this share.
MARGIN = {"ttft": 0.005, "itl": 0.001, "e2el": 0.005}
SHARE = 0.05

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_SOURCE = re.compile(r'\bsource="([^"]*)"')
_HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2el": "vllm:e2e_request_latency_seconds",
}
_PER_REQUEST = ("server_queue", "server_prefill", "server_itl")


async def scrape(urls: Sequence[str]) -> tuple[dict[str, float], ...]:
    """Return the counters of each Prometheus endpoint, in order; nothing when one is silent."""
    return tuple(read(text) for text in await fetch(urls))


async def fetch(urls: Sequence[str]) -> tuple[str, ...]:
    """Return what each Prometheus endpoint says, in order; nothing when one is silent."""
    found = []
    async with aiohttp.ClientSession(trust_env=False, headers=authorization()) as http:
        for url in urls:
            try:
                async with asyncio.timeout(SCRAPE_TIMEOUT), http.get(url) as response:
                    response.raise_for_status()
                    found.append(await response.text(errors="replace"))
            except (aiohttp.ClientError, OSError) as failure:
                log.warning("%s: no counters: %s", url, str(failure) or type(failure).__name__)
                return ()
    return tuple(found)


def read(text: str) -> dict[str, float]:
    """Return the counters of a text in Prometheus' form, summed over labels."""
    return _summed(parse_counters(text))


def total(scrapes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the counters of several endpoints, summed."""
    return _summed(pair for one in scrapes for pair in one.items())


def _summed(samples: Iterable[tuple[str, float]]) -> dict[str, float]:
    counters: dict[str, float] = {}
    for name, value in samples:
        counters[name] = counters.get(name, 0.0) + value
    return counters


def parse_counters(text: str) -> Iterator[tuple[str, float]]:
    """Yield name and value of each counter sample in Prometheus' text form.

    A sample with a label `source` is told a second time under `name{source="..."}`.
    """
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or not match["name"].endswith(("_total", "_sum", "_count")):
            continue
        with suppress(ValueError):
            if math.isfinite(value := float(match["value"])):
                yield match["name"], value
                if (source := _SOURCE.search(match["labels"] or "")) is not None:
                    yield by_source(match["name"], source[1]), value


def by_source(name: str, source: str) -> str:
    """Return the key of a counter's part from one source."""
    return f'{name}{{source="{source}"}}'


def tallies(
    members: Sequence[Member], before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]
) -> tuple[Tally, ...]:
    """Return by how much each member's counters grew."""
    return tuple(
        Tally(member, {name: value - first.get(name, 0.0) for name, value in last.items()})
        for member, first, last in zip(members, before, after, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The server's own figures, and where they disagree with the client's.

    Attributes:
        numbers: "server_ttft_mean", "server_itl_mean" and "server_e2el_mean" of the histograms;
            "server_queue_p50" and the like of the per-request metrics; in seconds.
        notes: a sentence for each disagreement beyond the margin.
    """

    numbers: Mapping[str, float]
    notes: tuple[str, ...]


def compare(records: Records, before: Mapping[str, float], after: Mapping[str, float]) -> Comparison:
    """Hold the server's histograms over the window, and its per-request metrics, against the records.

    The histograms can be compared only when they are about the same requests: all completed, and nobody
    else's among them.
    """
    numbers = dict(_per_request(records, _PER_REQUEST))
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    served = grown.get(f"{_HISTOGRAMS['ttft']}_count")
    if served is not None and records.is_completed.all() and served > len(records):
        words = f"the server answered {served:.0f} requests, {served - len(records):.0f} more than this replay sent: "
        return Comparison(numbers, (words + "somebody else uses it",))
    return _compared(records, numbers, grown, tuple(_HISTOGRAMS))


def compare_pd(records: Records, seen: Sequence[Tally]) -> Comparison:
    """Hold the decoders' ITL against the records.

    A request is on two servers, so that neither counts its TTFT or its E2EL from where the client does.
    """
    numbers = dict(_per_request(records, ("server_itl",)))
    grown = _summed(pair for tally in seen if tally.member.role is Role.DECODER for pair in tally.grown.items())
    return _compared(records, numbers, grown, ("itl",))


def _compared(
    records: Records, numbers: dict[str, float], grown: Mapping[str, float], names: Sequence[str]
) -> Comparison:
    if not records.is_completed.all():
        return Comparison(numbers, ())
    ours, notes = _means(records), []
    for name in (name for name in names if name in ours):
        total, count = (grown.get(f"{_HISTOGRAMS[name]}_{part}") for part in ("sum", "count"))
        if total is None or not count:
            continue
        # Of the gaps, the sum over the tokens that came after a first one: what is one sample there differs
        # from version to version.
        theirs = total / (_later_tokens(records) if name == "itl" else count)
        numbers[f"server_{name}_mean"] = theirs
        if abs(ours[name] - theirs) > MARGIN[name] + SHARE * theirs:
            notes.append(
                f"{name} mean is {format_ms(ours[name])} here and {format_ms(theirs)} by the server's own count, "
                f"further apart than {format_ms(MARGIN[name])} and {SHARE:.0%}"
            )
    return Comparison(numbers, tuple(notes))


def _means(records: Records) -> dict[str, float]:
    """Return the client's means of what the histograms hold."""
    found = {
        "ttft": metrics.per_request(records, "ttft_from_send"),
        "e2el": metrics.per_request(records, "e2el"),
    }
    means = {name: float(np.nanmean(values)) for name, values in found.items() if not np.isnan(values).all()}
    if later := _later_tokens(records):
        means["itl"] = float(np.nansum(metrics.last_token(records) - metrics.first_token(records))) / later
    return means


def _later_tokens(records: Records) -> float:
    """Return how many tokens came after the first chunk of their request."""
    tokens = metrics.known_tokens(records)
    if tokens is None:
        return 0.0
    has = np.diff(records.chunk_start) > 0
    return float(tokens.sum() - tokens[records.chunk_start[:-1][has]].sum())


def _per_request(records: Records, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    for name in names:
        values: Floats = getattr(records, name)
        known = metrics.Sample(values[~np.isnan(values)])
        for statistic in ("p50", "p99", "mean"):
            if (value := known.statistic(statistic)) is not None:
                yield f"{name}_{statistic}", value
    if "server_prefill" not in names:
        return
    ours = metrics.per_request(records, "ttft_from_send") - records.server_queue - records.server_prefill
    over = metrics.Sample(ours[~np.isnan(ours)])
    for statistic in ("p50", "p99"):
        if (value := over.statistic(statistic)) is not None:
            yield f"client_over_server_ttft_{statistic}", value
