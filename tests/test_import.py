"""Making a workload of a trace: every row counted, the same bytes every time, what is shared still shared."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tuner import intake, workload
from tuner.errors import HostError, SpecError
from tuner.readers import clock
from tuner.readers.changes import Changes
from tuner.readers.format import Options
from tuner.readers.source import Source
from tuner.reuse import ideal_hits
from tuner.workload import Request

TRACES = Path(__file__).parent / "traces"
MOONCAKE = TRACES / "mooncake_conversation" / "conversation_first2000.jsonl"
AZURE = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_conv_first3000.csv"
SPLITWISE = TRACES / "splitwise_vidur_csv" / "splitwise_conv_first1000.csv"


def imported(source: Path, out: Path, **flags: Any) -> dict[str, Any]:
    """Import a trace; return what source.json says."""
    intake.run(intake.wanted(source, out, **flags))
    found: dict[str, Any] = json.loads((out / "source.json").read_text())
    return found


def rows_of(folder: Path, name: str = "workload") -> tuple[Request, ...]:
    return workload.load(folder / f"{name}.jsonl").requests


def mooncake_row(at: int, ids: list[int], tail: int = 512, output: int = 5) -> str:
    length = 512 * (len(ids) - 1) + tail
    return json.dumps({"timestamp": at, "input_length": length, "output_length": output, "hash_ids": ids}) + "\n"


@st.composite
def traces(draw: st.DrawFn) -> list[str]:
    """Rows of Mooncake's format in prefix groups, each at a time of its own."""
    n = draw(st.integers(3, 40))
    stamps = draw(st.lists(st.integers(0, 60_000), min_size=n, max_size=n, unique=True))
    groups = draw(st.integers(1, 8))
    return [
        mooncake_row(at, [0, 1 + i % groups, 100 + i], tail=draw(st.integers(1, 511)), output=draw(st.integers(0, 9)))
        for i, at in enumerate(stamps)
    ]


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "rate_scale": st.sampled_from([0.3, 0.5, 1.5, 2.0]),
        "max_len": st.sampled_from([1100, 1300]),
        "shrink": st.sampled_from([2, 16]),
        "time_scale": st.sampled_from([0.5, 3.0]),
        "window": st.sampled_from(["5s", "20s"]),
        "seed": st.integers(0, 3),
    },
)
EXAMPLES = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EXAMPLES
@given(traces(), FLAGS)
def test_every_row_is_kept_or_counted(tmp_path_factory: pytest.TempPathFactory, rows: list[str], flags: Any) -> None:
    """Rows read = rows kept + rows dropped, whatever is done; the rows kept are those in the files, once each."""
    folder = tmp_path_factory.mktemp("w")
    (folder / "t.jsonl").write_text("".join(rows))
    try:
        said = imported(folder / "t.jsonl", folder / "w", **flags)
    except SpecError:  # too short for the window, or nothing left
        assert not (folder / "w").exists()
        return
    lines = {row.source_line for name in said["files"] for row in rows_of(folder / "w", name)}

    assert said["rows_read"] == len(rows) == said["rows_kept"] + sum(said["dropped"].values())
    assert said["rows_kept"] == len(lines)


@EXAMPLES
@given(traces(), FLAGS, st.randoms(use_true_random=False))
def test_the_order_of_the_file_means_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], flags: Any, rng: random.Random
) -> None:
    """Rows with distinct stamps may stand anywhere: proxies log at completion."""
    folder = tmp_path_factory.mktemp("w")
    shuffled = rng.sample(rows, len(rows))
    prints = []
    for name, lines in (("a", rows), ("b", shuffled)):
        (folder / f"{name}.jsonl").write_text("".join(lines))
        try:
            prints.append(imported(folder / f"{name}.jsonl", folder / name, **flags)["fingerprint"])
        except SpecError as error:
            prints.append(error.message.partition(":")[2])

    assert prints[0] == prints[1]


