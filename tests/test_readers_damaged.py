"""Damaged files of every format: an error with its line or a counted drop, in bounded memory, never a traceback."""

import gzip
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reader_data import LANGFUSE, LITELLM, MOONCAKE, SAMPLES, SPAN, SPANS, jsonl, read, written

from tuner.errors import SpecError
from tuner.readers import source as sources
from tuner.readers.formats import recognise
from tuner.readers.source import Source
from tuner.workload import Request

JUNK = ["NaN", "-1", "1e400", "-1e400", '"x"', "null", "[]", "{}", "true", "1.5", "9" * 20, "Infinity", ""]
NUMBER_OR_TEXT = re.compile(rb'-?\d+(?:\.\d+)?|"[^"]*"|null|\[|\{')


def is_sound(row: Request) -> bool:
    """Return whether a row can be replayed."""
    blocks = row.block_ids is None or len(row.block_ids) == -(-row.input_len // (row.block_size or 1))
    return row.input_len >= 1 and row.output_len >= 1 and math.isfinite(row.arrival) and blocks


def outcome(path: Path, name: str, *, skip_damaged: bool) -> list[Request] | SpecError:
    """Return the rows, which are sound and add up, or the error."""
    try:
        rows, _ = read(path, SAMPLES[name].options, name=name, skip_damaged=skip_damaged)
    except SpecError as error:
        return error
    assert all(map(is_sound, rows))
    return rows


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_or_read(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """A piece is taken out at any byte: what is left is read, or refused by file and line; skipping leaves the rest."""
    text = SAMPLES[name].text.encode()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    instead = data.draw(st.sampled_from([b"", b"\xff", b"\0", b'"', b"\n"]))
    path = written(tmp_path, text[:start] + instead + text[stop:])

    found = outcome(path, name, skip_damaged=False)
    skipped = outcome(path, name, skip_damaged=True)
    if isinstance(found, SpecError):
        assert str(path) in str(found)
    else:
        assert found == skipped


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_value_of_another_kind_is_refused_or_dropped(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Any value becomes NaN, negative, endless, text, nothing, a list: the row is refused with its line, or sound."""
    text = SAMPLES[name].text.encode()
    places = [match.span() for match in NUMBER_OR_TEXT.finditer(text)]
    start, stop = data.draw(st.sampled_from(places))
    path = written(tmp_path, text[:start] + data.draw(st.sampled_from(JUNK)).encode() + text[stop:])

    found = outcome(path, name, skip_damaged=False)
    if isinstance(found, SpecError):
        assert re.match(rf"{re.escape(str(path))}:\d+: ", str(found))
    outcome(path, name, skip_damaged=True)


@pytest.mark.parametrize("name", SAMPLES)
def test_each_line_cut_in_half_is_told_with_its_number(tmp_path: Path, name: str) -> None:
    """The last line of a log that was being written: refused with its number, or dropped and counted."""
    sample = SAMPLES[name]
    lines = sample.text.splitlines()
    path = written(tmp_path, "\n".join([*lines, lines[-1][: len(lines[-1]) // 3].rstrip(",")]))

    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:{len(lines) + 1}: ") as caught:
        read(path, sample.options, name=name)
    assert "--skip-damaged" in str(caught.value.hint)
    rows, tally = read(path, sample.options, name=name, skip_damaged=True)
    assert (len(rows), tally.dropped["damaged"]) == (sample.rows, 1)
    assert any(f"first on line {len(lines) + 1}" in note for note in tally.noted)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mooncake", "timestamp"), ("mooncake", "input_length"), ("bailian", "output_length"), ("bailian", "timestamp"),
        ("tracelab", "input_tokens_total"), ("tracelab", "output_tokens"), ("litellm", "prompt_tokens"),
        ("litellm", "startTime"), ("tune", "arrival_s"), ("tune", "input_len"), ("vllm-timed-trace", "timestamp"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", "-1e400", "1e300", '"7"', "[7]", "null", "true"])
def test_numbers_that_are_none_are_damage(tmp_path: Path, name: str, key: str, value: str) -> None:
    """What is no finite number within reason is never a length or a time."""
    sample = SAMPLES[name]
    rows = [json.loads(line) for line in sample.text.splitlines()]
    rows[-1] = {**rows[0], key: "@"}
    if name == "litellm" and value == '"7"' and key == "startTime":
        value = '"7 o\'clock"'
    path = written(tmp_path, jsonl(*rows).replace('"@"', value))

    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:{len(rows)}: "):
        read(path, sample.options, name=name)


@pytest.mark.parametrize(
    ("name", "key"), [("mooncake", "input_length"), ("bailian", "output_length"), ("litellm", "completion_tokens")]
)
@pytest.mark.parametrize("value", ["-1", "10000001", "1.5"])
def test_lengths_are_whole_and_within_reason(tmp_path: Path, name: str, key: str, value: str) -> None:
    """No negative, no fraction, no row that would fill the memory of the host that replays it."""
    first = json.loads(SAMPLES[name].text.splitlines()[0])
    path = written(tmp_path, jsonl({**first, key: "@"}).replace('"@"', value))

    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:1: .*{key}"):
        read(path, name=name)


@pytest.mark.parametrize("nano", ["-5", "1.5", "x", "123456789012345678901", ""])
def test_nanoseconds_are_whole(tmp_path: Path, nano: str) -> None:
    """A span's time in nanoseconds is a whole number, or there is no arrival."""
    row = {key: value for key, value in SPAN.items() if key != "start_time"}
    path = written(tmp_path, jsonl({**row, "startTimeUnixNano": nano}))

    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:1: .*(nanoseconds|no arrival time)"):
        read(path, name="otel")


# --- Files that are no text, or no rows -------------------------------------------------------------------


def test_lines_of_spaces_are_blank(tmp_path: Path) -> None:
    """An editor leaves them behind; they are no rows."""
    path = written(tmp_path, SAMPLES["mooncake"].text.replace("\n", "\n  \t\r\n"))
    rows, tally = read(path)

    assert (len(rows), tally.read) == (SAMPLES["mooncake"].rows, SAMPLES["mooncake"].rows)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """A trace is read more than once; waiting for a writer would be for ever."""
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(SpecError, match="no file that can be read twice"):
        recognise(Source(tmp_path / "pipe"))


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff"], ids=["empty", "blank", "mark"])
@pytest.mark.parametrize("name", ["mooncake", "azure", "otel", "langfuse", "tracelab", "bailian"])
def test_a_file_without_rows_has_none(tmp_path: Path, name: str, text: str) -> None:
    """Nothing is recognised in it, and nothing is read."""
    path = written(tmp_path, text)

    with pytest.raises(SpecError, match=re.escape(f"{path}: no rows")):
        recognise(Source(path))
    rows, tally = read(path, name=name)
    assert (rows, tally.read) == ([], 0)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_other_encodings_are_refused(tmp_path: Path, encoding: str) -> None:
    """UTF-16 with its mark is named; without, or in another encoding, the line is."""
    row = {**SPAN, "name": "chat café"}
    path = written(tmp_path, json.dumps(row, ensure_ascii=False).encode(encoding))

    with pytest.raises(SpecError, match=re.escape(str(path))) as caught:
        read(path, name="otel")
    assert ("iconv" in str(caught.value.hint)) == (encoding == "utf-16")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    """As is a folder that is no workload."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SpecError, match=re.escape(f"{path}: cannot be read")):
            recognise(Source(path))


@pytest.mark.parametrize("end", [100, -8])
def test_a_gzip_file_that_was_cut_is_told(tmp_path: Path, end: int) -> None:
    """Cut in the middle or before its checksum, it is not taken for a shorter trace."""
    path = written(tmp_path, gzip.compress(MOONCAKE.read_bytes())[:end])

    with pytest.raises(SpecError, match=re.escape(f"{path}: cannot be read")) as caught:
        read(path, name="mooncake")
    assert "gzip" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["otel", "langfuse", "litellm"])
def test_a_document_that_was_cut_is_told_with_its_line(tmp_path: Path, name: str) -> None:
    """One document is whole or it is none: also with damaged rows skipped, the line where it breaks is named."""
    document = [SPAN, SPAN] if name == "otel" else [LANGFUSE] if name == "langfuse" else [LITELLM]
    text = json.dumps(document, indent=1)
    path = written(tmp_path, text[: len(text) * 2 // 3])

    for skip_damaged in (False, True):
        with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:\d+: one document, and damaged: "):
            read(path, name=name, skip_damaged=skip_damaged)


def test_a_damaged_span_of_a_document_is_told_with_its_line(tmp_path: Path) -> None:
    """A span without a name in an indented document: the line on which it begins."""
    document = json.loads((SPANS / "fan_in_dependencies.json").read_text())
    del document["spans"][2]["name"]
    text = json.dumps(document, indent=1)
    path = written(tmp_path, text)
    line = text[: text.index("span_003")].count("\n") - 1

    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:{line}: .*`name`"):
        read(path, SAMPLES["openai-batch"].options)
    rows, tally = read(path, SAMPLES["openai-batch"].options, skip_damaged=True)
    assert (len(rows), dict(tally.dropped)) == (3, {"damaged": 1})


@pytest.mark.parametrize("name", ["otel", "langfuse", "litellm", "openai-batch"])
def test_deep_nesting_is_damage(tmp_path: Path, name: str) -> None:
    """A hundred thousand brackets are no traceback."""
    sample = SAMPLES[name]
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    path = written(tmp_path, sample.text + deep + "\n")

    with pytest.raises(SpecError, match=rf"^{re.escape(str(path))}:{sample.text.count(chr(10)) + 1}: "):
        read(path, sample.options, name=name)


# --- Memory -----------------------------------------------------------------------------------------------


def test_a_line_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its number; a line of the longest length is read."""
    line = MOONCAKE.read_bytes().splitlines(keepends=True)[0]
    monkeypatch.setattr(sources, "LONGEST_LINE", len(line))
    path = written(tmp_path, line * 2 + b" " + line)

    with pytest.raises(SpecError, match=re.escape(f"{path}:3: a line of more than")):
        read(path, name="mooncake")
    assert len(read(written(tmp_path, line * 2))[0]) == 2


READING = """
import sys
from pathlib import Path
from tuner.errors import SpecError
from tuner.readers.format import Options
from tuner.readers.formats import FORMATS, recognise
from tuner.readers.source import Source, Tally
source = Source(Path(sys.argv[1]))
for name in FORMATS:
    try:
        for row in FORMATS[name].read(source, Options(tokenize=len, rate=1.0, time_unit=1.0), Tally(source)):
            pass
        print(name, "read")
    except SpecError as error:
        print(name, error)
try:
    recognise(source)
except SpecError as error:
    print(error)
"""


@pytest.mark.once
@pytest.mark.parametrize("kind", ["sparse", "bomb"])
def test_a_gigabyte_in_one_line_is_refused_in_little_memory(tmp_path: Path, kind: str) -> None:
    """A gigabyte of nothing, on disk or unzipped, in 700 MB of address space: every format refuses it."""
    path = tmp_path / "trace"
    with path.open("wb") as file:
        if kind == "sparse":
            file.truncate(2**30)
        else:
            with gzip.open(file, "wb", compresslevel=1) as zipped:
                for _ in range(64):
                    zipped.write(bytes(2**24))

    limited = subprocess.run(
        [sys.executable, "-c", READING, str(path)], capture_output=True, text=True, timeout=100, check=False,
        cwd=Path(__file__).parent.parent, env={"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": "."},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (700 * 2**20,) * 2),
    )  # fmt: skip
    assert limited.returncode == 0, limited.stderr[-500:]
    said = limited.stdout.splitlines()
    assert len(said) == len(SAMPLES) + 1
    assert all(f"{path}:1: a line of more than 64 MiB" in line for line in said[:-1]), said


# --- Numbers that add up ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from(["good", "damaged", "useless"]), min_size=1, max_size=12), name=st.sampled_from(
    ["mooncake", "bailian", "tracelab", "litellm", "langfuse", "otel", "openai-batch", "tune"]
))  # fmt: skip
def test_rows_read_are_rows_kept_and_dropped(tmp_path: Path, kinds: list[str], name: str) -> None:
    """Good rows are kept, damaged ones and useless ones counted, in any mixture."""
    first = json.loads(SAMPLES[name].text.splitlines()[0])
    useless: dict[str, dict[str, Any]] = {
        "mooncake": {"output_length": 0}, "bailian": {"output_length": 0}, "tracelab": {"output_tokens": 0},
        "litellm": {"status": "failure"}, "langfuse": {"type": "SPAN"}, "otel": {"status": {"code": 2}},
        "openai-batch": {"url": "/v1/embeddings"}, "tune": {"output_len": 0},
    }  # fmt: skip
    lines = []
    for number, kind in enumerate(kinds):
        own = {"otel": {"span_id": f"s{number}"}, "langfuse": {"id": f"o{number}"}}.get(name, {})
        row = json.dumps({**first, **own, **(useless[name] if kind == "useless" else {})})
        lines.append(row[:-9] if kind == "damaged" else row)
    rows, tally = read(written(tmp_path, "\n".join(lines)), SAMPLES[name].options, name=name, skip_damaged=True)

    assert len(rows) == kinds.count("good")
    assert tally.read == len(kinds)
    assert tally.dropped["damaged"] == kinds.count("damaged")
    assert tally.dropped.total() == len(kinds) - kinds.count("good")
