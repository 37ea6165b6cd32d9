"""The card of a workload: its shape and its origin, for a terminal and as the README beside the rows.

Everything told is a figure or a name: no prompt is looked at. Names from outside are data, as everywhere in sinks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner.shape import BINS, LIMITS, Lengths, Shape, describe
from tuner.sinks import provenance
from tuner.sinks.provenance import Provenance
from tuner.sinks.runfolder import write_atomically
from tuner.sinks.words import markdown, percent, plain
from tuner.units import format_elapsed
from tuner.workload import Workload

PICTURE, PAGE = "card.png", "card.md"  # in a run folder, where README.md would be taken for the run's
QUANTILES = tuple(Lengths.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Card:
    """What is told of a workload; its texts can be shown to a terminal, for a page they are still escaped.

    Attributes:
        name, sha256, transforms: the workload's own.
        shapes: of the window, and of the rows to confirm with where there are such.
        history: of the rows before the window, which may be only those that it will hit; None without.
        has_prompts: whether rows of the window bring prompts of their own.
        origin: what is written about where the rows came from.
        picture: the picture beside the rows, where there is one.
    """

    name: str
    sha256: str
    transforms: tuple[str, ...]
    shapes: Mapping[str, Shape]
    history: Shape | None
    has_prompts: bool
    origin: Provenance | None
    picture: Path | None


def of(workload: Workload, folder: Path | None = None) -> Card:
    """Return the card of a workload; `folder` is where its rows lie, None when they are a file of their own."""
    shapes = {"window": describe(workload.requests, workload.history)}
    return Card(
        name=plain(workload.name),
        sha256=plain(workload.sha256),
        transforms=tuple(map(plain, workload.transforms)),
        shapes=shapes | ({"confirm": describe(workload.confirm, workload.confirm_history)} if workload.confirm else {}),
        history=describe(workload.history) if workload.history else None,
        has_prompts=any(row.prompt is not None for row in workload.requests),
        origin=provenance.read(folder) if folder is not None else None,
        picture=folder / PICTURE if folder is not None and (folder / PICTURE).is_file() else None,
    )


def write(folder: Path, workload: Workload, *, name: str = "README.md") -> None:
    """Write a workload's card into its folder: the page, and the picture it shows beside it.

    Raises:
        HostError: the disk is full or the folder cannot be written.
    """
    from tuner.sinks import traffic  # noqa: PLC0415 (a second, only where a picture is drawn)

    write_atomically(folder / PICTURE, traffic.figure_png(workload))
    write_atomically(folder / name, page(of(workload, folder)))


# --- Figures ----------------------------------------------------------------------------------------------

Figure = Callable[[Shape], str | None]


def grid(card: Card) -> list[tuple[str, ...]]:
    """Return what is told of the traffic: a row of labels, then a row a figure, "" where a file lacks it."""
    shapes = card.shapes
    told = ((label, [figure(shape) for shape in shapes.values()]) for label, figure in _figures(shapes).items())
    rows = [("", *shapes), *((label, *(cell or "" for cell in cells)) for label, cells in told if any(cells))]
    if (before := card.history) is not None:
        cell = f"{before.rows:,} / {before.input_len.total:,}"
        rows.append(("history before it, requests / prompt tokens", cell, *[""] * (len(shapes) - 1)))
    return rows


def _figures(shapes: Mapping[str, Shape]) -> dict[str, Figure]:
    return {
        "requests": lambda s: f"{s.rows:,}",
        "span": lambda s: None if s.span is None else _elapsed(s.span),
        "requests per second": lambda s: s.rate and (f"{s.rate:,.2f}" if s.rate >= 0.1 else f"{s.rate:.2g}"),
        **{f"dispersion of arrivals at {width} s": _dispersion(width) for width in BINS},
        **{f"above {name}: rows / their tokens": _above(limit) for name, limit in _shown(shapes).items()},
        "rows with one output token": lambda s: f"{s.single:,}" if s.single else None,
        "ideal prefix hit, cold": lambda s: _share(s.reuse and s.reuse.cold),
        "ideal prefix hit, after the history": lambda s: _share(s.reuse and s.reuse.after_history),
        "sessions / rows in them": lambda s: s.sessions and f"{s.sessions.count:,} / {s.sessions.rows:,}",
        "turns of a session, p50 / max": lambda s: (
            s.sessions and f"{s.sessions.turns_p50:g} / {s.sessions.turns_max:,}"
        ),
        "later turns with think time": lambda s: _share(s.sessions and s.sessions.timed),
        "stamps of the clock": lambda s: s.steps and f"{s.steps.stamps:,}, {s.steps.step:.3g} s apart",
    }


def _dispersion(width: int) -> Figure:
    return lambda s: f"{s.dispersion[width]:.2f}" if width in s.dispersion else None


def _above(limit: int) -> Figure:
    def told(shape: Shape) -> str:
        above = next(one for one in shape.above if one.limit == limit)
        return f"{percent(above.rows)} / {percent(above.tokens)}" if above.rows else "none"

    return told


def _shown(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the limits that some row is above, and the next one, which takes all."""
    crossed = sum(any(above.rows for above in at) for at in zip(*(s.above for s in shapes.values()), strict=True))
    return dict(list(LIMITS.items())[: crossed + 1])


