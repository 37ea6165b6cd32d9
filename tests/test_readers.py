"""Published traces: every row is read or counted, times are exact to the microsecond, nothing rests on the order.

What is expected is taken from the files in another way: counts from their descriptions, times from the digits.
"""

import csv
import gzip
import json
import random
import re
import tracemalloc
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace
from reader_data import (
    BURST_1,
    BURST_3,
    CODE,
    CODE_END,
    CONV,
    LANGFUSE,
    MOONCAKE,
    MOONCAKE_LATER,
    SAMPLES,
    SPANS,
    SPLITWISE,
    SYNTHETIC,
    TRACELAB,
    TRACES,
    jsonl,
    letters,
    read,
    written,
)

from tuner.errors import SpecError
from tuner.readers.format import Options
from tuner.readers.formats import FORMATS, at, beginning, named, recognise
from tuner.readers.source import Source, Tally
from tuner.workload import Request, encoded

COUNTED = Options(tokenize=letters)


@pytest.mark.parametrize(
    ("path", "name", "rows", "dropped"),
    [
        (MOONCAKE, "mooncake", 2000, {}),
        (MOONCAKE_LATER, "mooncake", 1007, {}),
        (SYNTHETIC, "mooncake", 1000, {}),
        (CODE, "azure", 2000, {}),
        (CODE_END, "azure", 300, {}),
        (CONV, "azure", 3000, {}),
        (BURST_1, "burstgpt", 400, {"failed call (no tokens at all)": 17}),
        (BURST_3, "burstgpt", 59, {}),
        (SPLITWISE, "arrived-at", 1000, {}),
        (SPANS / "simple_chain.json", "otel", 3, {}),
        (SPANS / "fan_in_dependencies.json", "otel", 4, {}),
        (SPANS / "parallel_requests.json", "otel", 5, {}),
        (SPANS / "prefix_sharing_example.json", "otel", 7, {}),
        (TRACELAB, "tracelab", 19, {}),
    ],
)
def test_every_row_of_a_published_window_is_read_or_counted(
    path: Path, name: str, rows: int, dropped: dict[str, int]
) -> None:
    """The windows have the rows that their description says; what is left out is told by reason."""
    kept, tally = read(path, COUNTED)

    assert recognise(Source(path)).name == name
    assert (tally.read, len(kept), dict(tally.dropped)) == (rows, rows - sum(dropped.values()), dropped)


# --- Azure ------------------------------------------------------------------------------------------------


def microseconds(stamp: str) -> int:
    """Return a time of day in whole microseconds, from its digits."""
    hours, minutes, seconds = stamp.partition(" ")[2].split(":")
    return int(hours) * 3_600_000_000 + int(minutes) * 60_000_000 + int(Decimal(seconds[:9]) * 1_000_000)


def test_seven_digits_of_a_fraction_are_read_to_the_microsecond() -> None:
    """Azure's 2023 stamps have seven digits, of which six are kept; gaps are those of the digits."""
    rows, _ = read(CONV)
    lines = list(csv.reader(CONV.read_text().splitlines()))[1:]
    expected = [microseconds(line[0][:26]) for line in lines]

    found = [round((row.arrival - rows[0].arrival) * 1e6) for row in rows]
    assert found == [stamp - expected[0] for stamp in expected]


