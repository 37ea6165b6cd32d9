"""Logs of one's own traffic: which entries are requests, how long they are, and when they came."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from reader_data import CHAT, COUNTED, LANGFUSE, LITELLM, SPAN, SPANS, VLLM_SPANS, jsonl, letters, read, written

from tuner.errors import SpecError
from tuner.readers.chat import Prompt, prompt
from tuner.readers.format import Options
from tuner.workload import Request, encoded

LETTERS = Options(tokenize=letters)
QUESTION = len("What is the capital of France?")


def span(**changes: Any) -> dict[str, Any]:
    """Return a span with other attributes (those with a dot or a `gen_ai` name) or other fields; None takes one out."""
    said = {key.replace("__", "."): value for key, value in changes.items() if "__" in key}
    fields = {key: value for key, value in changes.items() if "__" not in key}
    attributes = {key: value for key, value in {**SPAN["attributes"], **said}.items() if value is not None}  # type: ignore[dict-item]
    return {**SPAN, **fields, "attributes": attributes}


def dropped(tmp_path: Path, row: object, options: Options | None = None, name: str | None = None) -> str | None:
    """Return why a row is no request; None when it is one."""
    _, tally = read(written(tmp_path, jsonl(row)), options, name=name)
    return next(iter(tally.dropped), None)


# --- OpenTelemetry ----------------------------------------------------------------------------------------


def test_vllms_own_spans_are_read() -> None:
    """Spans that vLLM 0.26 (line 1) and 0.32 (line 2) made, as OpenTelemetry encodes them; times to the microsecond."""
    rows, tally = read(VLLM_SPANS)

    expected = [(1700000000_250000, 120, 30), (1700000000_123456, 77, 1)]
    assert [(round(r.arrival * 1e6), r.input_len, r.output_len) for r in rows] == expected * 2
    assert [row.source_line for row in rows] == [1, 1, 2, 2]
    assert dict(tally.dropped) == {"several answers to one prompt (n > 1)": 2, "no output tokens": 2}


def test_a_span_that_was_exported_twice_is_one_request(tmp_path: Path) -> None:
    """Exporters try again when no answer came: the rate would be doubled."""
    rows, tally = read(written(tmp_path, jsonl(span(), span(span_id="s2"), span())))

    assert ([row.source_line for row in rows], dict(tally.dropped)) == ([1, 2], {"logged before under the same id": 1})


def test_ids_of_zeros_are_none(tmp_path: Path) -> None:
    """OpenTelemetry calls them invalid: spans that have them are not one span logged again."""
    rows, _ = read(written(tmp_path, jsonl(*[span(span_id="0" * 16)] * 3)))

    assert [row.id for row in rows] == [None] * 3


def test_an_otlp_document_may_be_written_over_many_lines(tmp_path: Path) -> None:
    """The same spans as one indented document: the same rows, with the lines on which their spans begin."""
    first = json.loads(VLLM_SPANS.read_text().splitlines()[0])
    path = written(tmp_path, json.dumps(first, indent=2))
    rows, _ = read(path)

    assert [(r.arrival, r.input_len) for r in rows] == [(r.arrival, r.input_len) for r in read(VLLM_SPANS)[0][:2]]
    lines = path.read_text().splitlines()
    assert all(lines[(row.source_line or 0) - 1].strip() == "{" for row in rows)
    assert [int(lines[(row.source_line or 0)].split('"')[3], 16) > 0 for row in rows] == [True, True]


def test_spans_as_the_sdk_prints_them_are_read(tmp_path: Path) -> None:
    """OpenTelemetry's own SDK writes a span a line: ids in a context, times in ISO form."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("test")
    said = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 30, "gen_ai.usage.output_tokens": 6}
    for at in (1_700_000_000_250_000_000, 1_700_000_003_000_001_000):
        tracer.start_span("chat m", start_time=at, attributes=said).end(end_time=at + 10**9)
    tracer.start_span("GET /").end()
    text = "".join(one.to_json(indent=None) + "\n" for one in memory.get_finished_spans())

    rows, tally = read(written(tmp_path, text))
    assert [(round(r.arrival * 1e6), r.input_len, r.output_len) for r in rows] == [
        (1700000000_250000, 30, 6), (1700000003_000001, 30, 6),
    ]  # fmt: skip
    assert dict(tally.dropped) == {"no call of a language model": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (span(), None),
        (span(gen_ai__operation__name="text_completion"), None),
        (span(gen_ai__operation__name=None), None),
        (span(gen_ai__operation__name="execute_tool"), "no call of a language model"),
        (span(gen_ai__operation__name="invoke_agent"), "no call of a language model"),
        (span(gen_ai__operation__name="embeddings"), "embedding, no text is generated"),
        (span(status={"code": 2}), "failed call"),
        (span(status={"code": "STATUS_CODE_ERROR"}), "failed call"),
        (span(error__type="timeout"), "failed call"),
        (span(gen_ai__request__choice__count=3), "several answers to one prompt (n > 1)"),
        (span(gen_ai__usage__output_tokens=0), "no output tokens"),
        (span(gen_ai__usage__input_tokens=0), "no prompt tokens"),
        (span(gen_ai__usage__input_tokens=None), "no token counts and no text to count"),
        (span(gen_ai__usage__input_tokens=None, gen_ai__input__messages="[]"), "no token counts and no text to count"),
        (
            span(gen_ai__usage__input_tokens=None, gen_ai__input__messages=json.dumps(CHAT)),
            "no token counts (a tokenizer would count them)",
        ),
        (
            span(gen_ai__input__messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "images, audio or files in the prompt",
        ),
    ],
)
def test_only_calls_that_generated_text_are_requests(tmp_path: Path, row: dict[str, Any], reason: str | None) -> None:
    """Spans of tools, agents, embeddings and failures are left out, each by its reason."""
    assert dropped(tmp_path, row) == reason


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        (None, None),
        ("", None),
        ([], None),
        ("Hi", Prompt(("Hi",))),
        ([5, 6], Prompt(ids=(5, 6))),
        (["Hi"], Prompt(("Hi",))),
        ([[5, 6]], Prompt(ids=(5, 6))),
        ([{"role": "user", "content": "Hi"}], Prompt(("Hi",), is_chat=True)),
        ('[{"role": "user", "content": "Hi"}]', Prompt(("Hi",), is_chat=True)),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', Prompt(("Hi",), is_chat=True)),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": None}, Prompt(("Hi",), is_chat=True)),
        ({"role": "assistant", "content": "Hi"}, Prompt(("Hi",), is_chat=True)),
        ("[1, 2] and more", Prompt(("[1, 2] and more",))),
        ('{"a": 1}', Prompt(('{"a": 1}',))),
        ([{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}], Prompt(("Hi",), is_chat=True)),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}, "Ho"]}], Prompt(("Hi", "Ho"), is_chat=True)),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "Hm"}]}], Prompt(("Hm",), is_chat=True)),
        ([{"type": "text", "content": "Be kind."}], Prompt(("Be kind.",), is_chat=True)),
        ([{"role": "tool", "content": "42"}], Prompt(("42",), is_chat=True, has_tools=True)),
        (
            [{"role": "user", "content": "Hi"}, {"type": "function_call", "name": "f", "arguments": "{}"}],
            Prompt(("Hi", ""), is_chat=True, has_tools=True),
        ),
    ],
)
def test_a_prompt_is_found_in_the_spellings_of_logs(logged: object, expected: Prompt | None) -> None:
    """Text, token ids, OpenAI's messages, OpenTelemetry's parts, and JSON of these inside a string."""
    assert prompt(logged) == expected


