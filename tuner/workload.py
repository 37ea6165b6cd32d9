"""A recorded workload: who asked for how many tokens, when.

A workload is a folder: `workload.jsonl` (the window a study tunes on), optionally `confirm.jsonl` (a
window the search never sees), and `history.jsonl` and `confirm_history.jsonl` (what came before each, for a warm
prefix cache). Rows are JSON objects, one a line; `arrival_s` is in seconds from the start of the window.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

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
GREATEST_BLOCK = 2**63 - 1
MOST_TOKENS = 10_000_000  # of one prompt or answer; a row of more would fill this host's memory

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=-LATEST, le=LATEST)]
Pause = Annotated[float, msgspec.Meta(ge=0, le=LATEST)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=GREATEST_BLOCK)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Request(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={"arrival": "arrival_s", "think_time": "think_time_s"},
):
    """One row: arrival in seconds from the window's start, lengths in tokens.

    Limits hold for rows that are decoded. Arrival may be on another clock, and lengths zero, until rows are kept.

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

    arrival: Seconds
    input_len: Tokens
    output_len: Tokens
    block_ids: tuple[BlockId, ...] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    id: str | None = None
    session: str | None = None
    parent: str | None = None
    think_time: Pause | None = None
    prompt: str | tuple[TokenId, ...] | None = None
    model: str | None = None
    endpoint: str | None = None
    source_line: int | None = None


FIELDS = Request.__struct_encode_fields__
MUST_BE = {  # in a workload; fields that are not here are text
    "arrival_s": "a number of seconds, zero or more",
    **dict.fromkeys(("input_len", "output_len"), f"a whole number of tokens from 1 to {MOST_TOKENS:,}"),
    "block_ids": "a list of whole numbers, zero or more",
    "block_size": "a whole number of tokens, 1 or more",
    "think_time_s": "a number of seconds, zero or more",
    "prompt": "text or a list of token ids",
    "source_line": "a whole number",
}
decoded = msgspec.json.Decoder(Request).decode


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
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise SpecError(f"{file}: cannot be read: {error}") from error
    rows = [_row(f"{file}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    return tuple(sorted(rows, key=lambda row: row.arrival))


def _row(where: str, line: bytes) -> Request:
    try:
        row = decoded(line)
    except msgspec.ValidationError as error:
        raise _refused(where, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{where}: not JSON: {error}", hint="one JSON object a line") from error
    too_small = {"arrival_s": row.arrival < 0, "input_len": not row.input_len, "output_len": not row.output_len}
    for field in (name for name, is_so in too_small.items() if is_so):
        raise SpecError(f"{where}: {field} must be {MUST_BE[field]}")
    if why := mismatch(row):
        raise SpecError(f"{where}: {why}")
    return row


def _refused(where: str, why: str) -> SpecError:
    """Return the error for a row of which msgspec says why it is none."""
    if why.startswith("Object contains unknown field"):
        return SpecError(f"{where}: {why}", hint=f"the fields are: {', '.join(FIELDS)}")
    field = next((name for name in FIELDS if re.search(rf"[.`]{name}\b", why)), None)
    if field is not None:
        return SpecError(f"{where}: {field} must be {MUST_BE.get(field, 'text')} ({why.partition(' - at')[0]})")
    return SpecError(f"{where}: not a row: {why}",
                     hint='a row looks like {"arrival_s": 0.5, "input_len": 120, "output_len": 30}')  # fmt: skip


def mismatch(row: Request) -> str | None:
    """Say what of a row contradicts its length."""
    if row.block_ids is not None:
        if row.block_size is None:
            return "block_ids need a block_size in tokens"
        if why := miscounted(len(row.block_ids), row.input_len, row.block_size):
            return why
    if isinstance(row.prompt, tuple) and len(row.prompt) != row.input_len:
        return f"the prompt has {len(row.prompt)} token ids, input_len says {row.input_len}"
    return None


def miscounted(count: int, input_len: int, block_size: int) -> str | None:
    """Say how many block ids a prompt of so many tokens should have, where it has others."""
    needed = -(-input_len // block_size)
    if count == needed:
        return None
    return f"{count} block ids for {input_len} tokens, which are {needed} blocks of {block_size}, the last one cut"


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
    return _encode(row) + b"\n"


def trusted(line: bytes) -> Request:
    """Return the row of a line that `encoded` made; limits are not looked at, nor are they for a row that is made."""
    said = msgspec.json.decode(line)
    listed = {name: tuple(said[name]) for name in ("block_ids", "prompt") if isinstance(said.get(name), list)}
    return Request(**{_FIELD[name]: value for name, value in (said | listed).items()})


def moved(line: bytes, arrival: float) -> bytes:
    """Return the line of a row as that of the same row at another arrival, which is its first field."""
    return b'{"arrival_s":' + _encode(arrival) + line[line.index(b",") :]


_encode = msgspec.json.Encoder().encode
_FIELD = dict(zip(Request.__struct_encode_fields__, Request.__struct_fields__, strict=True))


class Fingerprint:
    """SHA-256 of what is replayed: the rows without where they came from (model, endpoint, source line)."""

    ORIGIN = (b',"model":', b',"endpoint":', b',"source_line":')  # the last fields of a row, and nowhere inside of one

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Take the next row in, as it is encoded."""
        ends = [end for field in self.ORIGIN if (end := line.find(field)) >= 0]
        self._sha256.update(line[: min(ends)] + b"}\n" if ends else line)

    def hexdigest(self) -> str:
        """Return the fingerprint of the rows so far."""
        return self._sha256.hexdigest()
