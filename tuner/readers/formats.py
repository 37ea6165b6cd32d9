"""The table of formats, and which of them a file is."""

import csv
from collections.abc import Mapping

import msgspec

from tuner.errors import SpecError
from tuner.readers import arrived_at, azure, burstgpt, mooncake
from tuner.readers.format import Format, Head
from tuner.readers.source import Source

FORMATS: Mapping[str, Format] = {
    reader.FORMAT.name: reader.FORMAT for reader in (mooncake, azure, burstgpt, arrived_at)
}


def named(name: str) -> Format:
    """Return the format of this name.

    Raises:
        SpecError: there is none; lists them.
    """
    if name not in FORMATS:
        raise SpecError(f"--format {name}: no such format", hint=f"one of: {', '.join(FORMATS)}")
    return FORMATS[name]


def recognise(source: Source) -> Format:
    """Return the format that a file certainly has.

    Raises:
        SpecError: the file is empty, or its beginning is that of no format, or of several.
    """
    head = _head(source)
    found = [known for known in FORMATS.values() if known.is_this(head)]
    if len(found) == 1:
        return found[0]
    seen = ", ".join(sorted(head.keys)[:8]) or "nothing that is known"
    which = " or ".join(known.name for known in found) or "one of: " + ", ".join(FORMATS)
    why = "several formats begin so" if found else "no format that is known begins so"
    raise SpecError(
        f"{source.path}: {why} ({'keys' if head.is_json else 'columns'}: {seen})", hint=f"say --format {which}"
    )


def _head(source: Source) -> Head:
    text = source.head()
    lines = text.splitlines()
    if not text.strip():
        raise SpecError(f"{source.path}: no rows", hint="the file is empty")
    first = _first_object(text)
    if first is not None:
        return Head(frozenset(first), is_json=True, first=first)
    line = next(line for line in lines if line.strip()).decode(errors="replace")
    return Head(frozenset(name.strip() for name in next(csv.reader([line]), [])), is_json=False)


def _first_object(text: bytes) -> dict[str, object] | None:
    """Return the first line's JSON object, or the document's, or the first one of its list."""
    for candidate in (next(line for line in text.splitlines() if line.strip()), text):
        try:
            value = msgspec.json.decode(candidate)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict):
            return value
    return None