@pytest.mark.parametrize("messages", [[None], [{"role": 5}], [{"role": "user", "content": [{"type": "text"}]}], 5])
def test_messages_that_are_none_are_damage(tmp_path: Path, messages: object) -> None:
    """They are refused with their line where they are to be counted, whatever stands in their place."""
    path = written(tmp_path, jsonl(span(gen_ai__input__messages=messages)))

    with pytest.raises(SpecError, match=re.escape(f"{path}:1: ")):
        read(path, LETTERS)


def test_lengths_are_counted_where_no_usage_is(tmp_path: Path) -> None:
    """With a tokenizer (a token a letter), and what the template is said to add."""
    answered = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Paris"}]}])
    row = span(
        gen_ai__usage__input_tokens=None, gen_ai__usage__output_tokens=None,
        gen_ai__input__messages=json.dumps(CHAT), gen_ai__output__messages=answered,
    )  # fmt: skip
    path = written(tmp_path, jsonl(row))

    (plain,), tally = read(path, LETTERS)
    assert (plain.input_len, plain.output_len) == (QUESTION, 5)
    assert any("without their template's tokens" in note for note in tally.noted)
    (templated,), tally = read(path, Options(tokenize=letters, template=9))
    assert (templated.input_len, tally.noted) == (QUESTION + 9, [])