def test_the_same_seed_gives_the_same_bytes_in_two_processes(tmp_path: Path) -> None:
    """Nothing depends on Python's string hash, the time or the process."""
    flags = ["--rate-scale", "0.7", "--spread-steps", "--window", "90s", "--shrink", "16", "--max-len", "2048"]
    for name, seed in (("a", "1"), ("b", "2")):
        words = [sys.executable, "-m", "tuner", "import", str(MOONCAKE), "-o", str(tmp_path / name), *flags]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, timeout=60)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).glob("*.json*")} for name in ("a", "b")]

    assert files[0] == files[1]
    assert {"workload.jsonl", "confirm.jsonl", "history.jsonl", "confirm_history.jsonl"} <= files[0].keys()


def test_the_same_trace_in_two_formats_is_the_same_workload(tmp_path: Path) -> None:
    """Azure's wall clock and the simulators' seconds give one fingerprint; only the provenance differs."""
    lines = AZURE.read_bytes().splitlines(keepends=True)
    (tmp_path / "first1000.csv").write_bytes(b"".join(lines[:1001]))
    azure = imported(tmp_path / "first1000.csv", tmp_path / "a")
    splitwise = imported(SPLITWISE, tmp_path / "b")

    assert azure["fingerprint"] == splitwise["fingerprint"]
    assert (azure["format"], splitwise["format"]) == ("azure", "arrived-at")


def test_arrivals_are_rebased_and_exact_to_the_microsecond(tmp_path: Path) -> None:
    """A window of a trace does not start at zero; a wall clock has digits that a float of its size barely holds."""
    imported(MOONCAKE.with_name("conversation_t1200s_t1500s.jsonl"), tmp_path / "w")
    imported(AZURE, tmp_path / "azure")

    assert rows_of(tmp_path / "w")[0].arrival == 0
    assert [row.arrival for row in rows_of(tmp_path / "azure")[:3]] == [0.0, 4.314579, 4.541877]  # 46.680590, 50.995169


def test_thinning_keeps_whole_groups_at_the_rate_that_is_wanted(tmp_path: Path) -> None:
    """Reuse inside a group survives; thinning rows at random would lose a third of it."""
    said = imported(MOONCAKE, tmp_path / "half", rate_scale=0.5)
    imported(MOONCAKE, tmp_path / "all")
    whole, half = rows_of(tmp_path / "all"), rows_of(tmp_path / "half")
    groups = {row.block_ids[:2] for row in half if row.block_ids and len(row.block_ids) > 1}
    hits = [ideal_hits(rows, 16).sum() / sum(row.input_len for row in rows) for rows in (whole, half)]

    assert len(half) == pytest.approx(len(whole) / 2, rel=0.01)
    assert [row for row in whole if row.block_ids and row.block_ids[:2] in groups] == [
        row for row in half if row.block_ids and len(row.block_ids) > 1
    ]
    assert hits[1] > 0.85 * hits[0]
    assert said["dropped"] == {"thinned to the rate": len(whole) - len(half)}
    # The shape before and after: 2,000 rows in 669 s, whose dispersions are published.
    assert "2.99 -> 1.49 requests/s, dispersion at 1 s 7.0" in said["transforms"][0]


def test_a_doubled_rate_shares_nothing_between_the_copies(tmp_path: Path) -> None:
    """Twice the rows in the same time, half of them with block ids of their own."""
    imported(MOONCAKE, tmp_path / "all")
    imported(MOONCAKE, tmp_path / "twice", rate_scale=2)
    whole, twice = rows_of(tmp_path / "all"), rows_of(tmp_path / "twice")
    known = {block for row in whole for block in row.block_ids or ()}
    copies = [row for row in twice if not known & set(row.block_ids or ())]

    assert (len(twice), len(copies)) == (2 * len(whole), len(whole))
    assert twice[-1].arrival <= whole[-1].arrival
    # A copy is the recording turned around: its rows in another order, but all of them and their sharing.
    assert sorted(row.input_len for row in copies) == sorted(row.input_len for row in whole)
    assert len({row.block_ids[0] for row in copies if row.block_ids}) == 1


def test_rows_that_come_all_at_once_have_no_rate(tmp_path: Path) -> None:
    """Twice nothing is not told as twice something."""
    trace = tmp_path / "burst.jsonl"
    trace.write_text(mooncake_row(7, [1]) + mooncake_row(7, [2]))
    said = imported(trace, tmp_path / "w", rate_scale=2)

    assert said["transforms"] == [
        "rate scaled 2x (shifted copies with relabelled ids, seed 0): 4 of 2 rows"
    ]  # fmt: skip


