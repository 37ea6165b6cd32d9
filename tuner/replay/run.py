"""Drive a replay and say whether its numbers mean anything.

Open loop: every request goes out at anchor + due, whatever became of the others. What the client itself was
late by is measured twice, at each send and by a 10 ms timer beside them, and a replay that the client could
not drive is invalid, not slow.
"""

import asyncio
import gc
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import numpy as np

from tuner import metrics
from tuner.errors import FailureKind, InvalidReplay
from tuner.metrics import Records
from tuner.replay import client
from tuner.replay.prompts import CHAT, COMPLETIONS, PATHS, PLAIN, Prompts, Scale
from tuner.replay.schedule import Schedule, schedule, warm_prefixes, warm_up_rows
from tuner.seams import Replay
from tuner.serving import Json
from tuner.units import format_ms
from tuner.workload import Request, Workload

try:
    import uvloop
except ImportError:  # not on this platform
    uvloop = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

HEARTBEAT = 0.01
POLL = 0.1
SCRAPE_TIMEOUT = 5.0
WARM_UP_DRAIN = 120.0
PREFIX_STREAMS = 4

# What the client may be late by: a p99 of 10 ms (20 ms for the timer), or this share of the TTFT limit.
LAG_P99, HEARTBEAT_P99, SHARE_OF_TTFT = 0.010, 0.020, 0.05
LAG_MAX = HEARTBEAT_MAX = 0.250
TOKENS_PER_CHUNK, SAME_READ = 1.05, 0.05
# Text for a chat endpoint is sized by words: what a prompt may be off by, in tokens or as a share.
CHAT_OFF_TOKENS, CHAT_OFF_SHARE = 5, 0.02

_CLEAN_BUT_WRONG = (client.SHORT, client.LONG)
_LENGTH_HINTS = {
    "prompt": "rows with a prompt of their own need input_len as this model's tokenizer counts it",
    "output": "the server ended streams early in spite of ignore_eos: look for stop strings or token limits",
}

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")

Result = TypeVar("Result")
CheckAlive = Callable[[], None]
OnProgress = Callable[[int, int], None]


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
    check_alive: CheckAlive = _nothing,
    endpoint: str = COMPLETIONS,
    extra_body: Mapping[str, Json] | None = None,
    scale: Scale = PLAIN,
) -> None:
    """Send made-up requests like the workload's for `duration` seconds and wait for their answers.

    Their prompts have a salt of their own: nothing of the measured rows is in the cache afterwards.
    """
    rows = warm_up_rows(workload, duration=duration, seed=seed)
    prompts = Prompts(f"warm-up {seed}", vocab_size)
    run = _Client(url, model, prompts, check_alive=check_alive, endpoint=endpoint, extra_body=extra_body, scale=scale)
    _finish(run.drive(schedule(rows), drain_timeout=WARM_UP_DRAIN))


def warm_prefix(
    url: str,
    model: str,
    workload: Workload,
    *,
    salt: str,
    vocab_size: int,
    capacity: int | None = None,
    check_alive: CheckAlive = _nothing,
    endpoint: str = COMPLETIONS,
    extra_body: Mapping[str, Json] | None = None,
    scale: Scale = PLAIN,
) -> int:
    """Prefill what the window will hit of the workload's history; return how many tokens that were.

    Args:
        url: of the server.
        model: the served model's name.
        workload: with `history`; without it nothing is sent.
        salt: the salt of the replay that follows.
        vocab_size: of the model.
        capacity: tokens that the server's KV cache holds; the oldest prefixes beyond it are left out.
        check_alive: raises ServerDied.
        endpoint: as for `replay`.
        extra_body: likewise.
        scale: likewise.
    """
    rows = warm_prefixes(workload, capacity)
    prompts = Prompts(salt, vocab_size)
    run = _Client(url, model, prompts, check_alive=check_alive, endpoint=endpoint, extra_body=extra_body, scale=scale)
    _finish(run.prefill(rows))
    return sum(row.input_len for row in rows)


