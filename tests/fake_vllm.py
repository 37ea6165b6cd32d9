#!/usr/bin/env python3
"""A stand-in for `vllm serve`: its flags, endpoints, log lines and failures, with steps of milliseconds.

    fake_vllm.py serve MODEL --host 127.0.0.1 --port 8000 [any flag of vLLM 0.26.0]

The scheduler is vLLM's: running requests first, then waiting ones, until `max_num_batched_tokens` are
placed; `long_prefill_token_threshold` caps one prompt's bite. A step lasts fixed + prefill tokens + decodes,
on an absolute schedule, so budgets trade TTFT for ITL the way they do on a real server.

With `first_token` the scheduler is left out and every token has its time, on an absolute schedule from the
moment the request was read: token i is due at first_token + i * gap + the stalls up to i. A chunk goes out
when its last token is due. What was written when is in the log, as the system's monotonic clock had it just
before the bytes went to the socket; a client on the same machine can be held against it.

With `--kv-transfer-config` for NixlConnector it is one of a PD pair (fake_pd.py).

The environment variable FAKE_VLLM, a JSON object, changes what it does; every key is a field of `Behaviour`.
Nothing but the standard library is needed.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import fake_pd
from fake_metrics import Histogram, counter, gauge, with_label

VERSION = "0.26.0"
FLAGS = Path(__file__).parent / "data" / "vllm_flags.txt"


def flags_of(kind: str) -> list[str]:
    """Return the long flags of vllm_flags.txt that are followed by this."""
    section = FLAGS.read_text(encoding="utf-8").split(f"[{kind}]\n")[1]
    return section.split("[")[0].split()


TAKES_A_VALUE, TAKES_VALUES = flags_of("a value"), flags_of("values")
SWITCHES, LONE_SWITCHES = flags_of("nothing, with a --no- form"), flags_of("nothing")
SHORT = {
    "-asc": "api-server-count", "-q": "quantization", "-dp": "data-parallel-size",
    "-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dcp": "decode-context-parallel-size",
    "-ac": "attention-config", "-cc": "compilation-config", "-sc": "speculative-config",
    "-ep": "enable-expert-parallel",
}  # fmt: skip
HUMAN = {"max-model-len", "max-num-batched-tokens", "max-num-scheduled-tokens", "kv-cache-memory-bytes"}
WHOLE = {"port", "max-num-seqs", "long-prefill-token-threshold", "stream-interval", "block-size", "seed",
         "num-gpu-blocks-override", "max-num-partial-prefills", "max-long-partial-prefills"}  # fmt: skip
COUNTERS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens",
            "generation_tokens", "request_success")  # fmt: skip
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
# Each with what vLLM says about it and its buckets.
SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Histogram of time to first token in seconds.",
     (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
      640, 2560)),
    ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.",
     (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)),
    ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", SECONDS),
    ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", SECONDS),
)  # fmt: skip
DEFAULT_BUDGET, DEFAULT_SEQS, DEFAULT_MODEL_LEN = 2048, 128, 4096

START_FAILED = """\
(EngineCore pid={pid}) ERROR {stamp} [core.py:1330] EngineCore failed to start.
(EngineCore pid={pid}) ERROR {stamp} [core.py:1330] Traceback (most recent call last):
(EngineCore pid={pid}) ERROR {stamp} [core.py:1330] {reason}
(APIServer pid={pid}) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
ENGINE_DIED = """\
(EngineCore pid={pid}) ERROR {stamp} [core.py:1332] EngineCore encountered a fatal error.
(EngineCore pid={pid}) ERROR {stamp} [core.py:1332] Traceback (most recent call last):
(EngineCore pid={pid}) ERROR {stamp} [core.py:1332] {reason}
(APIServer pid={pid}) ERROR {stamp} [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
"""
ENGINE_KILLED = """\
(APIServer pid={pid}) WARNING {stamp} [core_client.py:703] [shutdown] MPClient: engine core exited unexpectedly; \
starting cleanup
(APIServer pid={pid}) ERROR {stamp} [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
"""
REFUSED = """\
(APIServer pid={pid}) Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig
  Value error, {reason} [type=value_error, input_value=ArgsKwargs((), {{}}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""
SIDE_CHANNEL_TAKEN = """\
(EngineCore pid={pid}) Exception in thread nixl_handshake_listener:
(EngineCore pid={pid}) Traceback (most recent call last):
(EngineCore pid={pid}) zmq.error.ZMQError: Address already in use (addr='{reason}')
"""
PORT_TAKEN = """\
(APIServer pid={pid}) Traceback (most recent call last):
(APIServer pid={pid}) OSError: [Errno 98] Address already in use
"""
REASONS = {
    "oom": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total "
        "capacity of 23.64 GiB of which 512.00 MiB is free."
    ),
    "crash": "RuntimeError: CUDA error: an illegal memory access was encountered",
}


@dataclass(frozen=True)
class Behaviour:
    """What the server does beside serving; durations in seconds.

    A fault of single requests is a number n (every n-th request) or an object with "every", or "only" (a list of
    requests, counted from 1), and what it needs. Of a list of values the last one is for all that follow.
    """

    # Start and end
    start_delay: float = 0.05
    fail_at_start: str = ""  # oom | bad_argument | port | crash
    hang_at_start: bool = False
    health_while_starting: bool = True  # 503 until ready; false: connection refused, as the real one
    ignore_term: bool = False
    engine_child: bool = False  # a child in the same process group, as vLLM's EngineCore; the server ends without it
    child_escapes: bool = False  # a child in a session of its own that outlives the server (two minutes at most)
    stop_delay: float = 0.0
    noise_lines: int = 0  # log lines at start, for readers that must drain a pipe
    # Conditions on arguments: a number means "at least"
    oom_if: dict[str, Any] | None = None
    bad_argument_if: dict[str, Any] | None = None
    crash_if: dict[str, Any] | None = None
    hang_if: dict[str, Any] | None = None
    when: list[dict[str, Any]] = field(default_factory=list)  # [{"if": {...}, "then": {more behaviour}}]
    # Under load
    crash_after: int = 0  # completion requests received
    oom_after: int = 0
    freeze_at: float = -1.0  # after the first completion request
    freeze_for: float = 0.0
    barrier: int = 0  # no request is served before so many have arrived
    # PD pairs (fake_pd.py)
    ignore_kv: bool = False  # computes a prompt itself, whatever it was handed
    transfer: float = 0.0  # seconds that a transfer takes
    transfer_patience: float = 0.0  # before a transfer that cannot be is given up with an error
    side_channel_shift: int = 0  # listens so far from the port that it announces
    die_after: int = 0  # so many whole answers given; the last one still goes out
    # Times of tokens, instead of the scheduler's: a number, or a list of one for each request
    first_token: Any = -1.0  # seconds after the request was read; negative: the scheduler decides
    gap: Any = 0.0  # between later tokens
    stalls: dict[str, float] = field(default_factory=dict)  # {"3": 0.5}: token 3, counted from 0, and all later ones
    # Stream
    tokens_per_chunk: Any = 1  # or a list of one for each chunk; the first chunk too
    first_chunk_tokens: int = 0  # of the first chunk, where it is different
    text: str = " a"  # of each token; with "" tokens come without text, like those a detokenizer holds back
    reasoning: int = 0  # so many tokens of a chat answer are reasoning
    reasoning_as: str = "reasoning"  # or "reasoning_content", or both, separated by a space
    early_role: bool = False  # a chat's role chunk goes out at once and not with the first token
    merge_writes: int = 1  # events per write
    split_writes: int = 0  # bytes per write
    extras: bool = False  # comments and events without tokens in between
    crlf: bool = False
    cr: bool = False
    no_usage: bool = False
    no_done: bool = False
    never_stream: bool = False  # one JSON object, whatever was asked for
    prompt_drift: int = 0  # added to usage.prompt_tokens
    tokenizer: bool = True  # there is a /tokenize
    keep_alive: float = 5.0
    connect_delay: float = 0.0  # a new connection is not read from for so long (connecting itself is the kernel's)
    metrics_lie: float = 0.0  # added to each TTFT in the server's own metrics
    # Faults of single requests
    http_status: Any = 0  # {"every": 3, "status": 503}; or a list of one for each request
    in_band_error: Any = 0  # {"every": 3, "after": 2}: after so many chunks
    short_output: Any = 0  # {"every": 3, "tokens": 2}
    reset: Any = 0  # {"every": 3, "after": 2}
    early_close: Any = 0  # {"every": 3, "after": 2}
    silence: Any = 0  # {"every": 3, "after": 2}; without "after" there is no answer at all
    # Cost of a step
    step: float = 1e-3
    prefill_token: float = 5e-6
    decode: float = 3e-5
    time_scale: float = 1.0
    prefix_token: float = 0.0  # per prefill token and 1,000 tokens before it
    kv_tokens: int = 200_000
    # A line of JSON for each finished request: what was written when (time.monotonic)
    log: str = ""
    log_prompts: bool = False

    def given(self, args: dict[str, Any]) -> "Behaviour":
        """Return what it does with these arguments."""
        behaviour = self
        for case in self.when:
            if holds(case["if"], args):
                behaviour = replace(behaviour, **case["then"])
        if behaviour.hang_if and holds(behaviour.hang_if, args):
            behaviour = replace(behaviour, hang_at_start=True)
        for kind in ("oom", "bad_argument", "crash"):
            condition = getattr(behaviour, f"{kind}_if")
            if condition and holds(condition, args):
                behaviour = replace(behaviour, fail_at_start=kind)
        return behaviour

    def times(self, number: int, count: int) -> list[float] | None:
        """Return when the tokens of a request are due, None when the scheduler decides."""
        first, gap = in_turn(self.first_token, number - 1), in_turn(self.gap, number - 1)
        if first < 0:
            return None
        stalled = itertools.accumulate(float(self.stalls.get(str(i), 0.0)) for i in range(count))
        return [first + i * gap + stall for i, stall in enumerate(stalled)]

    def chunk_size(self, chunk: int) -> int:
        """Return how many tokens a chunk, counted from 0, waits for."""
        if chunk == 0 and self.first_chunk_tokens:
            return self.first_chunk_tokens
        return max(int(in_turn(self.tokens_per_chunk, chunk)), 1)


def in_turn(value: Any, index: int) -> Any:
    """Return the value itself, or one of a list: the last for all that follow."""
    return value[min(index, len(value) - 1)] if isinstance(value, list) else value


def holds(condition: dict[str, Any], args: dict[str, Any]) -> bool:
    """Return whether arguments are as said: numbers at least, everything else equal."""

    def one(name: str, wanted: Any) -> bool:
        value = args.get(name.replace("-", "_"))
        if isinstance(wanted, bool) or not isinstance(wanted, int | float):
            return bool(value == wanted)
        return value is not None and float(value) >= wanted

    return all(one(name, wanted) for name, wanted in condition.items())


def behaviour_from_environment() -> Behaviour:
    given = json.loads(os.environ.get("FAKE_VLLM") or "{}")
    known = {f.name for f in fields(Behaviour)}
    if unknown := sorted(set(given) - known):
        sys.exit(f"FAKE_VLLM: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return Behaviour(**given)


# --- Command line -----------------------------------------------------------------------------------------


def human_int(text: str) -> int:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text)
    if match is None:
        raise ValueError(text)
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
    return int(float(match[1]) * scale)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="vllm serve", usage="vllm serve [model_tag] [options]", allow_abbrev=False)
    made.add_argument("model_tag", nargs="?", help="The model tag to serve (optional if specified in config)")
    short: dict[str, list[str]] = {}
    for flag, name in SHORT.items():
        short.setdefault(name, []).append(flag)
    for name in TAKES_A_VALUE:
        kind: Callable[[str], Any] = human_int if name in HUMAN else int if name in WHOLE else str
        made.add_argument(f"--{name}", *short.get(name, []), type=kind)
    for name in TAKES_VALUES:
        made.add_argument(f"--{name}", nargs="+")
    for name in SWITCHES:
        made.add_argument(f"--{name}", *short.get(name, []), action=argparse.BooleanOptionalAction)
    for name in LONE_SWITCHES:
        made.add_argument(f"--{name}", action="store_true")
    return made


def normalise(argv: Sequence[str]) -> Iterator[str]:
    """Underscores in flags are dashes, and "--x.y z" sets a key inside JSON, which nothing here looks at."""
    skip = False
    for word in argv:
        if skip:
            skip = False
            continue
        if not word.startswith("--"):
            yield word
            continue
        flag, equals, value = word.partition("=")
        if "." in flag and flag[2:].split(".")[0].replace("_", "-") in TAKES_A_VALUE:
            skip = not equals
            continue
        yield flag.replace("_", "-") + equals + value


def with_config_file(argv: list[str]) -> list[str]:
    """Put the flags of `--config FILE` (flat YAML) before the others; like vLLM, drop `NAME: false`."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    rest, words = argv[:at] + argv[at + 2 :], []
    for line in Path(argv[at + 1]).read_text().splitlines():
        name, colon, value = line.partition(":")
        value = re.sub(r"\s+#.*$", "", value).strip()
        if not colon or not name.strip() or name.lstrip().startswith("#") or value == "false":
            continue
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        if name.strip() == "model":
            rest = [value, *rest] if not rest or rest[0].startswith("-") else rest
        elif value == "true":
            words.append(f"--{name.strip()}")
        else:
            words += [f"--{name.strip()}", value]
    return [*rest[:1], *words, *rest[1:]] if rest and not rest[0].startswith("-") else [*words, *rest]


