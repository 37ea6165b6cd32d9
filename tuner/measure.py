"""Replay a workload against a server that is there already, and return the numbers.

What `tune replay` does between its flags and its report. Everything that can be wrong is found before the
clock starts: flags, the server, the model, lengths that do not fit.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tuner import metrics, units
from tuner import slo as slos
from tuner import spec as specs
from tuner import workload as workloads
from tuner.errors import SpecError
from tuner.evaluate import telling, tightest
from tuner.metrics import DEFAULT_CLASSES
from tuner.replay import attempts, calibrate, gate, remote
from tuner.replay import run as replaying
from tuner.replay.prompts import CHAT, COMPLETIONS, DIGITS, LEAST_VOCABULARY, PATHS, PLAIN, Scale, vocabulary_of
from tuner.results import Repeat, combine
from tuner.seams import Measurement, Member, Progress, Replay
from tuner.serving import Json, Role
from tuner.sinks import provenance
from tuner.slo import Slo
from tuner.spec import FOLLOW, SESSIONS
from tuner.workload import Workload

WARM_UP, DRAIN_TIMEOUT = 5.0, 120.0  # a study's
OWN_KEYS = ("model", "prompt", "messages", "stream", "n")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to send where; durations in seconds, None where it is found out."""

    url: str
    workload: Workload
    slos: tuple[Slo, ...] = ()
    model: str | None = None
    endpoint: str = COMPLETIONS
    repeats: int = 1
    seed: int = 0
    vocab_size: int | None = None
    extra_body: Mapping[str, Json] | None = None
    sessions: str = FOLLOW
    warm_up: float = WARM_UP
    request_timeout: float | None = None
    drain_timeout: float = DRAIN_TIMEOUT
    processes: int | None = None


def wanted(
    workload: str, url: str, slo: Sequence[str] = (), rate_scale: float | None = None, seed: int | None = None,
    **flags: Any,
) -> Wanted:  # fmt: skip
    """Return what flags of the command line ask for; `flags` are those of `Wanted`, as text or None.

    Raises:
        SpecError: names the flag that is wrong.
    """
    folder = specs.find_workload(workload, None)
    rows = workloads.load(folder)
    if (origin := provenance.read(folder)) is not None:
        rows = replace(rows, transforms=origin.transforms)
    seed = secrets.randbelow(2**31) if seed is None else seed
    if rate_scale is not None:
        rows = workloads.scale_rate(rows, rate_scale, seed)
    given = {name: value for name, value in flags.items() if value is not None}
    for name in ("warm_up", "request_timeout", "drain_timeout"):
        if name in given:
            given[name] = _duration(name, given[name], may_be_zero=name == "warm_up")
    for name in ("repeats", "vocab_size", "processes"):
        if given.get(name, 1) < 1:
            raise SpecError(f"--{name.replace('_', '-')} {given[name]}: must be at least 1")
    if given.get("endpoint", COMPLETIONS) not in PATHS:
        raise SpecError(f"--endpoint {given['endpoint']}: no such endpoint", hint=f"one of: {', '.join(PATHS)}")
    if given.get("sessions", FOLLOW) not in SESSIONS:
        raise SpecError(f"--sessions {given['sessions']}: no such way", hint=f"one of: {', '.join(SESSIONS)}")
    if "extra_body" in given:
        given["extra_body"] = _extra_body(given["extra_body"])
    return Wanted(url=remote.base_of(url), workload=rows, slos=_slos(slo), seed=seed, **given)


def _duration(name: str, text: str, *, may_be_zero: bool) -> float:
    flag = f"--{name.replace('_', '-')} {text}"
    try:
        seconds = units.parse_duration(text)
    except ValueError as error:
        raise SpecError(f"{flag}: {error}") from None
    if not seconds and not may_be_zero:
        raise SpecError(f"{flag}: must be above zero")
    return seconds


def _extra_body(text: str) -> dict[str, Json]:
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"--extra-body: not JSON: {error.msg}") from error
    if not isinstance(body, dict):
        raise SpecError("--extra-body: not a JSON object", hint="write for example '{\"ignore_eos\": null}'")
    if own := [name for name in OWN_KEYS if name in body]:
        raise SpecError(f"--extra-body: {own[0]} is the replay's own", hint="any other key may be added or removed")
    return body


def _slos(texts: Sequence[str]) -> tuple[Slo, ...]:
    found = tuple(slos.parse(part) for text in texts for part in text.split(","))
    if relative := [slo for slo in found if slo.limit is None]:
        raise SpecError(
            f"--slo {relative[0].text}: a limit relative to the default, and a lone replay measures no default",
            hint=f"write a limit with its unit, such as {relative[0].metric}=500ms",
        )
    return found


# --- The measurement --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """A server that has answered, and how to talk to it."""

    base: str
    model: str
    vocab_size: int
    members: tuple[Member, ...]
    how: Mapping[str, Any]
    notes: tuple[str, ...]


def run(asked: Wanted, progress: Progress, on_progress: Callable[[int, int], None]) -> Measurement:
    """Return what was measured.

    Args:
        asked: what to send where.
        progress: told the phases.
        on_progress: told (ended, offered) during a replay.

    Raises:
        SpecError: the model is not offered, or the workload does not fit it.
        HostError: nobody answers at the URL.
        InvalidReplay: the client was late twice, lengths were not the recorded ones, or nothing completed.
    """
    target = _look(asked)
    for note in target.notes:
        progress.phase(f"note: {note}")
    started = time.time()
    if asked.warm_up > 0:
        progress.phase("warm-up", expected=asked.warm_up)
        replaying.warm_up(
            target.base, target.model, asked.workload, duration=asked.warm_up, seed=asked.seed,
            vocab_size=target.vocab_size, **target.how,
        )  # fmt: skip
    replays = tuple(_replay(asked, target, number, progress, on_progress) for number in range(1, asked.repeats + 1))
    repeats = tuple(_numbers(seen, asked.slos) for seen in replays)
    return Measurement(
        url=target.base, model=target.model, endpoint=asked.endpoint, workload=asked.workload, seed=asked.seed,
        slos=asked.slos, replays=replays, repeats=repeats, metrics=combine(repeats), notes=target.notes,
        started=started,
    )  # fmt: skip


