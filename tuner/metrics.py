"""Turn request records into the numbers people argue about.

Everything here is pure: records in, metrics out. Durations are seconds. Definitions: README, "Words".

    ttft            first token minus *scheduled* send           one value a request
    ttft_from_send  first token minus actual send                one value a request
    itl             a later chunk with k tokens at gap d gives   pooled over requests
                    k values of d / k
    icl             gap between chunks                           pooled over requests
    tpot            (last token - first) / (tokens - tokens of   one value a request
                    the first chunk)
    e2el            last token minus actual send                 one value a request
    max_stall       largest gap between chunks                   one value a request
    itl_first_gap   gap between first and second chunk           one value a request
    send_lag        actual minus scheduled send, less the wait   one value a request
                    for a connection

A failed request counts as worse than every completed one: a statistic that its rank reaches is absent. In
the pooled metrics each token that a failed request owes counts that way; the gaps it did show are kept.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.records import Bools, Floats, Ints, Records
from tuner.slo import Slo

Metrics = Mapping[str, float]
"""Keys such as "ttft_p99" or "itl_p50.long"; a key that cannot be computed is not there."""

Classes = Mapping[str, tuple[int, int]]
"""Names of classes of requests, each a half-open range of prompt lengths."""

DEFAULT_CLASSES: Classes = {"short": (0, 1024), "long": (1024, sys.maxsize)}
STATISTICS = ("p50", "p75", "p90", "p95", "p99", "mean", "max")
LATENCIES = ("ttft", "ttft_from_send", "itl", "icl", "tpot", "e2el", "max_stall", "itl_first_gap")

_KEY = re.compile(r"(?P<name>[a-z0-9_]+?)_(?P<statistic>p\d+(?:_\d+)?|mean|max)(?:\.(?P<scope>.+))?")


# --- One sample of values ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one metric, and how many more are missing because requests failed."""

    values: Floats
    missing: int = 0

    def statistic(self, name: str) -> float | None:
        """Return "p99", "p99_9", "mean" or "max" of the sample, None when failures reach it.

        Percentiles are numpy's "linear" over the values and the missing ones as +inf; with a missing value
        as one of the two neighbours there is no number.
        """
        if not len(self.values):
            return None
        if name in {"mean", "max"}:
            return None if self.missing else float(getattr(self.values, name)())
        quantile = percentile_of(name) / 100
        rank = math.ceil(round((len(self.values) + self.missing - 1) * quantile, 9))
        if rank >= len(self.values):
            return None
        # Any finite filler will do: the rank says that no neighbour is one.
        filler = np.full(self.missing, self.values.max())
        return float(np.quantile(np.concatenate([self.values, filler]), quantile))


def percentile_of(statistic: str) -> float:
    """Return 99.9 for "p99_9"."""
    return float(statistic.removeprefix("p").replace("_", "."))


def _finite(values: Floats) -> Floats:
    finite: Floats = values[~np.isnan(values)]
    return finite


# --- Values per request and per token ---------------------------------------------------------------------


def first_token(records: Records) -> Floats:
    """Return when each request's first token came, NaN where none did."""
    return _at(records, records.chunk_start[:-1])


def last_token(records: Records) -> Floats:
    """Return when each request's last token came, NaN where none did."""
    return _at(records, records.chunk_start[1:] - 1)


def _at(records: Records, index: Ints) -> Floats:
    times = np.full(len(records), np.nan)
    has = np.diff(records.chunk_start) > 0
    times[has] = records.chunk_time[index[has]]
    return times


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps between chunks: how long, how many tokens came after it, whose it is, and when it ended."""

    length: Floats
    tokens: Floats
    owner: Ints
    end: Floats

    def per_token(self) -> tuple[Floats, Ints]:
        """Return d / k, k times for each gap, and whose each value is."""
        times = self.tokens.astype(np.int64)
        return np.repeat(self.length / self.tokens, times), np.repeat(self.owner, times)


def gaps(records: Records, chunk_tokens: Floats) -> Gaps:
    """Return the gaps inside requests, in order."""
    owner = np.repeat(np.arange(len(records)), np.diff(records.chunk_start))
    inside = owner[1:] == owner[:-1]
    length, end = np.diff(records.chunk_time)[inside], records.chunk_time[1:][inside]
    return Gaps(length, chunk_tokens[1:][inside], owner[1:][inside], end)


def known_tokens(records: Records) -> Floats | None:
    """Return the tokens of each chunk, or None when they are not known.

    A server that does not say is believed to have sent one token a chunk when the number of chunks is the
    number of tokens, for each request that completed.
    """
    counts = np.diff(records.chunk_start)
    said = ~np.isnan(records.chunk_tokens)
    if said.all():
        return records.chunk_tokens
    silent = np.zeros(len(records), dtype=bool)
    silent[np.repeat(np.arange(len(records)), counts)[~said]] = True
    tokens = np.where(np.isnan(records.completion_tokens), records.output_len, records.completion_tokens)
    if (counts != tokens)[silent & records.is_completed].any():
        return None
    return np.where(said, records.chunk_tokens, 1.0)


def _owed(records: Records, chunk_tokens: Floats) -> int:
    """Return how many gaps failed requests owe: tokens asked for, less the first chunk's and those seen."""
    owner = np.repeat(np.arange(len(records)), np.diff(records.chunk_start))
    seen = np.bincount(owner, weights=chunk_tokens, minlength=len(records))
    owed = np.where(seen > 0, records.output_len - seen, records.output_len - 1)
    return int(np.maximum(owed, 0)[~records.is_completed].sum())