def test_tool_calls_are_not_counted_by_guess(tmp_path: Path) -> None:
    """Tokens of tool calls and definitions depend on the template: without a usage such a prompt has no length."""
    uncounted = {"gen_ai__usage__input_tokens": None, "gen_ai__input__messages": CHAT}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    reason = "no token counts, and tool calls in the prompt, whose tokens depend on the template"

    assert dropped(tmp_path, span(**uncounted), LETTERS) is None
    assert dropped(tmp_path, span(**{**uncounted, "gen_ai__input__messages": [*CHAT, call]}), LETTERS) == reason
    assert dropped(tmp_path, span(**uncounted, gen_ai__tool__definitions="[{}]"), LETTERS) == reason
    assert dropped(tmp_path, span(gen_ai__input__messages=[*CHAT, call]), LETTERS) is None


def test_a_chat_that_goes_on_shares_its_texts() -> None:
    """Turns of the published chain share all whole blocks of the turn before, counted letter by letter."""
    rows, _ = read(SPANS / "simple_chain.json", Options(tokenize=letters, template=5))
    spans = json.loads((SPANS / "simple_chain.json").read_text())["spans"]
    texts = ["".join(m["content"] for m in json.loads(s["attributes"]["gen_ai.input.messages"])) for s in spans]

    assert [row.input_len for row in rows] == [len(text) + 5 for text in texts]
    for row, text, after in zip(rows, texts, rows[1:], strict=False):
        whole = len(text) // 16
        assert (row.block_ids or ())[:whole] == (after.block_ids or ())[:whole]
        assert (row.block_ids or ())[whole:] != (after.block_ids or ())[whole : len(row.block_ids or ())]


def test_no_text_of_a_log_is_kept(tmp_path: Path) -> None:
    """Messages and answers become numbers; the prompt of a completion is kept when that is asked for."""
    rows, _ = read(SPANS / "simple_chain.json", LETTERS)
    assert not re.search(rb"France|Eiffel", b"".join(map(encoded, rows)))

    row = span(gen_ai__usage__input_tokens=None, gen_ai__prompt="Hello there")
    path = written(tmp_path, jsonl(row))
    assert read(path, LETTERS)[0][0].prompt is None
    assert read(path, Options(tokenize=letters, keep_prompts=True))[0][0].prompt == tuple(letters("Hello there"))
    other = written(tmp_path, jsonl(span(gen_ai__usage__input_tokens=9, gen_ai__prompt="Hello there")), "other")
    for path in (SPANS / "simple_chain.json", other):
        kept, tally = read(path, Options(tokenize=letters, keep_prompts=True))
        assert {row.prompt for row in kept} == {None}
        assert any("not kept as prompts" in note for note in tally.noted)


