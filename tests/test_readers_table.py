"""CSV as a whole: the fields of a row are those that Python's csv reads, and a wrong one is named."""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_data import written

from tuner.errors import SpecError
from tuner.readers.format import Options
from tuner.readers.source import Source, Tally
from tuner.readers.table import Fields, Values, by_csv
from tuner.workload import Request, Seconds, Tokens

COLUMNS = {"at": Seconds, "name": str, "tokens": Tokens}
MAY_HAVE = {"session": str, "images": Tokens}
LINE_ENDS = "\n\r"  # end a row wherever they stand
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LINE_ENDS), max_size=12)
ODD = st.text(st.sampled_from('",\\ \tné\x1f[]{}:'), max_size=8)


def seen(path: Path, *, skip_damaged: bool = False) -> tuple[list[Values], Tally]:
    """Return the values of each row as its format is given them."""
    values: list[Values] = []

    def make(_options: Options, _tally: Tally) -> Fields:
        def fields(row: Values, _line: int) -> Request | str:
            values.append(row)
            return "seen"

        return fields

    tally = Tally(Source(path), skip_damaged=skip_damaged)
    assert list(by_csv(COLUMNS, make, MAY_HAVE)(tally.source, Options(), tally)) == []
    return values, tally


def table(header: Sequence[str], *rows: Sequence[Any], **form: Any) -> str:
    """Return a CSV as Python writes it."""
    file = io.StringIO()
    csv.writer(file, **{"lineterminator": "\n", **form}).writerows([header, *rows])
    return file.getvalue()


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), TEXT | ODD, st.integers(0, 10**7), TEXT | ODD), min_size=1, max_size=5),
    st.permutations(["at", "name", "tokens", "session", "else"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
)
def test_every_csv_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[float, str, int, str]],
    header: list[str],
    quoting: Any,
) -> None:
    """Quotes, commas, backslashes and control characters included, in any order of columns, others passed over."""
    named = [dict(zip(("at", "name", "tokens", "session", "else"), (*row, row[1]), strict=True)) for row in rows]
    text = table(header, *([row[name] for name in header] for row in named), quoting=quoting)
    values, _ = seen(written(tmp_path_factory.mktemp("table"), text))

    assert values == [(at, name, tokens, session, None) for at, name, tokens, session in rows]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("soon,a,5", "at is 'soon': Expected `float`, got `str`"),
        ("nan,a,5", "at is 'nan': Expected `float` >= -1000000000000.0"),
        ("1e400,a,5", "at is '1e400': Number out of range"),
        ("1,a,", "tokens is '': Expected `int`, got `str`"),
        ("1,a,-1", "tokens is '-1': Expected `int` >= 0"),
        ("1,a,10000001", "tokens is '10000001': Expected `int` <= 10000000"),
        ("1,a,1.5", "tokens is '1.5': Expected `int`, got `str`"),
        ('1,"a,b",x', "tokens is 'x': Expected `int`, got `str`"),
        ("1,a\\,x", "tokens is 'x': Expected `int`, got `str`"),
        ("1,a", "2 fields, where the header has 3"),
        ("1,a,5,6", "4 fields, where the header has 3"),
        ('1,"a,5', "no CSV: unexpected end of data"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, row: str, says: str) -> None:
    """With its line, its column and what stands there; dropped and counted where that is wanted."""
    path = written(tmp_path, f"at,name,tokens\n1,a,5\n{row}\n2,b,6\n")

    with pytest.raises(SpecError, match=re.escape(f"{path}:3: {says}")):
        seen(path)
    values, tally = seen(path, skip_damaged=True)
    assert [value[2] for value in values] == [5, 6]
    assert dict(tally.dropped) == {"seen": 2, "damaged": 1}


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    """They are named like any other damage."""
    path = written(tmp_path, b"at,name,tokens\n1,\xff,5\n")

    with pytest.raises(SpecError, match=re.escape(f"{path}:2: no CSV: 'utf-8' codec")):
        seen(path)


def test_a_column_that_is_needed_is_missed_at_once(tmp_path: Path) -> None:
    """The message lists those that are there."""
    path = written(tmp_path, "at,tokens\n1,5\n")

    with pytest.raises(SpecError, match=re.escape(f"{path}:1: no column 'name'; the columns are 'at', 'tokens'")):
        seen(path)


@pytest.mark.parametrize("row", [" 1.0,a,5", "1.0 , a ,   5", "1.0,a,5 "])
def test_numbers_may_be_padded(tmp_path: Path, row: str) -> None:
    """As programs do that write columns of a width."""
    ((at, name, tokens, *_),), _ = seen(written(tmp_path, f"at,name,tokens\n{row}\n"))

    assert (at, name.strip(), tokens) == (1.0, "a", 5)


@pytest.mark.parametrize("name", ["tokens", "session"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, name: str) -> None:
    """Nobody knows which one is meant."""
    path = written(tmp_path, f"at,name,tokens,session,{name}\n1,a,5,s,6\n")

    with pytest.raises(SpecError, match=re.escape(f"{path}:1: 2 columns are called '{name}'")):
        seen(path)


def test_a_long_field_is_taken(tmp_path: Path) -> None:
    """Exports hold whole prompts: a quoted field may be longer than the 131,072 letters of Python's csv."""
    name = "a, " * 100_000
    values, _ = seen(written(tmp_path, table(["at", "name", "tokens"], [1, name, 5])))

    assert values == [(1.0, name, 5, None, None)]
