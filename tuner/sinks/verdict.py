"""What a study found, in words and as a table: the answer before the numbers.

Everything here is pure: a spec and results in, text out. Names from outside (arguments, messages) are
data: control characters are dropped, and nothing is read as terminal markup.
"""

import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner import slo as slos
from tuner import units
from tuner.results import TrialResult, closest, default_of, differences, feasible, front, limits, recommend
from tuner.serving import Json
from tuner.slo import Slo
from tuner.spec import StudySpec

NAMES = {
    "ttft": "TTFT",
    "ttft_from_send": "TTFT from send",
    "itl": "ITL",
    "icl": "ICL",
    "tpot": "TPOT",
    "e2el": "E2EL",
    "max_stall": "longest stall",
    "itl_first_gap": "first gap",
    "slo_attainment": "SLO attainment",
}
LONGEST_VALUE = 60


def metric_name(key: str) -> str:
    """Return a metric's name as a person reads it: "ttft_p50.long" becomes "TTFT p50 long"."""
    stem, _, scope = key.partition(".")
    family = units.family(key)
    statistic = stem.removeprefix(family).lstrip("_").replace("_", ".")
    words = [NAMES.get(family, family.replace("_", " ")), statistic, scope]
    return plain(" ".join(word for word in words if word))


def plain(text: object) -> str:
    """Return text from outside on one line, without characters that a terminal or a page obeys."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()


def describe_slo(slo: Slo) -> str:
    """Return an SLO as a person reads it: "ttft_p95 <= 500 ms", "itl_p99 <= 133 ms (0.33x)"."""
    if slo.limit is None:
        return f"{slo.metric} = {slo.describe_limit()}"
    relative = "" if slo.relative is None else f" ({slo.relative:g}x)"
    return f"{slo.metric} {'>=' if slo.is_lower_bound else '<='} {slo.describe_limit()}{relative}"


def configuration(result: TrialResult, default: TrialResult | None) -> str:
    """Return the arguments in which a trial differs from the default: "max_num_batched_tokens 256"."""
    return configuration_of(differences(result.config, default))


def configuration_of(changed: dict[str, Json]) -> str:
    """Return differences from the default as words."""
    words = [f"{name} not given" if value is None else f"{name} {_short(value)}" for name, value in changed.items()]
    return plain(", ".join(words)) or "the default's arguments"


def _short(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def verdict(spec: StudySpec, results: Sequence[TrialResult]) -> str:
    """Return what the study found: the answer on the first line, what limits it on the following ones."""
    own = [r for r in results if r.same_as is None]
    measured = [r for r in own if r.is_measured]
    if not measured:
        return _nothing(own)
    best = recommend(own, *spec.objective_metrics)
    shown = best or (closest(own) if spec.slo else None)
    lines = [_met(spec, own, best) if best else _missed(spec, own, shown)]
    default = default_of(own)
    if default is not None and default.slos_met and default is not best:
        lines.append(f"The default (trial {default.number}) already meets the SLO.")
    lines += _not_measurable(spec, measured)
    lines += _failures(own)
    lines += [f"Note: {note}" for note in notes_of([r for r in (shown, default) if r is not None])]
    return "\n".join(lines)


def _nothing(own: Sequence[TrialResult]) -> str:
    if not own:
        return "No trial has been measured yet."
    last = own[-1].failure
    said = f" Trial {own[-1].number}: {plain(last.message)}" if last is not None else ""
    return f"Nothing could be measured: {_kinds(own)}.{said}"


def _met(spec: StudySpec, own: Sequence[TrialResult], best: TrialResult) -> str:
    x, y = spec.objective_metrics
    default = default_of(own)
    if spec.slo:
        count = f"SLO met by {len(feasible(own))} of {_trials(_counted(own))}."
    else:
        n_front, n_measured = len(front(own, x, y)), len(feasible(own))
        count = f"Pareto front of {_many(n_front, 'configuration')} out of {n_measured} measured."
    name = "the default itself" if best is default else configuration(best, default)
    return f"{count} Best: trial {best.number} ({name}): {_numbers(spec, best, default)}"


def _missed(spec: StudySpec, own: Sequence[TrialResult], near: TrialResult | None) -> str:
    x, y = spec.objective_metrics
    if met := feasible(own):
        absent = [key for key in (x, y) if all(key not in r.metrics for r in met)]
        what = " and ".join(metric_name(key) for key in absent or (x, y))
        return f"No front: {what} could not be measured in any of the {_many(len(met), 'trial')} in question."
    if near is None:
        return f"SLO not met: none of its metrics could be measured in {_trials(_counted(own))}."
    default = default_of(own)
    misses = [_miss(slo, near) for slo in limits(spec.slo, own) if near.excess.get(slo.metric, 1.0) > 0]
    name = "the default itself" if near is default else configuration(near, default)
    return f"SLO not met: closest is trial {near.number} ({name}): {'; '.join(misses)}"


def _miss(slo: Slo, result: TrialResult) -> str:
    excess = result.excess.get(slo.metric)
    if excess is None or slo.metric not in result.metrics:
        return f"{slo.metric} not measurable"
    side = "under" if slo.is_lower_bound else "over"
    value = slos.describe(slo.metric, result.metrics[slo.metric])
    return f"{slo.metric} {value}, {percent(abs(excess))} {side} {slo.describe_limit()}"


def percent(share: float) -> str:
    """Return a share as "24 %", "3.1 %", or from ten times on as "88 times"."""
    if share >= 10:
        return f"{share:,.0f} times"
    return f"{share:.0%}".replace("%", " %") if share >= 0.095 else f"{share:.1%}".replace("%", " %")


def _numbers(spec: StudySpec, best: TrialResult, default: TrialResult | None) -> str:
    x, y = spec.objective_metrics
    values = [(key, slos.describe(key, best.metrics[key])) for key in (y, x)]
    if default is None or default is best or not all(default.metrics.get(key) for key in (x, y)):
        return ", ".join(f"{metric_name(key)} {value}" for key, value in values)
    changes = [
        f"{metric_name(key)} {change(best.metrics[key], default.metrics[key])} ({value})" for key, value in values
    ]
    return ", ".join(changes) + " against the default"


def change(value: float, base: float) -> str:
    """Return a relative change as a person reads it: "-74 %", "+27 %", "unchanged"."""
    share = value / base - 1
    return "unchanged" if abs(share) < 0.005 else f"{share:+.0%}".replace("%", " %")


def _not_measurable(spec: StudySpec, measured: Sequence[TrialResult]) -> list[str]:
    lines = []
    for slo in limits(spec.slo, measured):
        without = sum(slo.metric not in r.metrics for r in measured)
        if slo.limit is None:
            lines.append(f"{slo.text}: no limit in numbers, it is relative to the default, which was not measured.")
        elif without:
            lines.append(
                f"{slo.metric} could not be measured in {without} of {_many(len(measured), 'trial')}, which "
                "counts as missed: failed requests reach into it, or there was nothing of its kind."
            )
    return lines


def _failures(own: Sequence[TrialResult]) -> list[str]:
    failed = [r for r in own if r.failure is not None]
    return [f"{_kinds(failed)}."] if failed else []


def _kinds(own: Sequence[TrialResult]) -> str:
    kinds = Counter(str(r.failure.kind) for r in own if r.failure is not None)
    words = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    return f"{_many(sum(kinds.values()), 'trial')} failed ({words})" if kinds else "no trial has numbers"


def notes_of(results: Sequence[TrialResult]) -> list[str]:
    """Return what readers of these results must know, each once."""
    return list(dict.fromkeys(plain(note) for r in results for repeat in r.repeats for note in repeat.notes))


def _counted(own: Sequence[TrialResult]) -> int:
    return sum(counts(r) for r in own)


def counts(result: TrialResult) -> bool:
    """Return whether a trial uses up budget: measured, or failed by its configuration's own fault."""
    if result.same_as is not None:
        return False
    return result.is_measured or (result.failure is not None and result.failure.kind.is_configurations_fault)