@pytest.mark.parametrize(("recorded", "is_noted"), [(5, True), (QUESTION, False), (100, False)])
def test_recorded_lengths_win_over_counted_ones(tmp_path: Path, recorded: int, is_noted: bool) -> None:  # noqa: FBT001
    """The usage is what the server saw: block ids are filled to it, as by a template, or cut, which is told."""
    row = span(gen_ai__usage__input_tokens=recorded, gen_ai__input__messages=CHAT)
    (found,), tally = read(written(tmp_path, jsonl(row)), LETTERS)

    assert (found.input_len, len(found.block_ids or ())) == (recorded, -(-recorded // 16))
    assert any("cut or filled" in note for note in tally.noted) == is_noted


def links(rows: list[Request]) -> list[tuple[str, str | None, float | None]]:
    """Return the rows' names without their traces, whom each waited for, and for how long."""
    return [((r.id or "").split("/")[1], r.parent and r.parent.split("/")[1], r.think_time) for r in rows]


def test_a_turn_waited_for_the_last_answer_before_it() -> None:
    """The published fan-in by hand: 002 and 003 overlap and follow 001; 004 follows 003, which ended last."""
    rows, _ = read(SPANS / "fan_in_dependencies.json", LETTERS)

    assert links(rows) == [
        ("span_001", None, None), ("span_002", "span_001", 0.5), ("span_003", "span_001", 1.0),
        ("span_004", "span_003", 1.0),
    ]  # fmt: skip
    assert {row.session for row in rows} == {"session_003"}


def test_a_tree_of_spans_is_no_session() -> None:
    """In the published example turns hang below each other without a session: none is made up, none is lost."""
    rows, tally = read(SPANS / "prefix_sharing_example.json")

    assert {(row.session, row.parent, row.think_time) for row in rows} == {(None, None, None)}
    assert not tally.dropped


def test_a_request_seen_twice_is_one(tmp_path: Path) -> None:
    """A client's span around the HTTP call around vLLM's own span: the innermost is the request, in any order."""
    client = span(end_time="2026-02-25T10:00:05")
    http = {**span(), "name": "POST", "span_id": "s2", "parent_span_id": "s1", "attributes": {}}
    server = {**span(), "name": "llm_request", "span_id": "s3", "parent_span_id": "s2",
              "start_time": "2026-02-25T10:00:00.3"}  # fmt: skip

    for order in ([client, http, server], [server, http, client]):
        (row,), tally = read(written(tmp_path, jsonl(*order)))
        assert row.id == "t1/s3"
        assert sorted(tally.dropped.values()) == [1, 1]


@given(st.permutations(range(6)))
def test_the_order_of_a_log_changes_nothing(tmp_path_factory: pytest.TempPathFactory, order: list[int]) -> None:
    """Two sessions of turns that overlap, in any order of lines: the same parents and think times."""
    turns = [
        span(span_id=f"s{n}", session__id="ab"[n % 2], start_time=f"2026-02-25T10:00:0{start}",
             end_time=f"2026-02-25T10:00:0{start + lasts}")
        for n, (start, lasts) in enumerate([(0, 1), (0, 0), (1, 3), (2, 1), (4, 1), (4, 0)])
    ]  # fmt: skip
    rows, _ = read(written(tmp_path_factory.getbasetemp(), jsonl(*[turns[n] for n in order])))

    assert sorted(links(rows)) == [
        ("s0", None, None), ("s1", None, None), ("s2", "s0", 0.0), ("s3", "s1", 2.0), ("s4", "s2", 0.0),
        ("s5", "s3", 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["session.id", "gen_ai.conversation.id", "exgentic.session.id"])
def test_sessions_are_those_that_spans_name(tmp_path: Path, name: str) -> None:
    """Each of the attributes that name a session is one."""
    row = span(session__id=None)
    row["attributes"][name] = "s"

    assert read(written(tmp_path, jsonl(row)))[0][0].session == "s"


# --- LiteLLM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"call_type": "text_completion"}, None),
        ({"call_type": "anthropic_messages"}, None),
        ({"startTime": "2023-11-14T22:13:20.25"}, None),
        ({"messages": "redacted-by-litellm"}, None),
        ({"messages": None}, None),
        ({"status": "failure"}, "failed call"),
        ({"cache_hit": True}, "answered from the gateway's own cache"),
        ({"call_type": "aembedding"}, "embedding, no text is generated"),
        ({"call_type": "image_generation"}, "no call of a language model"),
        ({"model_parameters": {"n": 2}}, "several answers to one prompt (n > 1)"),
        ({"prompt_tokens": 0}, "no prompt tokens"),
        ({"completion_tokens": 0}, "no output tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images, audio or files in the prompt"),
        ({"messages": '[{"role": "user", "content": [{"type": "file"}]}]'}, "images, audio or files in the prompt"),
    ],
)
def test_litellms_successful_calls_are_requests(tmp_path: Path, changes: dict[str, Any], reason: str | None) -> None:
    """A success with tokens is one; failures, cached answers, embeddings, images and several answers are not."""
    rows, tally = read(written(tmp_path, jsonl({**LITELLM, **changes})))

    assert next(iter(tally.dropped), None) == reason
    assert [(r.arrival, r.input_len, r.output_len, r.model, r.session) for r in rows] == (
        [(1700000000.25, 30, 6, "m", None)] if reason is None else []
    )


def test_litellms_messages_become_blocks(tmp_path: Path) -> None:
    """With a tokenizer; the recorded length stays, and no text."""
    (row,), _ = read(written(tmp_path, jsonl(LITELLM)), LETTERS)

    assert (row.input_len, row.block_ids, row.block_size) == (30, (0, 1), 16)
    assert b"France" not in encoded(row)


def test_litellm_payloads_may_be_a_list(tmp_path: Path) -> None:
    """Exports to object storage are JSON documents: a list of payloads, or one over many lines."""
    path = written(tmp_path, json.dumps([LITELLM, LITELLM], indent=1))

    assert len(read(path)[0]) == 2
    assert len(read(written(tmp_path, json.dumps(LITELLM, indent=1)))[0]) == 1


# --- Langfuse ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"usageDetails": None, "usage": {"input": 30, "output": 6, "total": 36, "unit": "TOKENS"}}, None),
        ({"usageDetails": {}, "usage": {"promptTokens": 30, "completionTokens": 6}}, None),
        ({"usageDetails": None, "promptTokens": 30, "completionTokens": 6}, None),
        ({"type": "SPAN"}, "no call of a language model"),
        ({"type": "EMBEDDING"}, "embedding, no text is generated"),
        ({"level": "ERROR"}, "failed call"),
        ({"modelParameters": {"n": 2}}, "several answers to one prompt (n > 1)"),
        ({"modelParameters": '{"n": 2}'}, "several answers to one prompt (n > 1)"),
        ({"usageDetails": {"input": 30, "output": 0}}, "no output tokens"),
        ({"usageDetails": {"input": 0, "output": 0}}, "no token counts (a tokenizer would count them)"),
        (
            {"usageDetails": None, "usage": {"input": 30, "output": 6, "unit": "CHARACTERS"}},
            "no token counts (a tokenizer would count them)",
        ),
    ],
)
def test_langfuses_generations_are_requests(tmp_path: Path, changes: dict[str, Any], reason: str | None) -> None:
    """Cached and reasoning tokens are kinds of their own in `usageDetails`, and counted; older counts are read too."""
    rows, tally = read(written(tmp_path, jsonl({**LANGFUSE, **changes})))

    assert next(iter(tally.dropped), None) == reason
    assert [(round(r.arrival * 1e3), r.input_len, r.output_len, r.model, r.session) for r in rows] == (
        [(1772013600_250, 30, 6, "m", "a")] if reason is None else []
    )