def parse(argv: list[str]) -> dict[str, Any]:
    made = parser()
    if any(word.startswith("--help=") for word in argv):
        made.print_help()
        sys.exit(0)
    known, unknown = made.parse_known_args(with_config_file(list(normalise(argv))))
    if unknown:
        print("usage: vllm [-h] [-v]", file=sys.stderr)
        print(" " * 11, "{chat,complete,serve,launch,bench,collect-env,run-batch} ...", file=sys.stderr)
        print(f"vllm: error: unrecognized arguments: {' '.join(unknown)}", file=sys.stderr)
        sys.exit(2)
    return vars(known)


def settle(args: dict[str, Any]) -> dict[str, Any]:
    """Fill in what vLLM fills in, and refuse what it refuses."""
    settled = dict(args)
    model_len = settled["max_model_len"] = args["max_model_len"] or DEFAULT_MODEL_LEN
    chunked = settled["enable_chunked_prefill"] = args["enable_chunked_prefill"] is not False
    settled["max_num_batched_tokens"] = args["max_num_batched_tokens"] or (
        DEFAULT_BUDGET if chunked else max(DEFAULT_BUDGET, model_len)
    )
    settled["max_num_seqs"] = args["max_num_seqs"] or min(DEFAULT_SEQS, settled["max_num_batched_tokens"])
    budget, seqs = settled["max_num_batched_tokens"], settled["max_num_seqs"]
    if budget < model_len and not chunked:
        refuse(
            f"max_num_batched_tokens ({budget}) is smaller than max_model_len ({model_len}). This "
            "effectively limits the maximum sequence length to max_num_batched_tokens and makes vLLM reject "
            "longer sequences. Please increase max_num_batched_tokens or decrease max_model_len."
        )
    if budget < seqs:
        refuse(f"max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs ({seqs}).")
    return settled


