"""The JSONL of `vllm bench serve --dataset-name custom`: `prompt`, `output_tokens`, no clock.

Format: vLLM 0.26 and 0.32, benchmarks/datasets/datasets.py, `CustomDataset`. Prompts are what such a file is for: they
are kept, as the token ids that the tokenizer makes of them, so that their lengths are exact on any server.
"""

from dataclasses import replace
from typing import Annotated

import msgspec

from tuner.readers.chat import Prompt
from tuner.readers.clock import drawn
from tuner.readers.format import NO_OUTPUT, Format, Head, Options, Row, by_line
from tuner.readers.lengths import Ruler
from tuner.readers.source import Tally
from tuner.workload import MOST_TOKENS, Request

NO_LENGTH = "no output length (output_tokens)"


class _Line(msgspec.Struct):
    prompt: str
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None = None


def _make(options: Options, tally: Tally) -> Row:
    ruler = Ruler.counting(replace(options, keep_prompts=True), tally)
    arrival, words = drawn(options, tally.source)
    decode = msgspec.json.Decoder(_Line).decode

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        if not found.output_tokens:
            return NO_LENGTH if found.output_tokens is None else NO_OUTPUT
        measured = ruler.prompt(Prompt((found.prompt,)), None, number)
        tally.note(words, number)
        return Request(arrival(), measured.input_len, found.output_tokens, prompt=measured.prompt, source_line=number)

    return row


def _is_this(head: Head) -> bool:
    return head.is_json and "prompt" in head.keys and head.keys <= {"prompt", "output_tokens"}


FORMAT = Format(
    name="vllm-custom",
    title="vLLM bench's custom dataset, JSONL: prompt, output_tokens; no clock",
    is_this=_is_this,
    read=by_line(_make),
    takes=frozenset({"rate", "seed", "tokenize"}),
)