def test_steps_are_spread_inside_themselves(tmp_path: Path) -> None:
    """Each row stays in the step in which it was stamped, in the recorded order."""
    said = imported(MOONCAKE, tmp_path / "spread", spread_steps=True)
    imported(MOONCAKE, tmp_path / "all")
    moved = [
        after.arrival - before.arrival
        for before, after in zip(rows_of(tmp_path / "all"), rows_of(tmp_path / "spread"), strict=True)
    ]

    assert 2.9 < np.ptp(moved) <= 3.001
    assert np.mean(moved) == pytest.approx(1.5, abs=0.1)
    assert said["transforms"] == ["arrivals spread evenly inside their steps of 3 s (seed 0)"]


def test_a_raised_rate_does_not_hide_the_steps(tmp_path: Path) -> None:
    """Copies lie beside one another on a clock that looks finer: the note says whose bursts those are."""
    stepped = imported(MOONCAKE, tmp_path / "twice", rate_scale=2)
    spread = imported(MOONCAKE, tmp_path / "spread", rate_scale=2, spread_steps=True)

    assert any("steps of 3 s" in note for note in stepped["notes"])
    assert not any("steps" in note for note in spread["notes"])


def test_steps_that_are_none_are_not_spread(tmp_path: Path) -> None:
    """A continuous clock is refused, by the flag's name."""
    with pytest.raises(SpecError, match="--spread-steps"):
        imported(AZURE, tmp_path / "w", spread_steps=True)