def refuse(message: str) -> NoReturn:
    say_lines(REFUSED, message)
    sys.exit(1)


def say(where: str, message: str) -> None:
    print(
        f"(APIServer pid={os.getpid()}) INFO {time.strftime('%m-%d %H:%M:%S')} [{where}] {message}",
        flush=True,
    )


def say_lines(lines: str, reason: str = "") -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(lines.format(pid=os.getpid(), stamp=stamp, reason=reason), end="", flush=True)


# --- Scheduler --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """A request inside the engine."""

    prompt: Sequence[int]
    max_tokens: int
    stream: "Stream"
    hashes: list[int]
    computed: int = 0
    cached: int = 0
    made: int = 0
    queued: float = 0.0
    scheduled: float = 0.0
    external: int = 0

    @property
    def known(self) -> int:
        return len(self.prompt) + self.made


class Script:
    """Hands out the tokens of one request at known times, whatever else runs."""

    def __init__(self, engine: "Engine", request: Running, times: Sequence[float]) -> None:
        self.engine, self.request, self.times = engine, request, times
        self.wait()

    def wait(self) -> None:
        due = max(self.times[self.request.made], self.engine.frozen_until)
        self.timer = self.engine.loop.call_at(due, self.token)

    def token(self) -> None:
        if self.engine.frozen_until > self.engine.loop.time():
            self.wait()
            return
        self.engine.hand_out(self.request)
        if self.request in self.engine.scripts:
            self.wait()


