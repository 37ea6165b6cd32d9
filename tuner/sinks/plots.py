"""The picture of a study: every measured trial, TTFT against ITL, the front and the promise.

Both forms show the same `Picture`; the HTML opens offline, the PNG needs no display. Axes are logarithmic
and in milliseconds, because a step of 10 % should look alike at 20 ms and at 400 ms.
"""

import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tuner import slo as slos
from tuner import units
from tuner.results import TrialResult, default_of, flat, front, recommend, told_apart
from tuner.serving import SINGLE, Json, Topology
from tuner.sinks.palette import (
    BLUE,
    COLD,
    COLD_SYMBOLS,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    VERMILION,
    WARM,
    WARM_SYMBOLS,
)
from tuner.sinks.words import configuration_of, metric_name, plain, slo_state
from tuner.slo import Slo

MARGIN = 0.12  # of the axis, in decades, around points and limits
MOST_LABELS = 40


@dataclass(frozen=True, slots=True)
class Point:
    """A measured trial on the picture; x and y as the axes show them."""

    number: int
    x: float
    y: float
    label: str
    is_feasible: bool
    on_front: bool
    is_recommended: bool
    words: tuple[str, ...]
    topology: Topology = SINGLE


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its title, limits of SLOs on it (the strictest counts), range, and the ticks' values."""

    title: str
    limit: float | None
    low: float
    high: float
    ticks: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn, before anyone draws it."""

    points: tuple[Point, ...]
    front: tuple[tuple[float, float], ...]
    x: Axis
    y: Axis
    has_slos: bool
    off_axes: tuple[str, ...]
    topologies: tuple[Topology, ...] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """Points that look alike."""

    name: str
    points: tuple[Point, ...]
    colour: str
    symbol: str
    matplotlib_symbol: str
    size: int
    is_filled: bool = True
    is_mark: bool = False  # drawn over a point that is there already


def picture(results: Sequence[TrialResult], x: str, y: str, limits: Sequence[Slo]) -> Picture:
    """Return what to draw: x and y are metric keys, `limits` the SLOs with limits in numbers."""
    every = list(results)
    own = [
        r for r in every if r.is_measured and r.same_as is None and r.metrics.get(x, 0) > 0 and r.metrics.get(y, 0) > 0
    ]
    best, default = recommend(every, x, y), default_of(every)
    path = front(own, x, y)
    on_front = {r.number for r in path}
    points = tuple(
        Point(
            number=r.number,
            x=_outside(x, r.metrics[x]),
            y=_outside(y, r.metrics[y]),
            label=r.label,
            is_feasible=bool(r.slos_met) or not limits,
            on_front=r.number in on_front,
            is_recommended=best is not None and r.number == best.number,
            words=tuple(_words(r, (x, y), limits, told_apart(r.config, default))),
            topology=r.config.topology,
        )
        for r in own
    )
    return Picture(
        points=points,
        front=tuple((_outside(x, r.metrics[x]), _outside(y, r.metrics[y])) for r in path),
        x=_axis(x, [p.x for p in points], limits),
        y=_axis(y, [p.y for p in points], limits),
        has_slos=bool(limits),
        off_axes=tuple(slo.text or slo.metric for slo in limits if slo.metric not in {x, y}),
        topologies=tuple(sorted({r.config.topology for r in every}, key=_by_kind)),
    )


def _by_kind(topology: Topology) -> tuple[int, int, int]:
    """Replicas first, then PD groups by prefillers."""
    return topology.prefillers, topology.n_servers, topology.decoders


def _outside(key: str, value: float) -> float:
    return value * 1e3 if units.is_duration(key) else value


def _words(result: TrialResult, keys: tuple[str, str], limits: Sequence[Slo], changed: dict[str, Json]) -> list[str]:
    marks = [result.label] if result.label else []
    lines = [f"trial {result.number}" + "".join(f" ({mark})" for mark in marks)]
    lines += [f"{metric_name(k)}: {slos.describe(k, result.metrics[k])}{_spread(result, k)}" for k in keys]
    lines += [f"{slo.metric} {slo_state(slo, result)}" for slo in limits]
    lines += [f"differs by: {configuration_of(changed)}"] if result.label != "default" else []
    lines += [f"{name}: {value}" for name, value in flat(result.config).items() if name not in changed]
    return [plain(line)[:160] for line in lines]


def _spread(result: TrialResult, key: str) -> str:
    values = [r.metrics[key] for r in result.repeats if key in r.metrics]
    if len(values) < 2:
        return ""
    return f" ({len(values)} repeats: {slos.describe(key, min(values))} to {slos.describe(key, max(values))})"


def axis_title(key: str) -> str:
    """Return an axis title: "TTFT p50, long prompts (ms)"."""
    stem, _, scope = key.partition(".")
    title = metric_name(stem) + (f", {plain(scope)} prompts" if scope else "")
    return f"{title} (ms)" if units.is_duration(key) else title


def _axis(key: str, values: Sequence[float], limits: Sequence[Slo]) -> Axis:
    own = [_outside(key, slo.limit) for slo in limits if slo.metric == key and slo.limit and not slo.is_lower_bound]
    limit = min(own) if own else None
    shown = [*values, *own] or [10.0, 1000.0]
    low, high = math.log10(min(shown)), math.log10(max(shown))
    pad = max(MARGIN * (high - low), (0.2 - (high - low)) / 2, 0.03)
    low, high = 10 ** (low - pad), 10 ** (high + pad)
    return Axis(axis_title(key), limit, low, high, tuple(ticks(low, high)))


def ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between two positive ones, for a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) >= 3:
            return found
    step = _round_step((high - low) / 6)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * step for step in (1, 2, 5, 10) if unit * step >= rough * 0.999)


def _series(seen: Picture) -> list[Series]:
    return _by_topology(seen) if len(seen.topologies) > 1 else _by_role(seen)


def _by_topology(seen: Picture) -> list[Series]:
    """Colour and symbol say the topology, filled that the SLO is met; default and baseline have rings."""
    found = []
    for topology, (colour, symbol, other) in _looks(seen.topologies).items():
        own = [p for p in seen.points if p.topology == topology]
        met, missed = (tuple(p for p in own if p.is_feasible is state) for state in (True, False))
        found.append(Series(str(topology), met, colour, symbol, other, 11))
        found.append(
            Series(f"{topology}, misses the SLO", missed, colour, f"{symbol}-open", other, 11, is_filled=False)
        )
    for name, has_label in (("default", "default".__eq__), ("baseline", lambda label: label not in {"", "default"})):
        points = tuple(p for p in seen.points if has_label(p.label))
        symbol, other = ("circle-open", "o") if name == "default" else ("square-open", "s")
        found.append(Series(name, points, INK, symbol, other, 21, is_filled=False, is_mark=True))
    star = tuple(p for p in seen.points if p.is_recommended)
    found.append(Series("recommended", star, INK, "star-open", "*", 29, is_filled=False, is_mark=True))
    return [series for series in found if series.points]


def _looks(topologies: Sequence[Topology]) -> dict[Topology, tuple[str, str, str]]:
    """Return colour and symbols of each topology; a colour that comes again has another symbol."""
    looks: dict[Topology, tuple[str, str, str]] = {}
    for colours, symbols, is_pd in ((COLD, COLD_SYMBOLS, False), (WARM, WARM_SYMBOLS, True)):
        own = (t for t in topologies if t.is_pd is is_pd)
        looks |= {t: (colours[n % len(colours)], *symbols[n % len(symbols)]) for n, t in enumerate(own)}
    return looks


def _line_colour(seen: Picture) -> str:
    """Return the front's colour: no topology's."""
    return GREY if len(seen.topologies) > 1 else BLUE


def _by_role(seen: Picture) -> list[Series]:
    groups = (
        (
            "misses the SLO" if seen.has_slos else "",
            [p for p in seen.points if not p.label],
            GREY,
            BLUE,
            "circle",
            "o",
        ),
        ("default", [p for p in seen.points if p.label == "default"], VERMILION, VERMILION, "square", "s"),
        (
            "baseline",
            [p for p in seen.points if p.label not in {"", "default"}],
            PURPLE,
            PURPLE,
            "diamond",
            "D",
        ),
    )
    found = []
    for name, points, miss, colour, symbol, other in groups:
        missed, met = ([p for p in points if p.is_feasible is state] for state in (False, True))
        met_name = name if name in {"default", "baseline"} else "meets the SLO" if seen.has_slos else "measured"
        miss_name = f"{name}, misses the SLO" if name in {"default", "baseline"} else name
        found.append(Series(miss_name, tuple(missed), miss, f"{symbol}-open", other, 10, is_filled=False))
        found.append(Series(met_name, tuple(met), colour, symbol, other, 10))
    star = tuple(p for p in seen.points if p.is_recommended)
    return [
        series
        for series in [*found, Series("recommended", star, ORANGE, "star", "*", 19, is_mark=True)]
        if series.points
    ]


def figure_html(
    results: Sequence[TrialResult], x: str, y: str, limits: Sequence[Slo], *, title: str, subtitle: str = ""
) -> str:
    """Return the picture as one HTML page: interactive, and complete without a network."""
    page: str = figure(results, x, y, limits, title=title, subtitle=subtitle).to_html(
        full_html=True,
        include_plotlyjs=True,
        config={"displaylogo": False, "responsive": True},
        div_id="front",
    )
    head = f'<head><title>{html.escape(plain(title))}</title><link rel="icon" href="data:,">'
    return page.replace("<head>", head, 1)


def figure(
    results: Sequence[TrialResult], x: str, y: str, limits: Sequence[Slo], *, title: str, subtitle: str = ""
) -> go.Figure:
    """Return the picture as a Plotly figure."""
    seen = picture(results, x, y, limits)
    drawn = go.Figure()
    if len(seen.front) > 0:
        xs, ys = zip(*seen.front, strict=True)
        line = {"color": _line_colour(seen), "width": 1.5, "shape": "hv"}
        drawn.add_scatter(x=xs, y=ys, mode="lines", name="Pareto front", line=line, hoverinfo="skip")
    for series in _series(seen):
        drawn.add_trace(_trace(series, labelled=len(seen.points) <= MOST_LABELS))
    _draw_limits(drawn, seen)
    for axis, update in ((seen.x, drawn.update_xaxes), (seen.y, drawn.update_yaxes)):
        update(title_text=html.escape(axis.title),
               type="log", range=[math.log10(axis.low), math.log10(axis.high)],
               tickvals=axis.ticks, ticktext=[f"{tick:,g}" for tick in axis.ticks],
               gridcolor="#ececec", linecolor="#555", ticks="outside", zeroline=False)  # fmt: skip
    if not seen.points:
        drawn.add_annotation(text="no trial measured yet", showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    heading = {
        "text": html.escape(plain(title)),
        "subtitle": {"text": _wrapped(_caption(subtitle, seen))},
        "x": 0.02,
    }
    drawn.update_layout(template="plotly_white", title=heading, margin={"t": 125, "r": 20, "b": 60, "l": 70},
                        legend={"orientation": "h", "y": -0.14, "x": 0},
                        hoverlabel={"align": "left"})  # fmt: skip
    return drawn


def _trace(series: Series, *, labelled: bool) -> go.Scatter:
    marker = {"symbol": series.symbol, "size": series.size, "color": series.colour}
    marker["line"] = {
        "width": 1.5 if not series.is_filled else 1,
        "color": series.colour if not series.is_filled else INK,
    }
    has_text = labelled and not series.is_mark
    return go.Scatter(
        x=[p.x for p in series.points],
        y=[p.y for p in series.points],
        mode="markers+text" if has_text else "markers",
        text=[str(p.number) for p in series.points],
        textposition="top right",
        textfont={"size": 10, "color": "#555"},
        name=series.name,
        marker=marker,
        hovertext=["<br>".join(html.escape(word) for word in p.words) for p in series.points],
        hoverinfo="text",
    )


def _draw_limits(drawn: go.Figure, seen: Picture) -> None:
    x, y = seen.x.limit, seen.y.limit
    if x is None and y is None:
        return
    drawn.add_shape(type="rect", x0=seen.x.low, x1=x or seen.x.high, y0=seen.y.low, y1=y or seen.y.high,
                    fillcolor=GREEN, opacity=0.09, line_width=0, layer="below")  # fmt: skip
    line = {"color": GREEN, "dash": "dash", "width": 1.5}
    # An annotation of a logarithmic axis is placed by exponent, unlike a shape; add_vline's own text is not.
    text = {"showarrow": False, "font": {"color": GREEN, "size": 11}, "bgcolor": "rgba(255,255,255,0.7)"}
    if x is not None:
        drawn.add_vline(x=x, line=line)
        drawn.add_annotation(x=math.log10(x), y=1, yref="paper", yanchor="top", xanchor="right",
                             text=_limit_text(seen.x), **text)  # fmt: skip
    if y is not None:
        drawn.add_hline(y=y, line=line)
        drawn.add_annotation(x=1, xref="paper", y=math.log10(y), xanchor="right", yanchor="bottom",
                             text=_limit_text(seen.y), **text)  # fmt: skip


def _limit_text(axis: Axis) -> str:
    return f"SLO {axis.limit:,.4g}{' ms' if axis.title.endswith('(ms)') else ''}"


def _name(axis: Axis) -> str:
    return axis.title.removesuffix(" (ms)")


def _caption(subtitle: str, seen: Picture) -> str:
    off = f"Not on these axes: {', '.join(seen.off_axes)}." if seen.off_axes else ""
    return plain(f"{subtitle} {off}")


def _wrapped(text: str, width: int = 78) -> str:
    return "<br>".join(html.escape(line) for line in _lines(text, width)[:4])


def _lines(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def figure_png(
    results: Sequence[TrialResult], x: str, y: str, limits: Sequence[Slo], *, title: str, subtitle: str = ""
) -> bytes:
    """Return the same picture as a PNG."""
    seen = picture(results, x, y, limits)
    drawn = Figure(figsize=(9.5, 6.2), dpi=130, layout="constrained")
    axes = drawn.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    _paint(axes, seen)
    _set_axes(axes, seen)
    heading = "\n".join([plain(title)[:90], *_lines(_caption(subtitle, seen), 105)[:3]])
    axes.set_title(heading, loc="left", fontsize=9, parse_math=False)
    if axes.get_legend_handles_labels()[0]:
        scale = 0.6 if len(seen.topologies) > 1 else 1.0  # rings are as large as two lines of text
        axes.legend(fontsize=8, frameon=True, framealpha=0.9, loc="best", markerscale=scale)
    else:
        axes.text(0.5, 0.5, "no trial measured yet", transform=axes.transAxes, ha="center")
    out = io.BytesIO()
    drawn.savefig(out, format="png")
    return out.getvalue()


def _paint(axes: Axes, seen: Picture) -> None:
    if seen.front:
        xs, ys = zip(*seen.front, strict=True)
        axes.step(xs, ys, where="post", color=_line_colour(seen), linewidth=1.3, label="Pareto front", zorder=2)
    for series in _series(seen):
        face = series.colour if series.is_filled else "none"
        edge = INK if series.is_filled else series.colour
        axes.scatter([p.x for p in series.points], [p.y for p in series.points], label=series.name, zorder=3,
                     marker=series.matplotlib_symbol, s=series.size**2 * 0.55,
                     facecolors=face, edgecolors=edge,
                     linewidths=1)  # fmt: skip
    if len(seen.points) <= MOST_LABELS:
        for point in seen.points:
            axes.annotate(str(point.number), (point.x, point.y), xytext=(6, 5), textcoords="offset points",
                          fontsize=7, color="#555555")  # fmt: skip
    _paint_limits(axes, seen)


def _paint_limits(axes: Axes, seen: Picture) -> None:
    x, y = seen.x.limit, seen.y.limit
    if x is None and y is None:
        return
    right, top = x or seen.x.high, y or seen.y.high
    corner: dict[str, Any] = {"color": GREEN, "alpha": 0.09, "linewidth": 0, "zorder": 0}
    axes.fill_between([seen.x.low, right], seen.y.low, top, **corner)
    line: dict[str, Any] = {"color": GREEN, "linestyle": "--", "linewidth": 1.3, "zorder": 1}
    if x is not None:
        axes.axvline(x, label=f"{_limit_text(seen.x)} ({_name(seen.x)})", **line)
    if y is not None:
        axes.axhline(y, label=f"{_limit_text(seen.y)} ({_name(seen.y)})", **line)


def _set_axes(axes: Axes, seen: Picture) -> None:
    axes.set_xlim(seen.x.low, seen.x.high)
    axes.set_ylim(seen.y.low, seen.y.high)
    axes.minorticks_off()
    axes.set_xticks(seen.x.ticks, [f"{tick:,g}" for tick in seen.x.ticks])
    axes.set_yticks(seen.y.ticks, [f"{tick:,g}" for tick in seen.y.ticks])
    axes.set_xlabel(seen.x.title, parse_math=False)
    axes.set_ylabel(seen.y.title, parse_math=False)
    axes.grid(visible=True, color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