def test_shrinking_keeps_what_is_shared(tmp_path: Path) -> None:
    """Lengths are a sixteenth, rounded up; the ids stay, each now 32 tokens."""
    imported(MOONCAKE, tmp_path / "all")
    said = imported(MOONCAKE, tmp_path / "small", shrink=16, shrink_output=4)
    whole, small = rows_of(tmp_path / "all"), rows_of(tmp_path / "small")

    assert [row.input_len for row in small] == [-(-row.input_len // 16) for row in whole]
    assert [row.output_len for row in small] == [-(-row.output_len // 4) for row in whole]
    assert [row.block_ids for row in small] == [row.block_ids for row in whole]
    assert {row.block_size for row in small} == {32}
    assert any(words.startswith("SCALED") for words in said["transforms"])


def test_prompts_stay_where_only_answers_shrink_and_are_missed_where_they_cannot(tmp_path: Path) -> None:
    """A prompt of its own is no reason to be dropped in silence."""
    trace = tmp_path / "own.jsonl"
    trace.write_text('{"arrival_s": 0, "input_len": 4, "output_len": 8, "prompt": [5, 6, 7, 8]}\n')
    answers = imported(trace, tmp_path / "answers", shrink_output=4)
    both = imported(trace, tmp_path / "both", shrink=2)

    assert [(row.prompt, row.output_len) for row in rows_of(tmp_path / "answers")] == [((5, 6, 7, 8), 2)]
    assert [(row.prompt, row.input_len) for row in rows_of(tmp_path / "both")] == [(None, 2)]
    assert (answers["notes"], len(both["notes"])) == ([], 1)
    assert "prompts left out" in both["notes"][0]


def test_windows_are_like_the_whole_and_apart_from_each_other(tmp_path: Path) -> None:
    """The pair does not overlap, each starts at its own zero, and what came before is where it belongs."""
    said = imported(MOONCAKE, tmp_path / "w", window="2min")
    imported(MOONCAKE, tmp_path / "all")
    place = {row.source_line: row.arrival for row in rows_of(tmp_path / "all")}
    tune, confirm = (
        [(place[row.source_line], row.arrival) for row in rows_of(tmp_path / "w", name)]
        for name in ("workload", "confirm")
    )
    starts = [round(rows[0][0] - rows[0][1], 6) for rows in (tune, confirm)]

    assert abs(starts[0] - starts[1]) >= 120
    for start, rows in zip(starts, (tune, confirm), strict=True):
        assert all(at - start == pytest.approx(arrival, abs=1e-6) for at, arrival in rows)
        assert len(rows) == sum(start <= at < start + 120 for at in place.values())
    for start, name in zip(starts, ("history", "confirm_history"), strict=True):
        assert all(place[row.source_line] < start for row in rows_of(tmp_path / "w", name))
    assert sum(said["files"].values()) >= said["rows_kept"]


def test_the_history_that_is_kept_warms_as_all_of_it_would(tmp_path: Path) -> None:
    """Only the last user of a prefix that the window finds is kept, and nothing is lost by it."""
    imported(MOONCAKE, tmp_path / "w", window="2min")
    imported(MOONCAKE, tmp_path / "all")
    window, history = rows_of(tmp_path / "w"), rows_of(tmp_path / "w", "history")
    first = min(row.source_line or 0 for row in window)
    before = [row for row in rows_of(tmp_path / "all") if (row.source_line or 0) < first]

    assert len(history) < len(before) / 3
    assert np.array_equal(ideal_hits(window, 16, history), ideal_hits(window, 16, before))
    assert ideal_hits(window, 16, history).sum() > 1.3 * ideal_hits(window, 16).sum()


@pytest.mark.parametrize("flags", [{"rate_scale": 0.5}, {"rate_scale": 2.0}, {"time_scale": 2.0, "rate_scale": 0.7}])
def test_a_window_is_cut_after_the_rate_and_the_clock_are_changed(tmp_path: Path, flags: Any) -> None:
    """Both in one call give what the window of the changed trace gives: rows, confirm, and history."""
    at_once = imported(MOONCAKE, tmp_path / "at-once", window="90s", **flags)
    imported(MOONCAKE, tmp_path / "changed", **flags)
    then_cut = imported(tmp_path / "changed", tmp_path / "then-cut", window="90s")

    assert at_once["fingerprint"] == then_cut["fingerprint"]
    for name in ("workload", "confirm", "history", "confirm_history"):
        both = [
            [replace(row, source_line=None) for row in rows_of(tmp_path / folder, name)]
            for folder in ("at-once", "then-cut")
        ]
        assert both[0] == both[1], name


def test_what_was_done_to_a_workload_is_told_of_those_made_of_it(tmp_path: Path) -> None:
    """Scaled rows that are cut again are still scaled; what lies beside them is left behind, and that is said."""
    first = imported(MOONCAKE, tmp_path / "first", window="2min", shrink=16)
    second = imported(tmp_path / "first", tmp_path / "second", rate_scale=0.5)

    kept = [words for words in first["transforms"] if not words.startswith("confirm: ")]
    assert len(kept) == len(first["transforms"]) - 1
    assert second["transforms"][:-1] == kept
    assert second["transforms"][-1].startswith("rate scaled 0.5x")
    assert any("history.jsonl, confirm.jsonl, confirm_history.jsonl stay behind" in note for note in second["notes"])


def test_the_busiest_window_is_not_the_typical_one(tmp_path: Path) -> None:
    """A burst of ten times the rate in an even trace is chosen for neither window."""
    even = [i * 100 for i in range(6000)]
    burst = [300_000 + i * 10 for i in range(2000)]
    lines = [f"{at / 1e3},{200 + at % 7},{10 + at % 3}" for at in sorted(even + burst)]
    (tmp_path / "t.csv").write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]))
    intake.run(intake.wanted(tmp_path / "t.csv", tmp_path / "w", window="30s"))

    assert len(rows_of(tmp_path / "w")) < 400
    assert len(rows_of(tmp_path / "w", "confirm")) < 400


def test_a_trace_of_little_more_than_the_window_has_no_second_one(tmp_path: Path) -> None:
    """What is missing is said, not made of the same rows."""
    said = imported(AZURE, tmp_path / "w", window="10min")

    assert set(said["files"]) == {"workload"}
    assert any("no confirm.jsonl" in words for words in said["transforms"])


@pytest.mark.parametrize("flags", [{"time_scale": 0.001}, {"rate_scale": 2.0}, {"time_scale": 0.001, "window": "30s"}])
def test_a_clock_in_another_unit_is_scaled(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Milliseconds since 1970 taken for seconds are beyond all limits of a workload until they are rebased."""
    row = {"input_length": 40, "output_length": 5}
    stamps = [{**row, "timestamp": 1_700_000_000_000 + 500 * i, "hash_ids": [1, 2, i + 3]} for i in range(200)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stamps))
    said = imported(tmp_path / "t.jsonl", tmp_path / "w", format="vllm-timed-trace", time_unit="s", **flags)

    assert said["rows_kept"] > 0
    assert rows_of(tmp_path / "w")[0].arrival < 1


def test_hours_that_each_trial_would_replay_are_said(tmp_path: Path) -> None:
    """With the way out; a window is as long as somebody wanted it."""
    (tmp_path / "t.csv").write_text(
        "\n".join(
            ["arrived_at,num_prefill_tokens,num_decode_tokens", *(f"{i * 10},{100 + i % 7},5" for i in range(800))]
        )
    )
    whole, part = (
        imported(tmp_path / "t.csv", tmp_path / "a"),
        imported(tmp_path / "t.csv", tmp_path / "b", window="1h"),
    )

    assert any(note.startswith("from first to last row 2 h 13 min, and each trial") for note in whole["notes"])
    assert not any("each trial replays" in note for note in part["notes"])


def test_prompts_are_for_their_owners_eyes(tmp_path: Path) -> None:
    """Files with somebody's text are as a recording's are; lengths and block ids are for all."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"arrival_s": 0, "input_len": 2, "output_len": 5, "prompt": [7, 8]}))
    imported(tmp_path / "p.jsonl", tmp_path / "with")
    imported(AZURE, tmp_path / "without")

    (tmp_path / "any").touch()
    files = [tmp_path / "any", *(tmp_path / name / "workload.jsonl" for name in ("with", "without"))]
    usual, own, others = (file.stat().st_mode & 0o777 for file in files)
    assert (own, others) == (0o600, usual)


def test_times_are_scaled_on_request(tmp_path: Path) -> None:
    """Half the pace: every arrival at twice its time."""
    imported(AZURE, tmp_path / "all")
    imported(AZURE, tmp_path / "slow", time_scale=2.0)
    arrivals = [np.array([row.arrival for row in rows_of(tmp_path / name)]) for name in ("all", "slow")]

    assert np.allclose(arrivals[1], 2 * arrivals[0], atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_len": 0}, "--max-len 0"),
        ({"shrink": 0}, "--shrink 0"),
        ({"rate_scale": 0.0}, "--rate-scale 0"),
        ({"rate_scale": float("nan")}, "--rate-scale nan"),
        ({"time_scale": -1.0}, "--time-scale -1"),
        ({"window": "600"}, "--window 600"),
        ({"window": "0s"}, "--window 0s"),
        ({"window": "9h"}, "the trace lasts"),
        ({"format": "csv"}, "--format csv"),
        ({"time_unit": "min"}, "--time-unit"),
        ({"rate": "fast"}, "--rate"),
        ({"max_len": 1}, "none of 3,000 rows is left"),
        ({"rate_scale": 1e-5}, "no row is left"),
    ],
)
def test_flags_that_are_wrong_are_named_and_nothing_is_written(tmp_path: Path, flags: Any, says: str) -> None:
    """The folder is there whole or not at all."""
    with pytest.raises(SpecError, match=says):
        imported(AZURE, tmp_path / "w", **flags)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [{"template_tokens": 7}, {"keep_prompts": True}, {"block_size": 32}])
