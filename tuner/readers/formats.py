"""The table of formats, and which of them a file is."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tuner.errors import SpecError
from tuner.readers import (
    arrived_at,
    azure,
    bailian,
    burstgpt,
    langfuse,
    litellm,
    mooncake,
    openai_batch,
    otel,
    timed,
    tracelab,
    tune,
    vllm_custom,
)
from tuner.readers.format import Format, Head
from tuner.readers.source import Damaged, Source
from tuner.readers.table import split

FORMATS: Mapping[str, Format] = {
    known.name: known
    for known in (
        mooncake.FORMAT,
        azure.FORMAT,
        burstgpt.FORMAT,
        arrived_at.FORMAT,
        bailian.FORMAT,
        tracelab.FORMAT,
        otel.FORMAT,
        litellm.FORMAT,
        langfuse.FORMAT,
        openai_batch.FORMAT,
        tune.FORMAT,
        vllm_custom.FORMAT,
        timed.PROMPTS,
        timed.LENGTHS,
    )
}


def at(path: Path) -> Source:
    """Return the source that a path means: a file, or the rows in the folder of a workload of ours."""
    rows = path / "workload.jsonl"
    return Source(rows if rows.is_file() else path)


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
    seen = beginning(source)
    found = [known for known in FORMATS.values() if known.is_this(seen)]
    if len(found) == 1:
        return found[0]
    keys = ", ".join(sorted(seen.keys)[:8]) or "nothing that is known"
    which = " or ".join(known.name for known in found) or "one of: " + ", ".join(FORMATS)
    why = "several formats begin so" if found else "no format that is known begins so"
    raise SpecError(
        f"{source.path}: {why} ({'keys' if seen.is_json else 'columns'}: {keys})", hint=f"say --format {which}"
    )


def beginning(source: Source) -> Head:
    """Return the beginning of a file, as `Format.is_this` looks at it.

    Raises:
        SpecError: the file is empty, or cannot be read.
    """
    text = source.head()
    lines = text.splitlines()
    if not text.strip():
        raise SpecError(f"{source.path}: no rows", hint="the file is empty")
    first = _first_object(text)
    if first is not None:
        return Head(frozenset(first), is_json=True, first=first)
    try:
        columns = split(next(line for line in lines if line.strip()))
    except Damaged:
        columns = []
    return Head(frozenset(name.strip() for name in columns), is_json=False)


def _first_object(text: bytes) -> dict[str, object] | None:
    """Return the first line's JSON object, or the document's, or the first one of its list, as far as it is there."""
    for candidate in (next(line for line in text.splitlines() if line.strip()), text):
        try:
            value = msgspec.json.decode(candidate)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict):
            return value
    return _cut(text.decode(errors="replace").lstrip().removeprefix("[").lstrip())


def _cut(text: str) -> dict[str, object] | None:
    """Return what is whole of a JSON object that goes on beyond the text; the last key has None."""
    if not text.startswith("{"):
        return None
    found: dict[str, object] = {}
    decode, at = json.JSONDecoder().raw_decode, 1
    while key := KEY.match(text, at):
        try:
            found[name := json.loads(key[1])] = None
            found[name], at = decode(text, key.end())
        except (ValueError, RecursionError):
            break
    return found or None


KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
