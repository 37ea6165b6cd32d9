"""The picture of a workload: when its requests come, what of their prompts came before, how long they are.

Three panels. Arrivals and prompt tokens share a time axis, on which the window begins at zero; lengths have a
logarithmic axis of their own. Everything is drawn from sums over bins, so that a hundred thousand rows look like a
hundred, and no row's content is looked at.
"""

import io
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from tuner.reuse import Tokens, ideal_hits
from tuner.shape import SERVER_BLOCK, is_countable
from tuner.sinks.palette import BLUE, GREY, INK, ORANGE, PURPLE, SKY
from tuner.sinks.timeline import bin_width
from tuner.sinks.words import percent, plain
from tuner.transforms import clock_steps
from tuner.workload import Request, Workload

LENGTH_BINS = 60
NARROWEST = 1.0  # s, of a bin of time
EARLY = 0.03  # of a bin: no step is as exact as the next

Floats = npt.NDArray[np.float64]
COUNT = FuncFormatter(lambda value, _: f"{value:,.10g}")


def figure_png(workload: Workload) -> bytes:
    """Return the picture as a PNG of 1000 x 900."""
    out = io.BytesIO()
    figure(workload).savefig(out, format="png")
    return out.getvalue()


def figure(workload: Workload) -> Figure:
    """Return the picture as matplotlib has it."""
    drawn = Figure(figsize=(10, 9), dpi=100, layout="constrained")
    arrivals, tokens, lengths = drawn.subplots(3, 1, height_ratios=(4, 4, 3))
    tokens.sharex(arrivals)
    arrivals.set_title(plain(workload.name)[:110], loc="left", fontsize=11, pad=28, parse_math=False)
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
    """Return the borders of the bins of time, in seconds, around all arrivals from the first one.

    A bin holds whole steps of a clock that goes in steps, and begins a little before one.
    """
    width = max(bin_width(max(workload.span, NARROWEST)), NARROWEST)
    early, steps = 0.0, clock_steps(np.array([row.arrival for row in workload.requests]))
    if steps is not None:
        width, early = steps.step * np.ceil(width / steps.step), EARLY
    bins = np.floor(workload.span / width + early) + 1
    return np.asarray((np.arange(bins + 1) - early) * width, dtype=np.float64)


def _times(rows: Sequence[Request]) -> Floats:
    return np.array([r.arrival - rows[0].arrival for r in rows], dtype=np.float64)


def _arrivals(axes: Axes, workload: Workload, edges: Floats) -> None:
    width, times = edges[1] - edges[0], _times(workload.requests)
    _bars(axes, _sums(times, edges) / width, edges, BLUE, f"window ({len(times):,})")
    if workload.confirm:
        rate = _sums(_times(workload.confirm), edges) / width
        axes.stairs(rate, edges, baseline=None, color=ORANGE, linewidth=1.4,
                    label=f"confirm ({len(workload.confirm):,}), laid over it")  # fmt: skip
    if width > 1:
        axes.plot((edges[:-1] + edges[1:]) / 2, _peaks(times, edges), "_", color=INK, markersize=5,
                  label="busiest second of a bin")  # fmt: skip
    axes.set_ylabel(f"arrivals per second\n(bins of {width:,.3g} s)")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(COUNT)
    axes.tick_params(labelbottom=False)


def _peaks(times: Floats, edges: Floats) -> Floats:
    """Return the arrivals of each bin's busiest second, nothing for a bin without any."""
    place = np.searchsorted(edges, times, side="right") - 1
    seconds = np.stack([place, np.floor(times - edges[place])])
    (bins, _), counts = np.unique(seconds, axis=1, return_counts=True)
    peaks = np.full(len(edges) - 1, np.nan)
    np.fmax.at(peaks, bins.astype(np.int64), counts.astype(np.float64))
    return peaks


def _tokens(axes: Axes, workload: Workload, edges: Floats) -> None:
    """Draw the prompt tokens of the window: on top of those that are new, those that an ideal cache would hold."""
    below = np.zeros(len(edges) - 1)
    for label, colour, tokens in _sources(workload):
        rate = _sums(_times(workload.requests), edges, tokens) / (edges[1] - edges[0])
        _bars(axes, rate, edges, colour, label, below=below)
        below = below + rate
    axes.set_ylabel("prompt tokens per second")
    axes.yaxis.set_major_formatter(COUNT)
    axes.xaxis.set_major_formatter(COUNT)
    axes.set_xlabel("seconds of the window")
    axes.set_xlim(edges[0], edges[-1])


def _sources(workload: Workload) -> Iterator[tuple[str, str, Tokens]]:
    """Yield, with label and colour, how many tokens of each prompt are new, were in the window, in the history only."""
    rows, history = workload.requests, workload.history
    size = np.array([r.input_len for r in rows])
    if not any(r.block_ids for r in rows):
        yield "prompts; no block ids, so what they share is not known", BLUE, size
        return
    if not is_countable(rows, history):
        yield "prompts; too many blocks to count what they share", BLUE, size
        return
    cold, warm = ideal_hits(rows, SERVER_BLOCK), ideal_hits(rows, SERVER_BLOCK, history)

    def share(tokens: Tokens) -> str:
        return percent(float(tokens.sum() / size.sum()))

    yield f"new in whole blocks of {SERVER_BLOCK}: {share(size - warm)}", BLUE, size - warm
    yield f"seen earlier in the window: {share(cold)}", SKY, cold
    if history:
        yield f"seen in the history only: {share(warm - cold)}", GREY, warm - cold


def _bars(axes: Axes, heights: Floats, edges: Floats, colour: str, label: str, *, below: Floats | float = 0) -> None:
    axes.stairs(heights + below, edges, baseline=below, fill=True, color=colour, alpha=0.8, label=label)


def _sums(times: Floats, edges: Floats, weights: Tokens | None = None) -> Floats:
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
