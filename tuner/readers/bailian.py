"""Qwen-Bailian's JSONL: chats with their parents, seconds, lengths, and an id for each 16 tokens of the prompt.

Format: github.com/alibaba-edu/qwen-bailian-usagetraces-anon. Each block was hashed with one salt for the file, so that
ids of two files have nothing in common; a turn's prompt holds the chat before it. Two prompts share the tokens of
their equal leading ids, whether the hashes were chained or not. How long a turn's author thought is not known, since
only the times of requests are.
"""

from typing import Annotated

import msgspec

from tuner.readers.format import DAMAGE, NO_OUTPUT, NO_PROMPT, Format, Head, Options, Row, by_line, check_blocks
from tuner.readers.source import Source, Tally
from tuner.workload import BlockId, Request, Seconds, Tokens

BLOCK = 16
ROOT = -1
UNKNOWN = 2**29  # beyond the ids of any file: from here on are those of tails that it gives none for
WITHOUT_TAIL = "no block id for the partial last block: it is taken as shared with nobody"
MEDIA = "an image or a file in the prompt"

ChatId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Chat(msgspec.Struct):
    chat_id: ChatId
    parent_chat_id: ChatId


class _Line(_Chat):
    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...]
    type: str | None = None
    turn: int | None = None


def _make(options: Options, tally: Tally) -> Row:
    size = options.block_size or BLOCK
    decode = msgspec.json.Decoder(_Line).decode
    parents = _parents(tally.source)

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        if not found.input_length:
            return NO_PROMPT
        if not found.output_length:
            return NO_OUTPUT
        ids = found.hash_ids
        if found.input_length % size and len(ids) == found.input_length // size:
            tally.note(WITHOUT_TAIL, number)
            ids = (*ids, UNKNOWN + number)
        check_blocks(len(ids), found.input_length, size)
        chat, parent = found.chat_id, found.parent_chat_id
        return Request(
            found.timestamp, found.input_length, found.output_length, ids, size, source_line=number,
            id=str(chat), session=str(_root(chat, parents)), parent=None if parent == ROOT else str(parent),
        )  # fmt: skip

    return row


def _parents(source: Source) -> dict[int, int]:
    """Return the parent of each chat that has one, from a first reading: a turn may stand before its parent."""
    decode = msgspec.json.Decoder(_Chat).decode
    parents = {}
    for _, line in source.lines():
        try:
            found = decode(line)
        except DAMAGE:
            continue
        if found.parent_chat_id != ROOT:
            parents[found.chat_id] = found.parent_chat_id
    return parents


def _root(chat: int, parents: dict[int, int]) -> int:
    """Return the first chat of a turn's conversation, or the earliest that is known of it.

    What was walked through is short-cut for the turns that follow, and a circle is cut where it closes.
    """
    seen = {chat}
    while (parent := parents.get(chat, ROOT)) != ROOT and parent not in seen:
        seen.add(parent)
        chat = parent
    parents.update(dict.fromkeys(seen, chat))
    parents.pop(chat, None)
    return chat


def _is_this(head: Head) -> bool:
    return head.is_json and {"chat_id", "parent_chat_id", "timestamp", "input_length", "hash_ids"} <= head.keys


FORMAT = Format(
    name="bailian",
    title="Qwen-Bailian JSONL: chat_id, parent_chat_id, timestamp (s), lengths, hash_ids of 16 tokens",
    is_this=_is_this,
    read=by_line(_make),
    takes=frozenset({"block_size"}),
)