def _elapsed(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else format_elapsed(seconds)


def _share(value: float | None) -> str | None:
    return None if value is None else percent(value)


def lengths(shapes: Mapping[str, Shape]) -> list[tuple[str, ...]]:
    """Return the lengths in tokens: a row of labels, then two rows a file."""
    sides = [(name, side, s) for name, shape in shapes.items() for side, s in _sides(shape)]
    return [
        ("tokens", *QUANTILES),
        *((f"{name}, {side}", *(f"{getattr(of_side, q):,.0f}" for q in QUANTILES)) for name, side, of_side in sides),
    ]


def _sides(shape: Shape) -> tuple[tuple[str, Lengths], ...]:
    return ("prompt", shape.input_len), ("output", shape.output_len)


def warnings(card: Card) -> Iterator[str]:
    """Yield what an operator must know of these rows, what whoever wrote them says last."""
    window = card.shapes["window"]
    if (steps := window.steps) is not None:
        yield (
            f"The clock moves in steps of {steps.step:.3g} s, with up to {steps.most:,} requests on one stamp: most of "
            "that burst is the recorder's. It is replayed as recorded unless tune import --spread-steps spreads it."
        )
    if window.reuse is None and card.has_prompts:
        yield "The rows bring prompts of their own; what these share is not counted here."
    elif window.reuse is None:
        yield "There are no block ids: each prompt is made unlike all others, so that no prefix is ever hit."
    elif window.reuse.cold is None:
        yield "There are too many blocks to count what prompts share."
    elif window.reuse.rows < 1:
        yield f"{percent(1 - window.reuse.rows)} of the rows have no block ids and count as unlike all others."
    yield from card.origin.notes if card.origin else ()


def meanings(shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Yield what the words of the figures mean."""
    if any(shape.dispersion for shape in shapes.values()):
        yield "Dispersion: variance / mean of the arrivals per full bin, 1 for Poisson."
    yield "Above: prompt and output together, with 1k as 1,024 tokens."
    if (reuse := shapes["window"].reuse) is not None:
        recorded = " to ".join(f"{size:,}" for size in sorted({reuse.recorded[0], reuse.recorded[-1]}))
        yield (
            f"Ideal prefix hit: share of prompt tokens that stood in earlier rows, in whole blocks of "
            f"{reuse.block_size} (the trace's own have {recorded}), in a cache without limit."
        )


# --- For a terminal ---------------------------------------------------------------------------------------


def render(card: Card) -> RenderableType:
    """Return the card for a terminal or a pipe."""
    lines = [Text(card.name, style="bold"), Text(f"sha256 {card.sha256}"), *map(Text, _origin(card)), Text()]
    after = [Text(), *(Text(f"Note: {text}") for text in warnings(card))]
    after += [Text(text, style="dim") for text in meanings(card.shapes)]
    after += [Text(plain(f"Picture: {card.picture}"))] if card.picture else []
    return Group(*lines, _table(grid(card)), Text(), _table(lengths(card.shapes)), *after)


def _origin(card: Card) -> Iterator[str]:
    origin = card.origin or Provenance({}, {})
    yield from (f"{label}: {text}" for label, text in origin.facts.items())
    yield from (f"{n:,} rows {why}" for why, n in origin.lost.items())
    yield from (*origin.transforms, *card.transforms)


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for n, label in enumerate(rows[0]):
        table.add_column(label, justify="right" if n else "left")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


# --- As Markdown ------------------------------------------------------------------------------------------


def page(card: Card) -> str:
    """Return the card as a page; the picture is the one beside it."""
    lines = [f"# {markdown(card.name)}", "", f"![Arrivals, shared prompts and lengths]({PICTURE})", ""]
    sections = {
        "Origin": _items(_origin(card)),
        "Traffic": _rows(grid(card)),
        "Lengths": _rows(lengths(card.shapes)),
        "Notes": [*_items(warnings(card)), *_items(meanings(card.shapes))],
    }
    for heading, body in sections.items():
        lines += [f"## {heading}", "", *body, ""] if body else []
    return "\n".join([*lines, f"SHA-256 of the rows: {markdown(card.sha256)}", ""])


def _items(texts: Iterator[str]) -> list[str]:
    return [f"- {markdown(text)}" for text in texts]


def _rows(rows: list[tuple[str, ...]]) -> list[str]:
    head, *body = (f"| {' | '.join(map(markdown, cells))} |" for cells in rows)
    return [head, f"|---|{'---:|' * (len(rows[0]) - 1)}", *body]
