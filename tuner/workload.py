"""A recorded workload: who asked for how many tokens, when.

A workload is a folder: `workload.jsonl` (the window a study tunes on), optionally `confirm.jsonl` (a
window the search never sees), and `history.jsonl` and `confirm_history.jsonl` (what came before each, for a warm
prefix cache). Rows are JSON objects, one a line; `arrival_s` is in seconds from the start of the window.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace as changed

from tuner import transforms
from tuner.errors import SpecError
from tuner.outside import legible
from tuner.transforms import Columns

BESIDE = ("history.jsonl", "confirm.jsonl", "confirm_history.jsonl")  # files that a workload may have besides its rows
LATEST = 1e12  # later than any clock, and exact enough as a float
FIRST_MARK = "/"  # between the name of a row and the number of its copy
MOST_TOKENS = 10_000_000  # of one prompt or answer; a row of more would fill this host's memory


class Request(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"arrival": "arrival_s", "think_time": "think_time_s"}
):
    """One row: arrival in seconds from the window's start, lengths in tokens.

    Attributes:
        arrival: seconds, exact to the microsecond.
        input_len, output_len: tokens.
        block_ids, block_size: prompts that share leading ids share their tokens, `block_size` an id, the last cut.
        id: the row's own name, for rows whose `parent` it is.
        session: rows of one conversation share it.
        parent: the `id` of the row whose answer this one waited for; without, the row before it in its session.
        think_time: seconds from that answer's end to this arrival, where the trace knows them.
        prompt: text or token ids, where the trace has them.
        model, endpoint: as recorded.
        source_line: where the row was in the file it came from.
    """

    arrival: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] | None = None
    block_size: int | None = None
    id: str | None = None
    session: str | None = None
    parent: str | None = None
    think_time: float | None = None
    prompt: str | tuple[int, ...] | None = None
    model: str | None = None
    endpoint: str | None = None
    source_line: int | None = None


FIELDS = Request.__struct_encode_fields__


@dataclass(frozen=True, slots=True)
class Workload:
    """The rows of a window in order of arrival, and what identifies them.

    Attributes:
        name: the folder's name.
        requests: rows sorted by arrival, ties in file order.
        sha256: of the file's bytes, or of the file's and the transform's when rows were changed.
        history: rows that came before the window, in order, on a clock of their own.
        confirm: rows of a second window, which a search does not see.
        confirm_history: rows that came before that one.
        transforms: what was done to the recorded rows, in words, in order.
    """

    name: str
    requests: tuple[Request, ...]
    sha256: str
    history: tuple[Request, ...] = ()
    confirm: tuple[Request, ...] = ()
    confirm_history: tuple[Request, ...] = ()
    transforms: tuple[str, ...] = ()

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and output together."""
        return max(r.input_len + r.output_len for r in self.requests)


def load(path: Path) -> Workload:
    """Read a workload folder, or a single .jsonl file.

    Raises:
        SpecError: no such workload, or a row that cannot be replayed; says which line.
    """
    file = path / "workload.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise SpecError(f"{path}: no workload here", hint="give a folder with a workload.jsonl, or a .jsonl file")
    requests = _read(file)
    if not requests:
        raise SpecError(f"{file}: no rows", hint="a workload needs at least one request")
    history, confirm, confirm_history = (
        _read(path / name) if path.is_dir() and (path / name).is_file() else () for name in BESIDE
    )
    return Workload(
        name=legible(path.name if path.is_dir() else path.stem).replace("\n", " "),
        requests=requests,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        history=history,
        confirm=confirm,
        confirm_history=confirm_history,
    )


def _read(file: Path) -> tuple[Request, ...]:
    rows = [_row(file, number, line) for number, line in enumerate(_lines(file), start=1) if line.strip()]
    return tuple(sorted(rows, key=lambda row: row.arrival))


def _lines(file: Path) -> list[str]:
    try:
        # Not splitlines: a prompt may hold U+2028 and the like.
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: cannot be read: {error}") from error


