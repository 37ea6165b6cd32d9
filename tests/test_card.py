"""The card of a workload: what it says, what it shows, and that it obeys nothing it was told."""

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.image import imread
from rich.console import Console

from tuner import intake
from tuner import workload as workloads
from tuner.assemble import show
from tuner.errors import HostError
from tuner.gather import import_trace
from tuner.sinks import card, provenance, traffic
from tuner.workload import Request, Workload, to_jsonl

HOSTILE = "</script><img src=x onerror=alert(1)>[x](javascript:alert(1)) ![x](http://x/y.png) | **b** `c`\n# h\x1b[2J"
IMPORT: dict[str, Any] = {
    "source": "trace.jsonl", "format": "mooncake", "source_sha256": "ab" * 32, "rows_read": 1200, "rows_kept": 1100,
    "dropped": {"no output tokens": 4, "outside the window": 96}, "transforms": ["window of 120 s from 300 s"],
    "notes": ["chosen by match to the whole trace"], "files": {"workload": 1100}, "fingerprint": "cd" * 32,
}  # fmt: skip
RECORDING: dict[str, Any] = {
    "requests": 32, "rows": 30, "not_written": {"no usage in the stream": 2}, "hashed": "tokens", "block_size": 16,
    "started": "2026-11-30T10:00:00Z", "without_block_ids": {"too long": 1}, "was_cut": True,
    "upstream": "http://user:secret@10.0.0.1",
}  # fmt: skip
IDS: dict[str, Any] = {"block_ids": (1, 2), "block_size": 64}


def some(n: int = 12, **fields: Any) -> tuple[Request, ...]:
    """Rows a second apart, of 100 tokens and 10."""
    return tuple(Request(float(i), 100, 10, **fields) for i in range(n))


def kept(folder: Path, *, history: tuple[Request, ...] = (), **beside: Any) -> Path:
    """Write a workload's folder with JSON files beside its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workload.jsonl").write_text(to_jsonl(some()))
    if history:
        (folder / "history.jsonl").write_text(to_jsonl(history))
    for name, data in beside.items():
        (folder / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return folder


def told(made: card.Card) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(card.render(made))
    return out.getvalue()


def rendered(made: card.Card) -> str:
    """Return the page as a browser gets it."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(card.page(made))


# --- Words ------------------------------------------------------------------------------------------------


def test_a_card_says_how_much_how_fast_and_how_long() -> None:
    """Twelve rows a second apart, and what they lack is not there."""
    lines = [line.split() for line in told(card.of(Workload("even", some(), "ab"))).splitlines()]

    assert ["requests", "12"] in lines
    assert ["span", "11", "s"] in lines
    assert "span" not in told(card.of(Workload("one", some(1), "ab")))
    assert re.search("span +0 s", told(card.of(Workload("at once", some(1) * 2, "ab"))))
    assert ["requests", "per", "second", "1.09"] in lines
    assert ["dispersion", "of", "arrivals", "at", "1", "s", "0.00"] in lines
    assert ["window,", "prompt", *["100"] * 6, "1,200"] in lines
    assert not [line for line in lines if line[:1] in (["sessions"], ["stamps"], ["turns"], ["ideal"])]


def test_each_file_of_a_workload_has_a_column_and_lacks_what_it_lacks() -> None:
    """Only the window is told after its history; a file without a figure has an empty cell."""
    rows = some(2, **IDS)
    made = card.of(Workload("w", rows, "ab", history=rows[:1], confirm=some(1)))
    grid = {label: cells for label, *cells in card.grid(made)}

    assert grid[""] == ["window", "confirm"]
    assert grid["ideal prefix hit, cold"] == ["48 %", ""]
    assert grid["ideal prefix hit, after the history"] == ["96 %", ""]
    assert grid["span"] == ["1 s", ""]
    assert grid["history before it, requests / prompt tokens"] == ["1 / 100", ""]


def test_limits_are_shown_up_to_the_first_that_takes_all() -> None:
    """Half of the rows are longer than 4k and hold nine tenths of the tokens; 16k is not asked about."""
    rows = (Request(0.0, 800, 100), Request(1.0, 8000, 100))
    grid = dict(card.grid(card.of(Workload("w", rows, "ab"))))

    assert [label for label in grid if label.startswith("above")] == [
        "above 4k: rows / their tokens", "above 8k: rows / their tokens",
    ]  # fmt: skip
    assert grid["above 4k: rows / their tokens"] == "50 % / 90 %"
    assert grid["above 8k: rows / their tokens"] == "none"