def per_request(records: Records, name: str) -> Floats:
    """Return one value a request; NaN where there is none, as for the tpot of a single token."""
    if name in {"ttft", "ttft_from_send"}:
        return first_token(records) - (records.due if name == "ttft" else records.sent)
    if name == "e2el":
        return last_token(records) - records.sent
    values = np.full(len(records), np.nan)
    if name == "tpot":
        if (tokens := known_tokens(records)) is not None and len(tokens):
            has = np.diff(records.chunk_start) > 0
            starts = records.chunk_start[:-1][has]
            rest = np.add.reduceat(tokens, starts) - tokens[starts]
            span = (last_token(records) - first_token(records))[has]
            values[has] = np.where(rest > 0, span / np.where(rest > 0, rest, 1), np.nan)
        return values
    between = gaps(records, records.chunk_tokens)
    owners, starts = np.unique(between.owner, return_index=True)
    if len(owners):
        chosen = np.maximum.reduceat(between.length, starts) if name == "max_stall" else between.length[starts]
        values[owners] = chosen
    return values


def sample(records: Records, name: str) -> Sample:
    """Return the values of a latency metric with what failures left out."""
    done = records.is_completed
    if name in {"itl", "icl"}:
        return _pooled(records, name)
    # A request for a single token has no gap, whether it fails or not.
    counted = done if name in {"ttft", "ttft_from_send", "e2el"} else done & (records.output_len > 1)
    failed = ~done if name in {"ttft", "ttft_from_send", "e2el"} else ~done & (records.output_len > 1)
    if name == "tpot" and known_tokens(records) is None:
        return Sample(np.empty(0))
    return Sample(_finite(per_request(records, name)[counted]), int(failed.sum()))


def _pooled(records: Records, name: str) -> Sample:
    tokens = known_tokens(records)
    if tokens is None:
        if name == "itl":
            return Sample(np.empty(0))
        tokens = np.ones(len(records.chunk_time))
    owed, between = _owed(records, tokens), gaps(records, tokens)
    if name == "itl":
        return Sample(between.per_token()[0], owed)
    per_chunk = float(tokens.mean()) if len(tokens) else 1.0
    return Sample(between.length, math.ceil(owed / per_chunk))


# --- Everything at once -----------------------------------------------------------------------------------


def summarise(
    records: Records,
    *,
    window: float,
    classes: Classes = DEFAULT_CLASSES,
    slos: Sequence[Slo] = (),
    extra: Iterable[str] = (),
) -> dict[str, float]:
    """Return every metric that these records allow, overall and for each class of requests.

    Args:
        records: one row an offered request.
        window: seconds of the schedule; throughput and goodput are per second of it.
        classes: names and ranges of prompt lengths; latency metrics get keys such as "ttft_p90.long".
        slos: what attainment and goodput are measured against; their statistics are computed as well.
        extra: more keys to compute, for statistics beyond the usual ones ("ttft_p99_9").
    """
    wanted = _wanted([*(slo.metric for slo in slos), *extra])
    metrics = _latencies(records, "", wanted)
    for scope in classes:
        metrics |= _latencies(records.select(in_class(records, classes, scope)), scope, wanted)
    metrics |= _counts(records) | _rates(records, window) | _chunks(records)
    for statistic in ("p50", "p99", "max"):
        if (lag := Sample(_finite(records.send_lag)).statistic(statistic)) is not None:
            metrics[f"send_lag_{statistic}"] = lag
    if slos and len(records) and (good := is_good(records, slos, classes)) is not None:
        metrics["slo_attainment"] = float(good.mean())
        if window > 0:
            metrics["request_goodput"] = float(good.sum()) / window
    return metrics


def in_class(records: Records, classes: Classes, scope: str) -> Bools:
    """Return which requests are of a class; "" is every request."""
    if not scope:
        return np.ones(len(records), dtype=bool)
    low, high = classes[scope]
    return (records.input_len >= low) & (records.input_len < high)


