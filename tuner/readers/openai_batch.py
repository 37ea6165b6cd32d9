"""OpenAI's batch JSONL: requests whole, without a clock and without answers.

Format: `custom_id`, `method`, `url`, `body` a line, as the batch API and `vllm run-batch` take it. Arrivals are drawn,
lengths are counted, and an answer is taken to be as long as the request allows.
"""

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from tuner.readers.chat import Prompt, prompt
from tuner.readers.clock import drawn
from tuner.readers.format import EMBEDDING, NO_PROMPT, NOT_LLM, SEVERAL, Format, Head, Options, Row, by_line
from tuner.readers.lengths import Ruler
from tuner.readers.source import Tally
from tuner.workload import MOST_TOKENS, Request

NO_LENGTH = "no output length (max_tokens or max_completion_tokens)"
AT_MOST = "answers are taken to be as long as max_tokens allows"
TEXT_URLS = ("/chat/completions", "/completions", "/responses")

Limit = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None


class _Body(msgspec.Struct):
    model: str | None = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    instructions: str | None = None
    tools: list[msgspec.Raw] | None = None
    n: int | None = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    max_output_tokens: Limit = None

    @property
    def asked(self) -> Prompt | None:
        asked = prompt(self.messages or self.prompt or self.input)
        if asked is None:
            return None
        texts = (self.instructions, *asked.texts) if self.instructions else asked.texts
        return replace(asked, texts=texts, has_tools=asked.has_tools or bool(self.tools))


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: _Body
    method: str = "POST"


def _make(options: Options, tally: Tally) -> Row:
    ruler = Ruler.counting(options, tally)
    arrival, words = drawn(options, tally.source)
    decode = msgspec.json.Decoder(_Line).decode

    def row(line: bytes, number: int) -> Request | str:
        found = decode(line)
        body = found.body
        if reason := _useless(found):
            return reason
        limit = body.max_completion_tokens or body.max_tokens or body.max_output_tokens
        if not limit:
            return NO_LENGTH
        asked = body.asked
        if asked is None:
            return NO_PROMPT
        if found.url.endswith(("/chat/completions", "/responses")):
            asked = replace(asked, is_chat=True)
        measured = ruler.prompt(asked, None, number)
        tally.note(words, number)
        tally.note(AT_MOST, number)
        return Request(
            arrival(), measured.input_len, limit, measured.block_ids, measured.block_size, prompt=measured.prompt,
            id=found.custom_id, model=body.model, endpoint=found.url, source_line=number,
        )  # fmt: skip

    return row


def _useless(found: _Line) -> str | None:
    if found.url.endswith("/embeddings"):
        return EMBEDDING
    if not found.url.endswith(TEXT_URLS):
        return NOT_LLM
    return SEVERAL if (found.body.n or 1) > 1 else None


def _is_this(head: Head) -> bool:
    return head.is_json and {"custom_id", "url", "body"} <= head.keys


FORMAT = Format(
    name="openai-batch",
    title="OpenAI batch JSONL: custom_id, method, url, body; no clock, no answers",
    is_this=_is_this,
    read=by_line(_make),
    takes=frozenset({"rate", "seed", "tokenize", "template", "block_size", "keep_prompts"}),
)
