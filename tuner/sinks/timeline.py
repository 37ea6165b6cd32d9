"""The picture of a replay: what was asked when, and how long tokens took to come, on one time axis.

Three panels: arrivals and requests in flight; the TTFT of each request at its due time; the gaps between tokens
by the time at which they ended, with the longest stall of each bin. Latencies are logarithmic, in milliseconds.
"""

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from tuner import metrics
from tuner import slo as slos
from tuner.metrics import DEFAULT_CLASSES
from tuner.records import Records
from tuner.seams import Replay
from tuner.sinks.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from tuner.sinks.words import plain
from tuner.slo import Slo
from tuner.units import family

BINS = 80
MANY = 500  # requests, for smaller dots
COLOURS = {"short": BLUE, "long": PURPLE}

Floats = npt.NDArray[np.float64]


def figure_png(seen: Replay, limits: Sequence[Slo], *, title: str) -> bytes:
    """Return the picture as a PNG of 1000 x 800."""
    records = seen.records
    drawn = Figure(figsize=(10, 8), dpi=100, layout="constrained")
    arrivals, ttft, itl = drawn.subplots(3, 1, sharex=True, height_ratios=(2, 3, 3))
    end = max(float(np.nanmax(records.ended)), seen.window, 1e-3)
    edges: Floats = np.asarray(np.arange(0, end + bin_width(end), bin_width(end)), dtype=np.float64)
    arrivals.set_title(plain(title)[:110], loc="left", fontsize=10, parse_math=False)
    _arrivals(arrivals, records, edges)
    _ttft(ttft, records, [slo for slo in limits if family(slo.metric) == "ttft"])
    _itl(itl, records, edges, [slo for slo in limits if family(slo.metric) in {"itl", "icl", "max_stall"}])
    itl.set_xlabel("seconds of the replay")
    itl.set_xlim(-0.01 * end, 1.01 * end)
    for axes in (arrivals, ttft, itl):
        axes.grid(visible=True, color="#ececec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["top"].set_visible(False)
    out = io.BytesIO()
    drawn.savefig(out, format="png")
    return out.getvalue()


def bin_width(span: float) -> float:
    """Return a round number of seconds of which some forty to a hundred make the span."""
    rough = span / BINS
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * step for step in (1, 2, 5, 10) if unit * step >= rough * 0.999)


def _arrivals(axes: Axes, records: Records, edges: Floats) -> None:
    width = edges[1] - edges[0]
    counts, _ = np.histogram(records.due, edges)
    axes.bar(edges[:-1], counts / width, width=width, align="edge", color=GREY, alpha=0.55)
    axes.set_ylabel("arrivals per second")
    beside = axes.twinx()
    times, running = in_flight(records)
    beside.step(times, running, where="post", color=ORANGE, linewidth=1.3)
    beside.set_ylabel("in flight", color=ORANGE)
    beside.set_ylim(bottom=0)
    beside.spines["top"].set_visible(False)


def in_flight(records: Records) -> tuple[Floats, Floats]:
    """Return at which times how many requests had been sent and not ended."""
    was_sent = ~np.isnan(records.sent)
    sent, ended = records.sent[was_sent], records.ended[was_sent]
    ended = ended[~np.isnan(ended)]
    times = np.concatenate([sent, ended])
    order = np.argsort(times, kind="stable")
    steps = np.concatenate([np.ones(len(sent)), -np.ones(len(ended))])
    return times[order], np.cumsum(steps[order])


def _ttft(axes: Axes, records: Records, limits: Sequence[Slo]) -> None:
    values, done = metrics.per_request(records, "ttft") * 1e3, records.is_completed
    size = 14 if len(records) <= MANY else 5
    for scope, colour in COLOURS.items():
        chosen = done & metrics.in_class(records, DEFAULT_CLASSES, scope)
        if chosen.any():
            label = f"{scope} prompts ({int(chosen.sum())})"
            axes.scatter(
                records.due[chosen], values[chosen], s=size, color=colour, alpha=0.7, linewidths=0, label=label
            )
    if (~done).any():
        axes.scatter(records.due[~done], np.full(int((~done).sum()), 0.97), transform=axes.get_xaxis_transform(),
                     marker="x", s=28, color=VERMILION, label=f"failed ({int((~done).sum())})", zorder=4)  # fmt: skip
    axes.set_ylabel("TTFT (ms)")
    _finish(axes, limits, positive=values[done & (values > 0)])


def _itl(axes: Axes, records: Records, edges: Floats, limits: Sequence[Slo]) -> None:
    gaps, ends, name = token_gaps(records)
    middle = (edges[:-1] + edges[1:]) / 2
    inside = [gaps[(ends >= low) & (ends < high)] * 1e3 for low, high in pairwise(edges)]
    for statistic, colour, style in (("p50", BLUE, "-"), ("p99", PURPLE, "-")):
        line = [metrics.Sample(values).statistic(statistic) for values in inside]
        axes.plot(middle, [np.nan if v is None else v for v in line], style, color=colour, linewidth=1.4,
                  marker=".", markersize=3, label=f"{name} {statistic} of {edges[1]:g} s")  # fmt: skip
    between = metrics.gaps(records, records.chunk_tokens)
    longest = [between.length[(between.end >= low) & (between.end < high)] * 1e3 for low, high in pairwise(edges)]
    tops = np.array([values.max() if len(values) else np.nan for values in longest])
    axes.plot(middle, tops, "v", color=ORANGE, markersize=5, label="longest gap between chunks", zorder=3)
    axes.set_ylabel(f"{name} (ms)")
    usual = [np.median(values) for values in inside if len(values)]  # single gaps may be a microsecond
    shown = np.concatenate([usual, tops[~np.isnan(tops)]])
    _finish(axes, limits, positive=shown[shown > 0])


def token_gaps(records: Records) -> tuple[Floats, Floats, str]:
    """Return the gaps between tokens, when each ended, and their name: ICL where token counts are not known."""
    tokens = metrics.known_tokens(records)
    between = metrics.gaps(records, np.ones(len(records.chunk_time)) if tokens is None else tokens)
    times = between.tokens.astype(np.int64)
    return (
        np.repeat(between.length / between.tokens, times),
        np.repeat(between.end, times),
        "ICL" if tokens is None else "ITL",
    )


def _finish(axes: Axes, limits: Sequence[Slo], *, positive: Floats) -> None:
    """Draw the limits, and a logarithmic axis around what there is."""
    line: dict[str, Any] = {"color": GREEN, "linestyle": "--", "linewidth": 1.3, "zorder": 1}
    asked = [(slo, slo.limit * 1e3) for slo in limits if slo.limit is not None]
    for slo, limit in asked:
        axes.axhline(limit, label=f"SLO {slo.metric} {slos.describe(slo.metric, limit / 1e3)}", **line)
    shown = np.concatenate([positive, [limit for _, limit in asked]])
    if len(shown):
        axes.set_yscale("log")
        low, high = float(shown.min()), float(shown.max())
        axes.set_ylim(low / 1.3, high * 1.3 * (high / low) ** 0.12)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(_minor) if high / low < 30 else NullFormatter())
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=5, borderaxespad=0.2)


def _minor(value: float, _: object) -> str:
    digit = value / 10 ** math.floor(math.log10(value))
    return f"{value:,.10g}" if round(digit) in {2, 5} else ""
