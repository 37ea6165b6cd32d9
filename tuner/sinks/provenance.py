"""Where a workload's rows came from, as it is written beside them: `source.json` of an import, `recording.json`.

These files may be anybody's: what is not as it should be is left out, nothing in them is believed, and what is shown
of them goes through `plain`. A workload without them is as good.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.sinks.runfolder import write_atomically
from tuner.sinks.words import plain

FILES = ("source.json", "recording.json")
LARGEST = 1_000_000  # bytes of such a file
LONGEST, MOST = 300, 40  # characters of a text, entries of a list
FACTS = {
    "source": "source",
    "format": "format",
    "source_sha256": "SHA-256 of the source",
    "fingerprint": "fingerprint",
    "started": "recording began",
    "hashed": "block ids made from",
    "block_size": "recorded block size, tokens",
    "rows_read": "rows read",
    "rows_kept": "rows kept",
    "requests": "requests seen",
    "rows": "rows recorded",
}
LOST = {"dropped": "dropped", "not_written": "not recorded", "without_block_ids": "without block ids"}
CUT = "the recording was cut off: requests of its last seconds may be missing"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What is written about the rows' origin, in words that can be shown.

    Attributes:
        facts: by label, in the order in which they are told.
        lost: rows that are not there or lack something, by what became of them and why.
        transforms: what was done to the rows.
        notes: what whoever wrote it wants to be known.
    """

    facts: Mapping[str, str]
    lost: Mapping[str, int]
    transforms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read(folder: Path) -> Provenance | None:
    """Return what is written in a workload's folder about its origin, None where nothing is."""
    found = [_of(path) for name in FILES if (path := folder / name).is_file()]
    if not found:
        return None
    return Provenance(
        facts={label: text for one in found for label, text in one.facts.items()},
        lost={reason: n for one in found for reason, n in one.lost.items()},
        transforms=tuple(text for one in found for text in one.transforms),
        notes=tuple(text for one in found for text in one.notes),
    )


def copy(workload: Path, folder: Path) -> None:
    """Take along what is written about the origin of a workload's rows; nothing where they are a file of their own.

    Raises:
        HostError: the disk is full or the folder cannot be written.
    """
    for file in (workload / name for name in FILES):
        if file.is_file():
            with suppress(OSError), file.open("rb") as opened:  # it may not be ours to read
                write_atomically(folder / file.name, opened.read(LARGEST))


def _of(file: Path) -> Provenance:
    try:
        with file.open("rb") as opened:
            data = json.loads(opened.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return Provenance({}, {}, notes=(f"{file.name} is damaged: what it says is not known",))
    if not isinstance(data, dict):
        return Provenance({}, {}, notes=(f"{file.name} is no JSON object: what it says is not known",))
    return Provenance(
        facts={label: text for key, label in FACTS.items() if (text := _fact(data.get(key)))},
        lost={f"{words}: {why}": n for key, words in LOST.items() for why, n in _counts(data.get(key)).items()},
        transforms=_texts(data.get("transforms")),
        notes=_texts(data.get("notes")) + ((CUT,) if data.get("was_cut") is True else ()),
    )


def _fact(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return _text(value) if isinstance(value, str) else ""


def _text(value: str) -> str:
    text = plain(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _texts(value: Any) -> tuple[str, ...]:
    some = value[:MOST] if isinstance(value, list) else []
    return tuple(_text(one) for one in some if isinstance(one, str))


def _counts(value: Any) -> dict[str, int]:
    some = list(value.items())[:MOST] if isinstance(value, dict) else []
    return {_text(why): n for why, n in some if isinstance(n, int) and not isinstance(n, bool)}