def test_flags_about_counted_text_need_a_tokenizer(tmp_path: Path, flags: Any) -> None:
    """Without one no text is counted, cut or kept, and the flag would be ignored."""
    spans = Path(__file__).parent / "data" / "llm_request_spans.jsonl"
    with pytest.raises(SpecError, match="without --tokenizer"):
        imported(spans, tmp_path / "w", **flags)


def test_times_that_no_workload_may_have_are_refused(tmp_path: Path) -> None:
    """What is written can be read again: a month, a million times as long, cannot."""
    trace = tmp_path / "month.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n2600000,5,5\n")

    with pytest.raises(SpecError, match="--time-scale 900000: the last arrival"):
        imported(trace, tmp_path / "w", time_scale=900_000.0)


def test_copies_whose_ids_would_be_too_large_are_refused(tmp_path: Path) -> None:
    """Hashes of 63 bits leave no room for others: what is written can be read again."""
    trace = tmp_path / "hashes.jsonl"
    trace.write_text(mooncake_row(0, [2**62]) + mooncake_row(1000, [2**62 + 1]))

    with pytest.raises(SpecError, match="--rate-scale 2: with block ids up to"):
        imported(trace, tmp_path / "w", rate_scale=2)


def test_the_rate_that_is_advised_is_taken(tmp_path: Path) -> None:
    """Whoever does what the message says gets on."""
    trace = tmp_path / "custom.jsonl"
    trace.write_text('{"prompt": "a", "output_tokens": 5}\n')
    with pytest.raises(SpecError) as caught:
        clock.drawn(Options(), Source(trace))
    advised = str(caught.value.hint).partition("--rate ")[2].split()[0]

    assert intake.wanted(trace, tmp_path / "w", rate=advised).options.rate == 2