def test_the_same_trace_in_two_formats_is_the_same() -> None:
    """Azure's conversation trace and Splitwise's copy of it: row for row, to the microsecond."""
    azure, splitwise = read(CONV)[0][:1000], read(SPLITWISE)[0]

    def shape(rows: list[Request]) -> list[tuple[int, int, int]]:
        return [(round((row.arrival - rows[0].arrival) * 1e6), row.input_len, row.output_len) for row in rows]

    assert shape(azure) == shape(splitwise)


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "1715299200.00993"),
        ("2024-05-10 00:00:00+00:00", "1715299200"),
        ("2024-05-10 02:00:00+02:00", "1715299200"),
        ("2024-05-10 00:00:00.000001", "1715299200.000001"),
        ("2023-11-16 18:17:03.9799600", "1700158623.97996"),
        ("2023-11-16T18:17:03.979960Z", "1700158623.97996"),
    ],
)
def test_azures_clocks_of_both_years_are_read(tmp_path: Path, stamp: str, seconds: str) -> None:
    """With and without fraction, offset and zone, in one file."""
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{stamp},5,6\n"
    (row,), _ = read(written(tmp_path, text))

    assert round(row.arrival * 1e6) == int(Decimal(seconds) * 1_000_000)


def test_rows_with_images_are_counted(tmp_path: Path) -> None:
    """The multimodal trace says how many images a prompt had: such rows cannot be replayed as text."""
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2025-01-01 00:00:00,{},5,6\n2025-01-01 00:00:01,0,5,6\n"
    rows, tally = read(written(tmp_path, text.format(2)))

    assert (len(rows), dict(tally.dropped)) == (1, {"images in the prompt": 1})


# --- BurstGPT ---------------------------------------------------------------------------------------------


def test_burstgpts_columns_are_found_by_name() -> None:
    """The newer form inserts two columns in the middle; sessions and models come from where they stand."""
    rows, _ = read(BURST_3)
    lines = list(csv.DictReader(BURST_3.read_text().splitlines()))

    assert [(r.session, r.model, r.input_len, r.output_len) for r in rows] == [
        (line["Session ID"] or None, line["Model"], int(line["Request tokens"]), int(line["Response tokens"]))
        for line in lines
    ]


def test_large_stamps_keep_their_seconds() -> None:
    """Stamps near 2e7 are the recorded ones: as float32 they would be off by a second."""
    rows, _ = read(BURST_3)
    stamps = [Decimal(line.partition(",")[0]) for line in BURST_3.read_text().splitlines()[1:]]

    assert [Decimal(row.arrival) for row in rows] == stamps
    assert min(stamps) > 1.9e7


# --- Mooncake ---------------------------------------------------------------------------------------------


def test_mooncakes_rows_are_the_files(tmp_path: Path) -> None:
    """Milliseconds become seconds, ids stay ids of 512 tokens."""
    rows, tally = read(MOONCAKE_LATER)
    lines = [json.loads(line) for line in MOONCAKE_LATER.read_text().splitlines()]

    assert [(round(r.arrival * 1e6), r.input_len, r.output_len, list(r.block_ids or ())) for r in rows] == [
        (line["timestamp"] * 1000, line["input_length"], line["output_length"], line["hash_ids"]) for line in lines
    ]
    assert {row.block_size for row in rows} == {512}
    assert not tally.notes


@pytest.mark.parametrize("count", [1, 3])
def test_a_prompt_has_as_many_ids_as_blocks(tmp_path: Path, count: int) -> None:
    """1000 tokens are two blocks of 512: one id (rounded down) or three are refused with the line."""
    good = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    path = written(tmp_path, jsonl(good, {**good, "hash_ids": list(range(count))}))

    with pytest.raises(SpecError, match=re.escape(f"{path}:2: {count} block ids for 1000 tokens, which are 2 blocks")):
        read(path)


def test_a_tail_that_is_used_as_a_whole_block_is_told_with_its_line(tmp_path: Path) -> None:
    """Report 16 (aiperf#1208, PR1219): converted traces reuse a partial tail's id; what it shares is not certain."""
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    path = written(tmp_path, jsonl(row, {**row, "input_length": 1536, "hash_ids": [1, 2, 3]}))

    rows, tally = read(path)
    assert len(rows) == 2
    assert [note for note in tally.noted if "partial tail" in note and "first on line 2" in note]


