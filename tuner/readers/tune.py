"""Our own `workload.jsonl`, read once more: to cut a window of it, or to merge what was recorded."""

from typing import Annotated

import msgspec

from tuner.readers.format import (
    NO_OUTPUT,
    NO_PROMPT,
    BlockId,
    Format,
    Head,
    Options,
    Row,
    Seconds,
    Tokens,
    by_line,
    check_blocks,
)
from tuner.readers.source import Damaged, Tally
from tuner.workload import LATEST, Request

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    arrival_s: Seconds
    input_len: Tokens
    output_len: Tokens
    block_ids: tuple[BlockId, ...] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    id: str | None = None
    session: str | None = None
    parent: str | None = None
    think_time_s: Annotated[float, msgspec.Meta(ge=0, le=LATEST)] | None = None
    prompt: str | tuple[TokenId, ...] | None = None
    model: str | None = None
    endpoint: str | None = None
    source_line: int | None = None


def _make(_options: Options, _tally: Tally) -> Row:
    decode = msgspec.json.Decoder(_Line).decode

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        if not found.input_len:
            return NO_PROMPT
        if not found.output_len:
            return NO_OUTPUT
        _check(found)
        return Request(
            found.arrival_s, found.input_len, found.output_len, found.block_ids, found.block_size, found.id,
            found.session, found.parent, found.think_time_s, found.prompt, found.model, found.endpoint, number,
        )  # fmt: skip

    return row


def _check(found: _Line) -> None:
    if found.block_ids is not None:
        if found.block_size is None:
            raise Damaged("block_ids need a block_size in tokens")
        check_blocks(len(found.block_ids), found.input_len, found.block_size)
    if isinstance(found.prompt, tuple) and len(found.prompt) != found.input_len:
        raise Damaged(f"the prompt has {len(found.prompt)} token ids, input_len says {found.input_len}")


def _is_this(head: Head) -> bool:
    return head.is_json and {"arrival_s", "input_len", "output_len"} <= head.keys


FORMAT = Format(
    name="tune",
    title="a workload of ours, JSONL: arrival_s, input_len, output_len",
    is_this=_is_this,
    read=by_line(_make),
)
