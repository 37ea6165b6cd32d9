"""What a study found, in words and as a table: the answer before the numbers.

Everything here is pure: a spec and results in, text out. Names from outside (arguments, messages) are
data: control characters are dropped, and nothing is read as terminal markup.
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner import slo as slos
from tuner.results import TrialResult, closest, default_of, feasible, front, limits, recommend
from tuner.sinks import topologies
from tuner.sinks.words import change, configuration, describe_slo, metric_name, percent, plain, slo_state
from tuner.slo import Slo
from tuner.spec import StudySpec


def verdict(spec: StudySpec, results: Sequence[TrialResult]) -> str:
    """Return what the study found: `answer`, then the best of each topology where there are several."""
    table = topologies.compared(spec, results)
    return "\n".join([*answer(spec, results), *(table.lines() if table is not None else [])])


def answer(spec: StudySpec, results: Sequence[TrialResult]) -> list[str]:
    """Return what the study found: the answer on the first line, what limits it on the following ones."""
    own = [r for r in results if r.same_as is None]
    measured = [r for r in own if r.is_measured]
    if not measured:
        return [_nothing(own)]
    best = recommend(own, *spec.objective_metrics)
    shown = best or (closest(own) if spec.slo else None)
    lines = [_met(spec, own, best) if best else _missed(spec, own, shown)]
    default = default_of(own)
    if default is not None and default.slos_met and default is not best:
        lines.append(f"The default (trial {default.number}) already meets the SLO.")
    lines += topologies.pays(spec, own)
    lines += _not_measurable(spec, measured)
    lines += _failures(own)
    lines += _notes([r for r in (shown, default) if r is not None])
    return lines


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


def _numbers(spec: StudySpec, best: TrialResult, default: TrialResult | None) -> str:
    x, y = spec.objective_metrics
    values = [(key, slos.describe(key, best.metrics[key])) for key in (y, x)]
    if default is None or default is best or not all(default.metrics.get(key) for key in (x, y)):
        return ", ".join(f"{metric_name(key)} {value}" for key, value in values)
    changes = [
        f"{metric_name(key)} {change(best.metrics[key], default.metrics[key])} ({value})" for key, value in values
    ]
    return ", ".join(changes) + " against the default"


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


def _notes(shown: Sequence[TrialResult]) -> list[str]:
    """Return what to know of some trials, with whose it is where not all of them have it."""
    by_note: dict[str, list[int]] = {}
    for result in dict.fromkeys(r.number for r in shown):
        for note in notes_of([r for r in shown if r.number == result][:1]):
            by_note.setdefault(note, []).append(result)
    everybody = len({r.number for r in shown})
    whose = {note: "" if len(ns) == everybody else f" on trial {ns[0]}" for note, ns in by_note.items()}
    return [f"Note{whose[note]}: {note}" for note in by_note]


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
    return (*marks, plain(result.label)) if result.label else tuple(marks)


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