def _row(file: Path, number: int, line: str) -> Request:
    where = f"{file}:{number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise SpecError(f"{where}: not JSON: {why}", hint="one JSON object a line") from error
    if not isinstance(data, dict):
        raise SpecError(
            f"{where}: not a JSON object",
            hint='a row looks like {"arrival_s": 0.5, "input_len": 120, "output_len": 30}',
        )
    if unknown := sorted(set(data) - set(FIELDS)):
        raise SpecError(f"{where}: unknown field {unknown[0]!r}", hint=f"the fields are: {', '.join(FIELDS)}")
    arrival = _number(where, data, "arrival_s")
    input_len = _whole(where, data, "input_len", least=1)
    output_len = _whole(where, data, "output_len", least=1)
    blocks, size = data.get("block_ids"), data.get("block_size")
    if blocks is not None:
        _check_blocks(where, blocks, size, input_len)
    for name in ("id", "session", "parent", "model", "endpoint"):
        if not isinstance(data.get(name), str | None):
            raise SpecError(f"{where}: {name} must be text, not {json.dumps(data[name])[:60]}")
    think_time = None if data.get("think_time_s") is None else _number(where, data, "think_time_s")
    prompt = data.get("prompt")
    if prompt is not None:
        _check_prompt(where, prompt, input_len)
    return Request(
        arrival=arrival, input_len=input_len, output_len=output_len,
        block_ids=None if blocks is None else tuple(blocks), block_size=size,
        id=data.get("id"), session=data.get("session"), parent=data.get("parent"), think_time=think_time,
        prompt=tuple(prompt) if isinstance(prompt, list) else prompt,
        model=data.get("model"), endpoint=data.get("endpoint"), source_line=data.get("source_line"),
    )  # fmt: skip


def _number(where: str, data: dict[str, object], name: str) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
        raise SpecError(f"{where}: {name} must be a number of seconds, zero or more, not {json.dumps(value)}")
    return float(value)


def _whole(where: str, data: dict[str, object], name: str, *, least: int) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS:
        raise SpecError(
            f"{where}: {name} must be a whole number of tokens from {least} to {MOST_TOKENS:,}, not {json.dumps(value)}"
        )
    return value


def _check_prompt(where: str, prompt: object, input_len: int) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        raise SpecError(f"{where}: prompt must be text or a list of token ids")
    if len(prompt) != input_len:
        raise SpecError(f"{where}: the prompt has {len(prompt)} token ids, input_len says {input_len}")


