"""What replays at a URL found: as a table for people, as one JSON object for programs.

Everything here is pure: a measurement in, text out. Durations leave in milliseconds; a number that is not there
is "-" in the table with its reason below, and missing in the JSON with its reason under "absent".
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner import metrics, units
from tuner import slo as slos
from tuner.metrics import DEFAULT_CLASSES
from tuner.results import Repeat, combine
from tuner.seams import Measurement
from tuner.sinks.words import NAMES, describe_slo, metric_name, percent, plain
from tuner.slo import Slo
from tuner.units import format_elapsed, format_ms

SHOWN = ("ttft", "ttft_from_send", "itl", "icl", "tpot", "e2el", "max_stall")
COLUMNS = ("p50", "p90", "p95", "p99", "max", "mean")
RATES = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput", "slo_attainment")


# --- For people -------------------------------------------------------------------------------------------


def render(found: Measurement) -> RenderableType:
    """Return the report for a terminal or a pipe."""
    lines = [*_verdict(found), *_facts("Client", client_facts(found)), *_facts("Server", server_facts(found))]
    lines += [Text(f"-: {reason}") for reason in _reasons(found)]
    lines += [Text(f"Note: {plain(note)}") for note in notes_of(found)]
    return Group(*map(Text, _heading(found)), Text(), _table(found), Text(), Text(_rates(found)), *lines)


def _heading(found: Measurement) -> Iterator[str]:
    first = found.replays[0]
    times = f", median of {len(found.replays)} repeats" if len(found.replays) > 1 else ""
    yield plain(
        f"{found.workload.name} at {found.url} ({found.model}, {found.endpoint}): {len(first.records)} requests in "
        f"{format_elapsed(first.window)}{times}"
    )
    yield from (plain(words) for words in found.workload.transforms)
    counts = request_counts(found)
    failed = ", ".join(f"{n} {kind}" for kind, n in counts["failed"].items())
    yield f"offered {counts['offered']}, completed {counts['completed']}, failed {failed or 0}"


def _table(found: Measurement) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("ms")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for scope in ("", *shown_classes(found)):
        if scope:
            table.add_row(Text(f"{scope} prompts ({_size(found, scope)})", style="bold"))
        for name in SHOWN:
            keys = [f"{name}_{column}" + (f".{scope}" if scope else "") for column in COLUMNS]
            table.add_row("  " * bool(scope) + NAMES[name], *(_cell(found.metrics.get(key)) for key in keys))
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else format_ms(value).removesuffix(" ms")


def shown_classes(found: Measurement) -> tuple[str, ...]:
    """Return the classes of prompts when more than one has requests, else none."""
    present = tuple(scope for scope in DEFAULT_CLASSES if _size(found, scope))
    return present if len(present) > 1 else ()


def _size(found: Measurement, scope: str) -> int:
    return int(metrics.in_class(found.replays[0].records, DEFAULT_CLASSES, scope).sum())


def _rates(found: Measurement) -> str:
    known = [key for key in RATES if key in found.metrics]
    return ", ".join(f"{metric_name(key)} {_rate(key, found.metrics[key])}" for key in known)


def _rate(key: str, value: float) -> str:
    return f"{value:,.0f}/s" if value >= 1000 else slos.describe(key, value)


def _verdict(found: Measurement) -> Iterator[Text]:
    if found.slos_met is None:
        return
    yield Text("SLO met" if found.slos_met else "SLO not met", style="bold green" if found.slos_met else "bold red")
    for slo in found.slos:
        yield Text(f"  {describe_slo(slo)}: {_state(slo, found.metrics)}")


def _state(slo: Slo, numbers: Mapping[str, float]) -> str:
    excess = slo.excess(numbers)
    if excess is None:
        return "not measurable, which counts as missed"
    state = "met" if excess <= 0 else f"missed by {percent(excess)}"
    return f"{slos.describe(slo.metric, numbers[slo.metric])}, {state}"


def _facts(whose: str, facts: Mapping[str, float]) -> Iterator[Text]:
    """Yield facts on one line, the statistics of one thing side by side."""
    told: dict[str, list[str]] = {}
    for key, value in facts.items():
        name = metric_name(units.family(key))
        told.setdefault(name, []).append(f"{metric_name(key).removeprefix(name).strip()} {_fact(key, value)}".strip())
    if told:
        yield Text(f"{whose}: " + "; ".join(f"{name} {', '.join(values)}" for name, values in told.items()))


def _fact(key: str, value: float) -> str:
    if units.is_duration(key):
        return format_ms(value)
    return f"{value:.1%}".replace("%", " %") if key.endswith("_share") else f"{value:,.6g}"


def _reasons(found: Measurement) -> list[str]:
    same: dict[str, list[str]] = {}
    for key, reason in absent(found).items():
        same.setdefault(reason, []).append(_title(key))
    return [plain(f"{', '.join(titles)}: {reason}") for reason, titles in same.items()]


def _title(key: str) -> str:
    name, _, scope = key.partition(".")
    return f"{NAMES[name]} {scope}".rstrip()


# --- Facts that both forms share --------------------------------------------------------------------------


def request_counts(found: Measurement) -> dict[str, Any]:
    """Return how many requests of all repeats were offered, completed, and failed by kind."""
    errors = np.concatenate([seen.records.error for seen in found.replays])
    kinds, times = np.unique(errors[errors != ""], return_counts=True)
    failed = {str(kind): int(n) for kind, n in zip(kinds, times, strict=True)}
    return {"offered": len(errors), "completed": int((errors == "").sum()), "failed": failed}


def absent(found: Measurement) -> dict[str, str]:
    """Return why a latency metric that is shown lost a number, by "name" or "name.class"."""
    reasons: dict[str, str] = {}
    for scope in ("", *shown_classes(found)):
        for seen in found.replays:
            part = seen.records.select(metrics.in_class(seen.records, DEFAULT_CLASSES, scope))
            why = metrics.why_absent(part)
            tail = f".{scope}" if scope else ""
            reasons |= {name + tail: why[name] for name in SHOWN if name in why and _lacks(found, name, tail)}
    return reasons


def _lacks(found: Measurement, name: str, tail: str) -> bool:
    return any(f"{name}_{column}{tail}" not in found.metrics for column in COLUMNS)


def client_facts(found: Measurement) -> dict[str, float]:
    """Return what the client saw of itself, in seconds: the median over repeats."""
    return combine([Repeat(seen.client, {}, ()) for seen in found.replays])


def server_facts(found: Measurement) -> dict[str, float]:
    """Return the server's own counts that explain the numbers: the median over repeats."""
    return combine([Repeat(repeat.counters, {}, ()) for repeat in found.repeats])