def test_text_without_lengths_asks_for_a_tokenizer(tmp_path: Path) -> None:
    """Spans without usage leave no row; the message says how their text is counted."""
    with pytest.raises(SpecError, match="none of 4 rows is left") as caught:
        imported(TRACES / "otel_genai_spans" / "fan_in_dependencies.json", tmp_path / "w")

    assert caught.value.hint == "name the model's tokenizer: --tokenizer FOLDER or MODEL"


def test_blocks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """512 tokens a block cannot be a third."""
    with pytest.raises(SpecError, match="--shrink 3: blocks of 512"):
        imported(MOONCAKE, tmp_path / "w", shrink=3)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """A workload is never written over."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "workload.jsonl").write_text("mine")

    with pytest.raises(SpecError, match="is there already"):
        imported(AZURE, tmp_path / "w")
    assert (tmp_path / "w" / "workload.jsonl").read_text() == "mine"


def test_a_traces_name_is_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    """Neither in the name of the folder that is made of it, nor where that is told."""
    trace = tmp_path / "re\x1b[31md\n.jsonl"
    trace.write_text(mooncake_row(0, [1]))
    folder = intake.wanted(trace, None).out
    found = intake.run(intake.wanted(trace, tmp_path / trace.stem))

    assert folder == Path("workloads/re [31md")
    assert all(line.isprintable() for line in intake.told(found))


@pytest.mark.parametrize("name", ["gone", "empty"])
def test_a_link_is_no_folder_to_make(tmp_path: Path, name: str) -> None:
    """A folder takes its name at the end, which a link has already, wherever it leads."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / name)

    with pytest.raises(SpecError, match="is there already"):
        imported(AZURE, tmp_path / "link")


def test_the_folder_one_stands_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wanted is a folder with a name."""
    monkeypatch.chdir(tmp_path)
    for here in (".", ".."):
        with pytest.raises(SpecError, match="somebody is in"):
            imported(AZURE, Path(here))


def test_a_folder_that_cannot_be_written_is_the_hosts_fault(tmp_path: Path) -> None:
    """A file stands where the folder should be made."""
    (tmp_path / "file").write_text("")

    with pytest.raises(HostError, match="cannot be made"):
        imported(AZURE, tmp_path / "file" / "w")


def test_a_million_rows_would_fit(tmp_path: Path) -> None:
    """More rows take less than 300 bytes of memory each, where a row of this trace has a kilobyte and more."""
    peaks = []
    for times in (5, 60):
        trace = tmp_path / f"{times}.jsonl"
        trace.write_bytes(MOONCAKE.read_bytes() * times)
        code = (
            "import resource, sys; from pathlib import Path; from tuner import intake;"
            "intake.run(intake.wanted(Path(sys.argv[1]), Path(sys.argv[2])));"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
        )
        words = [sys.executable, "-c", code, str(trace), str(tmp_path / f"w{times}")]
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=100)
        peaks.append(int(done.stdout))

    assert (peaks[1] - peaks[0]) / (55 * 2000) < 300


def test_defaults_change_nothing() -> None:
    """What was not asked for is not done."""
    assert Changes() == intake.wanted(AZURE, Path("nowhere")).changes