def replay(
    url: str,
    model: str,
    workload: Workload,
    *,
    salt: str,
    vocab_size: int,
    metrics_urls: Sequence[str] = (),
    drain_timeout: float = 120.0,
    request_timeout: float | None = None,
    check_alive: CheckAlive = _nothing,
    on_progress: OnProgress = _nothing,
    endpoint: str = COMPLETIONS,
    extra_body: Mapping[str, Json] | None = None,
    scale: Scale = PLAIN,
    processes: int | None = None,  # noqa: ARG001
) -> Replay:
    """Send the workload's requests at their recorded times and return what was seen.

    Args:
        url: of the server, with or without /v1.
        model: the served model's name.
        workload: what to send; its history is not sent (see `warm_prefix`).
        salt: what makes this repeat's prompts different from another's.
        vocab_size: of the model; prompts are ordinary tokens below it.
        metrics_urls: Prometheus endpoints, read before and after, never during the window.
        drain_timeout: seconds that requests may still run after the last one was sent.
        request_timeout: seconds that one request may take, if it is limited.
        check_alive: raises ServerDied; called every 100 ms and at the end.
        on_progress: told (ended, offered) about every half second.
        endpoint: "completions" or "chat".
        extra_body: merged into every request's body; null removes a key.
        scale: how the server counts text, for chat (see calibrate.py).
        processes: client processes; without a number the client decides.

    Raises:
        ServerDied: from `check_alive`.
    """
    run = _Client(
        url, model, Prompts(salt, vocab_size), request_timeout, check_alive, on_progress, endpoint, extra_body, scale
    )
    plan = schedule(workload.requests)

    async def measured() -> Replay:
        before = await scrape(metrics_urls)
        seen = await run.drive(plan, drain_timeout=drain_timeout)
        after = await scrape(metrics_urls)
        return Replay(
            records=seen.records,
            window=plan.window,
            counters_before=before,
            counters_after=after,
            heartbeat_lag=tuple(seen.heartbeat_lag),
            notes=seen.notes,
        )

    return _finish(measured())


# --- The run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    records: Records
    heartbeat_lag: list[float]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Client:
    """Where requests go and who is asked meanwhile."""

    url: str
    model: str
    prompts: Prompts
    request_timeout: float | None = None
    check_alive: CheckAlive = _nothing
    on_progress: OnProgress = _nothing
    endpoint: str = COMPLETIONS
    extra_body: Mapping[str, Json] | None = None
    scale: Scale = PLAIN

    @property
    def base(self) -> str:
        """The URL without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    async def drive(self, plan: Schedule, *, drain_timeout: float) -> _Seen:
        """Send the rows when they are due and wait for the answers."""
        bodies = self._bodies(plan.rows)
        enough_files = client.allow_open_files(len(bodies))
        tape = _tape(plan)
        heartbeat_lag: list[float] = []
        async with client.session(tape) as http:
            with _no_garbage_collection():
                tape.anchor = time.perf_counter()
                beating = asyncio.ensure_future(_beat(heartbeat_lag))
                try:
                    await self._watched(self._send(http, bodies, tape, drain_timeout), tape)
                finally:
                    beating.cancel()
        self.check_alive()
        return _Seen(tape.records(), heartbeat_lag, tuple(_failure_notes(tape, enough_files=enough_files)))

    async def prefill(self, rows: tuple[Request, ...]) -> None:
        """Send rows in order, a few at a time."""
        plan = schedule(rows)
        bodies, order = self._bodies(rows), iter(range(len(rows)))
        tape = _tape(plan)

        async def stream(http: aiohttp.ClientSession) -> None:
            for row in order:
                await client.ask(http, self.base, bodies[row], tape, row, deadline=WARM_UP_DRAIN, path=self._path)

        async with client.session() as http:
            await self._watched(_all(stream(http) for _ in range(PREFIX_STREAMS)), tape)

    def _bodies(self, rows: Sequence[Request]) -> list[bytes]:
        how: dict[str, Any] = {"endpoint": self.endpoint, "extra_body": self.extra_body, "scale": self.scale}
        return [self.prompts.body(self.model, row, number, **how) for number, row in enumerate(rows)]

    @property
    def _path(self) -> str:
        return PATHS[self.endpoint]

    async def _send(
        self, http: aiohttp.ClientSession, bodies: list[bytes], tape: client.Tape, drain_timeout: float
    ) -> None:
        asking: list[asyncio.Task[None]] = []
        path = self._path
        try:
            for row, due in enumerate(tape.due):
                while (wait := due - tape.clock()) > 0:  # noqa: ASYNC110 (a timer of uvloop may be early)
                    await asyncio.sleep(wait)
                sending = client.ask(http, self.base, bodies[row], tape, row, deadline=self.request_timeout, path=path)
                asking.append(asyncio.create_task(sending))
            ended, _ = await asyncio.wait(asking, timeout=drain_timeout)
            for request in ended:
                request.result()
        finally:
            await _cancel(asking)

    async def _watched(self, work: Awaitable[None], tape: client.Tape) -> None:
        """Await the work while the server lives."""
        working = asyncio.ensure_future(work)
        told = time.perf_counter()
        try:
            while not working.done():
                self.check_alive()
                if time.perf_counter() - told >= 0.5:
                    told = time.perf_counter()
                    self.on_progress(tape.finished, len(tape.due))
                await asyncio.wait([working], timeout=POLL)
            await working
        finally:
            await _cancel([working])
        self.on_progress(tape.finished, len(tape.due))


def _tape(plan: Schedule) -> client.Tape:
    return client.Tape(plan.due, [row.input_len for row in plan.rows], [row.output_len for row in plan.rows])


async def _all(work: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*work)


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _beat(lag: list[float]) -> None:
    """Note how late each beat of a 10 ms timer is; beats missed in a stall are one late beat."""
    due = time.perf_counter() + HEARTBEAT
    while True:
        await asyncio.sleep(due - time.perf_counter())
        now = time.perf_counter()
        lag.append(max(now - due, 0.0))
        due = max(due, now) + HEARTBEAT


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep collections, which stop the loop for as long as there are objects, out of the window."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _finish(work: Coroutine[None, None, Result]) -> Result:
    with asyncio.Runner(loop_factory=None if uvloop is None else uvloop.new_event_loop) as runner:
        return runner.run(work)


# --- The server's own counters ----------------------------------------------------------------------------


async def scrape(urls: Sequence[str]) -> dict[str, float]:
    """Return the counters of Prometheus endpoints, summed over labels; {} when one endpoint is silent."""
    counters: dict[str, float] = {}
    async with client.session() as http:
        for url in urls:
            try:
                async with asyncio.timeout(SCRAPE_TIMEOUT), http.get(url) as response:
                    response.raise_for_status()
                    text = await response.text()
            except (aiohttp.ClientError, OSError) as failure:
                log.warning("%s: no counters: %s", url, failure)
                return {}
            for name, value in parse_counters(text):
                counters[name] = counters.get(name, 0.0) + value
    return counters


def parse_counters(text: str) -> Iterator[tuple[str, float]]:
    """Yield name and value of each counter sample in Prometheus' text form."""
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is not None and match["name"].endswith(("_total", "_sum", "_count")):
            yield match["name"], float(match["value"])