class Engine:
    """vLLM's token-budget scheduler, with the time of a step from a formula."""

    def __init__(self, args: dict[str, Any], behaviour: Behaviour, loop: asyncio.AbstractEventLoop) -> None:
        self.args, self.behaviour, self.loop = args, behaviour, loop
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.scripts: dict[Running, Script] = {}
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.block = args["block_size"] or 16
        self.caching = args["enable_prefix_caching"] is not False
        self.frozen_until = 0.0
        self.step_end: float | None = None
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.sources = dict.fromkeys(SOURCES, 0)

    def submit(self, prompt: Sequence[int], max_tokens: int, stream: "Stream") -> Running:
        request = Running(prompt, max_tokens, stream, self.hash_blocks(prompt) if self.caching else [])
        request.queued = self.loop.time()
        if (times := self.behaviour.times(stream.number, max_tokens)) is not None:
            request.scheduled = request.queued
            self.look_up(request)
            began = request.queued if self.behaviour.barrier else stream.arrived
            self.scripts[request] = Script(self, request, [began + time for time in times])
            return request
        self.waiting.append(request)
        if self.step_end is None:
            self.step_end = self.loop.time()
            self.loop.call_soon(self.begin)
        return request

    def hash_blocks(self, prompt: Sequence[int]) -> list[int]:
        hashes, last = [], 0
        for start in range(0, len(prompt) - self.block + 1, self.block):
            last = hash((last, *prompt[start : start + self.block]))
            hashes.append(last)
        return hashes

    def abort(self, request: Running) -> None:
        if request in self.scripts:
            self.scripts.pop(request).timer.cancel()
        elif request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def begin(self) -> None:
        """Plan a step and come back when it is over."""
        now = self.loop.time()
        if self.frozen_until > now:
            self.step_end = self.frozen_until
            self.loop.call_at(self.frozen_until, self.begin)
            return
        plan = self.plan()
        if not plan:
            self.step_end = None
            return
        started = self.step_end if self.step_end is not None and now - self.step_end < 0.02 else now
        self.step_end = started + self.duration(plan)
        self.loop.call_at(self.step_end, self.end, plan)

    def plan(self) -> list[tuple[Running, int]]:
        budget, threshold = (
            self.args["max_num_batched_tokens"],
            self.args["long_prefill_token_threshold"] or 0,
        )
        plan: list[tuple[Running, int]] = []
        self.make_room()
        for request in self.running:
            tokens = min(request.known - request.computed, threshold or budget, budget)
            if tokens:
                plan.append((request, tokens))
                budget -= tokens
        while self.waiting and budget and len(self.running) < self.args["max_num_seqs"]:
            request = self.waiting[0]
            self.look_up(request)
            need = min(request.known - request.computed, threshold or request.known)
            if need > budget and not self.args["enable_chunked_prefill"]:
                break
            if request.known + self.held() > self.behaviour.kv_tokens and self.running:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.scheduled = request.scheduled or self.loop.time()
            plan.append((request, min(need, budget)))
            budget -= min(need, budget)
        return plan

    def held(self) -> int:
        return sum(request.known for request in self.running)

    def make_room(self) -> None:
        """Preempt the latest request while the cache is too small for one more token each."""
        while len(self.running) > 1 and self.held() + len(self.running) > self.behaviour.kv_tokens:
            victim = self.running.pop()
            victim.computed = 0
            victim.stream.is_pulled = False  # as on the real server, what was pulled is computed again
            self.waiting.appendleft(victim)
            self.counters["num_preemptions"] += 1

    def look_up(self, request: Running) -> None:
        if request.computed:
            return
        hits = self.hits(request.hashes, request.known)
        if self.caching and not request.made:
            self.counters["prefix_cache_queries"] += len(request.prompt)
            self.counters["prefix_cache_hits"] += hits * self.block
            request.cached = hits * self.block
        request.computed = hits * self.block
        if request.stream.is_pulled:  # all but the last token, which is what the first output is made of
            request.external = len(request.prompt) - request.cached
            request.computed = request.known - 1

    def hits(self, hashes: Sequence[int], known: int) -> int:
        """Return how many blocks are in the cache; the last token is always computed."""
        found = itertools.takewhile(self.cache.__contains__, hashes[: (known - 1) // self.block])
        return sum(1 for block in found if self.cache.move_to_end(block) is None)

    def duration(self, plan: list[tuple[Running, int]]) -> float:
        cost = self.behaviour
        seconds = cost.step
        for request, tokens in plan:
            if request.made and tokens == 1:
                seconds += cost.decode
            else:
                seconds += tokens * (cost.prefill_token + cost.prefix_token * request.computed / 1000)
        return seconds * cost.time_scale

    def end(self, plan: list[tuple[Running, int]]) -> None:
        """Hand out the tokens of a step and begin the next one."""
        for request, tokens in plan:
            if request not in self.running:
                continue
            request.computed += tokens
            if request.computed >= request.known:
                self.hand_out(request)
        self.begin()

    def hand_out(self, request: Running) -> None:
        if not request.made:
            self.counters["prompt_tokens"] += len(request.prompt)
            computed = len(request.prompt) - request.cached - request.external
            for source, tokens in zip(SOURCES, (computed, request.cached, request.external), strict=True):
                self.sources[source] += tokens
            self.remember(request)
        request.made += 1
        self.counters["generation_tokens"] += 1
        done = request.made >= request.max_tokens
        if done:
            self.abort(request)
            self.counters["request_success"] += 1
        request.stream.token(done=done)

    def remember(self, request: Running) -> None:
        for block in request.hashes:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) * self.block > self.behaviour.kv_tokens:
            self.cache.popitem(last=False)


# --- HTTP -------------------------------------------------------------------------------------------------


class Completions:
    """What /v1/completions is asked and how it answers."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    def prompt(self, body: dict[str, Any]) -> Sequence[int]:
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, list) else list(str(prompt).encode())

    def max_tokens(self, body: dict[str, Any]) -> int:
        return body.get("max_tokens") or 16

    def delta(self, first: int, tokens: int, finish_reason: str | None) -> dict[str, Any]:
        """Return a choice with so many tokens from the first on."""
        return {"index": 0, "text": self.behaviour.text * tokens, "logprobs": None, "finish_reason": finish_reason,
                "stop_reason": None, "prompt_token_ids": None, "token_ids": None}  # fmt: skip

    def message(self, tokens: int) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        return self.delta(0, tokens, "length")


class Chat(Completions):
    """What /v1/chat/completions is asked and how it answers: a role first, reasoning apart from content."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def prompt(self, body: dict[str, Any]) -> Sequence[int]:
        contents = [message.get("content") or "" for message in body.get("messages") or []]
        parts = [part for said in contents for part in ([{"text": said}] if isinstance(said, str) else said)]
        return list("".join(part.get("text", "") for part in parts).encode())

    def max_tokens(self, body: dict[str, Any]) -> int:
        return body.get("max_completion_tokens") or super().max_tokens(body)

    def role(self) -> dict[str, Any]:
        return self.choice(None, delta={"role": "assistant", "content": ""})

    def delta(self, first: int, tokens: int, finish_reason: str | None) -> dict[str, Any]:
        return self.choice(finish_reason, delta=self.said(first, tokens))

    def message(self, tokens: int) -> dict[str, Any]:
        return self.choice("length", message={"role": "assistant", "content": None, **self.said(0, tokens)})

    def choice(self, finish_reason: str | None, **said: Any) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish_reason, "token_ids": None}

    def said(self, first: int, tokens: int) -> dict[str, str]:
        text = self.behaviour.text
        thoughts = min(max(self.behaviour.reasoning - first, 0), tokens)
        channels = dict.fromkeys(self.behaviour.reasoning_as.split(), text * thoughts) if thoughts else {}
        return channels | ({"content": text * (tokens - thoughts)} if tokens > thoughts or not tokens else {})


