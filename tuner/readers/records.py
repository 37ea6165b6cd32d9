"""JSON records wherever they stand: one a line, several in a line, or all in one document."""

import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from tuner.readers.format import DAMAGE, Options, Read, Row, taken
from tuner.readers.source import Source, Tally
from tuner.workload import Request

Split = Callable[[bytes], Iterable[bytes | msgspec.Raw]]

AT_BYTE = re.compile(r"\(byte (\d+)\)")


def by_record(split: Split, make: Callable[[Options, Tally], Row]) -> Read:
    """Return the reader of a format whose records may be lines of a file or parts of one document.

    Args:
        split: returns the records of a JSON text, each a slice of it, in order.
        make: returns the function from a record and its line to a request, or to the reason why it is dropped, as
            `by_line` takes it.
    """

    def read(source: Source, options: Options, tally: Tally) -> Iterator[Request]:
        return taken(_records(source, split, tally), make(options, tally), tally)

    return read


def listed(text: bytes) -> Iterable[bytes | msgspec.Raw]:
    """Return the elements of a JSON list, or the one record that a text is."""
    return _LIST.decode(text) if text.lstrip()[:1] == b"[" else (text,)


def _records(source: Source, split: Split, tally: Tally) -> Iterator[tuple[int, bytes]]:
    if _is_one_document(source):
        yield from _located(*_document(source, split), 1)
        return
    for number, line in source.lines():
        try:
            records = split(line)
        except DAMAGE as error:
            tally.read += 1
            tally.damaged(number, error)
            continue
        for record in records:
            yield number, bytes(record)


def _is_one_document(source: Source) -> bool:
    """Return whether the first line is only the beginning of a JSON text, which the second one goes on with."""
    lines = [line for line in source.head().splitlines() if line.strip()]
    if len(lines) < 2:
        return False
    try:
        _RAW.decode(lines[0])
    except DAMAGE:
        return not lines[1].startswith(b"{") or lines[0].strip() == b"["
    return False


def _document(source: Source, split: Split) -> tuple[bytes, list[bytes | msgspec.Raw]]:
    text = source.whole()
    try:
        return text, list(split(text))
    except DAMAGE as error:
        at = AT_BYTE.search(str(error))
        line = 1 + text.count(b"\n", 0, int(at[1])) if at else 1
        why = f"one document, and damaged: {str(error).removesuffix(at[0] if at else '')}".strip()
        raise source.refused(line, why, "export it again, or with a record a line") from error


def _located(text: bytes, records: Iterable[bytes | msgspec.Raw], line: int) -> Iterator[tuple[int, bytes]]:
    """Yield each record with the line on which it begins."""
    seen = 0
    for part in records:
        record = bytes(part)
        at = max(seen, text.find(record, seen))
        line += text.count(b"\n", seen, at)
        yield line, record
        line += record.count(b"\n")
        seen = at + len(record)


_RAW = msgspec.json.Decoder(msgspec.Raw)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
