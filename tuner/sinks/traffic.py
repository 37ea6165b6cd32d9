"""The picture of a workload: when its requests come, what of their prompts came before, how long they are.

Three panels. Arrivals and prompt tokens share a time axis, on which the window begins at zero and its history lies
before it; lengths have a logarithmic axis of their own. Everything is drawn from sums over bins, so that a hundred
thousand rows look like a hundred, and no row's content is looked at.
"""

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from tuner.reuse import ideal_hits
from tuner.shape import SERVER_BLOCK
from tuner.sinks.palette import BLUE, GREY, INK, ORANGE, PURPLE, SKY
from tuner.sinks.timeline import bin_width
from tuner.sinks.words import percent, plain
from tuner.workload import Request, Workload

LENGTH_BINS = 60
NARROWEST = 1.0  # s, of a bin of time
MOST_HISTORY = 1.0  # of the window's span: what lies further back would leave the window no room

Floats = npt.NDArray[np.float64]
COUNT = FuncFormatter(lambda value, _: f"{value:,.10g}")


def figure_png(workload: Workload, *, title: str = "") -> bytes:
    """Return the picture as a PNG of 1000 x 900."""
    out = io.BytesIO()
    figure(workload, title=title).savefig(out, format="png")
    return out.getvalue()


def figure(workload: Workload, *, title: str = "") -> Figure:
    """Return the picture as matplotlib has it."""
    drawn = Figure(figsize=(10, 9), dpi=100, layout="constrained")
    arrivals, tokens, lengths = drawn.subplots(3, 1, height_ratios=(4, 4, 3))
    tokens.sharex(arrivals)
    arrivals.set_title(plain(title or workload.name)[:110], loc="left", fontsize=11, pad=28, parse_math=False)
    edges = _edges(workload)
    _arrivals(arrivals, workload, edges)
    _tokens(tokens, workload, edges)
    _lengths(lengths, workload.requests)
    for axes in (arrivals, tokens, lengths):
        axes.grid(visible=True, color="#ececec", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=5, borderaxespad=0.2)
    return drawn


def _edges(workload: Workload) -> Floats:
    """Return the borders of the bins of time, in seconds; one of them is zero, where the window begins."""
    before = min(_span(workload.history), MOST_HISTORY * max(workload.span, NARROWEST))
    width = max(bin_width(max(workload.span + before, NARROWEST)), NARROWEST)
    first, last = -np.ceil(before / width), np.floor(workload.span / width) + 1
    return np.asarray(np.arange(first, last + 1) * width, dtype=np.float64)


def _span(rows: Sequence[Request]) -> float:
    return rows[-1].arrival - rows[0].arrival if rows else 0.0


def _times(rows: Sequence[Request]) -> Floats:
    return np.array([r.arrival - rows[0].arrival for r in rows], dtype=np.float64)


def _times_before(rows: Sequence[Request]) -> Floats:
    """Return arrivals of a history as if the window began right after its last one: its clock is its own."""
    end = np.nextafter(rows[-1].arrival, np.inf)
    return np.array([r.arrival - end for r in rows], dtype=np.float64)


def _arrivals(axes: Axes, workload: Workload, edges: Floats) -> None:
    width, rows = edges[1] - edges[0], workload.requests
    rates = [_sums(_times(rows), edges) / width]
    axes.stairs(rates[0], edges, fill=True, color=BLUE, alpha=0.8, label=f"window ({len(rows):,})")
    if workload.history:
        rates.append(_sums(_times_before(workload.history), edges) / width)
        axes.stairs(rates[1], edges, fill=True, color=GREY, alpha=0.8, label=_before(workload, edges))
    if workload.confirm:
        inside = edges[edges >= 0]
        rate = _sums(_times(workload.confirm), inside) / width
        axes.stairs(rate, inside, baseline=None, color=ORANGE, linewidth=1.4,
                    label=f"confirm ({len(workload.confirm):,}), laid over it")  # fmt: skip
    if width > 1:
        axes.plot((edges[:-1] + edges[1:]) / 2, _peaks(_times(rows), edges), "_", color=INK, markersize=5,
                  label="busiest second of a bin")  # fmt: skip
    _mark_window(axes, workload, edges)
    axes.set_ylabel(f"arrivals per second\n(bins of {width:,g} s)")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(COUNT)
    axes.tick_params(labelbottom=False)