def test_langfuses_pages_and_blob_storage_are_read(tmp_path: Path) -> None:
    """The API's page, a trace with its observations, and blob storage's names, as JSON or as CSV: the same request."""
    stored = {
        "id": "o1", "trace_id": "x", "type": "GENERATION", "start_time": "2026-02-25 10:00:00.250000",
        "end_time": "2026-02-25 10:00:02.000000", "provided_model_name": "m", "session_id": "a", "level": "DEFAULT",
        "usage_details": {"input": 30, "output": 6, "total": 36},
    }  # fmt: skip
    cells = [json.dumps(v).replace('"', '""') if isinstance(v, dict) else v for v in stored.values()]
    texts = [
        json.dumps({"data": [LANGFUSE], "meta": {"page": 1}}),
        json.dumps({"id": "x", "observations": [LANGFUSE]}, indent=2),
        jsonl(stored),
        ",".join(stored) + "\n" + ",".join(f'"{cell}"' for cell in cells) + "\n",
    ]
    found = [read(written(tmp_path, text))[0][0] for text in texts]

    uncounted = texts[-1].replace('""input"": 30', '""cost"": 30')
    assert dict(read(written(tmp_path, uncounted))[1].dropped) == {"no token counts and no text to count": 1}
    shape = {(r.arrival, r.input_len, r.output_len, r.id, r.session, r.model) for r in found}
    assert shape == {(1772013600.25, 30, 6, "o1", "a", "m")}


def test_langfuses_kinds_of_tokens_are_not_cut(tmp_path: Path) -> None:
    """Kinds that add up to more than a prompt can have are damage."""
    path = written(tmp_path, jsonl({**LANGFUSE, "usageDetails": {"input": 10_000_000, "input_cached_tokens": 1}}))

    with pytest.raises(SpecError, match=re.escape(f"{path}:1: usageDetails has more than 10,000,000 tokens of input")):
        read(path)


def test_langfuses_sessions_have_think_times(tmp_path: Path) -> None:
    """The second turn began three seconds after the first one's answer."""
    later = {**LANGFUSE, "id": "o2", "startTime": "2026-02-25T10:00:05Z", "endTime": None}
    rows, _ = read(written(tmp_path, jsonl(later, LANGFUSE)))

    assert [(r.id, r.parent, r.think_time) for r in rows] == [("o2", "o1", 3.0), ("o1", None, None)]


def test_no_text_of_langfuse_is_kept(tmp_path: Path) -> None:
    """With a tokenizer, text becomes block ids."""
    (row,), _ = read(written(tmp_path, jsonl(LANGFUSE)), COUNTED)

    assert len(row.block_ids or ()) == 2
    assert b"France" not in encoded(row)


def test_a_csv_field_over_several_lines_is_refused(tmp_path: Path) -> None:
    """Rows end with their lines; the refusal names the line."""
    path = written(tmp_path, 'id,trace_id,type,start_time,usage_details,input\n1,2,GENERATION,2026-02-25,"{}","a\nb"\n')

    with pytest.raises(SpecError, match=re.escape(f"{path}:2: no CSV")):
        read(path)