class Stream:
    """The answer to one request, streamed or not."""

    def __init__(self, connection: "Connection", number: int, body: dict[str, Any], api: Completions) -> None:
        self.connection, self.number, self.body, self.api = connection, number, body, api
        self.server = connection.server
        self.behaviour = self.server.behaviour
        self.arrived = connection.arrived
        self.prompt: Sequence[int] = ()
        self.request: Running | None = None
        self.id = f"{api.prefix}-{hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()}"
        self.made = self.sent = self.chunks = 0
        self.first = self.last = 0.0  # when the first and the latest tokens were ready
        self.writes: list[tuple[float, int]] = []
        self.held: list[tuple[bytes, int]] = []
        self.outcome = "open"
        self.is_pulled = False
        self.transfer_params: dict[str, Any] = body.get("kv_transfer_params") or {}
        self.is_streamed = bool(body.get("stream")) and not self.behaviour.never_stream
        options, forced = body.get("stream_options") or {}, bool(self.server.args["enable_force_include_usage"])
        self.final_usage = forced or bool(options.get("include_usage"))
        continuous = forced or (self.final_usage and bool(options.get("continuous_usage_stats")))
        self.per_chunk = continuous and not self.behaviour.no_usage

    def fault(self, name: str) -> dict[str, Any] | None:
        """Return the details of a fault when this request is to suffer it."""
        given = getattr(self.behaviour, name)
        details: dict[str, Any] = given if isinstance(given, dict) else {"every": given}
        every = details.get("every") or 0
        hit = self.number in details.get("only", ()) or (every and self.number % every == 0)
        return details if hit else None

    def start(self) -> None:
        self.prompt = self.api.prompt(self.body)
        max_tokens = self.api.max_tokens(self.body)
        problem = self.problem(len(self.prompt), max_tokens)
        if problem:
            status, message, kind = problem
            self.refuse("refused", status, message, kind)
        elif (silence := self.fault("silence")) is not None and not silence.get("after"):
            self.outcome = "silence"
        else:
            if (short := self.fault("short_output")) is not None:
                max_tokens = min(max_tokens, short.get("tokens", max(1, max_tokens // 2)))
            self.max_tokens = max_tokens
            if self.behaviour.early_role and self.is_streamed:
                self.open()
            transfer = self.server.transfer
            if transfer and self.transfer_params.get("do_remote_prefill") and not self.behaviour.ignore_kv:
                self.pulling = self.server.loop.create_task(self.pull(transfer))
            else:
                self.server.admit(self)

    async def pull(self, transfer: fake_pd.KvTransfer) -> None:
        """Get the prompt's KV from where it was computed, and go on."""
        engine = self.server.engine
        cached = engine.hits(engine.hash_blocks(self.prompt) if engine.caching else [], len(self.prompt))
        try:
            await transfer.pull(self.transfer_params, transfer.blocks(len(self.prompt)) - cached)
        except fake_pd.PullError:
            if self.outcome == "open":
                self.fail("transfer_failed", "Internal server error")
            return
        if self.outcome == "open":
            self.is_pulled = True
            self.server.admit(self)

    def fail(self, outcome: str, message: str) -> None:
        """Answer with an error of the engine: a status, or an event where a stream has one already."""
        if not self.is_streamed:
            self.refuse(outcome, 500, message, "InternalServerError")
            return
        self.open()
        error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        self.write(self.event({"error": error}))
        self.write(self.event("[DONE]"))
        self.flush()
        self.finish(outcome)
        self.connection.end_stream()

    def refuse(self, outcome: str, status: int, message: str, kind: str) -> None:
        self.finish(outcome)
        error = {"message": message, "type": kind, "param": None, "code": status}
        self.connection.answer(status, {"error": error})

    def problem(self, prompt_len: int, max_tokens: int) -> tuple[int, str, str] | None:
        if (fault := self.fault("http_status")) is not None:
            return in_turn(fault.get("status", 500), self.number - 1), "made to fail", "InternalServerError"
        if self.body.get("model") not in {None, *self.server.names}:
            return 404, f"The model `{self.body.get('model')}` does not exist.", "NotFoundError"
        limit = self.server.args["max_model_len"]
        if max_tokens > limit:
            message = f"max_tokens={max_tokens} cannot be greater than max_model_len=max_total_tokens={limit}."
            return 400, message, "BadRequestError"
        if prompt_len + max_tokens > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} "
                f"output tokens and your prompt contains {prompt_len} input tokens, for a total of "
                f"{prompt_len + max_tokens} tokens. Please reduce the length of the input prompt or the "
                "number of requested output tokens."
            )
            return 400, message, "BadRequestError"
        return None

    def token(self, *, done: bool) -> None:
        """One token is ready; write a chunk when it is time for one."""
        self.made += 1
        if not self.is_streamed:
            self.note_ready()
            if done:
                self.answer_whole()
            return
        size, interval = self.behaviour.chunk_size(self.chunks), self.server.args["stream_interval"] or 1
        waiting = self.made - self.sent
        if done or (waiting >= size and (not self.sent or waiting >= interval)):
            self.chunk(waiting, done=done)

    def note_ready(self) -> None:
        """Keep the server's own metrics: what is ready now, however it is written then."""
        now = time.monotonic()
        if self.first:
            self.server.histograms["inter_token_latency_seconds"].observe(now - self.last)
        else:
            self.first = now
            ttft = now - self.arrived + self.behaviour.metrics_lie
            self.server.histograms["time_to_first_token_seconds"].observe(ttft)
        self.last = now

    def open(self) -> None:
        """Begin the answer; a chat begins with a role."""
        if self.connection.streaming:
            return
        self.connection.begin_stream()
        if isinstance(self.api, Chat):
            self.write(self.event(self.payload(self.api.role(), 0)))
            if self.behaviour.early_role:
                self.flush()

    def chunk(self, tokens: int, *, done: bool) -> None:
        for name in ("reset", "early_close", "in_band_error", "silence"):
            details = self.fault(name)
            if details is not None and self.chunks >= details.get("after", 1):
                self.open()
                self.break_off(name)
                return
        self.open()
        if self.behaviour.extras:
            self.write_extras()
        choice = self.api.delta(self.sent, tokens, "length" if done else None)
        self.sent, self.chunks = self.made, self.chunks + 1
        self.note_ready()
        self.write(self.event(self.payload(choice, self.made)), tokens)
        if done:
            self.complete()

    def write_extras(self) -> None:
        """Send what brings no tokens: a comment, events without data, choices or text."""
        self.write(b": keep-alive" + self.newline * 2 + b"event: ping" + self.newline * 3)
        self.write(self.event(self.payload(None, self.sent)))
        if not self.chunks:
            self.write(self.event(self.payload(self.api.delta(0, 0, None), 0)))

    @property
    def newline(self) -> bytes:
        return b"\r\n" if self.behaviour.crlf else b"\r" if self.behaviour.cr else b"\n"

    def event(self, payload: object) -> bytes:
        text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
        return b"data: " + text.encode() + self.newline * 2

    def payload(self, choice: dict[str, Any] | None, made: int) -> dict[str, Any]:
        payload = {"id": self.id, "object": self.api.part, "created": int(time.time()),
                   "model": self.server.names[0], "choices": [choice] if choice else []}  # fmt: skip
        return {**payload, "usage": self.usage(made)} if self.per_chunk else payload

    def usage(self, made: int) -> dict[str, Any]:
        prompt_len = len(self.prompt) + self.behaviour.prompt_drift
        return {"prompt_tokens": prompt_len, "total_tokens": prompt_len + made, "completion_tokens": made}

    def closing(self) -> dict[str, Any]:
        """Return what stands in the last event, or beside an answer that is not streamed."""
        closing: dict[str, Any] = {"usage": self.usage(self.made), "system_fingerprint": "vllm-0.26.0-fake"}
        if self.server.args["enable_prompt_tokens_details"] and self.request is not None:
            closing["usage"]["prompt_tokens_details"] = {"cached_tokens": self.request.cached}
        if self.server.args["enable_per_request_metrics"]:
            closing["metrics"] = self.timing()
        return closing

    def timing(self) -> dict[str, float]:
        """Return vLLM's PerRequestTimingMetrics; what has no value is left out, as in its JSON."""
        assert self.request is not None
        queued, scheduled = self.request.queued, self.request.scheduled
        seconds = {"time_to_first_token_ms": self.first - scheduled + self.behaviour.metrics_lie,
                   "generation_time_ms": self.last - self.first, "queue_time_ms": scheduled - queued}  # fmt: skip
        if self.made > 1:
            seconds["mean_itl_ms"] = (self.last - self.first) / (self.made - 1)
        timing = {name: 1000 * value for name, value in seconds.items()}
        return timing | ({"tokens_per_second": self.made / (self.last - scheduled)} if self.last > scheduled else {})

    def complete(self) -> None:
        if self.final_usage:
            self.write(self.event(self.payload(None, self.made) | self.closing()))
        if not self.behaviour.no_done:
            self.write(self.event("[DONE]"))
        self.flush()
        self.finish("completed")
        self.connection.end_stream()

    def answer_whole(self) -> None:
        for name in ("reset", "early_close"):
            if self.fault(name) is not None:
                self.break_off(name)
                return
        if self.fault("in_band_error") is not None:
            self.fail("in_band_error", "EngineCore encountered an issue.")
            return
        self.writes.append((time.monotonic(), self.made))
        self.finish("completed")
        answer = {"id": self.id, "object": self.api.whole, "created": int(time.time()),
                  "model": self.server.names[0], "choices": [self.api.message(self.made)]}  # fmt: skip
        if self.server.transfer is not None:
            answer["kv_transfer_params"] = self.handed_over(self.server.transfer)
        self.connection.answer(200, answer | self.closing())
        self.server.answered()

    def handed_over(self, transfer: fake_pd.KvTransfer) -> dict[str, Any] | None:
        is_prefill = bool(self.transfer_params.get("do_remote_decode"))
        return transfer.hand_over(self.id, len(self.prompt)) if is_prefill else None

    def break_off(self, how: str) -> None:
        if self.request is not None:
            self.server.engine.abort(self.request)
        self.flush()
        if how == "silence":
            self.outcome = how
        elif how == "in_band_error":
            self.fail(how, "EngineCore encountered an issue.")
        elif how == "reset":
            self.finish(how)
            self.connection.reset()
        else:
            self.finish(how)
            self.connection.transport.close()

    def write(self, data: bytes, tokens: int = 0) -> None:
        """Send an event, or keep it until `merge_writes` of them are together."""
        self.held.append((data, tokens))
        if len(self.held) >= self.behaviour.merge_writes:
            self.flush()

    def flush(self) -> None:
        held, self.held = self.held, []
        if held:
            now = time.monotonic()
            self.writes += [(now, tokens) for _, tokens in held if tokens]
            self.connection.write_part(b"".join(data for data, _ in held))

    def finish(self, outcome: str) -> None:
        self.outcome = outcome
        self.server.finished(self)


class Connection(asyncio.Protocol):
    """One client's connection: HTTP/1.1 with keep-alive."""

    def __init__(self, server: "Server") -> None:
        self.server, self.loop = server, server.loop
        self.buffer, self.streaming, self.busy = b"", False, False
        self.is_open, self.arrived = False, 0.0
        self.stream: Stream | None = None
        self.idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections.add(self)
        self.rest()
        if delay := self.server.behaviour.connect_delay:
            self.loop.call_later(delay, self.open)
        else:
            self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self.idle is not None:
            self.idle.cancel()
        if self.stream is not None and self.stream.outcome in {"open", "silence"}:
            if self.stream.request is not None:
                self.server.engine.abort(self.stream.request)
            self.stream.finish("client_left")

    def open(self) -> None:
        """Read what has come since the connection was made."""
        self.is_open = True
        self.data_received(b"")

    def rest(self) -> None:
        """Idle from now on: close after the keep-alive time."""
        self.busy = self.streaming = False
        self.stream = None
        self.idle = self.loop.call_later(self.server.behaviour.keep_alive, self.transport.close)
        if self.buffer:
            self.loop.call_soon(self.data_received, b"")

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if self.busy or not self.is_open or not found:
            return
        length = re.search(rb"content-length:\s*(\d+)", head.lower())
        size = int(length[1]) if length else 0
        if len(rest) < size:
            return
        self.buffer = rest[size:]
        self.busy, self.arrived = True, time.monotonic()
        if self.idle is not None:
            self.idle.cancel()
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        authorization = re.search(rb"^authorization:\s*bearer\s+(\S+)", head, re.IGNORECASE | re.MULTILINE)
        self.route(method, path.split("?")[0], rest[:size], authorization[1].decode() if authorization else None)

    def route(self, method: str, path: str, body: bytes, key: str | None) -> None:
        server = self.server
        if not server.is_ready:
            self.answer(503, {"error": "starting"})
        elif path == "/health":
            self.answer(200, None)
        elif path == "/metrics":
            self.answer(200, server.metrics())
        elif path == "/version":
            self.answer(200, {"version": VERSION})
        elif path.startswith("/v1") and server.keys and key not in server.keys:
            self.answer(401, {"error": "Unauthorized"})
        elif path == "/v1/models":
            self.answer(200, server.models())
        elif method == "POST" and path == "/v1/completions":
            server.complete(self, body, Completions(server.behaviour))
        elif method == "POST" and path == "/v1/chat/completions":
            server.complete(self, body, Chat(server.behaviour))
        elif method == "POST" and path == "/tokenize" and server.behaviour.tokenizer:
            self.answer(200, server.tokenize(json.loads(body)))
        else:
            self.answer(404, {"detail": "Not Found"})

    def answer(self, status: int, content: object) -> None:
        kind = "text/plain; version=0.0.4" if isinstance(content, str) else "application/json"
        body = (
            b"" if content is None else content.encode() if isinstance(content, str) else json.dumps(content).encode()
        )
        self.transport.write(
            f"HTTP/1.1 {status} Made Up\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self.rest()

    def begin_stream(self) -> None:
        self.streaming = True
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    def write_part(self, data: bytes) -> None:
        part = b"%x\r\n%s\r\n" % (len(data), data)
        size = self.server.behaviour.split_writes or len(part)
        for start in range(0, len(part), size):
            self.transport.write(part[start : start + size])

    def end_stream(self) -> None:
        self.transport.write(b"0\r\n\r\n")
        self.rest()

    def reset(self) -> None:
        """Leave with RST instead of FIN."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.transport.abort()


class Server:
    """What the connections share."""

    def __init__(self, args: dict[str, Any], behaviour: Behaviour, loop: asyncio.AbstractEventLoop) -> None:
        self.args, self.behaviour, self.loop = args, behaviour, loop
        self.engine = Engine(args, behaviour, loop)
        self.names: list[str] = args["served_model_name"] or [args["model_tag"] or args["model"] or "Qwen/Qwen3-0.6B"]
        self.keys: list[str] = args["api_key"] or [k for k in [os.environ.get("VLLM_API_KEY")] if k]
        self.connections: set[Connection] = set()
        sabotage = fake_pd.Sabotage(behaviour.transfer, behaviour.transfer_patience, behaviour.side_channel_shift)
        self.transfer = fake_pd.from_argument(args["kv_transfer_config"], sabotage, self.engine.block)
        self.is_ready = False
        self.received = self.whole_answers = 0
        self.behind_barrier: list[Stream] = []
        self.histograms = {name: Histogram(name, *rest) for name, *rest in HISTOGRAMS}
        self.log = Path(behaviour.log).open("a") if behaviour.log else None  # noqa: SIM115 (open as long as it serves)

    def complete(self, connection: Connection, body: bytes, api: Completions) -> None:
        self.received += 1
        if self.received == 1 and self.behaviour.freeze_at >= 0:
            self.engine.frozen_until = 0.0
            self.loop.call_later(self.behaviour.freeze_at, self.freeze)
        for limit, kind in ((self.behaviour.crash_after, "crash"), (self.behaviour.oom_after, "oom")):
            if limit and self.received >= limit:
                say_lines(ENGINE_DIED, REASONS[kind])
                os._exit(1)
        connection.stream = Stream(connection, self.received, json.loads(body), api)
        connection.stream.start()

    def answered(self) -> None:
        """Count a whole answer; die after the last one that was to be given."""
        self.whole_answers += 1
        if self.whole_answers == self.behaviour.die_after:
            say_lines(ENGINE_DIED, REASONS["crash"])
            os._exit(1)

    def freeze(self) -> None:
        self.engine.frozen_until = self.loop.time() + self.behaviour.freeze_for

    def admit(self, stream: Stream) -> None:
        self.behind_barrier.append(stream)
        if len(self.behind_barrier) < self.behaviour.barrier:
            return
        admitted, self.behind_barrier = self.behind_barrier, []
        for one in admitted:
            one.request = self.engine.submit(one.prompt, one.max_tokens, one)

    def finished(self, stream: Stream) -> None:
        if stream.outcome == "completed" and (request := stream.request) is not None:
            self.histograms["e2e_request_latency_seconds"].observe(time.monotonic() - stream.arrived)
            self.histograms["request_queue_time_seconds"].observe(request.scheduled - request.queued)
        if self.log is None:
            return
        entry: dict[str, Any] = {
            "request": stream.number, "arrived": stream.arrived, "outcome": stream.outcome,
            "prompt_len": len(stream.prompt), "cached": stream.request.cached if stream.request else 0,
            "writes": stream.writes,
        }  # fmt: skip
        if self.behaviour.log_prompts:
            entry["prompt"] = list(stream.prompt)
        self.log.write(json.dumps(entry) + "\n")
        self.log.flush()

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer /tokenize: a token is a byte."""
        api = Chat if "messages" in body else Completions
        tokens = list(api(self.behaviour).prompt(body))
        limit = self.args["max_model_len"]
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}

    def models(self) -> dict[str, Any]:
        """Answer /v1/models."""
        model = self.args["model_tag"] or self.args["model"] or self.names[0]
        about = {"object": "model", "created": int(time.time()), "owned_by": "vllm", "root": model,
                 "parent": None, "max_model_len": self.args["max_model_len"]}  # fmt: skip
        return {"object": "list", "data": [{"id": name, **about} for name in self.names]}

    def metrics(self) -> str:
        """Answer /metrics, in Prometheus' text form."""
        engine = self.engine
        labels = f'{{engine="0",model_name="{self.names[0]}"}}'
        gauges = {
            "num_requests_running": len(engine.running) + len(engine.scripts),
            "num_requests_waiting": len(engine.waiting),
            "kv_cache_usage_perc": engine.held() / self.behaviour.kv_tokens,
        }
        lines: list[str] = []
        for name, value in gauges.items():
            lines += gauge(name, labels, value)
        for name, count in engine.counters.items():
            extra = with_label(labels, "finished_reason", "length") if name == "request_success" else labels
            lines += counter(name, (extra, count))
        sources = [(with_label(labels, "source", source), count) for source, count in engine.sources.items()]
        lines += counter("prompt_tokens_by_source", *sources)
        for histogram in self.histograms.values():
            lines += histogram.lines(labels)
        if self.transfer is not None:
            lines += self.transfer.metrics(labels)
        blocks = self.behaviour.kv_tokens // engine.block
        lines.append(f'vllm:cache_config_info{{block_size="{engine.block}",num_gpu_blocks="{blocks}"}} 1.0')
        return "\n".join(lines) + "\n"


# --- Life -------------------------------------------------------------------------------------------------


class FineSelector(selectors.EpollSelector):
    """Epoll rounds waits up to a millisecond; select() on its descriptor does not."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        return super().select(0)


def listen(args: dict[str, Any]) -> socket.socket:
    # asyncio switches Nagle's algorithm off only for sockets that say TCP; it would hold each answer's first
    # event back for the client's delayed acknowledgement, 40 ms. vLLM's uvloop switches it off for all.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((args["host"] or "127.0.0.1", args["port"] or 8000))
    except OSError:
        say_lines(PORT_TAKEN)
        sys.exit(1)
    return sock


def fail_if_asked(kind: str) -> None:
    if not kind:
        return
    if kind in REASONS:
        say_lines(START_FAILED, REASONS[kind])
    elif kind == "port":
        say_lines(PORT_TAKEN)
    elif kind == "bad_argument":
        refuse("made to fail")
    else:
        print(f"FAKE_VLLM: fail_at_start {kind!r}")
    sys.exit(1)


def start_children(behaviour: Behaviour) -> list[subprocess.Popen[bytes]]:
    """Start the children asked for; return those that end with the server."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(120)", "fake-vllm-child"]
    if behaviour.child_escapes:
        child = subprocess.Popen(sleeper, start_new_session=True)
        say("core.py:1", f"escaped child pid={child.pid}")
    if not behaviour.engine_child:
        return []
    child = subprocess.Popen(sleeper)
    say("core.py:1", f"engine child pid={child.pid}")
    return [child]


