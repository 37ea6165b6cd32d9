"""What people read in MLflow: the descriptions of a trial, of a study and of the experiment, in Markdown.

Names from outside are data here: they are escaped for Markdown and HTML.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner import slo as slos
from tuner.results import TrialResult, default_of, limits, recommend
from tuner.sinks import pages, topologies
from tuner.sinks.verdict import answer, notes_of
from tuner.sinks.words import configuration, describe_slo, markdown, metric_name, plain
from tuner.spec import StudySpec


@dataclass(frozen=True, slots=True)
class Links:
    """Addresses inside the UI: the saved view, and each trial's page by its number."""

    review: str
    trials: Mapping[int, str]


def trial_note(spec: StudySpec, result: TrialResult, default: TrialResult | None) -> str:
    """Return a trial's description: configuration, what came out, or why it failed."""
    words = result.label or configuration(result, default)
    lines = [f"**{markdown(words)}**", ""]
    if result.same_as is not None:
        lines.append(f"The same configuration as trial {result.same_as}: not measured again.")
    elif result.failure is not None:
        lines += [f"Failed ({result.failure.kind}): {markdown(result.failure.message)}", ""]
        lines += [f"    {html.escape(plain(line))[:300]}" for line in result.failure.log[-10:]]
    else:
        lines += [f"- {_value(k, result)}" for k in spec.objective_metrics if k in result.metrics]
        lines += [f"- Note: {markdown(text)}" for text in notes_of([result])]
    return "\n".join(lines)[: pages.LONGEST_TAG]


def _value(name: str, result: TrialResult) -> str:
    return markdown(f"{metric_name(name)} {slos.describe(name, result.metrics[name])}")


def note(spec: StudySpec, results: Sequence[TrialResult], links: Links) -> str:
    """Return the parent's description: the answer first, because the UI folds what comes after five lines."""
    x, y = spec.objective_metrics
    own = [r for r in results if r.same_as is None]
    first, *rest = answer(spec, own)
    lines = [f"**{markdown(first)}**", ""]
    if rows := _compared(own, recommend(own, x, y), links):
        lines += [f"| | {markdown(metric_name(x))} | {markdown(metric_name(y))} | differs from the default by |"]
        lines += ["|---|---|---|---|", *(_note_row(spec, name, r, default_of(own)) for name, r in rows), ""]
    lines += [f"- {markdown(line)}" for line in rest]
    lines += _topologies(spec, own)
    if asked := limits(spec.slo, own):
        lines.append(f"- SLO: {markdown(', '.join(describe_slo(slo) for slo in asked))}")
    lines.append(f"- All trials: [Pareto review]({links.review}). The front: Artifacts, `pareto/pareto.html`.")
    return "\n".join(lines)[: pages.LONGEST_TAG]


def _topologies(spec: StudySpec, own: Sequence[TrialResult]) -> list[str]:
    """The best of each topology as a table in Markdown, which begins and ends with an empty line."""
    table = topologies.compared(spec, own)
    if table is None:
        return []
    rows = [f"| {' | '.join(map(markdown, cells))} |" for cells in (table.columns, *table.rows)]
    return ["", markdown(table.heading), "", rows[0], f"|{'---|' * len(table.columns)}", *rows[1:], ""]


def _compared(own: Sequence[TrialResult], best: TrialResult | None, links: Links) -> list[tuple[str, TrialResult]]:
    """The trials a reader compares, each with its linked name: the recommended one, default, baselines."""
    chosen = [("recommended", best)] if best is not None else []
    chosen += [(r.label, r) for r in own if r.label and r.is_measured and r is not best]
    return [(_linked(f"{markdown(role)}, trial {r.number}", links.trials.get(r.number)), r) for role, r in chosen if r]


def _linked(text: str, address: str | None) -> str:
    return f"[{text}]({address})" if address else text


def _note_row(spec: StudySpec, name: str, result: TrialResult, default: TrialResult | None) -> str:
    cells = [slos.describe(k, result.metrics[k]) if k in result.metrics else "" for k in spec.objective_metrics]
    return f"| {name} | {' | '.join(cells)} | {markdown(configuration(result, default))} |"


def experiment_note(spec: StudySpec, workload: pages.WorkloadFacts, review: str) -> str:
    """Return the experiment's description: what is served on which traffic, and where to look."""
    traffic = f"{markdown(pages.short_model(spec.model))} on recorded traffic, **{markdown(workload.name)}**"
    shape = [f"{words} {workload.shape[name]:,.4g}" for name, words in pages.SHAPE.items() if name in workload.shape]
    return f"{traffic}. [Pareto review of {markdown(spec.name)}]({review})\n\n{markdown(', '.join(shape))}\n"
