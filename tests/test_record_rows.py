"""What a recorded request says: its lengths, whose turn it is, and which prompts begin alike."""

import json
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from record_data import event, lines

from tuner import workload
from tuner.errors import SpecError
from tuner.proxy import recording
from tuner.proxy.answered import (
    COMPRESSED,
    CUT_SHORT,
    IN_BAND,
    MOST_OF_AN_EVENT,
    NO_STREAM_USAGE,
    NO_USAGE,
    NOT_READ,
    NOTHING_MADE,
    TOO_LARGE,
    TOO_MANY,
    Reader,
    Told,
)
from tuner.proxy.asked import (
    CHAT,
    COMPLETIONS,
    EMBEDDED,
    NOT_TEXT,
    RESPONSES,
    SERVER_TOOLS,
    SEVERAL,
    Message,
    Unreplayable,
    endpoint_of,
    read,
)
from tuner.proxy.exchange import CROWDED, Allowance, Exchange
from tuner.proxy.hashing import BLOCK_SIZE, BYTES_PER_BLOCK, Salt, blocks_of_text, blocks_of_tokens
from tuner.proxy.ledger import ANOTHER_PATH, NO_FORM, NOT_EQUAL, TEXT, TOKENS, Ledger, Question, opening
from tuner.proxy.recording import CUT_LINE, NOT_IDENTIFIED, Parts
from tuner.replay.stream import EventParser

SALT = Salt()
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
JSON_HEADERS = {"Content-Type": "application/json"}
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


def told(*parts: bytes, is_stream: bool = True) -> Told:
    reader = Reader(is_stream)
    for part in parts:
        reader.feed(part)
    return reader.end()


def refused(*parts: bytes, is_stream: bool = True) -> str:
    """Return why an answer makes no row."""
    with pytest.raises(Unreplayable) as caught:
        told(*parts, is_stream=is_stream)
    return str(caught.value)


def delta(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": finish}]})


def closing(usage: Any = USAGE) -> bytes:
    return event({"choices": [], "usage": usage})


DONE = event("[DONE]")
STREAM = delta("Hé") + delta("llo \N{GRINNING FACE}") + delta(None, "length") + closing() + DONE

# --- Lengths ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.sampled_from(["\n", "\r\n", "\r"]))
def test_a_stream_says_the_same_wherever_it_is_cut(cuts: list[int], newline: str) -> None:
    """Lengths and text do not depend on how the bytes came, nor on how lines end."""
    said = STREAM.replace(b"\n", newline.encode())
    places = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    parts = [said[a:b] for a, b in pairwise(places)]

    assert told(*parts) == Told(5, 2, Message("assistant", "Héllo \N{GRINNING FACE}"))


LINES = [b"data: {}", b"data:[1]", b"data: a", b": c", b"event: x", b"", b"id: 1"]


@given(st.lists(st.sampled_from(LINES), max_size=9))
def test_events_are_those_of_the_replay_clients_parser(rows: list[bytes]) -> None:
    """Two parsers, written for different ends, find the same events."""
    said = b"\n".join(rows) + b"\n\n"
    reader = Reader(is_stream=True)
    reader._rest = bytearray(said)

    assert list(reader._events()) == list(EventParser().feed(said))


def test_the_last_usage_counts() -> None:
    """With usage in every event, the last has the whole answer's; events with null change nothing."""
    first = event({"choices": [{"delta": {"content": "a"}}], "usage": USAGE | {"completion_tokens": 1}})
    last = event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE})

    assert told(first, last, event({"choices": [], "usage": None}), DONE).output_len == 2


