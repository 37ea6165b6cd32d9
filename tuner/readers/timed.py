"""JSONL with a `timestamp` of a unit that only its author knows: prompts, or lengths as vLLM's bench replays them.

The lengths are those of `vllm bench serve --dataset-name timed_trace` (vLLM 0.26 and 0.32): `timestamp`,
`input_length`, `output_length`, and `hash_ids` of as many tokens as its option says, 16 by default.
"""

from dataclasses import replace
from typing import Annotated

import msgspec

from tuner.readers.blocks import BLOCK
from tuner.readers.chat import Prompt
from tuner.readers.clock import unit
from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Format, Head, Options, Row, by_line, check_blocks
from tuner.readers.lengths import Ruler
from tuner.readers.source import Tally
from tuner.workload import LATEST, BlockId, Request, Tokens

NO_LENGTH = "no output length (output_tokens or output_length)"

Stamp = Annotated[float, msgspec.Meta(ge=-LATEST * 1e6, le=LATEST * 1e6)]


class _Prompt(msgspec.Struct):
    timestamp: Stamp
    prompt: str
    output_tokens: Tokens | None = None
    output_length: Tokens | None = None


class _Lengths(msgspec.Struct):
    timestamp: Stamp
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[BlockId, ...] | None = None


def _make_prompts(options: Options, tally: Tally) -> Row:
    second = unit(options, tally.source)
    decode = msgspec.json.Decoder(_Prompt).decode
    ruler = Ruler.counting(replace(options, keep_prompts=True), tally)

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        output_len = found.output_length if found.output_tokens is None else found.output_tokens
        if not output_len:
            return NO_LENGTH if output_len is None else NO_OUTPUT
        measured = ruler.prompt(Prompt((found.prompt,)), None, number)
        arrival = found.timestamp * second
        return Request(arrival, measured.input_len, output_len, prompt=measured.prompt, source_line=number)

    return row


def _make_lengths(options: Options, tally: Tally) -> Row:
    second, size = unit(options, tally.source), options.block_size or BLOCK
    decode = msgspec.json.Decoder(_Lengths).decode

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        ids, arrival = found.hash_ids, found.timestamp * second
        if ids is not None:
            check_blocks(len(ids), found.input_length, size)
        if not found.input_length:
            return NO_PROMPT
        if not found.output_length:
            return NO_OUTPUT
        return Request(arrival, found.input_length, found.output_length, ids, size if ids else None, source_line=number)

    return row


def _is_prompts(head: Head) -> bool:
    return head.is_json and {"timestamp", "prompt"} <= head.keys <= {"timestamp", "prompt", "output_tokens",
                                                                     "output_length"}  # fmt: skip


PROMPTS = Format(
    name="timed-prompts",
    title="prompts with times, JSONL: timestamp (--time-unit), prompt, output_tokens or output_length",
    is_this=_is_prompts,
    read=by_line(_make_prompts),
    takes=frozenset({"time_unit", "tokenize"}),
)

LENGTHS = Format(
    name="vllm-timed-trace",
    title="vLLM bench's timed_trace, JSONL: timestamp (--time-unit), input_length, output_length, hash_ids",
    is_this=lambda _: False,  # its keys are Mooncake's too
    read=by_line(_make_lengths),
    takes=frozenset({"time_unit", "block_size"}),
)
