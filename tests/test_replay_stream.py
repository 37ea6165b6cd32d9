"""Reading a stream: events cut anywhere, chunks that are not tokens, ends that are not ends."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_data import DONE, closing, event, read

from tuner.replay.stream import Completion, EventParser

STREAM = b"".join(
    [
        b": keep-alive\r\n\r\n",
        event(0, ""),
        event(1, newline="\r\n"),
        b"event: message\nid: 5\n" + event(3, 'é "usage": {"completion_tokens": 99} \u2028'),
        b": comment\n\n",
        event(4, ""),
        closing(4),
        DONE,
    ]
)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_may_be_cut_anywhere(cuts: list[int]) -> None:
    """Any split of the bytes, even inside a character or CRLF, gives the same tokens and the same end."""
    edges = [0, *sorted(cuts), len(STREAM)]
    completion = Completion()
    for start, stop in pairwise(edges):
        completion.feed(STREAM[start:stop], 1.0)

    assert list(completion.tokens) == [1, 2, 1]
    assert completion.end(4, 1.0) == ""
    assert (completion.prompt_tokens, completion.completion_tokens) == (7, 4)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40).filter(lambda data: not set(data) & set(b"\r\n")), max_size=6), st.data())
def test_the_parser_returns_the_data_of_every_event(datas: list[bytes], data: st.DataObject) -> None:
    """What was framed comes out, byte for byte, with either line ending."""
    newline = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    stream = b"".join(b"data: " + one + newline * 2 for one in datas)
    cut = data.draw(st.integers(0, len(stream)))
    parser = EventParser()

    assert [*parser.feed(stream[:cut]), *parser.feed(stream[cut:])] == datas


def test_an_empty_text_with_a_token_is_a_token() -> None:
    """A token held back by the detokenizer counts when the server counts it."""
    assert list(read(event(1, ""), event(2, "")).tokens) == [1, 1]


def test_without_usage_tokens_are_unknown() -> None:
    """Text without counts is a chunk of unknown size; the closing usage gives the total but no chunk."""
    completion = read(event(None), event(None, ""), event(None), closing(8), DONE)

    assert list(completion.times) == [0.0, 2.0]
    assert all(math.isnan(tokens) for tokens in completion.tokens)
    assert completion.completion_tokens == 8


def test_reasoning_is_output_too() -> None:
    """A delta with reasoning only has tokens."""
    completion = read(b'data: {"choices": [{"delta": {"role": "assistant", "content": "", "reasoning": "hm"}}]}\n\n')

    assert len(completion.times) == 1


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([event(1), event(2), closing(2), DONE], ""),
        ([event(1), closing(1), DONE], "short"),
        ([event(1), event(3), closing(3), DONE], "long"),
        ([event(1), event(2), closing(2)], "no_done"),
        ([closing(0), DONE], "empty"),
        ([event(1), b'data: {"error": {"message": "dead", "code": 500}}\n\n', DONE], "in_band_error"),
        ([event(1), b"data: <html>\n\n", DONE], "malformed"),
        ([event(1), event(2), b"data: [DONE]\n"], ""),
        ([event(None), event(None), DONE], ""),
    ],
)
def test_the_end_of_a_stream_is_judged(parts: list[bytes], error: str) -> None:
    """HTTP 200 is not success: two tokens were asked for, and the stream must be whole."""
    assert read(*parts).end(2, 9.0) == error


def test_the_message_of_an_error_is_kept() -> None:
    """What the server said is there for the reader."""
    completion = read(b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\n')

    assert completion.message == "EngineCore encountered an issue."


def test_no_reads_are_no_events() -> None:
    """What was looked at already is not looked at again."""
    completion = read(event(1), event(2))
    completion.feed_all([], [])

    assert list(completion.tokens) == [1, 1]


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 1, 1, 2, 0]), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
def test_many_reads_at_once_are_the_same_as_one_by_one(steps: list[int], size: int, ends: bool) -> None:  # noqa: FBT001
    """Plain events, empty ones, the closing ones: batches of any size give the same stamps and counts."""
    made, events = 0, []
    for step in steps:
        made += step
        events.append(event(made, " a" if step else ""))
    events += [closing(made), DONE] if ends else []
    one, batched = read(*events), Completion()
    for start in range(0, len(events), size):
        part = events[start : start + size]
        batched.feed_all(part, [float(start + i) for i in range(len(part))])

    assert (list(batched.times), list(batched.tokens)) == (list(one.times), list(one.tokens))
    assert (batched.made, batched.is_done, batched.prompt_tokens) == (one.made, one.is_done, 7)


def test_counts_that_do_not_add_up_are_no_measurement() -> None:
    """Chunks that were counted up to 2 and a stream of 4: whose gaps are they?"""
    for last in (4, 1):
        completion = read(event(1), event(2), event(2), closing(last), DONE)

        assert completion.end(4, 9.0) == "miscounted"
        assert completion.message == f"the chunks' counts end at 2 tokens, the stream's at {last}"


def test_an_error_beside_usage_is_an_error() -> None:
    """A count does not make an error event a token."""
    said = b'data: {"error": {"message": "dead"}, "usage": {"completion_tokens": 2}}\n\n'
    completion = Completion()
    completion.feed_all([event(1), said], [0.0, 1.0])

    assert (completion.end(2, 9.0), completion.message) == ("in_band_error", "dead")


@pytest.mark.parametrize(
    "data",
    [b'{"choices":["x"]}', b'{"choices":5}', b"[" * 100_000, b'{"choices":[],"usage":{"completion_tokens":"x"}}'],
)
def test_events_of_another_shape_do_not_break_the_client(data: bytes) -> None:
    """Whatever comes ends as a kind of failure, or as nothing."""
    completion = read(b"data: " + data + b"\n\n", DONE)

    assert completion.end(1, 9.0) in {"malformed", "empty"}


@pytest.mark.parametrize("said", [b"[1]", b'"none"', b"null", b'{"mean_itl_ms": NaN, "queue_time_ms": "x"}'])
def test_metrics_of_another_shape_are_none(said: bytes) -> None:
    """The server's own times are read where they are numbers."""
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1},"metrics":' + said + b"}\n\n"

    assert read(event(1), usage, DONE).server_metrics == {}


def test_an_endless_event_is_given_up() -> None:
    """Nine megabytes without an end are no event; what follows is not kept."""
    completion = Completion()
    for _ in range(160):
        completion.feed(b"data: " + b"x" * 65_536, 1.0)

    assert completion.end(1, 2.0) == "malformed"
