"""Run a tap until it is told to end, and leave a workload.

One process, one event loop for traffic, and one thread that settles what has passed. The first Ctrl-C or SIGTERM
stops accepting and lets open requests end; the second cuts them off.
"""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from tuner.errors import HostError
from tuner.proxy import recording, tokenizer
from tuner.proxy.exchange import Exchange
from tuner.proxy.ledger import TEXT, TOKENS, Ledger, Question, opening
from tuner.proxy.recording import Parts, Summary
from tuner.proxy.tap import Tap, session

try:
    import uvloop
except ImportError:  # not on this platform
    uvloop = None  # type: ignore[assignment]

START_DEADLINE = 10.0  # seconds for the server to answer before anything listens
DRAIN = 60.0  # that open requests may take after the first signal
LAST_QUESTIONS = 30.0  # that the tokenizer may take after the last request
AT_ONCE = 2  # questions to the tokenizer
MOST_WAITING = 64 << 20  # bytes of requests
# A thread that computes gives way to the traffic within this time; Python's own 5 ms would show in every TTFT.
SWITCH_INTERVAL = 0.0005

BEHIND = "the tokenizer was too far behind"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to record: `upstream` is the server's URL without /v1, `rotate` the bytes of a part."""

    upstream: str
    host: str
    port: int
    folder: Path
    keeps_prompts: bool
    rotate: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is left: the summary, and whether every line reached the disk."""

    summary: Summary
    is_whole: bool


def run(wanted: Wanted, say: Callable[[str], None]) -> Recorded:
    """Record until a signal, and make a workload of it.

    Raises:
        HostError: the server does not answer, the port is taken, or the disk is full at the end.
        SpecError: the folder holds something.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()  # what is here stays: no collection in the middle of an answer need look at it
    try:
        with ExitStack() as until_finished:
            with asyncio.Runner(loop_factory=None if uvloop is None else uvloop.new_event_loop) as runner:
                ledger = runner.run(_record(wanted, say, until_finished))
            return Recorded(recording.finish(wanted.folder, ledger.counted()), not ledger.is_broken)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)


async def _record(wanted: Wanted, say: Callable[[str], None], until_finished: ExitStack) -> Ledger:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(session())
        await _check_answers(http, wanted.upstream)
        hashed = TOKENS if await tokenizer.is_there(http, wanted.upstream) else TEXT
        until_finished.enter_context(recording.prepared(wanted.folder))
        parts = Parts(wanted.folder, wanted.rotate, 0o600 if wanted.keeps_prompts else 0o644)
        stack.callback(parts.close)
        opened = opening(wanted.upstream, hashed=hashed, keeps_prompts=wanted.keeps_prompts)
        ledger = Ledger(wanted.folder, opened, parts, say)
        ledger.save()
        desk = Desk(ledger, http, stack.enter_context(ThreadPoolExecutor(1, "ledger")))
        await _serve(wanted, Tap(http, wanted.upstream, desk.begun, desk.ended), desk, say)
    return ledger