def _look(asked: Wanted) -> _Target:
    """Ask the server what it is, before the clock starts."""
    served = remote.choose(remote.models(asked.url), asked.model)
    if served.max_model_len is not None:
        hint = "start the server with a larger --max-model-len, or use a workload whose rows fit"
        workloads.check_fits(asked.workload, served.max_model_len, hint=hint)
    scale, notes = PLAIN, []
    if asked.endpoint == CHAT:
        scale = calibrate.scale_of(asked.url, served.name, asked.extra_body or {})
        calibrate.check_fits(asked.workload, scale)
        notes += _chat_notes(asked.workload, scale)
    vocab_size = asked.vocab_size or vocabulary_of(served.root)
    if vocab_size is None and asked.endpoint != CHAT and any(row.prompt is None for row in asked.workload.requests):
        notes.append(
            f"prompts are token ids below {LEAST_VOCABULARY:,}, which every usual model knows: the model's folder "
            "is not here to say its own size (--vocab-size)"
        )
    counters = (Member(Role.ANY, asked.url),) if remote.has_counters(asked.url) else ()
    how = {"endpoint": asked.endpoint, "extra_body": asked.extra_body, "scale": scale}
    return _Target(asked.url, served.name, vocab_size or LEAST_VOCABULARY, counters, how, tuple(notes))


def _chat_notes(workload: Workload, scale: Scale) -> list[str]:
    counted = f"{scale.template:.0f} tokens for an empty chat and {scale.per_word:.3g} for {_noun(scale)}"
    notes = [f"prompts are text: the server counts {counted}"]
    if n := sum(isinstance(row.prompt, tuple) for row in workload.requests):
        notes.append(f"{n} rows have prompts of token ids, which a chat endpoint does not take: their text is made up")
    return notes


def _noun(scale: Scale) -> str:
    return "a digit" if len(scale.alphabet) == len(DIGITS) else "a word"


def _replay(
    asked: Wanted, target: _Target, number: int, progress: Progress, on_progress: Callable[[int, int], None]
) -> Replay:
    def once(attempt: int) -> Replay:
        salt = f"{asked.seed}/{number}/{attempt}"
        if asked.workload.history:
            progress.phase("warming the prefix cache with the workload's history")
        how = {"salt": salt, "vocab_size": target.vocab_size, "members": target.members, **target.how}
        cache = replaying.warm_prefix(target.base, target.model, asked.workload, **how)
        again = " again: the client was late" if attempt > 1 else ""
        progress.phase(f"replay {number} of {asked.repeats}{again}", expected=asked.workload.span)
        return replaying.replay(
            target.base, target.model, asked.workload, cache=cache, **how,
            follow_sessions=asked.sessions == FOLLOW, drain_timeout=asked.drain_timeout,
            request_timeout=asked.request_timeout, on_progress=on_progress, processes=asked.processes,
        )  # fmt: skip

    def judge(seen: Replay) -> tuple[str, ...]:
        keys = [slo.metric for slo in asked.slos] or ["ttft_p99"]
        cautions = gate.judge(
            seen, ttft_limit=tightest(asked.slos, "ttft"), itl_limit=tightest(asked.slos, "itl"), keys=keys,
            endpoint=asked.endpoint,
        )  # fmt: skip
        return (*_prompt_notes(seen, asked.endpoint), *_made_up(asked), *_cache_notes(seen, asked.workload), *cautions)

    return attempts.valid(once, judge)


def _prompt_notes(seen: Replay, endpoint: str) -> list[str]:
    """Say how far the prompts of a chat were from the recorded lengths."""
    off = seen.records.prompt_tokens - seen.records.input_len
    off = off[~np.isnan(off)]
    if endpoint != CHAT or not len(off):
        return []
    middle, most = np.percentile(off, 50), np.percentile(np.abs(off), 99)
    return [f"prompts are off the recorded lengths by {middle:+.0f} tokens (p50), {most:.0f} at the 99th percentile"]


def _made_up(asked: Wanted) -> Iterator[str]:
    """Say when prompts of their own could not be sent: a chat endpoint takes no token ids."""
    if asked.endpoint == CHAT and (n := sum(isinstance(row.prompt, tuple) for row in asked.workload.requests)):
        yield f"{n} prompts are token ids, which a chat cannot be sent: made-up text of their lengths was"


def _cache_notes(seen: Replay, workload: Workload) -> list[str]:
    """Say when prompts that share nothing were found in the prefix cache: they had been there before."""
    hits = telling(seen).get("prefix_cache_hit_tokens", 0)
    if not hits or any(row.block_ids is not None or row.prompt is not None for row in workload.requests):
        return []
    return [f"{hits:,.0f} prompt tokens were in the server's prefix cache, from a replay with this --seed before"]


def _numbers(seen: Replay, limits: Sequence[Slo]) -> Repeat:
    numbers = metrics.summarise(
        seen.records, window=seen.window, classes=DEFAULT_CLASSES, slos=limits, extra=[slo.metric for slo in limits]
    )
    return Repeat(numbers, {**telling(seen), **seen.server}, seen.notes)