def test_token_ids_count_where_usage_is_not_asked_for() -> None:
    """With return_token_ids a stream has its tokens, so that nothing is guessed."""
    first = event({"prompt_token_ids": [7, 8, 9], "choices": [{"text": "a", "token_ids": [1]}]})
    last = event({"choices": [{"text": "bc", "token_ids": [2, 3], "finish_reason": "length"}]})

    assert told(first, last, DONE) == Told(3, 3, Message("assistant", ""), (7, 8, 9))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([delta("a"), delta(None, "stop"), DONE], NO_STREAM_USAGE),
        ([delta("a"), closing()], CUT_SHORT),
        ([delta("a"), event({"error": {"message": "EngineCore"}}), DONE], IN_BAND),
        ([event({"type": "error", "message": "x"})], IN_BAND),
        ([event({"type": "response.failed", "response": {"status": "failed"}})], IN_BAND),
        ([b"data: {cut\n\n", DONE], NOT_READ),
        ([b'data: {"choices": 5}\n\n', DONE], NOT_READ),
        ([b"data: " + b"[" * 100_000 + b"\n\n", DONE], NOT_READ),
        ([delta(None, "stop"), closing(USAGE | {"completion_tokens": 0}), DONE], NOTHING_MADE),
        ([b"data: " + b"x" * MOST_OF_AN_EVENT, b"x" * 10], TOO_LARGE),
        ([b"data: " + b"x" * 1000 + b"\n"] * (MOST_OF_AN_EVENT // 1000), TOO_LARGE),
        ([delta(None, "stop"), closing(USAGE | {"prompt_tokens": 10**11}), DONE], TOO_MANY),
        ([], CUT_SHORT),
    ],
)
def test_a_stream_without_certain_lengths_makes_no_row(parts: list[bytes], reason: str) -> None:
    """It is counted by what it lacks, and nothing is guessed from its chunks."""
    assert refused(*parts) == reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"choices": [{"finish_reason": "stop"}]}, NO_USAGE), ({"error": {"message": "x"}}, IN_BAND), ([1], NOT_READ),
     ({"object": "response", "status": "queued"}, CUT_SHORT)],
)  # fmt: skip
def test_an_answer_without_certain_lengths_makes_no_row(body: object, reason: str) -> None:
    """Likewise an answer that is not streamed."""
    assert refused(json.dumps(body).encode(), is_stream=False) == reason


def test_the_responses_api_tells_its_lengths_too() -> None:
    """Streamed, in the event that completes it; whole, in the answer. An answer cut by its limit is whole."""
    items = [{"type": "reasoning", "content": [{"text": "hm"}]}, {"type": "message", "content": [{"text": "hello"}]}]
    answer = {"id": "resp_1", "status": "incomplete", "error": None, "output": items,
              "usage": {"input_tokens": 9, "output_tokens": 4}}  # fmt: skip
    created = event({"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}})
    wanted = Told(9, 4, Message("assistant", "hello"), id="resp_1")

    assert told(json.dumps(answer).encode(), is_stream=False) == wanted
    assert told(created, event({"type": "response.incomplete", "response": answer})) == wanted


# --- Requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "endpoint"),
    [("POST", "/v1/chat/completions", CHAT), ("POST", "/v1/completions?x=1", COMPLETIONS),
     ("POST", "/openai/v1/responses", RESPONSES), ("GET", "/v1/responses", None), ("POST", "/v1/embeddings", None),
     ("POST", "/tokenize", None), ("GET", "/metrics", None)],
)  # fmt: skip
def test_three_endpoints_make_tokens(method: str, path: str, endpoint: str | None) -> None:
    """Whatever stands before them; everything else is passed and not recorded."""
    assert endpoint_of(method, path) == endpoint


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (CHAT, {"messages": [], "n": 2}, SEVERAL),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, SEVERAL),
        (COMPLETIONS, {"prompt": ["a", "b"]}, SEVERAL),
        (COMPLETIONS, {"prompt": [[1], [2]]}, SEVERAL),
        (COMPLETIONS, {"prompt": "", "prompt_embeds": "AAAA"}, EMBEDDED),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]}, NOT_TEXT),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, NOT_TEXT),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, SERVER_TOOLS),
    ],
)
def test_what_a_row_cannot_stand_for_has_a_reason(endpoint: str, body: Any, reason: str) -> None:
    """Several answers, images, tools that the server runs: their lengths are not those of one prompt of tokens."""
    with pytest.raises(Unreplayable, match=reason):
        read(endpoint, json.dumps(body).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"messages": 5}', b'{"messages": [5]}', b"[" * 10**5,
                                  b'{"messages": [{"role": "user", "content": 5}]}', b'{"n": "x"}',
                                  b'{"prompt": [1, "x"]}', b'{"prompt": [%d]}' % 2**70])  # fmt: skip
def test_a_request_that_cannot_be_read_is_counted(body: bytes) -> None:
    """Whatever clients send, no request ends the recording."""
    for endpoint in (CHAT, COMPLETIONS, RESPONSES):
        with pytest.raises(Unreplayable):
            read(endpoint, body)