def test_a_burst_of_the_recorders_clock_is_warned_of() -> None:
    """Ten rows at each third second; rows that come evenly are no reason to warn."""
    stepped = tuple(Request(3.0 * (i // 10), 100, 10, (1, 2), 64) for i in range(100))
    (warning,) = card.warnings(card.of(Workload("w", stepped, "ab")))

    assert "steps of 3 s, with up to 10 requests on one stamp" in warning
    assert list(card.warnings(card.of(Workload("w", some(100, **IDS), "ab")))) == []


def test_block_sizes_of_the_trace_are_told_by_their_range() -> None:
    """A row may have any."""
    rows = tuple(Request(float(i), 100, 10, (1,) * (-(-100 // size)), size) for i, size in enumerate(range(30, 60)))

    assert "whole blocks of 16 (the trace's own have 30 to 59)" in told(card.of(Workload("w", rows, "ab"))).replace(
        "\n", ""
    )


def test_what_is_not_known_of_reuse_is_said() -> None:
    """Rows without ids, with prompts of their own, and half and half."""
    rows = {"no block ids": some(), "not counted": some(prompt="hello"), "50 % of the rows": some(2, **IDS) + some(2)}

    for words, requests in rows.items():
        (warning,) = card.warnings(card.of(Workload("w", requests, "ab")))
        assert words in warning


def test_blocks_beyond_what_memory_holds_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million rows with ids would take gigabytes: what is not counted is absent and said."""
    rows = some(12, **IDS)
    monkeypatch.setattr("tuner.shape.MOST_BLOCKS", 25)
    assert card.of(Workload("w", rows, "ab")).shapes["window"].reuse is not None
    assert list(card.warnings(card.of(Workload("w", rows, "ab")))) == []
    made = card.of(Workload("w", rows, "ab", history=rows[:1]))

    assert list(card.warnings(made)) == ["There are too many blocks to count what prompts share."]
    assert not [label for label, *_ in card.grid(made) if label.startswith("ideal")]
    assert texts(Workload("w", rows, "ab", history=rows[:1]))[1] == "prompts; too many blocks to count what they share"


def test_no_prompt_is_told(tmp_path: Path) -> None:
    """Not by the page, the terminal or the names of either."""
    secret = "the merger is on Friday"
    made = Workload("w", some(prompt=secret, session=secret, model=secret), "ab", history=some(prompt=secret))
    card.write(tmp_path, made)

    assert secret not in told(card.of(made))
    assert secret not in (tmp_path / "README.md").read_text()
    assert secret.encode() not in (tmp_path / "card.png").read_bytes()


# --- Where the rows came from -----------------------------------------------------------------------------


def test_an_import_says_where_its_rows_came_from(tmp_path: Path) -> None:
    """Source, counts by reason, transforms and notes; large numbers can be read."""
    made = card.of(workloads.load(kept(tmp_path / "w", source=IMPORT)), tmp_path / "w")

    for page in (told(made), card.page(made).replace("\\", "")):
        for words in ("source: trace.jsonl", "rows read: 1,200", "96 rows dropped: outside the window",
                      "window of 120 s from 300 s", "chosen by match to the whole trace", "cd" * 32):  # fmt: skip
            assert words in page


def test_a_recording_says_what_it_did_not_write(tmp_path: Path) -> None:
    """And of what its block ids were made."""
    page = told(card.of(workloads.load(kept(tmp_path / "w", recording=RECORDING)), tmp_path / "w"))

    for words in ("recording began: 2026-11-30T10:00:00Z", "2 rows not recorded: no usage in the stream",
                  "block ids made from: tokens", "requests seen: 32", "1 rows without block ids: too long",
                  "Note: the recording was cut off"):  # fmt: skip
        assert words in page
    assert "10.0.0.1" not in page


def test_rows_that_say_nothing_of_themselves_have_a_card_too(tmp_path: Path) -> None:
    """No file beside them is needed."""
    assert provenance.read(kept(tmp_path / "w")) is None
    assert "Origin" not in card.page(card.of(workloads.load(tmp_path / "w"), tmp_path / "w"))


DAMAGED = {
    "cut": "{",
    "deep": "[" * 100_000,
    "a list": "[1]",
    "no number": '{"rows_read": 1e999',
    "binary": "\x00",
    "a long number": "1" * 5000,
    "too long": json.dumps(IMPORT | {"note": "x" * 2**20}),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_beside_the_rows_is_said_and_no_more(tmp_path: Path, what: str) -> None:
    """The rows are what counts."""
    page = told(card.of(workloads.load(kept(tmp_path / "w", source=DAMAGED[what])), tmp_path / "w"))

    assert "Note: source.json is" in page
    assert ["requests", "12"] in [line.split() for line in page.splitlines()]


@pytest.mark.parametrize("odd", [None, True, 1.5, [], {}, [[]], {"a": "b"}, [1, None], {"x": None, "y": [1]}])
def test_a_fact_of_another_kind_is_left_out(tmp_path: Path, odd: Any) -> None:
    """Whatever stands where a name, a count or a list should."""
    found = provenance.read(kept(tmp_path / "w", source=dict.fromkeys(IMPORT, odd)))

    assert found == provenance.Provenance({}, {})


def test_a_file_beside_the_rows_cannot_flood_the_card(tmp_path: Path) -> None:
    """Texts and lists are cut."""
    flood = IMPORT | {"source": "x" * 100_000, "notes": ["n"] * 10_000, "dropped": {str(i): i for i in range(9999)}}
    page = card.page(card.of(workloads.load(kept(tmp_path / "w", source=flood)), tmp_path / "w"))

    assert len(page) < 10_000


def test_names_are_shown_and_obeyed_by_nobody(tmp_path: Path) -> None:
    """On the page no image but the card's, no script, no link, no further heading or column; no escape code."""
    source = {key: HOSTILE if isinstance(value, str) else value for key, value in IMPORT.items()}
    source |= {"dropped": {HOSTILE: 1}, "transforms": [HOSTILE], "notes": [HOSTILE]}
    made = Workload(HOSTILE, some(), HOSTILE, transforms=(HOSTILE,))
    page = rendered(card.of(made, kept(tmp_path / "w", source=source)))
    tame = rendered(card.of(Workload("w", some(), "ab", transforms=("t",)), kept(tmp_path / "t", source=IMPORT)))

    assert re.findall(r"<img[^>]*", page) == ['<img src="card.png" alt="Arrivals, shared prompts and lengths" /']
    for tag in ("<script", "<a ", "<h", "<td", "<strong", "<code"):
        assert page.count(tag) == tame.count(tag), tag
    assert all(c.isprintable() or c == "\n" for c in page + told(card.of(made, tmp_path / "w")))


# --- What is written and shown ----------------------------------------------------------------------------


def test_a_folder_gets_a_page_and_its_picture(tmp_path: Path) -> None:
    """Whole files, which a link in their place does not lead elsewhere."""
    folder, elsewhere = kept(tmp_path / "w", source=IMPORT), tmp_path / "elsewhere"
    (folder / "README.md").symlink_to(elsewhere)
    card.write(folder, workloads.load(folder))

    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "card.png", "source.json", "workload.jsonl"]
    assert (folder / "README.md").read_text().startswith("# w\n")
    assert not elsewhere.exists()


def test_a_folder_that_cannot_be_written_is_the_hosts_fault(tmp_path: Path) -> None:
    """As everywhere."""
    (tmp_path / "file").write_text("")

    with pytest.raises(HostError, match=r"card\.png: cannot be written"):
        card.write(tmp_path / "file", Workload("w", some(), "ab"))


def test_show_tells_the_card_of_a_folder_and_where_its_picture_is(tmp_path: Path) -> None:
    """A damaged profile or page beside the rows does not matter."""
    folder = kept(tmp_path / "w", source=IMPORT, history=some(3))
    (folder / "profile.yaml").write_text("{")
    assert "Picture" not in show(folder)
    card.write(folder, workloads.load(folder))

    text = show(folder).replace("\n", "")
    assert f"Picture: {folder / 'card.png'}" in text
    assert "format: mooncake" in text
    assert re.search(r"requests +12", text)
    assert re.search(r"prompt tokens +3 / 300", text)


def test_show_tells_the_card_of_a_file_alone(tmp_path: Path) -> None:
    """What lies beside it is of others."""
    folder = kept(tmp_path / "w", source=IMPORT)

    assert re.search(r"requests +12", show(folder / "workload.jsonl"))
    assert "mooncake" not in show(folder / "workload.jsonl")


def test_an_import_leaves_its_card(tmp_path: Path) -> None:
    """A published trace, cut to windows: the page tells where the rows came from, and of a warm cache."""
    trace = Path(__file__).parent / "traces" / "mooncake_conversation" / "conversation_first2000.jsonl"
    said = import_trace(intake.wanted(trace, tmp_path / "chat", window="2min", max_len=8192))
    page = (tmp_path / "chat" / "README.md").read_text().replace("\\", "")

    assert (tmp_path / "chat" / "card.png").read_bytes().startswith(b"\x89PNG")
    for words in ("source: conversation_first2000.jsonl", "rows read: 2,000", "input + output above 8,192 tokens"):
        assert words in page
        assert words in said
    assert re.search(r"\| ideal prefix hit, after the history \| \d+ % \|", page)
    assert re.search(
        r"\| above 4k: rows / their tokens \| [^|]+ \| [^|]+ \|\n\| above 8k: [^|]+ \| none \| none \|", page
    )


# --- The picture ------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
MANY = tuple(
    Request(float(at), 4097 + i % 4000, 1 + i % 900, (i % 50, 50 + i), 4096)
    for i, at in enumerate(np.cumsum(RNG.exponential(0.05, 100_000)))
)
PICTURED = {
    "one row": Workload("w", some(1), "ab"),
    "all at once": Workload("w", tuple(Request(5.0, 1, 1) for _ in range(9)), "ab"),
    "everything": Workload(HOSTILE, some(**IDS), "ab", history=some(40, **IDS), confirm=some(99)),
    "one row after one": Workload("$\\frac$", some(1), "ab", history=some(1)),
    "ages": Workload("w", (*some(), Request(1e12, 10_000_000, 10_000_000)), "ab"),
    "a hundred thousand": Workload("w", MANY, "ab"),
}


@pytest.mark.parametrize("what", PICTURED)
def test_the_picture_is_a_png_of_one_size(what: str) -> None:
    """Whatever there is to draw; nothing warns."""
    png = traffic.figure_png(PICTURED[what])

    assert png.startswith(b"\x89PNG")
    assert imread(io.BytesIO(png)).shape[:2] == (900, 1000)


def texts(workload: Workload) -> list[str]:
    """Return what the legends say."""
    return [text.get_text() for axes in traffic.figure(workload).axes for text in axes.get_legend().get_texts()]


def test_the_picture_names_what_it_shows() -> None:
    """Window and confirm; what was seen before and where, if that is known; medians."""
    assert texts(PICTURED["everything"]) == [
        "window (12)", "confirm (99), laid over it", "new in whole blocks of 16: 4.0 %",
        "seen earlier in the window: 88 %", "seen in the history only: 8.0 %",
        "prompt tokens, median 100", "output tokens, median 10",
    ]  # fmt: skip
    assert texts(PICTURED["one row"])[:2] == ["window (1)", "prompts; no block ids, so what they share is not known"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5000), st.integers(0, 3)), min_size=1, max_size=30), st.integers(0, 3))
def test_each_row_is_in_one_bin(window: list[tuple[float, int]], before: int) -> None:
    """The bars add up to the rows, and one on the other to their tokens and to what the card says was seen before."""
    rows = tuple(Request(t, 70, 1, (i, 9), 64) for t, i in sorted(window))
    traffic_ = Workload("w", rows, "ab", history=tuple(Request(0.0, 70, 1, (i, 9), 64) for i in range(before)))
    arrivals, tokens, _ = traffic.figure(traffic_).axes
    edges = arrivals.patches[0].get_data().edges
    levels = [np.broadcast_to(p.get_data().baseline, len(edges) - 1) for p in tokens.patches]
    levels.append(tokens.patches[-1].get_data().values)
    totals = [float((level * np.diff(edges)).sum()) for level in levels]

    assert (arrivals.patches[0].get_data().values * np.diff(edges)).sum() == pytest.approx(len(rows))
    assert (totals[0], totals[-1]) == pytest.approx((0, 70 * len(rows)))
    reuse = card.of(traffic_).shapes["window"].reuse
    assert reuse is not None
    assert (totals[2] - totals[1]) / totals[-1] == pytest.approx(reuse.cold)
    assert 1 - totals[1] / totals[-1] == pytest.approx(reuse.after_history if before else reuse.cold)
    for below, above in pairwise(tokens.patches):
        np.testing.assert_array_equal(below.get_data().values, above.get_data().baseline)


def test_bins_hold_whole_steps_of_a_stepped_clock() -> None:
    """Bins of 2 s over steps of 3 s would show lulls that nobody recorded, as would a step a millisecond short."""
    rows = tuple(Request(3.0 * i - 0.001 * (i % 2), 10, 1) for i in range(50) for _ in range(4))
    values, edges, _ = traffic.figure(Workload("w", rows, "ab")).axes[0].patches[0].get_data()

    assert np.diff(edges) == pytest.approx(3.0, abs=0.001)
    assert values == pytest.approx(4 / 3, rel=0.001)


def test_the_busiest_second_of_a_bin_is_marked() -> None:
    """Bins of 20 s over a quarter of an hour: five rows in one second and one in another, then an empty bin."""
    rows = (*(Request(t, 10, 1) for t in (0.0, 0.1, 0.2, 0.3, 0.99, 19.5)), *(Request(t, 10, 1) for t in (45.0, 900.0)))
    (marks,) = (line for line in traffic.figure(Workload("w", rows, "ab")).axes[0].lines)

    assert marks.get_label() == "busiest second of a bin"
    np.testing.assert_array_equal(np.asarray(marks.get_ydata())[:4], [5, np.nan, 1, np.nan])