def _before(workload: Workload, edges: Floats) -> str:
    is_cut = _span(workload.history) > -edges[0]
    return f"history before it ({len(workload.history):,}{f', its last {-edges[0]:,.0f} s' if is_cut else ''})"


def _peaks(times: Floats, edges: Floats) -> Floats:
    """Return the arrivals of each bin's busiest second, nothing for a bin without any."""
    seconds, counts = np.unique(np.floor(times), return_counts=True)
    peaks = np.full(len(edges) - 1, np.nan)
    np.fmax.at(peaks, np.searchsorted(edges, seconds, side="right") - 1, counts.astype(np.float64))
    return peaks


def _mark_window(axes: Axes, workload: Workload, edges: Floats) -> None:
    """Shade the window where something else is beside it."""
    if edges[0] < 0:
        axes.axvspan(0, max(workload.span, NARROWEST), color=BLUE, alpha=0.07, linewidth=0, zorder=0)


def _tokens(axes: Axes, workload: Workload, edges: Floats) -> None:
    """Draw the prompt tokens of history and window: what an ideal cache would hold on top of what is new."""
    history, rows = workload.history, workload.requests
    held = ideal_hits((*history, *rows), SERVER_BLOCK)
    size = np.array([r.input_len for r in (*history, *rows)])
    time = np.concatenate([_times_before(history) if history else np.empty(0), _times(rows)])
    width = edges[1] - edges[0]
    new, every = _sums(time, edges, size - held) / width, _sums(time, edges, size) / width
    if any(r.block_ids for r in rows):
        share = percent(float(held[len(history) :].sum() / size[len(history) :].sum()))
        old = f"seen before, in whole blocks of {SERVER_BLOCK}: {share} of the window"
        axes.stairs(new, edges, fill=True, color=BLUE, alpha=0.8, label="new")
        axes.stairs(every, edges, baseline=new, fill=True, color=SKY, alpha=0.8, label=old)
    else:
        what = "prompts; no block ids, so what they share is not known"
        axes.stairs(every, edges, fill=True, color=BLUE, alpha=0.8, label=what)
    _mark_window(axes, workload, edges)
    axes.set_ylabel("prompt tokens per second")
    axes.yaxis.set_major_formatter(COUNT)
    axes.xaxis.set_major_formatter(COUNT)
    axes.set_xlabel("seconds of the window")
    axes.set_xlim(edges[0], edges[-1])


def _sums(times: Floats, edges: Floats, weights: npt.NDArray[np.int64] | None = None) -> Floats:
    return np.asarray(np.histogram(times, edges, weights=weights)[0], dtype=np.float64)


def _lengths(axes: Axes, rows: Sequence[Request]) -> None:
    """Draw the share of rows by length, on an axis of powers of two, where limits lie."""
    sides = (
        ("prompt tokens", BLUE, [r.input_len for r in rows]),
        ("output tokens", PURPLE, [r.output_len for r in rows]),
    )
    high = max(max(lengths) for _, _, lengths in sides)
    edges = np.geomspace(0.9, max(high, 2) * 1.1, LENGTH_BINS + 1)
    for name, colour, lengths in sides:
        sums, median = _sums(np.array(lengths, dtype=np.float64), edges), float(np.median(lengths))
        axes.stairs(sums / len(rows), edges, fill=True, color=colour, alpha=0.45, label=f"{name}, median {median:,.0f}")
        axes.axvline(median, color=colour, linestyle="--", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xlim(edges[0], edges[-1])
    step = 1 if high < 64 else 2
    axes.xaxis.set_major_locator(FixedLocator([2.0**n for n in range(0, 40, step)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}" if n < 1024 else f"{n / 1024:,g}k"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    axes.set_xlabel("tokens (1k = 1,024)")
    axes.set_ylabel("share of requests")