def notes_of(found: Measurement) -> list[str]:
    """Return what readers must know, each once."""
    return list(dict.fromkeys([*found.notes, *(note for seen in found.replays for note in seen.notes)]))


# --- For programs -----------------------------------------------------------------------------------------


def to_json(found: Measurement) -> dict[str, Any]:
    """Return the whole result; durations in milliseconds under keys with `_ms`."""
    first = found.replays[0]
    return {
        "url": found.url,
        "model": found.model,
        "endpoint": found.endpoint,
        "workload": {
            "name": found.workload.name,
            "sha256": found.workload.sha256,
            "transforms": list(found.workload.transforms),
        },
        "seed": found.seed,
        "started": found.started,
        "window_ms": first.window * 1e3,
        "requests": request_counts(found),
        "metrics": units.to_outside(found.metrics),
        "absent": absent(found),
        "slo": [_slo_json(slo, found.metrics) for slo in found.slos],
        "slos_met": found.slos_met,
        "client": units.to_outside(client_facts(found)),
        "server": units.to_outside(server_facts(found)),
        "notes": notes_of(found),
        "repeats": [
            {
                "metrics": units.to_outside(repeat.metrics),
                "client": units.to_outside(seen.client),
                "server": units.to_outside(repeat.counters),
                "notes": list(seen.notes),
            }
            for seen, repeat in zip(found.replays, found.repeats, strict=True)
        ],
    }


def _slo_json(slo: Slo, numbers: Mapping[str, float]) -> dict[str, Any]:
    factor, tail = (1e3, "_ms") if units.is_duration(slo.metric) else (1.0, "")
    value, excess = numbers.get(slo.metric), slo.excess(numbers)
    return {
        "slo": slo.text,
        "metric": units.outside_key(slo.metric),
        f"limit{tail}": None if slo.limit is None else slo.limit * factor,
        f"value{tail}": None if value is None else value * factor,
        "excess": excess,
        "is_met": excess is not None and excess <= 0,
    }
