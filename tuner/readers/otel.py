"""OpenTelemetry spans of calls of language models: GenAI conventions, and vLLM's own `llm_request`.

Three shapes: OTLP's JSON (`resourceSpans`; one document, or one a line as the Collector's file exporter writes), a
document with a list of `spans`, and a span a line. Conventions: github.com/open-telemetry/semantic-conventions-genai;
vLLM 0.26 and 0.32 set `gen_ai.usage.prompt_tokens` and `.completion_tokens` (vllm/v1/engine/output_processor.py), with
the arrival as the start. A tree of spans is no session: turns are joined only by a session that the spans name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import msgspec

from tuner.readers.chat import Prompt, glanced
from tuner.readers.clock import NO_ARRIVAL, nanoseconds
from tuner.readers.format import (
    EMBEDDING,
    FAILED,
    NO_OUTPUT,
    NO_PROMPT,
    NOT_LLM,
    SEVERAL,
    Format,
    Head,
    Options,
    Row,
    instant,
)
from tuner.readers.lengths import Ruler
from tuner.readers.records import by_record
from tuner.readers.sessions import Calls, settled
from tuner.readers.source import Damaged, Source, Tally
from tuner.workload import Request, Tokens

VLLM = "llm_request"
GENERATING = frozenset({"chat", "text_completion", "generate_content", "completion", "responses"})
EMPTY, NO_TOOLS = msgspec.Raw(), (b"", b"null", b"[]", b'"[]"', b'""')
ERRORS = frozenset({2, "2", "STATUS_CODE_ERROR", "ERROR", "error"})


class _Attributes(
    msgspec.Struct,
    rename={
        "operation": "gen_ai.operation.name",
        "asked_model": "gen_ai.request.model",
        "model": "gen_ai.response.model",
        "input_tokens": "gen_ai.usage.input_tokens",
        "prompt_tokens": "gen_ai.usage.prompt_tokens",
        "output_tokens": "gen_ai.usage.output_tokens",
        "completion_tokens": "gen_ai.usage.completion_tokens",
        "n": "gen_ai.request.n",
        "choices": "gen_ai.request.choice.count",
        "input_messages": "gen_ai.input.messages",
        "system": "gen_ai.system_instructions",
        "tools": "gen_ai.tool.definitions",
        "prompt": "gen_ai.prompt",
        "output_messages": "gen_ai.output.messages",
        "output_text": "gen_ai.output.text",
        "completion": "gen_ai.completion",
        "error": "error.type",
        "conversation": "gen_ai.conversation.id",
        "session": "session.id",
        "exgentic_session": "exgentic.session.id",
        "langfuse_session": "langfuse.session.id",
    },
):
    operation: str | None = None
    asked_model: str | None = None
    model: str | None = None
    input_tokens: Tokens | None = None
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    n: int | None = None
    choices: int | None = None
    input_messages: msgspec.Raw = EMPTY
    system: msgspec.Raw = EMPTY
    tools: msgspec.Raw = EMPTY
    prompt: msgspec.Raw = EMPTY
    output_messages: msgspec.Raw = EMPTY
    output_text: msgspec.Raw = EMPTY
    completion: msgspec.Raw = EMPTY
    error: str | None = None
    conversation: str | None = None
    session: str | None = None
    exgentic_session: str | None = None
    langfuse_session: str | None = None

    @property
    def prompt_len(self) -> int | None:
        return self.prompt_tokens if self.input_tokens is None else self.input_tokens

    @property
    def output_len(self) -> int | None:
        return self.completion_tokens if self.output_tokens is None else self.output_tokens

    @property
    def session_name(self) -> str | None:
        return self.session or self.conversation or self.exgentic_session or self.langfuse_session or None

    def asked(self, *, is_counted: bool) -> Prompt | None:
        """Return the prompt with what was said before it, where its text matters."""
        asked = glanced(self.input_messages, self.prompt, is_counted=is_counted)
        system = glanced(self.system, is_counted=is_counted)
        if asked is None:
            return None
        has_tools = asked.has_tools or bytes(self.tools) not in NO_TOOLS
        return replace(asked, texts=(system.texts if system else ()) + asked.texts, has_tools=has_tools)

    @property
    def answered(self) -> Prompt | None:
        return glanced(self.output_messages, self.output_text, self.completion, is_counted=True)


class _Value(msgspec.Struct):
    stringValue: str | None = None  # noqa: N815 (OTLP's names)
    intValue: int | str | None = None  # noqa: N815
    doubleValue: float | str | None = None  # noqa: N815

    @property
    def plain(self) -> str | int | float | None:
        return next((v for v in (self.stringValue, self.intValue, self.doubleValue) if v is not None), None)


class _Pair(msgspec.Struct):
    key: str
    value: _Value | None = None


class _Status(msgspec.Struct):
    code: int | str | None = None
    status_code: str | None = None


class _Context(msgspec.Struct):
    trace_id: str | None = None
    span_id: str | None = None


class _Span(msgspec.Struct):
    name: str
    attributes: _Attributes | list[_Pair] | None = None
    status: _Status | str | None = None
    context: _Context | None = None
    trace_id: str | None = None
    traceId: str | None = None  # noqa: N815 (OTLP's names)
    span_id: str | None = None
    spanId: str | None = None  # noqa: N815
    parent_span_id: str | None = None
    parentSpanId: str | None = None  # noqa: N815
    parent_id: str | None = None
    start_time: str | None = None
    startTimeUnixNano: int | str | None = None  # noqa: N815
    start_time_unix_nano: int | str | None = None
    end_time: str | None = None
    endTimeUnixNano: int | str | None = None  # noqa: N815
    end_time_unix_nano: int | str | None = None


class _Scope(msgspec.Struct):
    spans: list[msgspec.Raw] = []


class _Resource(msgspec.Struct):
    scopeSpans: list[_Scope] = []  # noqa: N815 (OTLP's names)
    scope_spans: list[_Scope] = []
    instrumentationLibrarySpans: list[_Scope] = []  # noqa: N815


class _Document(msgspec.Struct):
    resourceSpans: list[_Resource] | None = None  # noqa: N815 (OTLP's names)
    resource_spans: list[_Resource] | None = None
    spans: list[msgspec.Raw] | None = None


def _split(text: bytes) -> Iterable[bytes | msgspec.Raw]:
    """Return the spans of a JSON text: a document of them, a list of documents or spans, or one span."""
    document = _DOCUMENT.decode(text)
    if isinstance(document, list):
        return [span for part in document for span in _split(bytes(part))]
    if document.spans is not None:
        return document.spans
    resources = document.resourceSpans if document.resourceSpans is not None else document.resource_spans
    if resources is None:
        return (text,)
    return [
        span
        for resource in resources
        for scope in (*resource.scopeSpans, *resource.scope_spans, *resource.instrumentationLibrarySpans)
        for span in scope.spans
    ]


def _make(options: Options, tally: Tally, calls: Calls) -> Row:
    decode = msgspec.json.Decoder(_Span).decode
    ruler = Ruler.of(options, tally)

    def row(record: bytes, number: int) -> Request | str:
        span = decode(record)
        name, outer = _names(span)
        if name is not None and outer is not None:
            calls.around[name] = outer
        said = _attributes(span)
        if reason := _useless(span, said):
            return reason
        arrival = _time(span.start_time, span.startTimeUnixNano or span.start_time_unix_nano)
        if arrival is None:
            raise Damaged(f"{NO_ARRIVAL}: neither start_time nor startTimeUnixNano")
        output_len = ruler.output(said.answered if said.output_len is None else None, said.output_len)
        if not output_len:
            return NO_OUTPUT
        is_counted = said.prompt_len is None or options.tokenize is not None
        found = ruler.prompt(said.asked(is_counted=is_counted), said.prompt_len, number)
        calls.ends.append(_time(span.end_time, span.endTimeUnixNano or span.end_time_unix_nano))
        return Request(
            arrival, found.input_len, output_len, found.block_ids, found.block_size, id=name, prompt=found.prompt,
            session=said.session_name, model=said.model or said.asked_model, source_line=number,
        )  # fmt: skip

    return row


def _names(span: _Span) -> tuple[str | None, str | None]:
    """Return the span's id and that of the span it is in, each with its trace's; an id of zeros is none."""
    context = span.context or _Context()
    trace = span.trace_id or span.traceId or context.trace_id
    own = span.span_id or span.spanId or context.span_id
    outer = span.parent_span_id or span.parentSpanId or span.parent_id
    prefix = f"{trace}/" if trace else ""
    return _full(prefix, own), _full(prefix, outer)


def _full(prefix: str, name: str | None) -> str | None:
    return f"{prefix}{name}" if name and name.strip("0") else None


def _attributes(span: _Span) -> _Attributes:
    if not isinstance(span.attributes, list):
        return span.attributes or _Attributes()
    plain = {pair.key: pair.value.plain for pair in span.attributes if pair.value is not None}
    return msgspec.json.decode(msgspec.json.encode(plain), type=_Attributes, strict=False)


def _useless(span: _Span, said: _Attributes) -> str | None:
    if said.operation == "embeddings":
        return EMBEDDING
    if not _is_call(span, said):
        return NOT_LLM
    status = span.status if isinstance(span.status, _Status) else _Status(span.status)
    if status.code in ERRORS or status.status_code in ERRORS or said.error:
        return FAILED
    if max(said.n or 1, said.choices or 1) > 1:
        return SEVERAL
    return NO_PROMPT if said.prompt_len == 0 else None


def _is_call(span: _Span, said: _Attributes) -> bool:
    if said.operation is not None:
        return said.operation in GENERATING
    return span.name == VLLM or said.output_len is not None or bool(bytes(said.input_messages))


def _time(text: str | None, nano: int | str | None) -> float | None:
    """Return a span's time in seconds since 1970; a number is one only where its name says nanoseconds."""
    if nano is not None and nano != "":
        return nanoseconds(nano, "a span's time")
    return None if not text else instant(text)


def _read(source: Source, options: Options, tally: Tally) -> Iterator[Request]:
    calls = Calls()
    rows = list(by_record(_split, partial(_make, calls=calls))(source, options, tally))
    yield from settled(rows, calls, tally)


def _is_this(head: Head) -> bool:
    if not head.is_json:
        return False
    is_span = "name" in head.keys and bool({"span_id", "spanId", "context"} & head.keys)
    is_timed = bool({"start_time", "startTimeUnixNano", "start_time_unix_nano"} & head.keys)
    return (
        bool({"resourceSpans", "resource_spans"} & head.keys)
        or {"trace_id", "spans"} <= head.keys
        or (is_span and is_timed)
    )


FORMAT = Format(
    name="otel",
    title="OpenTelemetry spans of GenAI calls and of vLLM (llm_request): OTLP JSON, a document of spans, or JSONL",
    is_this=_is_this,
    read=_read,
    takes=frozenset({"tokenize", "template", "block_size", "keep_prompts"}),
)

_DOCUMENT = msgspec.json.Decoder(_Document | list[msgspec.Raw])