async def _serve(wanted: Wanted, tap: Tap, desk: "Desk", say: Callable[[str], None]) -> None:
    """Listen until the first signal; then let what is open end, until the second."""
    first, second = _signals()
    runner = web.ServerRunner(tap.server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = await _listen(runner, wanted)
        host, port = runner.addresses[0][:2]
        say(f"recording at {_url(host, port)} what goes to {wanted.upstream} (block ids of {desk.hashed}); "
            "Ctrl-C ends it")  # fmt: skip
        await first.wait()
        tap.is_ending = True
        await site.stop()
        if tap.open:
            say(f"{len(tap.open)} requests are open: waiting {DRAIN:.0f} s for them at most; Ctrl-C cuts them off")
        await _either(tap.drained(), second, DRAIN)
    finally:
        tap.is_cut = True
        await runner.cleanup()
    if desk.asks:
        say(f"{desk.asks} prompts wait for the tokenizer: {LAST_QUESTIONS:.0f} s at most; Ctrl-C leaves them "
            "without block ids")  # fmt: skip
    await _either(desk.drained(), second, LAST_QUESTIONS)
    await desk.close()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return what the first Ctrl-C or SIGTERM sets, and what the next one does."""
    first, second = asyncio.Event(), asyncio.Event()

    def came() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, came)
    return first, second


async def _listen(runner: web.ServerRunner, wanted: Wanted) -> web.TCPSite:
    site = web.TCPSite(runner, wanted.host, wanted.port, backlog=1024)
    try:
        await site.start()
    except OSError as error:
        recording.clear(wanted.folder)
        raise HostError(
            f"--port {wanted.port}: cannot listen at {wanted.host}: {error.strerror}",
            hint="name another --port, or --host",
        ) from error
    return site


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _either(work: Coroutine[None, None, None], stop: asyncio.Event, patience: float) -> None:
    """Wait for work until it is done, an event or a time; what is not done is cancelled."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())}
    _, left = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _check_answers(http: aiohttp.ClientSession, base: str) -> None:
    """Ask the server for anything, before clients do.

    Raises:
        HostError: nobody answers, or with a server's error.
    """
    why = ""
    for path in ("/v1/models", "/health"):
        try:
            async with asyncio.timeout(START_DEADLINE), http.get(base + path) as answer:
                if answer.status < 500:
                    return
                why = f"it answers {answer.status}"
        except aiohttp.ClientConnectorError as error:
            why = f"nobody answers there: {error.strerror or error}"
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or f"nothing within {START_DEADLINE:.0f} s"
    raise HostError(f"--upstream {base}: {why}", hint="is the server up, and --upstream right?")


class Desk:
    """What is done about requests beside their way: rows in one thread, questions to the tokenizer a few at a time."""

    def __init__(self, ledger: Ledger, http: aiohttp.ClientSession, worker: ThreadPoolExecutor) -> None:
        self._ledger, self._http, self._worker = ledger, http, worker
        self._few = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, int] = {}  # bytes of each request whose tokens are asked for, by its id
        self._has_begun = False

    @property
    def hashed(self) -> str:
        """What block ids are made of."""
        return self._ledger.summary.hashed

    @property
    def asks(self) -> int:
        """How many prompts wait for the tokenizer."""
        return len(self._waiting)

    def begun(self, exchange: Exchange) -> None:
        """Take the first request that makes tokens for the recording's zero."""
        if exchange.endpoint is not None and not self._has_begun:
            self._has_begun = True
            self._worker.submit(self._ledger.begin, exchange.arrival)

    def ended(self, exchange: Exchange) -> None:
        """Settle a request that has passed; its row is written whatever happens to what follows."""
        task = asyncio.create_task(self._settle(exchange, self._worker.submit(self._ledger.settle, exchange)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drained(self) -> None:
        """Wait until every request is settled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Give up what is still waiting for the tokenizer; rows are written all the same."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _settle(self, exchange: Exchange, row: "Future[Question | None]") -> None:
        question = await asyncio.shield(asyncio.wrap_future(row))
        exchange.release()
        if question is not None:
            tokens, why_not = await self._tokens(question)
            written = self._worker.submit(self._ledger.identify, question, tokens, why_not)
            await asyncio.shield(asyncio.wrap_future(written))

    async def _tokens(self, question: Question) -> tuple[Sequence[int] | None, str | None]:
        """Return a prompt's tokens, or why they are not known."""
        if question.tokens is not None or question.form is None or self.hashed == TEXT:
            return question.tokens, None
        if self._waiting and sum(self._waiting.values()) + question.size > MOST_WAITING:
            return None, BEHIND
        self._waiting[question.id] = question.size
        try:
            async with self._few:
                base = self._ledger.summary.upstream
                return await tokenizer.ask(self._http, base, question.form, question.keys), None
        except tokenizer.Unknown as reason:
            return None, str(reason)
        finally:
            del self._waiting[question.id]
