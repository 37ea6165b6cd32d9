"""The same replay in the spelling of `vllm bench serve --save-result --save-detailed` (vLLM 0.26).

Keys and meanings are vLLM's, so that its plots and comparisons read the file. That makes some numbers differ
from ours, and from vLLM's own:

    ttft        counts from the actual send, as there; ours from the scheduled one (there is no `ttft_from_send`)
    itl         is a gap between chunks, as there: our icl. With one token a chunk both are the same
    tpot        (last token - first) / (tokens - 1), as there; ours divides by the tokens after the first chunk
    e2el        from the send to the last token, as here
    duration    from the first due time to the end of the last request; rates are per second of it, not of the window
    request_goodput   counts requests that pass our per-request tests, null without an SLO
    max_output_tokens_per_s   counts tokens, where vLLM counts chunks
    start_times               seconds after the replay's anchor; vLLM's are readings of a clock without an origin
    request_rate              is what the workload offers; vLLM's is what was asked for

As there, statistics are over completed requests alone: a failure does not reach into them. A number that was not
measured is null, where vLLM writes 0: a request without a first token, the output of one that failed. What a
replay does not have is null as well: label, tokenizer_id, burstiness, max_concurrency, generated_texts, rtfx.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tuner import metrics
from tuner.records import Floats, Records
from tuner.seams import Measurement, Replay

BACKENDS = {"completions": "openai", "chat": "openai-chat"}
PERCENTILES = (50, 90, 95, 99)


def to_bench(found: Measurement, repeat: int = 0) -> dict[str, Any]:
    """Return one repeat under the keys of vLLM's benchmark, ready for JSON."""
    seen = found.replays[repeat]
    return {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(found.started)),
        "endpoint_type": BACKENDS[found.endpoint],
        "backend": BACKENDS[found.endpoint],
        "label": None,
        "model_id": found.model,
        "tokenizer_id": None,
        "num_prompts": len(seen.records),
        "request_rate": len(seen.records) / seen.window if seen.window > 0 else "inf",
        "burstiness": None,
        "max_concurrency": None,
        **_totals(found, seen),
        **_details(seen.records),
        **_peaks(seen.records),
        "rtfx": None,
        **_statistics(seen.records),
    }


def _totals(found: Measurement, seen: Replay) -> dict[str, Any]:
    done = seen.records.select(seen.records.is_completed)
    duration = float(np.nanmax(seen.records.ended)) if len(seen.records) else 0.0
    n_in, n_out = float(_input(done).sum()), float(_output(done).sum())
    good = metrics.is_good(seen.records, found.slos) if found.slos else None

    def rate(count: float) -> float | None:
        return count / duration if duration > 0 else None

    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(seen.records) - len(done),
        "total_input_tokens": int(n_in),
        "total_output_tokens": int(n_out),
        "request_throughput": rate(len(done)),
        "request_goodput": None if good is None else rate(int(good.sum())),
        "output_throughput": rate(n_out),
        "total_token_throughput": rate(n_in + n_out),
    }


def _input(records: Records) -> Floats:
    """Return prompt lengths as the server counted them, as recorded where it did not say."""
    return np.where(np.isnan(records.prompt_tokens), records.input_len, records.prompt_tokens)


def _output(records: Records) -> Floats:
    """Return output lengths; NaN for a failed request of which the server said nothing."""
    asked = np.where(records.is_completed, records.output_len, np.nan)
    return np.where(np.isnan(records.completion_tokens), asked, records.completion_tokens)


def _details(records: Records) -> dict[str, Any]:
    parts = np.split(records.chunk_time, records.chunk_start[1:-1])
    return {
        "input_lens": [_whole(n) for n in _input(records)],
        "output_lens": [_whole(n) for n in _output(records)],
        "ttfts": [_number(t) for t in metrics.per_request(records, "ttft_from_send")],
        "itls": [np.diff(times).tolist() for times in parts],
        "start_times": [_number(t) for t in records.sent],
        "generated_texts": None,
        "errors": [str(error) for error in records.error],
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _whole(value: float) -> int | None:
    return None if np.isnan(value) else int(value)


def _peaks(records: Records) -> dict[str, float | int | None]:
    """Return tokens in the fullest second, and requests that touched the busiest one, counted from the first send."""
    done = records.select(records.is_completed)
    if not len(done):
        return {"max_output_tokens_per_s": None, "max_concurrent_requests": None}
    start = float(done.sent.min())
    tokens = metrics.known_tokens(done)
    per_second = np.bincount((done.chunk_time - start).astype(int), weights=tokens)
    firsts, lasts = ((t - start).astype(int) for t in (done.sent, metrics.last_token(done)))
    touched = np.zeros(int(lasts.max()) + 2)
    np.add.at(touched, firsts, 1)
    np.add.at(touched, lasts + 1, -1)
    return {
        "max_output_tokens_per_s": None if tokens is None else float(per_second.max()),
        "max_concurrent_requests": int(touched.cumsum().max()),
    }


def _statistics(records: Records) -> dict[str, float | None]:
    result: dict[str, float | None] = {}
    for name, values in _samples(records.select(records.is_completed)).items():
        known = values[~np.isnan(values)] * 1e3
        has = len(known) > 0
        result[f"mean_{name}_ms"] = float(known.mean()) if has else None
        result[f"median_{name}_ms"] = float(np.median(known)) if has else None
        result[f"std_{name}_ms"] = float(known.std()) if has else None
        for q in PERCENTILES:
            result[f"p{q}_{name}_ms"] = float(np.percentile(known, q)) if has else None
    return result


def _samples(done: Records) -> Mapping[str, Floats]:
    more = _output(done) - 1
    span = metrics.last_token(done) - metrics.first_token(done)
    return {
        "ttft": metrics.per_request(done, "ttft_from_send"),
        "tpot": np.where(more > 0, span / np.where(more > 0, more, 1), np.nan),
        "itl": metrics.gaps(done, done.chunk_tokens).length,
        "e2el": metrics.per_request(done, "e2el"),
    }
