"""A CSV with a header: columns are found by name, wherever they stand, and decoded to their types.

A row is decoded as the JSON array of its fields, by msgspec's lax rules (a number may be text): types and limits are
said as for formats in JSON, and it is as fast.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from tuner.readers.format import Options, Read, taken
from tuner.readers.source import LONGEST_LINE, Damaged, Source, Tally
from tuner.workload import Request

BACKSLASH = ord("\\")  # as a number: to look for bytes in bytes takes five times as long
csv.field_size_limit(LONGEST_LINE)  # of the whole process: exports hold prompts, and lines are limited already
Values = tuple[Any, ...]
Fields = Callable[[Values, int], Request | str]


def by_csv(
    columns: Mapping[str, Any], make: Callable[[Options, Tally], Fields], may_have: Mapping[str, Any] | None = None
) -> Read:
    """Return the reader of a CSV with a header.

    Args:
        columns: that the file must have, with the type of each.
        make: returns the function from a row's values, in the order of `columns` and `may_have`, and its line to a
            request, or to the reason why it is dropped.
        may_have: columns that it need not have; the value of one that is not there is None.
    """
    wanted = {**columns, **(may_have or {})}

    def read(source: Source, options: Options, tally: Tally) -> Iterator[Request]:
        lines = source.lines()
        first = next(lines, None)
        if first is None:
            return
        try:
            header = _header(first[1], columns, wanted)
        except Damaged as error:
            raise source.refused(first[0], str(error), "the first line names the columns") from error
        values, fields = _decoder(header, wanted), make(options, tally)
        yield from taken(lines, lambda line, number: fields(values(line), number), tally)

    return read


def _header(line: bytes, needed: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Return the names of the columns.

    Raises:
        Damaged: one that is needed is not there, or one that is wanted is there twice.
    """
    header = [name.strip() for name in split(line)]
    for name in needed:
        if name not in header:
            raise Damaged(f"no column {name!r}; the columns are {', '.join(map(repr, header))[:200]}")
    for name in wanted:
        if header.count(name) > 1:
            raise Damaged(f"{header.count(name)} columns are called {name!r}")
    return header


def _decoder(header: Sequence[str], wanted: Mapping[str, Any]) -> Callable[[bytes], Values]:
    """Return the function from a line to the values that are wanted."""
    missing = [name for name in wanted if name not in header]
    nones = [None for _ in missing]
    types = (*(wanted.get(name, str) for name in header), *nones)
    end = b'"' + b",null" * len(missing) + b"]"
    decode = msgspec.json.Decoder(tuple[types], strict=False).decode  # type: ignore[valid-type]

    def row(line: bytes) -> Values:
        if BACKSLASH not in line:
            try:
                return decode(b'["' + line.replace(b",", b'","') + end)
            except msgspec.MsgspecError:
                pass  # a quoted field, or a wrong one
        fields = split(line)
        if len(fields) != len(header):
            raise Damaged(f"{len(fields)} fields, where the header has {len(header)}")
        try:
            return decode(msgspec.json.encode([*fields, *nones]))
        except msgspec.ValidationError as error:
            why = _named(str(error), header, fields)
        try:  # numbers may be padded
            return decode(msgspec.json.encode([*(field.strip() for field in fields), *nones]))
        except msgspec.ValidationError as error:
            raise Damaged(why) from error

    there = [*header, *missing]
    if there == list(wanted):
        return row
    chosen = itemgetter(*(there.index(name) for name in wanted))
    return lambda line: chosen(row(line))


def _named(why: str, header: Sequence[str], fields: Sequence[str]) -> str:
    words, _, place = why.partition(" - at `$[")
    column = int(place.rstrip("]`"))
    return f"{header[column]} is {fields[column][:40]!r}: {words}"


def split(line: bytes) -> list[str]:
    """Return the fields of a CSV's line; a quoted field ends where its line does.

    Raises:
        Damaged: a quote is left open, or it is no UTF-8.
    """
    try:
        return next(csv.reader([line.decode()], strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise Damaged(f"no CSV: {error}") from error
