"""Is it a measurement? What the client was late by, and when that makes a replay invalid.

A client that is slow itself finds the server slow, and a burst sent late is a burst smoothed. So the client's
own lateness is measured beside the server's, held against limits that follow from the SLO, and kept with each
trial; beyond them the replay is invalid, not slow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from tuner import metrics
from tuner.errors import FailureKind, InvalidReplay
from tuner.metrics import Sample
from tuner.records import Floats, Records
from tuner.replay import client, connection, stream
from tuner.replay.prompts import CHAT, COMPLETIONS
from tuner.seams import Replay
from tuner.units import format_ms

# What the client may be late by: a p99 of 10 ms (20 ms for the timer), or this share of the TTFT limit.
LAG_P99, TIMER_P99, SHARE_OF_TTFT = 0.010, 0.020, 0.05
# The timer's lag is an error of each stamp: a tight ITL limit needs a better one.
LEAST_TIMER_P99, SHARE_OF_ITL = 0.005, 0.10
LAG_MAX = TIMER_MAX = 0.250
CPU_SHARE = 0.9
TOKENS_PER_CHUNK, SAME_READ = 1.05, 0.05
# Text for a chat endpoint is sized by words: what a prompt may be off by, in tokens or as a share.
CHAT_OFF_TOKENS, CHAT_OFF_SHARE = 5, 0.02

_WORDS = {
    "send_lag_p99": "send lag p99",
    "send_lag_max": "send lag max",
    "timer_lag_p99": "lag of the 10 ms timer p99",
    "timer_lag_max": "lag of the 10 ms timer max",
    "client_cpu_share": "the share of a core that a client process used",
}
_CLEAN_BUT_WRONG = (stream.SHORT, stream.LONG)
_LENGTH_HINTS = {
    "prompt": "rows with a prompt of their own need input_len as this model's tokenizer counts it",
    "output": "the server ended streams early in spite of ignore_eos: look for stop strings or token limits",
}


def limits(ttft_limit: float | None = None, itl_limit: float | None = None) -> dict[str, float]:
    """Return the most that each of the client's facts may be, given the SLO's limits in seconds."""
    timer = max(TIMER_P99, SHARE_OF_TTFT * (ttft_limit or 0.0))
    if itl_limit is not None:
        timer = min(timer, max(LEAST_TIMER_P99, SHARE_OF_ITL * itl_limit))
    return {
        "send_lag_p99": max(LAG_P99, SHARE_OF_TTFT * (ttft_limit or 0.0)),
        "send_lag_max": LAG_MAX,
        "timer_lag_p99": timer,
        "timer_lag_max": TIMER_MAX,
        "client_cpu_share": CPU_SHARE,
    }


def facts(records: Records, heartbeat_lag: Sequence[float]) -> dict[str, float]:
    """Return what is known of the client's own doing; what cannot be told is not there.

    send_lag_p50, _p99, _max: how late requests went out.
    send_lag_drift: median lag of the last tenth of the requests less that of the first.
    send_gap_error_p99: how far the gaps between sends were from the recorded ones.
    timer_lag_p99, _max: how late a 10 ms timer beside the client was.
    connect_wait_max: the longest time that a request had no connection; connections_awaited: how many had none.
    coalesced_share: share of the gaps between chunks that are zero, because one read brought both.
    """
    lag, waits = records.send_lag, records.connect_wait
    found: dict[str, float | None] = {
        "send_lag_p50": _statistic(lag, "p50"),
        "send_lag_p99": _statistic(lag, "p99"),
        "send_lag_max": _statistic(lag, "max"),
        "send_gap_error_p99": _statistic(np.abs(np.diff(records.sent) - np.diff(records.due)), "p99"),
        "timer_lag_p99": _statistic(np.asarray(heartbeat_lag, dtype=np.float64), "p99"),
        "timer_lag_max": _statistic(np.asarray(heartbeat_lag, dtype=np.float64), "max"),
        "connect_wait_max": _statistic(waits, "max"),
        "connections_awaited": float((waits > 0).sum()),
    }
    if tenth := len(lag) // 10:
        first, last = (_statistic(part, "p50") for part in (lag[:tenth], lag[-tenth:]))
        found["send_lag_drift"] = None if first is None or last is None else last - first
    between = metrics.gaps(records, records.chunk_tokens).length
    if len(between):
        found["coalesced_share"] = float((between == 0).mean())
    return {name: value for name, value in found.items() if value is not None}


def _statistic(values: Floats, name: str) -> float | None:
    return Sample(values[~np.isnan(values)]).statistic(name)


def judge(
    seen: Replay,
    *,
    ttft_limit: float | None = None,
    itl_limit: float | None = None,
    keys: Iterable[str] = (),
    classes: metrics.Classes = metrics.DEFAULT_CLASSES,
    endpoint: str = COMPLETIONS,
) -> tuple[str, ...]:
    """Refuse a replay whose numbers say nothing about the server; return what to be careful about.

    Args:
        seen: the replay.
        ttft_limit: the TTFT SLO, which says how much lag is too much.
        itl_limit: the ITL SLO, likewise.
        keys: the metrics that matter, to warn of percentiles over too few requests.
        classes: ranges of prompt lengths by name, as the keys use them.
        endpoint: text for "chat" is sized by words, and may be off by a few tokens.

    Raises:
        InvalidReplay: the client was late, lengths were not the recorded ones, or nothing completed.
    """
    records = seen.records
    notes = list(_check_client(seen.client, limits(ttft_limit, itl_limit)))
    _check_sockets(records)
    _check_something_completed(seen)
    _check_lengths(records, endpoint)
    return (*notes, *_stream_notes(records), *metrics.warnings(records, keys, classes))


def _check_client(found: Mapping[str, float], most: Mapping[str, float]) -> Iterator[str]:
    """Yield a caution from half a limit on; refuse the replay beyond it."""
    for name, limit in most.items():
        if (value := found.get(name)) is None:
            continue
        if name == "client_cpu_share":
            words = f"{_WORDS[name]} was {value:.0%} (limit {limit:.0%})"
        else:
            words = f"{_WORDS[name]} was {format_ms(value)} (limit {format_ms(limit)})"
        if value > limit:
            raise InvalidReplay(
                FailureKind.CLIENT_LAG,
                f"the client could not keep the schedule: {words}",
                hint="leave a core to tune, stop what else runs on this host, or lower --rate-scale",
            )
        if value > limit / 2:
            yield f"the client was near its limit: {words}"
    if (drift := found.get("send_lag_drift", 0.0)) > most["send_lag_p99"] / 2:
        yield f"the client fell behind during the replay: sends were {format_ms(drift)} later at its end"
    if found.get("connect_wait_max", 0.0) > most["send_lag_p99"]:
        yield (
            f"{found['connections_awaited']:.0f} requests waited for a connection, "
            f"up to {format_ms(found['connect_wait_max'])}: part of their TTFT from the schedule"
        )


def _check_sockets(records: Records) -> None:
    if (n := int((records.error == connection.NO_SOCKET).sum())) > 0:
        raise InvalidReplay(
            FailureKind.CLIENT_LAG,
            f"{n} requests found no free socket: too many open files",
            hint=f"raise the limit: ulimit -n {len(records) + client.SPARE_FILES}",
        )


def _check_something_completed(seen: Replay) -> None:
    if seen.records.is_completed.any():
        return
    kinds, counts = np.unique(seen.records.error, return_counts=True)
    failures = ", ".join(f"{n} {kind}" for kind, n in zip(kinds, counts, strict=True))
    raise InvalidReplay(
        FailureKind.NOTHING_COMPLETED,
        f"none of {len(seen.records)} requests completed: {failures}",
        hint=seen.notes[0] if seen.notes else None,
    )


def _check_lengths(records: Records, endpoint: str) -> None:
    done = records.is_completed
    ended = np.isin(records.error, _CLEAN_BUT_WRONG) | done
    prompt_off = np.zeros(len(records))
    if endpoint == CHAT:
        prompt_off = np.maximum(CHAT_OFF_TOKENS, CHAT_OFF_SHARE * records.input_len)
    for what, got, asked, wrong, allowed in (
        ("prompt", records.prompt_tokens, records.input_len, done, prompt_off),
        ("output", records.completion_tokens, records.output_len, ended, np.zeros(len(records))),
    ):
        off = np.flatnonzero(wrong & ~np.isnan(got) & (np.abs(got - asked) > allowed))
        if len(off):
            row = off[0]
            raise InvalidReplay(
                FailureKind.LENGTHS_OFF,
                f"{len(off)} of {len(records)} requests had another {what} length than recorded: "
                f"request {row} has {got[row]:.0f} tokens, not {asked[row]}",
                hint=_LENGTH_HINTS[what],
            )


def _stream_notes(records: Records) -> Iterator[str]:
    tokens = records.chunk_tokens[~np.isnan(records.chunk_tokens)]
    if len(tokens) and tokens.mean() > TOKENS_PER_CHUNK:
        yield (
            f"chunks carry {tokens.mean():.2f} tokens on average: a stall is spread over them in itl, "
            "look at icl and max_stall too"
        )
    between = metrics.gaps(records, records.chunk_tokens).length
    if len(between) and (share := float((between == 0).mean())) > SAME_READ:
        yield f"{share:.0%} of the chunks arrived in one read with the chunk before: those gaps are zero"
    if np.isnan(records.completion_tokens[records.is_completed]).any():
        yield "the server reports no usage: output lengths could not be checked"