def _wanted(keys: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Return the statistics asked for by (metric, class)."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        if (match := _KEY.fullmatch(key)) is not None:
            wanted.setdefault((match["name"], match["scope"] or ""), []).append(match["statistic"])
    return wanted


def _latencies(records: Records, scope: str, wanted: Mapping[tuple[str, str], list[str]]) -> dict[str, float]:
    metrics = {}
    for name in LATENCIES:
        values = sample(records, name)
        for statistic in dict.fromkeys([*STATISTICS, *wanted.get((name, scope), [])]):
            if (value := values.statistic(statistic)) is not None:
                metrics[f"{name}_{statistic}" + (f".{scope}" if scope else "")] = value
    return metrics


def _counts(records: Records) -> dict[str, float]:
    counts = {"n_offered": float(len(records)), "n_completed": float(records.is_completed.sum())}
    kinds, times = np.unique(records.error[~records.is_completed], return_counts=True)
    return counts | {f"failed.{kind}": float(n) for kind, n in zip(kinds, times, strict=True)}


def _rates(records: Records, window: float) -> dict[str, float]:
    if window <= 0:
        return {}
    done = records.select(records.is_completed)
    output = np.where(np.isnan(done.completion_tokens), done.output_len, done.completion_tokens).sum()
    prompts = np.where(np.isnan(done.prompt_tokens), done.input_len, done.prompt_tokens).sum()
    return {
        "request_throughput": len(done) / window,
        "output_throughput": float(output) / window,
        "total_token_throughput": float(output + prompts) / window,
    }


def _chunks(records: Records) -> dict[str, float]:
    tokens = Sample(_finite(records.chunk_tokens))
    values = {f"tokens_per_chunk_{name}": tokens.statistic(name) for name in ("mean", "p99")}
    return {key: value for key, value in values.items() if value is not None}


# --- Per-request tests ------------------------------------------------------------------------------------


def is_good(records: Records, slos: Sequence[Slo], classes: Classes = DEFAULT_CLASSES) -> Bools | None:
    """Return which requests pass every per-request test, None when a test cannot be made.

    A failed request passes none. A test whose metric a request does not have (the gaps of a single token)
    is met. A test with a class looks at requests of that class. SLOs on shares and rates test no request.
    """
    good = records.is_completed
    for slo in slos:
        match = _KEY.fullmatch(slo.metric)
        if match is None or match["name"] not in LATENCIES:
            continue
        values = _own(records, match["name"], match["statistic"])
        if values is None or slo.limit is None:
            return None
        missed = in_class(records, classes, match["scope"] or "") & (values > slo.limit)
        good = good & ~missed
    return good


def _own(records: Records, name: str, statistic: str) -> Floats | None:
    """Return each request's own value; for gaps, the statistic of its own gaps."""
    tokens = known_tokens(records)
    if tokens is None and name in {"itl", "tpot"}:
        return None
    if name not in {"itl", "icl"}:
        return per_request(records, name)
    between = gaps(records, records.chunk_tokens if tokens is None else tokens)
    lengths, owner = between.per_token() if name == "itl" else (between.length, between.owner)
    values = np.full(len(records), np.nan)
    owners, starts = np.unique(owner, return_index=True)
    for index, own in zip(owners, np.split(lengths, starts[1:]), strict=False):
        values[index] = Sample(own).statistic(statistic)
    return values


# --- What to tell the reader ------------------------------------------------------------------------------


def why_absent(records: Records) -> dict[str, str]:
    """Return, for each latency metric that lost something, why, in words."""
    if not records.is_completed.any():
        return dict.fromkeys(LATENCIES, f"none of {len(records)} requests completed")
    reasons: dict[str, str] = {}
    if known_tokens(records) is None:
        chunks = len(records.chunk_time)
        tokens = int(np.nansum(np.where(records.is_completed, records.completion_tokens, np.nan)))
        words = f"the server did not say how many tokens a chunk has, and {chunks} chunks are not {tokens} tokens"
        reasons |= dict.fromkeys(("itl", "tpot"), words)
    for name in LATENCIES:
        values = sample(records, name)
        if name in reasons:
            continue
        if not len(values.values):
            reasons[name] = "no request has a second chunk"
        elif values.missing:
            total = len(values.values) + values.missing
            share = math.floor(100 * (len(values.values) - 1) / (total - 1))
            what = "gaps are owed by failed requests" if name in {"itl", "icl"} else "requests failed"
            reasons[name] = f"{values.missing} of {total} {what}: percentiles above p{share} are absent"
    return reasons


def needed(percentile: float) -> int:
    """Return how many requests a percentile needs: 30 for p90, 60 for p95, 300 for p99.

    From there on, a 95 % upper bound from order statistics exists.
    """
    return math.ceil(round(3 / (1 - percentile / 100), 6))


def highest_estimable(n: int) -> str | None:
    """Return the highest of p99, p95 and p90 that n requests can carry, None below 30."""
    return next((f"p{q}" for q in (99, 95, 90) if n >= needed(q)), None)


def warnings(records: Records, keys: Iterable[str], classes: Classes = DEFAULT_CLASSES) -> list[str]:
    """Return a sentence for each asked percentile that rests on too few requests.

    Gaps count by requests too: a stall hits all requests of a batch, so tokens are no independent samples.
    """
    sentences = []
    for key in dict.fromkeys(keys):
        match = _KEY.fullmatch(key)
        if match is None or match["name"] not in LATENCIES or not match["statistic"].startswith("p"):
            continue
        n = int(in_class(records, classes, match["scope"] or "").sum())
        least = needed(percentile_of(match["statistic"]))
        if n < least:
            highest = highest_estimable(n) or "p50 (a tail needs 30)"
            sentences.append(f"{key} rests on {n} requests and needs {least}; the highest to trust is {highest}")
    return sentences