def test_rows_without_output_are_counted(tmp_path: Path) -> None:
    """Nothing can be timed where nothing is generated."""
    row = {"timestamp": 0, "input_length": 10, "output_length": 0, "hash_ids": [1]}
    rows, tally = read(written(tmp_path, jsonl(row, {**row, "output_length": 1})))

    assert (len(rows), dict(tally.dropped)) == (1, {"no output tokens": 1})


def test_a_raw_trace_goes_through_to_a_workload(tmp_path: Path) -> None:
    """Report 24 (sglang#12601, PR12603, PR20461, PR37201): rows of a raw trace become rows that can be replayed."""
    rows, _ = read(MOONCAKE)
    ours = written(tmp_path, b"".join(encoded(replace(row, arrival=row.arrival - rows[0].arrival)) for row in rows))

    again, _ = read(ours)
    assert recognise(Source(ours)).name == "tune"
    assert [(r.input_len, r.output_len, r.block_ids) for r in again] == [
        (r.input_len, r.output_len, r.block_ids) for r in rows
    ]


@pytest.mark.parametrize("name", ["mooncake", "bailian", "litellm", "langfuse", "otel", "timed-prompts", "tune"])
def test_a_row_without_a_time_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    """Report 26 (dynamo PR8998): a missing time is no zero."""
    sample = SAMPLES[name]
    first = json.loads(sample.text.splitlines()[0])
    times = {"timestamp", "startTime", "start_time", "arrival_s"}
    path = written(tmp_path, sample.text + jsonl({key: value for key, value in first.items() if key not in times}))

    with pytest.raises(SpecError, match=rf"{re.escape(str(path))}:{sample.text.count(chr(10)) + 1}: .*(time|arrival)"):
        read(path, sample.options, name=name)


# --- Whatever the file looks like -------------------------------------------------------------------------


def known_as(path: Path) -> list[str]:
    """Return all formats that a file is taken for."""
    return [known.name for known in FORMATS.values() if known.is_this(beginning(Source(path)))]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_format_is_recognised_as_itself_alone(tmp_path: Path, name: str) -> None:
    """No sample is taken for another format; vLLM's timed trace is never recognised, as others have its keys."""
    path = written(tmp_path, SAMPLES[name].text)

    assert known_as(path) == ([] if name == "vllm-timed-trace" else [name])


@pytest.mark.parametrize(
    "path", [p for p in sorted(TRACES.rglob("*")) if p.suffix in (".jsonl", ".json", ".csv")], ids=lambda p: p.stem
)
def test_a_published_file_is_recognised_as_one_format(path: Path) -> None:
    """Nothing that was published is of two formats."""
    assert len(known_as(path)) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 0.5, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": list(range(38))},
    ],
)
def test_mooncakes_keys_with_other_units_are_not_recognised(tmp_path: Path, row: dict[str, object]) -> None:
    """Seconds, or blocks of 16, under the same keys: the user is asked rather than a unit guessed."""
    path = written(tmp_path, jsonl(row))

    with pytest.raises(SpecError, match="no format that is known begins so") as caught:
        recognise(Source(path))
    assert "--format" in str(caught.value.hint)


def test_a_large_document_is_recognised_by_its_beginning(tmp_path: Path) -> None:
    """A document whose first megabyte ends in the middle is known by the keys that are whole."""
    document = json.loads((SPANS / "simple_chain.json").read_text())
    document["spans"] *= 2000
    path = written(tmp_path, json.dumps(document, indent=1))

    assert path.stat().st_size > 2**21
    assert recognise(Source(path)).name == "otel"
    assert recognise(Source(written(tmp_path, json.dumps([LANGFUSE] * 5000, indent=1), "list"))).name == "langfuse"


def test_an_unknown_file_is_asked_for(tmp_path: Path) -> None:
    """A file of no format is refused with what it begins with and the names of the formats."""
    path = written(tmp_path, '{"when": 1}\n')

    with pytest.raises(SpecError, match=r"begins so \(keys: when\)") as caught:
        recognise(Source(path))
    assert "mooncake" in str(caught.value.hint)


