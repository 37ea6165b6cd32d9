"""`processes.jsonl`: which servers a run started and saw end, one JSON object a line."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def append(path: Path, **entry: Any) -> None:
    """Add one line; a single write, so that lines of several writers do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"at": round(time.time(), 3), **entry}) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def unended(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of servers that started and were not seen to end, in order.

    What is no such entry is left out: the journal of a run that came from elsewhere may say anything.
    """
    started: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            event, marker = entry["event"], entry["marker"]
        except (ValueError, KeyError, TypeError, RecursionError):  # or the last line of a host that lost power
            continue
        if not isinstance(marker, str):
            continue
        if event == "started":
            started[marker] = entry
        else:
            started.pop(marker, None)
    yield from started.values()
