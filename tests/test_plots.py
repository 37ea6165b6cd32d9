"""The picture of a study: what is on it, in both forms."""

import io
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread
from study_data import GROUPS, X, Y, budgets, config, failed, groups, study, trial

from tuner.results import TrialResult, limits
from tuner.serving import Topology
from tuner.sinks import palette, plots

LIMITS = limits(study().slo, budgets())
POSITIVE = st.floats(1e-6, 1e3)


def traces(results: Sequence[TrialResult]) -> dict[str, list[str]]:
    """The first line of each point's hover text, by legend entry."""
    drawn = json.loads(plots.figure(results, X, Y, LIMITS, title="t").to_json())["data"]
    return {t["name"]: [text.split("<br>")[0] for text in t["hovertext"]] for t in drawn if "hovertext" in t}


def test_every_measured_trial_is_a_point_and_nothing_else_is() -> None:
    """Failed trials and repeats of a point stay out; the default and the baseline have symbols of their own."""
    assert traces(budgets()) == {
        "misses the SLO": ["trial 2", "trial 3", "trial 6", "trial 8"],
        "meets the SLO": ["trial 4"],
        "default, misses the SLO": ["trial 0 (default)"],
        "baseline, misses the SLO": ["trial 1 (baseline)"],
        "recommended": ["trial 4"],
    }


def test_hover_text_tells_the_configuration() -> None:
    """A reader who points at trial 8 sees what was changed, both numbers, their spread and the SLOs."""
    point = next(p for p in plots.picture(budgets(), X, Y, LIMITS).points if p.number == 8)

    assert point.words[:5] == (
        "trial 8",
        "TTFT p50 long: 618 ms (2 repeats: 606 ms to 618 ms)",
        "ITL p99: 112 ms (2 repeats: 110 ms to 112 ms)",
        "ttft_p50.long missed by 3.0 %",
        "itl_p99 met",
    )
    assert "differs by: long_prefill_token_threshold 256" in point.words


def test_axes_are_in_milliseconds_with_readable_names() -> None:
    """The axes say what they show, and carry the SLOs' limits."""
    seen = plots.picture(budgets(), X, Y, LIMITS)

    assert (seen.x.title, seen.y.title) == ("TTFT p50, long prompts (ms)", "ITL p99 (ms)")
    assert [seen.x.limit, seen.y.limit] == pytest.approx([600.0, 132.66])
    assert seen.off_axes == ()


def test_an_slo_on_another_metric_is_named_in_words() -> None:
    """A limit that has no place on the axes is not forgotten."""
    asked = limits(study(slo=("ttft_p95=1s", "attainment=0.99")).slo, budgets())
    seen = plots.picture(budgets(), X, Y, asked)

    assert seen.x.limit is None
    assert seen.off_axes == ("ttft_p95=1s", "attainment=0.99")


def test_the_front_is_the_line() -> None:
    """The line goes through the front's points in order of TTFT."""
    seen = plots.picture(budgets(), X, Y, LIMITS)

    assert [round(x) for x, _ in seen.front] == [471, 490, 512, 589, 709]


def test_without_slos_no_trial_is_called_a_miss() -> None:
    """No promise, no verdict in the legend."""
    drawn = plots.figure([trial(0, label="default"), trial(1, 2, 0.5)], X, Y, (), title="t")

    assert [t.name for t in drawn.data] == ["Pareto front", "measured", "default", "recommended"]


class Loads(HTMLParser):
    """Collects what a page asks a network for, and its inline scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in {"src", "href"} and v and not v.startswith("data:")]


def test_the_page_opens_offline_and_outside_names_stay_text() -> None:
    """Plotly comes with the page, nothing is fetched, and a name cannot close a script or start a tag."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    results = [*budgets(), trial(9, 0.5, 0.2, args={"model_impl": evil})]
    page = plots.figure_html(results, X, Y, LIMITS, title=evil, subtitle=evil)
    parsed = Loads()
    parsed.feed(page)

    assert parsed.addresses == []
    assert "img" not in parsed.tags
    assert "alert(1)</script>" not in page
    assert len(page) > 1_000_000, "plotly itself is inside"


@pytest.mark.parametrize(
    "results",
    [
        [],
        [failed(0)],
        [trial(0, label="default")],
        budgets(),
        [trial(n, 1 + n / 9, 2 - n / 99) for n in range(60)],
    ],
    ids=["none", "only failed", "one", "several", "sixty"],
)
def test_any_number_of_points_can_be_drawn(results: list[TrialResult]) -> None:
    """Zero, one or many points give a page and a picture."""
    page = plots.figure_html(results, X, Y, LIMITS, title="$x$ & co", subtitle="s")
    png = plots.figure_png(results, X, Y, LIMITS, title="$x$ & co", subtitle="s")

    assert "</html>" in page
    height, width = imread(io.BytesIO(png)).shape[:2]
    assert (width, height) == (1235, 806)