# --- Is it a measurement? ---------------------------------------------------------------------------------


def judge(
    seen: Replay,
    *,
    ttft_limit: float | None = None,
    keys: Iterable[str] = (),
    classes: metrics.Classes = metrics.DEFAULT_CLASSES,
    endpoint: str = COMPLETIONS,
) -> tuple[str, ...]:
    """Refuse a replay whose numbers say nothing about the server; return what to be careful about.

    Args:
        seen: the replay.
        ttft_limit: the TTFT SLO, which says how much lag is too much.
        keys: the metrics that matter, to warn of percentiles over too few requests.
        classes: ranges of prompt lengths by name, as the keys use them.
        endpoint: text for "chat" is sized by words, and may be off by a few tokens.

    Raises:
        InvalidReplay: the client was late, lengths were not the recorded ones, or nothing completed.
    """
    records = seen.records
    notes = [note for gate in _gates(seen, ttft_limit) if (note := gate.check())]
    _check_something_completed(seen)
    _check_lengths(records, endpoint)
    return (*notes, *_stream_notes(records), *metrics.warnings(records, keys, classes))


@dataclass(frozen=True, slots=True)
class _Gate:
    """A limit on how late the client was."""

    what: str
    late: float
    limit: float

    def check(self) -> str | None:
        """Return a caution from half the limit on; refuse the replay beyond it."""
        words = f"{self.what} was {format_ms(self.late)} (limit {format_ms(self.limit)})"
        if self.late > self.limit:
            raise InvalidReplay(
                FailureKind.CLIENT_LAG,
                f"the client could not keep the schedule: {words}",
                hint="leave a core to tune, stop what else runs on this host, or lower --rate-scale",
            )
        return f"the client was near its limit: {words}" if self.late > self.limit / 2 else None


def _gates(seen: Replay, ttft_limit: float | None) -> list[_Gate]:
    share = SHARE_OF_TTFT * (ttft_limit or 0.0)
    lag = seen.records.sent - seen.records.due
    gates = []
    for what, late, p99, most in (
        ("send lag", lag[~np.isnan(lag)], LAG_P99, LAG_MAX),
        ("lag of the 10 ms timer", np.asarray(seen.heartbeat_lag), HEARTBEAT_P99, HEARTBEAT_MAX),
    ):
        if len(late):
            gates.append(_Gate(f"{what} p99", float(np.percentile(late, 99)), max(p99, share)))
            gates.append(_Gate(f"{what} max", float(late.max()), most))
    if (n := int((seen.records.error == client.NO_SOCKET).sum())) > 0:
        raise InvalidReplay(
            FailureKind.CLIENT_LAG,
            f"{n} requests found no free socket: too many open files",
            hint=f"raise the limit: ulimit -n {len(seen.records) + client.SPARE_FILES}",
        )
    return gates


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


def _failure_notes(tape: client.Tape, *, enough_files: bool) -> Iterator[str]:
    kinds, counts = np.unique([error for error in tape.error if error], return_counts=True)
    for kind, n in zip(kinds, counts, strict=True):
        said = tape.messages.get(str(kind))
        yield f"{n} of {len(tape.due)} requests failed: {kind}" + (f": {said}" if said else "")
    if not enough_files:
        yield f"fewer than {len(tape.due)} files may be open at once (ulimit -n)"