def _trials(n: int) -> str:
    return _many(n, "trial")


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial as a line of the table.

    Attributes:
        marks: of "front", "recommended", "default", "baseline", those that hold.
        x, y: the objectives, in the metric's unit inside (seconds), None where not measured.
        slo: a word for each SLO of the study: "met", "missed by 24 %", "not measured", "" for a failed trial.
        failure: the kind of failure, or None.
    """

    number: int
    marks: tuple[str, ...]
    configuration: str
    x: float | None
    y: float | None
    slo: tuple[str, ...]
    failure: str | None


def trial_table(spec: StudySpec, results: Sequence[TrialResult]) -> list[TrialRow]:
    """Return a row for each trial that was run itself, by number."""
    own = sorted((r for r in results if r.same_as is None), key=lambda r: r.number)
    x, y = spec.objective_metrics
    default, best = default_of(own), recommend(own, x, y)
    on_front = {r.number for r in front(own, x, y)}
    asked = limits(spec.slo, own)
    return [
        TrialRow(
            number=r.number,
            marks=_marks(r, best, on_front),
            configuration=configuration(r, default),
            x=r.metrics.get(x) if r.is_measured else None,
            y=r.metrics.get(y) if r.is_measured else None,
            slo=tuple(slo_state(slo, r) for slo in asked),
            failure=str(r.failure.kind) if r.failure is not None else None,
        )
        for r in own
    ]


def _marks(result: TrialResult, best: TrialResult | None, on_front: set[int]) -> tuple[str, ...]:
    marks = ["front"] * (result.number in on_front) + ["recommended"] * (result is best)
    return (*marks, result.label) if result.label else tuple(marks)


def slo_state(slo: Slo, result: TrialResult) -> str:
    """Return how a trial stands to an SLO: "met", "missed by 24 %", "not measured", "" for a failed trial."""
    if not result.is_measured:
        return ""
    excess = result.excess.get(slo.metric, slo.excess(result.metrics))
    if excess is None:
        return "not measured"
    return "met" if excess <= 0 else f"missed by {percent(excess)}"


def render_trials(
    spec: StudySpec, results: Sequence[TrialResult], *, only: Container[int] | None = None
) -> RenderableType:
    """Return the table of `tune show` for a terminal or a pipe; `only` picks trials, judged among all results."""
    x, y = spec.objective_metrics
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("trial", justify="right")
    table.add_column("")
    table.add_column("differs from the default by", overflow="fold", ratio=1)
    for key in (x, y):
        table.add_column(metric_name(key), justify="right")
    for slo in limits(spec.slo, results):
        table.add_column(Text(_on_two_lines(describe_slo(slo))), overflow="fold")
    rows = [row for row in trial_table(spec, results) if only is None or row.number in only]
    for row in rows:
        table.add_row(*_cells(row, (x, y)), style="bold" if "recommended" in row.marks else None)
    legend = "* on the Pareto front" if any("front" in row.marks for row in rows) else ""
    return Group(table, Text(legend, style="dim"))


def _on_two_lines(words: str) -> str:
    """Break "itl_p99 <= 151 ms (0.33x)" before the limit, to leave room for the arguments."""
    return words.replace(" <= ", "\n<= ").replace(" >= ", "\n>= ")


def _cells(row: TrialRow, keys: tuple[str, str]) -> list[Text]:
    star = "*" if "front" in row.marks else " "
    words = " ".join(mark for mark in row.marks if mark != "front")
    values = ["" if v is None else slos.describe(k, v) for k, v in zip(keys, (row.x, row.y), strict=True)]
    if row.failure is not None:
        values[0] = f"failed: {row.failure}"
    states = [Text(state, style=_style(state)) for state in row.slo]
    return [
        Text(str(row.number)),
        Text(f"{star} {words}".rstrip()),
        Text(row.configuration),
        *map(Text, values),
        *states,
    ]


def _style(state: str) -> str:
    return "green" if state == "met" else "red" if state.startswith("missed") else "yellow"
