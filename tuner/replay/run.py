"""Drive a replay: rows in, records out.

Open loop: every request goes out at anchor + due, whatever became of the others; one process or several.
Whether the numbers mean anything is for `gate.judge` to say.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tuner.errors import FailureKind, InvalidReplay
from tuner.replay import counters, crew, gate, selftest, transfer
from tuner.replay.client import Driver, Seen, cancel, finish
from tuner.replay.connection import Target, clock
from tuner.replay.counters import compare, compare_pd, scrape
from tuner.replay.load import DRAIN_TIMEOUT, Job
from tuner.replay.prompts import COMPLETIONS, PLAIN, Prompts, Scale
from tuner.replay.schedule import Schedule, schedule, turn_facts, warm_up_rows
from tuner.replay.warmth import Warmth, look, measured, warmth
from tuner.seams import Member, Replay
from tuner.serving import Json, Role
from tuner.units import format_ms
from tuner.workload import Request, Workload

POLL = 0.1
PREFIX_STREAMS = 4
# Up to so many tokens a second one process carries on any host; the self-test is spared.
SURELY_CARRIED = 3000.0
BIN = 10.0
TELL_EVERY = 0.5
COLD = Warmth()

Result = TypeVar("Result")

CheckAlive = Callable[[], None]
OnProgress = Callable[[int, int], None]
ExtraBody = Mapping[str, Json]


def _nothing(*_: object) -> None:
    """Stand in for a callback that was not given."""


# --- What the corridor calls ------------------------------------------------------------------------------


def warm_up(
    url: str,
    model: str,
    workload: Workload,
    *,
    duration: float,
    seed: int,
    vocab_size: int,
    endpoint: str = COMPLETIONS,
    extra_body: ExtraBody | None = None,
    scale: Scale = PLAIN,
    check_alive: CheckAlive = _nothing,
    drain_timeout: float = DRAIN_TIMEOUT,
) -> None:
    """Send made-up requests like the workload's for `duration` seconds and wait for their answers.

    Their prompts have a salt of their own: nothing of the measured rows is in the cache afterwards.
    """
    rows = warm_up_rows(workload, duration=duration, seed=seed)
    prompts = Prompts(f"warm-up {seed}", vocab_size)
    job = _job(
        Target(url, endpoint), model, prompts, schedule(rows), extra_body=extra_body, scale=scale,
        drain_timeout=drain_timeout,
    )  # fmt: skip
    _alone(job, _Watch(check_alive, _nothing, len(rows)))


def warm_prefix(
    url: str,
    model: str,
    workload: Workload,
    *,
    salt: str,
    vocab_size: int,
    members: Sequence[Member] = (),
    endpoint: str = COMPLETIONS,
    extra_body: ExtraBody | None = None,
    scale: Scale = PLAIN,
    check_alive: CheckAlive = _nothing,
) -> Warmth:
    """Prefill what the window will hit of the workload's history; return what that was, and what can be hit now.

    Args:
        url: of the server.
        model: the served model's name.
        workload: without `history` or block ids nothing is sent.
        salt: the salt of the replay that follows.
        vocab_size: of the model.
        members: servers that are asked what their caches hold: what is older than fits is left out.
        endpoint: "completions" or "chat".
        extra_body: merged into every request's body; null removes a key.
        scale: how the server counts text, for chat (see calibrate.py).
        check_alive: raises ServerDied.

    Raises:
        InvalidReplay: a request failed; the cache is not as the history would have left it.
    """
    if all(row.block_ids is None for row in workload.requests):
        return COLD
    found = warmth(workload, finish(look(members)))
    if not found.rows:
        return found
    job = _job(
        Target(url, endpoint), model, Prompts(salt, vocab_size), schedule(found.rows), extra_body=extra_body,
        scale=scale, request_timeout=DRAIN_TIMEOUT,
    )  # fmt: skip
    with job() as load:
        driver, watch = Driver(load), _Watch(check_alive, _nothing, len(found.rows))
        failed = finish(_watched(driver, driver.in_order(PREFIX_STREAMS), watch))
    if failed:
        kinds = ", ".join(sorted(failed))
        raise InvalidReplay(
            FailureKind.NOTHING_COMPLETED, f"the prefix cache could not be warmed with the workload's history: {kinds}",
            hint=_repeatable(next(filter(None, failed.values()), None), found.rows),
        )  # fmt: skip
    return found


def replay(
    url: str,
    model: str,
    workload: Workload,
    *,
    salt: str,
    vocab_size: int,
    endpoint: str = COMPLETIONS,
    extra_body: ExtraBody | None = None,
    scale: Scale = PLAIN,
    members: Sequence[Member] = (),
    cache: Warmth = COLD,
    follow_sessions: bool = True,
    drain_timeout: float = DRAIN_TIMEOUT,
    request_timeout: float | None = None,
    processes: int | None = None,
    check_alive: CheckAlive = _nothing,
    on_progress: OnProgress = _nothing,
) -> Replay:
    """Send the workload's requests at their recorded times and return what was seen.

    Args:
        url: of the server, with or without /v1.
        model: the served model's name.
        workload: what to send; its history is not sent (see `warm_prefix`).
        salt: what makes this repeat's prompts different from another's.
        vocab_size: of the model; prompts are ordinary tokens below it.
        endpoint: "completions" or "chat".
        extra_body: merged into every request's body; null removes a key.
        scale: how the server counts text, for chat (see calibrate.py).
        members: servers whose counters are read before and after, never during the window.
        cache: what `warm_prefix` found out; its numbers and notes are told with the replay's.
        follow_sessions: send a turn no earlier than the answer before it and its think time, where they are known;
            else at recorded times.
        drain_timeout: seconds that requests may still run, and turns be sent, after the last recorded time.
        request_timeout: seconds that one request may take, if it is limited.
        processes: how many send; None lets the load and a self-test of this host decide.
        check_alive: raises ServerDied; called every 100 ms and at the end.
        on_progress: told (ended, offered) about every half second.

    Raises:
        ServerDied: from `check_alive`.
    """
    plan = schedule(workload.requests, follow=follow_sessions)
    count, why = (min(processes, len(plan.rows)), ()) if processes else _crowd(plan)
    job = _job(
        Target(url, endpoint), model, Prompts(salt, vocab_size), plan, extra_body=extra_body, scale=scale,
        request_timeout=request_timeout, drain_timeout=drain_timeout,
    )  # fmt: skip
    watch = _Watch(check_alive, on_progress, len(plan.rows))
    urls = [member.metrics_url for member in members]
    before = finish(scrape(urls))
    cut = crew.shards(plan, count)
    parts = [_alone(job, watch)] if len(cut) <= 1 else crew.drive([job.part(rows) for rows in cut], watch, every=POLL)
    check_alive()
    after = finish(scrape(urls))
    if not before or not after:  # half of a difference is none
        before, after = (), ()
    all_seen = crew.together(parts, cut)
    tallies = counters.tallies(members if after else (), before, after)
    first, last = counters.total(before), counters.total(after)
    is_pd = any(member.role is not Role.ANY for member in members)
    comparison = compare_pd(all_seen.records, tallies) if is_pd else compare(all_seen.records, first, last)
    return Replay(
        records=all_seen.records,
        window=plan.window,
        counters_before=first,
        counters_after=last,
        heartbeat_lag=tuple(all_seen.heartbeat_lag),
        client=_facts(all_seen, parts) | turn_facts(plan, all_seen.records.due),
        server={
            **comparison.numbers,
            **transfer.numbers(all_seen.records, tallies),
            **measured(tallies),
            **cache.numbers,
        },
        notes=(
            *_failure_notes(all_seen, plan.rows),
            *_session_notes(plan, all_seen, follow=follow_sessions),
            *cache.notes,
            *why,
            *comparison.notes,
        ),
        tallies=tallies,
    )


# --- What is sent -----------------------------------------------------------------------------------------


def _job(target: Target, model: str, prompts: Prompts, plan: Schedule, **how: Any) -> Job:
    """Return the job of sending all rows of a schedule; `how` are the other fields of `Job`."""
    return Job(target, model, prompts, plan, np.arange(len(plan.rows)), **how)


def _crowd(plan: Schedule) -> tuple[int, tuple[str, ...]]:
    """Return how many processes send, and why: one, unless the self-test says it would need more than half a core."""
    rate = _tokens_per_second(plan)
    if rate <= SURELY_CARRIED:
        return 1, ()
    cost = selftest.cost_per_token()
    processes = crew.processes_for(rate, cost)
    how = "one process sends" if processes == 1 else f"{processes} processes send"
    words = f"about {rate:,.0f} tokens/s are expected, and one costs this client {cost * 1e6:.0f} us of CPU: {how}"
    return processes, (words,) if processes > 1 or rate * cost > crew.SHARE_OF_CORE / crew.HEADROOM else ()


def _tokens_per_second(plan: Schedule) -> float:
    """Return the output tokens that the densest ten seconds ask for, by the second."""
    if not plan.rows:
        return 0.0
    asked = np.bincount((plan.due // BIN).astype(np.int64), weights=[row.output_len for row in plan.rows])
    return float(asked.max()) / min(BIN, max(plan.window, 1.0))


# --- The run ----------------------------------------------------------------------------------------------


class _Watch:
    """Called again and again while requests run: is the server alive, and who wants to know how far we are?"""

    def __init__(self, check_alive: CheckAlive, on_progress: OnProgress, offered: int) -> None:
        self._check_alive, self._on_progress, self._offered = check_alive, on_progress, offered
        self._told = clock()

    def __call__(self, finished: int) -> None:
        self._check_alive()
        if clock() - self._told >= TELL_EVERY or finished == self._offered:
            self._told = clock()
            self._on_progress(finished, self._offered)


def _alone(job: Job, watch: _Watch) -> Seen:
    """Drive a load in this process."""

    async def begin() -> float:
        return clock()

    with job() as load:
        driver = Driver(load)
        return finish(_watched(driver, driver.drive(begin), watch))


async def _watched(driver: Driver, work: Coroutine[None, None, Result], watch: _Watch) -> Result:
    """Await the work while the server lives."""
    working = asyncio.ensure_future(work)
    try:
        while not working.done():
            watch(driver.finished)
            await asyncio.wait([working], timeout=POLL)
        watch(driver.finished)
        return await working
    finally:
        await cancel([working])


def _facts(seen: Seen, parts: Sequence[Seen]) -> dict[str, float]:
    """Return what the client says of itself."""
    found = gate.facts(seen.records, seen.heartbeat_lag)
    found |= {"client_processes": float(len(parts)), "connections_opened": float(seen.opened)}
    if shares := [part.cpu / part.wall for part in parts if part.wall > 0]:
        found["client_cpu_share"] = max(shares)
    if tokens := float(np.nansum(seen.records.completion_tokens)):
        found["client_cpu_per_token"] = seen.cpu / tokens
    return found


def _failure_notes(seen: Seen, rows: Sequence[Request]) -> Iterator[str]:
    records = seen.records
    kinds, counts = np.unique(records.error[~records.is_completed], return_counts=True)
    for kind, n in zip(kinds, counts, strict=True):
        said = _repeatable(seen.messages.get(str(kind)), rows)
        yield f"{n} of {len(records)} requests failed: {kind}" + (f": {said}" if said else "")
    if not seen.enough_files:
        yield f"fewer than {len(records)} files may be open at once (ulimit -n)"


def _session_notes(plan: Schedule, seen: Seen, *, follow: bool) -> Iterator[str]:
    """Say how the rows of sessions were sent."""
    if all(row.session is None and row.parent is None for row in plan.rows):
        return
    if not follow:
        yield "turns were sent at recorded times, whether their answers were there or not"
    elif not plan.turns:
        yield "turns were sent at recorded times: the workload has sessions, but no think times"
    else:
        found, late = turn_facts(plan, seen.records.due), ""
        if "turn_delay_max" in found:
            late = f", by {format_ms(found['turn_delay_p50'])} (p50), {format_ms(found['turn_delay_max'])} at most"
        words = f"{len(plan.turns)} turns waited for the answers before them"
        yield f"{words}: {found['turns_delayed']:.0f} of them were due later than recorded{late}"


def _repeatable(said: str | None, rows: Sequence[Request]) -> str | None:
    """Return what a server said unless it may hold a recorded prompt: vLLM quotes what it refuses."""
    if said and any(row.prompt is not None for row in rows):
        return "what was said is not repeated: it may hold a prompt of the workload"
    return said