def test_a_format_that_is_not_there_is_refused() -> None:
    """A name that is none is answered with the names that are."""
    with pytest.raises(SpecError, match="--format mooncke: no such format") as caught:
        named("mooncke")
    assert "mooncake" in str(caught.value.hint)


def test_the_folder_of_a_workload_is_a_source(tmp_path: Path) -> None:
    """A workload of ours is imported by its folder, to cut a window of it."""
    written(tmp_path, SAMPLES["tune"].text, "workload.jsonl")

    assert len(read(at(tmp_path))[0]) == 2


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("change", ["mark", "crlf", "gzip", "blank", "no_end"])
def test_marks_line_ends_and_gzip_change_nothing(tmp_path: Path, name: str, change: str) -> None:
    """A byte order mark, CRLF, compression, blank lines and a last line without an end leave the rows as they are."""
    sample = SAMPLES[name]
    text = sample.text.encode()
    changed = {
        "mark": b"\xef\xbb\xbf" + text,
        "crlf": text.replace(b"\n", b"\r\n"),
        "gzip": gzip.compress(text),
        "blank": text.replace(b"\n", b"\n\n"),
        "no_end": text.removesuffix(b"\n"),
    }[change]

    plain, _ = read(written(tmp_path, text, "plain"), sample.options, name=name)
    rows, tally = read(written(tmp_path, changed, "changed"), sample.options, name=name)
    assert len(plain) == sample.rows
    assert [replace_line(row) for row in rows] == [replace_line(row) for row in plain]
    if name != "vllm-timed-trace":
        assert recognise(tally.source).name == name


def replace_line(row: Request) -> Request:
    return replace(row, source_line=None)


@pytest.mark.parametrize(
    ("path", "options"),
    [(MOONCAKE, Options()), (CONV, Options()), (BURST_1, Options()), (SPLITWISE, Options()), (TRACELAB, Options())],
    ids=lambda value: getattr(value, "stem", ""),
)
def test_the_order_of_rows_changes_nothing(tmp_path: Path, path: Path, options: Options) -> None:
    """A log is written at completion: shuffled lines give the same rows, up to the numbering of new block ids."""
    head, *lines = path.read_text().splitlines(keepends=True)
    if path.suffix == ".jsonl":
        head, lines = "", [head, *lines]
    random.Random(7).shuffle(lines)
    shuffled, tally = read(written(tmp_path, head + "".join(lines)), options)
    rows, before = read(path, options)

    assert by_time(shuffled) == by_time(rows)
    assert tally.dropped == before.dropped


def by_time(rows: list[Request]) -> list[Request]:
    """Return rows in order, with block ids renumbered by their appearance in it and without their lines."""
    numbers: dict[int, int] = {}

    def renumbered(row: Request) -> Request:
        ids = None if row.block_ids is None else tuple(numbers.setdefault(i, len(numbers)) for i in row.block_ids)
        return replace(row, block_ids=ids, source_line=None)

    order = sorted(rows, key=lambda row: (row.arrival, row.input_len, row.output_len, row.block_ids or ()))
    return [renumbered(row) for row in order]


# --- Memory and speed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MOONCAKE, CONV, BURST_1, SPLITWISE], ids=lambda path: path.stem)
def test_rows_are_not_held(tmp_path: Path, path: Path) -> None:
    """Report 18 (aiperf PR1407): a hundred times the rows are read in the memory of a few, one after the other."""
    head, *lines = path.read_bytes().splitlines(keepends=True)[:201]
    text = b"".join(lines) * 100
    many = written(tmp_path, head + text if path.suffix == ".csv" else text)
    known, source = recognise(Source(many)), Source(many)
    tracemalloc.start()
    try:
        count = sum(1 for _ in known.read(source, Options(), Tally(source)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count > 18_000
    assert peak < 1_500_000
