"""LiteLLM's standard logging payload, a call a line as its callbacks write it, in the order of completion.

Format: docs.litellm.ai/docs/proxy/logging_spec. `trace_id` joins the tries of one call, not the turns of a chat.
"""

import msgspec

from tuner.readers.chat import glanced
from tuner.readers.clock import moment
from tuner.readers.format import EMBEDDING, FAILED, NO_OUTPUT, NO_PROMPT, NOT_LLM, SEVERAL, Format, Head, Options, Row
from tuner.readers.lengths import Ruler
from tuner.readers.records import by_record, listed
from tuner.readers.source import Tally
from tuner.workload import Request, Tokens

CACHED = "answered from the gateway's own cache"
CALLS = frozenset({
    "completion", "acompletion", "text_completion", "atext_completion", "responses", "aresponses",
    "anthropic_messages", "generate_content", "agenerate_content", "generate_content_stream",
    "agenerate_content_stream",
})  # fmt: skip


class _Parameters(msgspec.Struct):
    n: int | None = None


class _Call(msgspec.Struct):
    status: str
    prompt_tokens: Tokens
    completion_tokens: Tokens
    call_type: str
    startTime: float | str | None = None  # noqa: N815 (the format's name)
    id: str | None = None
    model: str | None = None
    cache_hit: bool | str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    model_parameters: _Parameters | str | None = None


def _make(options: Options, tally: Tally) -> Row:
    decode = msgspec.json.Decoder(_Call).decode
    ruler, is_counted = Ruler.of(options, tally), options.tokenize is not None

    def row(record: bytes, number: int) -> Request | str:
        call = decode(record)
        arrival = moment(call.startTime, "startTime")
        if reason := _useless(call):
            return reason
        found = ruler.prompt(glanced(call.messages, is_counted=is_counted), call.prompt_tokens, number)
        return Request(
            arrival, found.input_len, call.completion_tokens, found.block_ids, found.block_size, id=call.id or None,
            prompt=found.prompt, model=call.model or None, source_line=number,
        )  # fmt: skip

    return row


def _useless(call: _Call) -> str | None:
    if call.status != "success":
        return FAILED
    if call.cache_hit in (True, "True", "true"):
        return CACHED
    if call.call_type not in CALLS:
        return EMBEDDING if "embedding" in call.call_type else NOT_LLM
    if isinstance(call.model_parameters, _Parameters) and (call.model_parameters.n or 1) > 1:
        return SEVERAL
    if not call.prompt_tokens:
        return NO_PROMPT
    return None if call.completion_tokens else NO_OUTPUT


def _is_this(head: Head) -> bool:
    return head.is_json and {"prompt_tokens", "completion_tokens", "startTime", "status", "call_type"} <= head.keys


FORMAT = Format(
    name="litellm",
    title="LiteLLM standard logging payloads, JSONL: startTime, prompt_tokens, completion_tokens, status, call_type",
    is_this=_is_this,
    read=by_record(listed, _make),
    takes=frozenset({"tokenize", "block_size", "keep_prompts"}),
)
