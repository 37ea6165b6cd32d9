"""The YAML text of a study file: its values, and the lines on which its keys stand."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from tuner.errors import SpecError
from tuner.topologies import ROLES

MOST_CHARACTERS, MOST_VALUES = 1 << 20, 100_000


def text_of(path: Path) -> str:
    """Return the text of a file that a person wrote.

    Raises:
        OSError, ValueError: it cannot be read, or is no such file.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS:,} characters")
    return text


def read(text: str, source: str) -> Any:
    """Return the mapping that a YAML text is, its lines kept; `source` names it in errors.

    Raises:
        SpecError: not YAML, not a mapping, a key twice, or more than a person writes; says where.
    """
    try:
        data = YAML(typ="rt").load(text)
        check_size(data)
    except DuplicateKeyError as error:
        mark = error.problem_mark
        match = re.search(r'duplicate key "?([^"\s]+)"?', str(error.problem))
        raise SpecError(f"{source}:{mark.line + 1}: the key {match[1] if match else ''!r} stands here twice",
                        hint="keep one of them") from error  # fmt: skip
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"{source}:{line}: not YAML: {error.problem}") from error
    except (ValueError, RecursionError, YAMLError) as error:  # a number of thousands of digits, braces in braces
        raise SpecError(f"{source}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{source}:1: a study is a mapping of keys", hint="see studies/ for examples")
    return data


def check_size(data: Any) -> None:
    """Raise ValueError where there is more than a person writes: anchors make billions of values of a few lines."""
    found, waiting = 0, [data]
    while waiting:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if (found := found + len(inner)) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        waiting.extend(inner)


def plain(value: Any) -> Any:
    """Return ruamel's round-trip values as plain Python ones, lists as tuples."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def put(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a value by its dotted path, as a flag gives it."""
    *parents, last = _keys(dotted)
    for name in parents:
        inner = data.get(name)
        if isinstance(inner, str) and name == "workload":
            inner = {"path": inner}
        data[name] = inner = dict(inner) if isinstance(inner, dict) else {}
        data = inner
    data[last] = value


def _keys(dotted: str) -> list[str]:
    """Return the keys of a path; a role and its argument are one: engine_args, decoder.max_num_seqs."""
    parts = dotted.split(".")
    if parts[0] in {"engine_args", "search_space"} and len(parts) > 2 and parts[1] in ROLES:
        parts[1:3] = [f"{parts[1]}.{parts[2]}"]
    return parts


def line_of(data: Any, loc: Sequence[Any]) -> int:
    """Return the line on which a key stands, or the nearest one above it that there is."""
    line = 1
    for part in loc:
        if isinstance(data, CommentedMap) and part in data:
            line = data.lc.key(part)[0] + 1
            data = data[part]
        elif isinstance(data, CommentedSeq) and isinstance(part, int) and part < len(data):
            line = data.lc.item(part)[0] + 1
            data = data[part]
        else:
            break
    return int(line)


def where(study: Path, dotted: str) -> str:
    """Return "FILE:LINE" of a key of a study file, for errors found after it was read."""
    try:
        data = YAML(typ="rt").load(study.read_text(encoding="utf-8"))
    except (OSError, MarkedYAMLError):
        return str(study)
    return f"{study}:{line_of(data, _keys(dotted))}"