def test_the_empty_picture_says_so() -> None:
    """Nothing measured is a sentence, not an empty frame."""
    page = plots.figure_html([failed(0)], X, Y, LIMITS, title="t")

    assert "no trial measured yet" in page


@given(POSITIVE, POSITIVE)
def test_ticks_are_few_round_and_inside(a: float, b: float) -> None:
    """Between any two numbers there are labels to read, and none outside."""
    low, high = sorted((a, b))
    high = max(high, low * 1.5)
    found = plots.ticks(low, high)

    assert 2 <= len(found) <= 30
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in found)
    assert all(re.fullmatch(r"[\d.,e+-]+", f"{tick:,g}") for tick in found)


def test_a_zero_metric_has_no_place_on_a_log_axis() -> None:
    """A server without a gap between tokens does not break the picture."""
    assert plots.picture([trial(0, 1.0, 0.0)], X, Y, ()).points == ()


def test_a_secret_free_config_is_shown_whole() -> None:
    """Arguments equal to the default's are listed after those that differ."""
    words = plots.picture([trial(0, label="default", args={"max_num_seqs": 8})], X, Y, ()).points[0].words

    assert "max_num_seqs: 8" in words
    assert config().model == "tune/tiny-qwen2"


def drawn_groups() -> list[Any]:
    return list(plots.figure(groups(), X, Y, limits(GROUPS.slo, groups()), title="t").data)


def test_topologies_have_a_legend_entry_each() -> None:
    """Filled meets the SLO, open misses it; the marks of one topology stay, as rings around its points."""
    shown = [(t.name, list(t.hovertext or ())) for t in drawn_groups()]

    assert {name: [text.split("<br>")[0] for text in texts] for name, texts in shown if name != "Pareto front"} == {
        "4x, misses the SLO": ["trial 0 (default)", "trial 1"],
        "1p3d": ["trial 2", "trial 5"],
        "2p2d, misses the SLO": ["trial 3"],
        "default": ["trial 0 (default)"],
        "recommended": ["trial 5"],
    }


def test_topologies_differ_by_colour_and_by_symbol() -> None:
    """A colour-blind reader, or one with a grey print, tells them by shape; the two states of one share both."""
    looks = {t.name.split(",")[0]: (t.marker.color, t.marker.symbol.removesuffix("-open")) for t in drawn_groups()[1:4]}
    colours, symbols = zip(*looks.values(), strict=True)

    assert set(looks) == {"4x", "1p3d", "2p2d"}
    assert len(set(colours)) == len(set(symbols)) == 3
    assert looks["4x"][0] in palette.COLD
    assert {looks["1p3d"][0], looks["2p2d"][0]} <= set(palette.WARM)
    assert palette.GREEN not in {*palette.COLD, *palette.WARM}, "green is the promise"
    assert drawn_groups()[0].line.color not in colours, "the front is no topology's"


def test_every_ratio_of_sixteen_gpus_looks_its_own_way() -> None:
    """Colour and symbol together repeat only after all pairs."""
    every = [Topology.parse(text) for text in ("2x", "4x", "8x", "16x", *(f"{n}p{16 - n}d" for n in range(1, 16)))]
    looks = plots._looks(every)

    assert len(set(looks.values())) == len(every)


def test_one_topology_looks_as_before() -> None:
    """Colour by SLO, default and baseline with symbols of their own; a failed trial's topology has no entry."""
    names = [t.name for t in plots.figure(budgets(), X, Y, LIMITS, title="t").data]

    assert "default, misses the SLO" in names
    assert not any("1x" in name for name in names)


def test_the_png_shows_topologies_too() -> None:
    """The same series, with matplotlib's symbols; the picture keeps its size."""
    axes = Figure().add_subplot()
    plots._paint(axes, plots.picture(groups(), X, Y, limits(GROUPS.slo, groups())))
    png = plots.figure_png(groups(), X, Y, limits(GROUPS.slo, groups()), title="t")

    assert axes.get_legend_handles_labels()[1][:4] == [
        "Pareto front",
        "4x, misses the SLO",
        "1p3d",
        "2p2d, misses the SLO",
    ]
    assert imread(io.BytesIO(png)).shape[:2] == (806, 1235)