async def serve(args: dict[str, Any], behaviour: Behaviour) -> None:
    loop = asyncio.get_running_loop()
    sock = listen(args)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, (lambda: None) if behaviour.ignore_term else stopping.set)
    server = Server(args, behaviour, loop)
    children = start_children(behaviour)
    for child in children:
        threading.Thread(target=watch, args=(child, stopping), daemon=True).start()
    starting = asyncio.ensure_future(start(server, sock, behaviour))
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
    await stop
    say("launcher.py:137", "Shutting down FastAPI HTTP server.")
    await asyncio.sleep(behaviour.stop_delay)
    for child in children:
        child.kill()
        child.wait()


def watch(child: subprocess.Popen[bytes], stopping: asyncio.Event) -> None:
    """End as vLLM does when its engine is killed."""
    child.wait()
    time.sleep(0.2)  # both may have been asked to end
    if not stopping.is_set():
        say_lines(ENGINE_KILLED)
        os._exit(1)


async def start(server: Server, sock: socket.socket, behaviour: Behaviour) -> None:
    args, loop = server.args, server.loop
    say("api_utils.py:262", f"vLLM server version {VERSION}, serving model {args['model_tag']}")
    say(
        "api_utils.py:273",
        f"non-default args: { ({k: v for k, v in args.items() if v not in (None, False)}) }",
    )
    say(
        "scheduler.py:252",
        f"Chunked prefill is enabled with max_num_batched_tokens={args['max_num_batched_tokens']}.",
    )
    for number in range(behaviour.noise_lines):
        say("loader.py:1", f"line {number} " + "." * 200)
    if behaviour.health_while_starting:
        await loop.create_server(lambda: Connection(server), sock=sock, backlog=2048)
    await asyncio.sleep(behaviour.start_delay)
    fail_if_asked(behaviour.fail_at_start)
    if behaviour.hang_at_start:
        await asyncio.Event().wait()
    tokens = behaviour.kv_tokens
    say("kv_cache_utils.py:2177", f"GPU KV cache size: {tokens:,} tokens")
    say("kv_cache_utils.py:2179", f"Maximum concurrency for {args['max_model_len']:,} tokens per request: "
                                  f"{tokens / args['max_model_len']:.2f}x")  # fmt: skip
    say("api_server.py:677", f"Starting vLLM server on http://{args['host']}:{args['port']}")
    if server.transfer is not None:
        try:
            await server.transfer.listen()
        except OSError:
            # vLLM 0.26 waits for ever for the thread that could not bind.
            say_lines(SIDE_CHANNEL_TAKEN, f"tcp://{server.transfer.host}:{server.transfer.port}")
            await asyncio.Event().wait()
    if not behaviour.health_while_starting:
        await loop.create_server(lambda: Connection(server), sock=sock, backlog=2048)
    server.is_ready = True
    print(f"(APIServer pid={os.getpid()}) INFO:     Application startup complete.", file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
    if argv in (["--version"], ["-v"]):
        print(VERSION)
        return
    if not argv or argv[0] != "serve":
        sys.exit("usage: fake_vllm.py serve MODEL [options]")
    args = settle(parse(argv[1:]))
    behaviour = behaviour_from_environment().given(args)
    loop = asyncio.SelectorEventLoop(FineSelector())
    loop._clock_resolution = 1e-6  # type: ignore[attr-defined]
    asyncio.set_event_loop(loop)
    loop.run_until_complete(serve(args, behaviour))


if __name__ == "__main__":
    main(sys.argv[1:])