def test_tool_calls_are_recorded() -> None:
    """Tools are part of the prompt that the tokenizer is asked for; a call is told from another by its id."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "function": {"name": "f"}}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    asked = read(CHAT, json.dumps({"model": "m", "messages": [call, result], "tools": tools}).encode())

    assert asked.form is not None
    assert asked.form["tools"] == tools
    assert asked.messages == (Message("assistant", "", ("call_1",)), Message("tool", "5", ("call_1",)))


def test_the_tokenizer_is_asked_for_the_template_that_was_used() -> None:
    """What changes a chat's prompt goes along: template arguments, effort of reasoning, documents."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1},
            "reasoning_effort": "none", "documents": [{"t": 1}], "add_generation_prompt": False,
            "top_p": 1}  # fmt: skip
    form = read(CHAT, json.dumps(body).encode()).form
    more = {"x": 1, "reasoning_effort": "none", "enable_thinking": False, "documents": [{"t": 1}]}

    assert form == {"model": "m", "messages": body["messages"], "add_generation_prompt": False,
                    "chat_template_kwargs": more}  # fmt: skip


# --- Block ids --------------------------------------------------------------------------------------------

TOKEN_LISTS = st.lists(st.integers(0, 3), min_size=1, max_size=70)


def shared(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many leading elements are equal."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@given(TOKEN_LISTS, TOKEN_LISTS, st.integers(0, 70))
def test_leading_ids_are_equal_as_far_as_whole_blocks_are(a: list[int], b: list[int], common: int) -> None:
    """Prompts share ids exactly where they share all tokens up to a block's end; equal prompts share the tail's too."""
    b = a[:common] + b
    ids_a, ids_b = blocks_of_tokens(SALT, a), blocks_of_tokens(SALT, b)
    whole = len(ids_a) if a == b else shared(a, b) // BLOCK_SIZE

    assert len(ids_a) == -(-len(a) // BLOCK_SIZE)
    assert shared(ids_a, ids_b) == whole
    assert not set(ids_a[whole:]) & set(ids_b[whole:])


@given(st.binary(max_size=400), st.binary(max_size=400), st.integers(0, 400), st.integers(1, 200), st.integers(1, 200))
@example(a=b"", b=b"beyond the text", common=0, len_a=1, len_b=1)
def test_text_shares_ids_as_far_as_it_is_shared(a: bytes, b: bytes, common: int, len_a: int, len_b: int) -> None:
    """The count is that of the tokens; a block of 64 bytes that both have from the start has one id in both."""
    b = a[:common] + b
    ids_a, ids_b = blocks_of_text(SALT, a, len_a), blocks_of_text(SALT, b, len_b)
    least = min(shared(a, b) // BYTES_PER_BLOCK, len(ids_a) - 1, len(ids_b) - 1)

    assert (len(ids_a), len(ids_b)) == (-(-len_a // BLOCK_SIZE), -(-len_b // BLOCK_SIZE))
    assert shared(ids_a, ids_b) >= least
    if a != b:
        assert shared(ids_a, ids_b) <= shared(a, b) // BYTES_PER_BLOCK
    assert len(set(ids_a)) == len(ids_a)


def test_two_recordings_cannot_be_joined() -> None:
    """The same prompt has other ids under another salt, and ids are whole numbers that any JSON reader keeps."""
    tokens = list(range(160))
    one, other = (blocks_of_tokens(Salt(), tokens) for _ in range(2))

    assert not set(one) & set(other)
    assert max(one + other) < 2**53
    assert "key" not in repr(Salt())


# --- Rows -------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """A ledger, and requests that pass through it."""

    ledger: Ledger
    questions: list[Question] = field(default_factory=list)
    count: int = 0

    def take(self, path: str, body: Any, answer: bytes, *, at: float, **headers: str) -> str:
        """Settle a request; return its id."""
        self.count += 1
        endpoint = endpoint_of("POST", path)
        exchange = Exchange(self.count, endpoint, 100.0 + at, headers, Allowance())
        if self.count == 1:
            self.ledger.begin(exchange.arrival)
        exchange.asked(json.dumps(body).encode())
        exchange.answering(200, STREAM_HEADERS if answer.startswith(b"data:") else JSON_HEADERS)
        exchange.answered(answer)
        exchange.ended = 100.5 + at
        if (question := self.ledger.settle(exchange)) is not None:
            self.questions.append(question)
        return str(self.count)

    def chat(self, *said: str, at: float, answer: str = "yes", usage: Any = USAGE, **headers: str) -> str:
        """Settle a chat in which user and assistant take turns."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        asked = {"model": "m", "messages": messages}
        return self.take("/v1/chat/completions", asked, chat_answer(answer, usage), at=at, **headers)

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows by id."""
        written = [line for part in sorted(self.ledger.folder.glob(recording.PARTS)) for line in lines(part)]
        return {row["id"]: row for row in written if "arrival_s" in row}

    def identity(self, question: Question, tokens: Sequence[int] | None = None) -> dict[str, Any] | None:
        """Return the line that identifying a row wrote, if any."""
        before = len(lines(self.ledger.folder / "recording-0001.jsonl"))
        self.ledger.identify(question, tokens)
        return next(iter(lines(self.ledger.folder / "recording-0001.jsonl")[before:]), None)


def chat_answer(text: str, usage: Any = USAGE) -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}).encode()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Recording]:
    yield from a_recording(tmp_path)


def a_recording(
    folder: Path, hashed: str = TOKENS, rotate: int = 1 << 20, *, keeps: bool = False
) -> Iterator[Recording]:
    parts = Parts(folder, rotate)
    yield Recording(Ledger(folder, opening("http://x", hashed=hashed, keeps_prompts=keeps), parts, print))
    parts.close()


def test_arrivals_count_from_the_first_request(made: Recording) -> None:
    """To the microsecond, also where the first one is settled last."""
    made.ledger.begin(100.0)
    made.count = 1
    late = made.chat("b", at=0.1234567)
    first = made.chat("a", at=0.0)

    assert (made.rows()[first]["arrival_s"], made.rows()[late]["arrival_s"]) == (0.0, 0.123457)


def test_the_next_turn_begins_with_what_was_said(made: Recording) -> None:
    """Request and answer of the one before, stripped or not, make it the parent; think time counts from its end."""
    first = made.chat("hi", at=0.0, answer=" hello ")
    other = made.chat("hi there", at=0.1)
    second = made.chat("hi", "hello", "and?", at=2.0)
    third = made.chat("hi", "hello", "and?", "yes", "so?", at=3.0)
    rows = made.rows()

    assert (rows[second]["parent"], rows[second]["think_time_s"]) == (first, 1.5)
    assert rows[third]["parent"] == second
    assert rows[first]["session"] == rows[second]["session"] == rows[third]["session"] != rows[other]["session"]
    assert not {"parent", "think_time_s"} & (set(rows[first]) | set(rows[other]))


def test_another_answer_is_another_conversation(made: Recording) -> None:
    """Messages that begin alike but hold another answer, or go on from none, are no next turn."""
    made.chat("hi", at=0.0, answer="hello")
    turns = (("hi", "good day", "and?"), ("hi", "hell", "and?"), ("hi",))
    others = [made.chat(*said, at=5.0) for said in turns]

    assert [made.rows()[other].get("parent") for other in others] == [None, None, None]


def test_a_session_header_is_kept_as_a_digest(made: Recording) -> None:
    """Its rows share a name that is not the client's; the row before it in the session is what it waited for."""
    first = made.chat("a", at=0.0, **{"X-Session-Id": "alice"})
    beside = made.chat("b", at=0.2, **{"X-Session-Id": "alice"})
    later = made.chat("c", at=3.0, **{"X-LiteLLM-Session-Id": "alice"})
    rows = made.rows()

    assert rows[first]["session"] == rows[beside]["session"] == rows[later]["session"]
    assert "parent" not in rows[beside]
    assert (rows[later]["parent"], rows[later]["think_time_s"]) == (beside, 2.3)
    assert "alice" not in json.dumps(rows)


def test_a_response_goes_on_from_the_one_it_names(made: Recording) -> None:
    """The responses API names its predecessor, whose text is then not in the request: no block ids are made up."""
    answer = {"id": "resp_1", "status": "completed", "output": [], "usage": {"input_tokens": 3, "output_tokens": 2}}
    first = made.take("/v1/responses", {"input": "hi"}, json.dumps(answer).encode(), at=0.0)
    body = {"input": "and?", "previous_response_id": "resp_1"}
    second = made.take("/v1/responses", body, json.dumps(answer | {"id": "resp_2"}).encode(), at=1.0)

    assert made.rows()[second]["parent"] == first
    assert made.questions[0].form == {"messages": [{"role": "user", "content": "hi"}]}
    assert made.identity(made.questions[1]) is None
    assert made.ledger.counted().without_block_ids == {NO_FORM: 1}


def test_every_request_is_a_row_or_has_a_reason(made: Recording) -> None:
    """The sum holds whatever came: requests = rows + not written, by reason."""
    made.chat("a", at=0.0)
    made.chat("b", at=0.1, usage=None)
    made.take("/v1/embeddings", {}, b"{}", at=0.2)
    made.take("/v1/chat/completions", {"messages": []}, delta("a"), at=0.3)
    made.take("/v1/completions", {"prompt": ["a", "b"]}, chat_answer("x"), at=0.4)
    made.take("/v1/completions", {"prompt": "a"}, chat_answer("x"), at=0.5, **{"Content-Encoding": "gzip"})
    counted = made.ledger.counted()

    assert counted.not_written == {NO_USAGE: 1, ANOTHER_PATH: 1, CUT_SHORT: 1, SEVERAL: 1, COMPRESSED: 1}
    assert (counted.requests, counted.rows) == (6, 1)


def test_ids_are_those_of_the_tokens_and_only_where_they_agree(made: Recording) -> None:
    """Where the tokenizer counts otherwise than the answer did, the prompt was another one: no ids."""
    made.chat("a", at=0.0)
    question = made.questions[0]
    line = made.identity(question, [1, 2, 3, 4, 5])

    assert line == {"id": "1", "block_ids": list(blocks_of_tokens(made.ledger.salt, [1, 2, 3, 4, 5])), "block_size": 16}
    assert made.identity(question, [1, 2, 3, 4]) is None
    assert made.ledger.counted().without_block_ids == {NOT_EQUAL: 1}


def test_prompts_are_kept_only_when_asked_for(tmp_path: Path) -> None:
    """As token ids where they are known, else a completion's own text; a chat's text is the template's and not kept."""
    for keeps in (True, False):
        folder = tmp_path / str(keeps)
        folder.mkdir()
        for made in a_recording(folder, TEXT, keeps=keeps):
            made.take("/v1/completions", {"prompt": "secret"}, chat_answer("x"), at=0.0)
            made.take("/v1/completions", {"prompt": [1, 2, 3, 4, 5]}, chat_answer("x"), at=0.1)
            made.chat("secret", at=0.2)
            found = [made.identity(question, question.tokens) or {} for question in made.questions]

        assert [line.get("prompt") for line in found] == (["secret", [1, 2, 3, 4, 5], None] if keeps else [None] * 3)
        assert all(len(line["block_ids"]) == 1 for line in found)
        assert ("secret" in (folder / "recording-0001.jsonl").read_text()) is keeps


def test_what_is_kept_of_requests_is_bounded() -> None:
    """One that is too large, or too much for all together, is counted; what is settled makes room again."""
    room = Allowance(100)
    first, second = (Exchange(i, CHAT, 0.0, {}, room) for i in range(2))
    first.asked(b"x" * 60)
    second.asked(b"x" * 60)
    first.release()
    third = Exchange(3, CHAT, 0.0, {}, room)
    third.asked(b"x" * 100)

    third.answering(200, JSON_HEADERS)
    third.answered(b"x")

    assert (first.failure, second.failure, third.failure, room.left) == (None, CROWDED, CROWDED, 100)


def test_a_kind_of_content_is_a_stream_in_any_case() -> None:
    """Media types know no case (RFC 9110, 8.3.1)."""
    exchange = Exchange(1, CHAT, 0.0, {}, Allowance())
    exchange.answering(200, {"Content-Type": "Text/Event-Stream"})

    assert exchange.reader is not None
    assert exchange.reader.is_stream


# --- Files ------------------------------------------------------------------------------------------------


def filled(folder: Path, rotate: int = 300) -> None:
    """Leave the parts of a recorder that was killed: eight rows, settled out of order, three without ids."""
    for made in a_recording(folder, rotate=rotate):
        made.ledger.begin(100.0)
        made.count = 1
        for i in (3, 1, 0, 2, 7, 5, 4, 6):
            made.chat(f"message {i}", at=i / 10)
        for question in made.questions[:5]:
            made.ledger.identify(question, [1, 2, 3, 4, 5])
        made.ledger.save()


def test_parts_become_a_workload(tmp_path: Path) -> None:
    """Sorted by arrival, with their ids; loaded as any other; the parts are gone and the summary says what there is."""
    filled(tmp_path)
    assert len(list(tmp_path.glob(recording.PARTS))) > 3
    summary = recording.finish(tmp_path)
    rows = workload.load(tmp_path).requests

    assert [row.arrival for row in rows] == [i / 10 for i in range(8)]
    assert sum(row.block_ids is not None for row in rows) == 5
    assert summary.without_block_ids == {NOT_IDENTIFIED: 3}
    assert (summary.rows, summary.requests, summary.ended, summary.was_cut) == (8, 8, True, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recording.json", "workload.jsonl"]
    assert recording.finish(tmp_path).rows == 8


def test_a_cut_line_is_counted(tmp_path: Path) -> None:
    """The rest of a line that a kill or a full disk cut off costs that request and no other."""
    filled(tmp_path)
    last = max(tmp_path.glob(recording.PARTS))
    last.write_bytes(last.read_bytes() + b'{"arrival_s":1.0,"inp')
    summary = recording.finish(tmp_path)

    assert summary.not_written == {CUT_LINE: 1}
    assert (summary.rows, summary.requests) == (8, 9)


def test_a_finish_that_was_cut_off_can_be_done_again(tmp_path: Path) -> None:
    """A workload beside parts that are still there is made anew, and the same."""
    filled(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    recording.finish(tmp_path)
    first = (tmp_path / "workload.jsonl").read_bytes()
    for path, data in kept.items():
        path.write_bytes(data)
    recording.finish(tmp_path)

    assert (tmp_path / "workload.jsonl").read_bytes() == first


@pytest.mark.parametrize("line", ['{"id": "9", "arrival_s": 0.5}', '{"id": "1", "block_ids": "many"}'])
def test_a_line_that_is_no_row_is_counted(tmp_path: Path, line: str) -> None:
    """Whoever edits a part, or a disk that mixes things up, costs that line and no other."""
    filled(tmp_path)
    (tmp_path / "recording-0099.jsonl").write_text(line + "\n")

    assert (recording.finish(tmp_path).rows, sum(recording.read_summary(tmp_path).not_written.values())) == (8, 1)


def test_a_recording_of_more_parts_than_may_be_open_is_finished(tmp_path: Path) -> None:
    """A long recording in small parts; a process may have a thousand files open, here some twenty."""
    filled(tmp_path, rotate=1)
    parts = len(list(tmp_path.glob(recording.PARTS)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 8, hard))
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(recording, "MOST_OPEN", 2)
            summary = recording.finish(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert parts > 8
    assert (summary.rows, len(workload.load(tmp_path).requests)) == (8, 8)


def test_a_recording_that_ended_is_not_said_to_be_cut_off(tmp_path: Path) -> None:
    """--finish of one that is finished says what is there."""
    filled(tmp_path)
    recording.finish(tmp_path, recording.read_summary(tmp_path))

    assert (recording.finish(tmp_path).was_cut, recording.finish(tmp_path).rows) == (False, 8)


@pytest.mark.parametrize("name", ["workload.jsonl", "recording-0001.jsonl", "notes.txt"])
def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, name: str) -> None:
    """A recording never joins another, whose ids have another salt."""
    (tmp_path / name).write_text("x")
    with pytest.raises(SpecError, match="holds"), recording.prepared(tmp_path):
        pass


@pytest.mark.parametrize(("text", "size"), [("64MB", 64_000_000), ("1 kb", 1000), ("2GB", 2 * 10**9)])
def test_sizes_have_a_unit(text: str, size: int) -> None:
    """A bare number is refused, as everywhere."""
    assert recording.parse_size(text) == size
    for wrong in ("64", "0MB", "-1MB", "MB", "1.5MB"):
        with pytest.raises(SpecError):
            recording.parse_size(wrong)