def _check_blocks(where: str, blocks: object, size: object, input_len: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise SpecError(f"{where}: block_ids need a block_size in tokens")
    if not isinstance(blocks, list) or not all(isinstance(b, int) and not isinstance(b, bool) for b in blocks):
        raise SpecError(f"{where}: block_ids must be a list of whole numbers")
    if len(blocks) != -(-input_len // size):
        raise SpecError(f"{where}: {len(blocks)} block ids for {input_len} tokens in blocks of {size}",
                        hint=f"this prompt has {-(-input_len // size)} blocks, the last one partial")  # fmt: skip


def check_fits(workload: Workload, max_model_len: int, *, hint: str | None = None) -> None:
    """Refuse a workload with a row longer than the model takes; `hint` says what to do.

    Raises:
        SpecError: names the first such row and how many there are.
    """
    over = [(i, r) for i, r in enumerate(workload.requests, start=1) if r.input_len + r.output_len > max_model_len]
    if over:
        number, row = over[0]
        line = f" (source line {row.source_line})" if row.source_line else ""
        raise SpecError(
            f"workload {workload.name}, row {number}{line}: {row.input_len} + {row.output_len} tokens are more than "
            f"max_model_len {max_model_len}; {len(over)} of {len(workload.requests)} rows are too long",
            hint=hint or "raise engine_args.max_model_len or use a workload whose rows fit",
        )


def scale_rate(workload: Workload, factor: float, seed: int) -> Workload:
    """Return the workload at `factor` times its request rate, on the recorded clock.

    Down: whole prefix groups are kept or dropped, so that reuse inside a group survives. Up: shifted
    copies with relabelled block ids and sessions are laid over the window, so that reuse is not doubled.
    """
    if factor == 1:
        return workload
    if not 0 < factor < np.inf:
        raise SpecError(f"--rate-scale {factor}: must be above zero", hint="0.5 halves the request rate")
    chosen = transforms.scale_rate(_columns(workload.requests), factor, np.random.default_rng(seed))
    if not len(chosen):
        raise SpecError(f"--rate-scale {factor}: no row is left", hint="use a larger factor")
    known = (*workload.requests, *workload.history)
    blocks = 1 + max((b for r in known for b in r.block_ids or ()), default=0)
    mark = FIRST_MARK
    for row in known:
        mark = unused_mark(row, mark)
    rows = tuple(
        changed(relabelled(workload.requests[row], copy, blocks, mark), arrival=arrival)
        for row, copy, arrival in zip(chosen.row.tolist(), chosen.copy.tolist(), chosen.arrival.tolist(), strict=True)
    )
    copies = range(int(chosen.copy.max()) + 1)  # each has a history of its own, or it would find a cold cache
    history = tuple(relabelled(row, copy, blocks, mark) for row in workload.history for copy in copies)
    counts = f"{len(rows)} of {len(workload.requests)} rows"
    words = f"rate scaled {factor:g}x (groups thinned, copies relabelled, seed {seed}): {counts}"
    digest = hashlib.sha256(f"{workload.sha256}/{words}".encode()).hexdigest()
    return replace(workload, requests=rows, history=history, sha256=digest, transforms=(*workload.transforms, words))


def _columns(rows: Sequence[Request]) -> Columns:
    groups: dict[object, int] = {}
    keys = (group_of(row) or place for place, row in enumerate(rows))
    group = [groups.setdefault(key, len(groups)) for key in keys]
    return Columns(
        np.array([row.arrival for row in rows]),
        np.array([row.input_len for row in rows]),
        np.array([row.output_len for row in rows]),
        np.array(group),
    )


def group_of(row: Request) -> str | tuple[int, ...] | None:
    """Return what names the rows that share a session, or the two blocks at their start; None for a row alone."""
    if row.session is not None:
        return row.session
    return row.block_ids[:2] if row.block_ids is not None and len(row.block_ids) > 1 else None


def unused_mark(row: Request, mark: str) -> str:
    """Return `mark`, longer where the row's names have it in them: a copy's name is that, and no original's.

    Rows that were copied before have names with a mark already.
    """
    for name in (row.id, row.session, row.parent):
        while name is not None and mark in name:
            mark += FIRST_MARK
    return mark


def relabelled(row: Request, copy: int, blocks: int, mark: str) -> Request:
    """Return the row as a copy that shares nothing with any original: block ids from `blocks` on, names with `mark`.

    Copy 0 is the original itself.
    """
    if not copy:
        return row

    def name(text: str | None) -> str | None:
        return None if text is None else f"{text}{mark}{copy}"

    ids = None if row.block_ids is None else tuple(block + copy * blocks for block in row.block_ids)
    return changed(row, block_ids=ids, id=name(row.id), session=name(row.session), parent=name(row.parent))


def to_jsonl(requests: Iterable[Request]) -> str:
    """Return rows in the form `load` reads."""
    return b"".join(encoded(row) for row in requests).decode()


def encoded(row: Request) -> bytes:
    """Return a row as a line of `workload.jsonl`."""
    return _ENCODER.encode(row) + b"\n"


_ENCODER = msgspec.json.Encoder()


class Fingerprint:
    """SHA-256 of what is replayed: the rows without where they came from (source line, model, endpoint)."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, row: Request) -> None:
        """Take the next row in."""
        self._sha256.update(encoded(changed(row, source_line=None, model=None, endpoint=None)))

    def hexdigest(self) -> str:
        """Return the fingerprint of the rows so far."""
        return self._sha256.hexdigest()
