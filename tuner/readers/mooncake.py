"""Mooncake's JSONL (FAST'25 release): `timestamp` in ms, lengths, and an id for each 512 tokens of the prompt.

Format: github.com/kvcache-ai/Mooncake, FAST25-release/traces. The last block may be partial, and its id belongs to
that partial block alone.
"""

from typing import Annotated

import msgspec

from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Format, Head, Options, Row, by_line, check_blocks
from tuner.readers.source import Tally
from tuner.workload import LATEST, BlockId, Request, Tokens

BLOCK = 512
KEYS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
MOST_TAILS = 1_000_000  # so many ids are remembered to see one used twice
SHARED_TAIL = "a block id that was another row's partial tail is used for a full block"


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=-LATEST, le=LATEST * 1e3)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...]


def _make(options: Options, tally: Tally) -> Row:
    size = options.block_size or BLOCK
    decode = msgspec.json.Decoder(_Line).decode
    tails: set[int] = set()

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        ids, input_len = found.hash_ids, found.input_length
        if len(ids) != -(-input_len // size):
            check_blocks(len(ids), input_len, size)
        if not input_len:
            return NO_PROMPT
        if not found.output_length:
            return NO_OUTPUT
        if input_len % size:
            if not tails.isdisjoint(ids[:-1]):
                tally.note(SHARED_TAIL, number)
            if len(tails) < MOST_TAILS:
                tails.add(ids[-1])
        elif not tails.isdisjoint(ids):
            tally.note(SHARED_TAIL, number)
        return Request(found.timestamp / 1e3, input_len, found.output_length, ids, size, source_line=number)

    return row


def _is_this(head: Head) -> bool:
    """Return whether the first row is Mooncake's: others have its keys too, with seconds or smaller blocks."""
    if not head.is_json or not head.keys >= KEYS or "chat_id" in head.keys:
        return False
    stamp, length, ids = (head.first.get(key) for key in ("timestamp", "input_length", "hash_ids"))
    is_counted = isinstance(length, int) and isinstance(ids, list) and len(ids) == -(-length // BLOCK)
    return isinstance(stamp, int) and is_counted


FORMAT = Format(
    name="mooncake",
    title="Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
    is_this=_is_this,
    read=by_line(_make),
    takes=frozenset({"block_size"}),
)
