"""The reference server itself: its times are as scripted, its bytes are as asked, its own metrics are true."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from replay_data import FakeServer, serving

from tuner.records import Floats
from tuner.replay.counters import parse_counters
from tuner.replay.stream import Completion, EventParser

pytestmark = [pytest.mark.timing, pytest.mark.once]

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
COUNTED = {"include_usage": True, "continuous_usage_stats": True}


@contextmanager
def posted(server: FakeServer, path: str = TEXT, **more: Any) -> Iterator[http.client.HTTPResponse]:
    """Give the answer to a request for five tokens, its body not read yet."""
    prompt = {"prompt": [5] * 10} if path == TEXT else {"messages": [{"role": "user", "content": "x" * 10}]}
    body = {**prompt, "max_tokens": 5, "stream": True, "stream_options": COUNTED} | more
    with closing(http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)) as connection:
        connection.request("POST", path, json.dumps(body))
        yield connection.getresponse()


def reads(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body as it comes."""
    while data := answer.read1():
        yield data


def ask(server: FakeServer, path: str = TEXT, **more: Any) -> bytes:
    with posted(server, path, **more) as answer:
        return b"".join(reads(answer))


def whole(server: FakeServer, path: str = TEXT, **more: Any) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    said: dict[str, Any] = json.loads(ask(server, path, stream=False, stream_options=None, **more))
    return said


def events(body: bytes) -> list[Any]:
    """Return the JSON of a stream's events, [DONE] left out."""
    return [json.loads(data) for data in EventParser().feed(body) if data != b"[DONE]"]


def deltas(body: bytes) -> list[dict[str, str]]:
    return [event["choices"][0]["delta"] for event in events(body) if event["choices"]]


def times(server: FakeServer) -> Floats:
    """Return when chunks were written after their request's arrival, each by the request that was least late."""
    written = [[at - entry["arrived"] for at, _ in entry["writes"]] for entry in server.log()]
    return np.array(written).min(axis=0)


def metrics(server: FakeServer) -> dict[str, float]:
    with urlopen(f"{server.url}/metrics", timeout=5) as answer:
        return dict(parse_counters(answer.read().decode()))


# --- Times ------------------------------------------------------------------------------------------------


def test_tokens_are_written_when_the_script_says(tmp_path: Path) -> None:
    """First after 50 ms, then every 20 ms, with 100 ms more before the fourth: never early, seldom late."""
    with serving(tmp_path, {"first_token": 0.05, "gap": 0.02, "stalls": {"3": 0.1}}) as server:
        for _ in range(4):
            ask(server)
        late = times(server) - [0.05, 0.07, 0.09, 0.21, 0.23]

    assert late.min() > -1e-4
    assert late.max() < 0.005


def test_a_chunk_goes_out_when_its_last_token_is_due(tmp_path: Path) -> None:
    """Chunks of 2, 1, 1 and then 3 tokens at 20 ms a token; the last chunk takes what is left."""
    with serving(tmp_path, {"first_token": 0.02, "gap": 0.02, "tokens_per_chunk": [2, 1, 1, 3]}) as server:
        for _ in range(4):
            completion = Completion()
            completion.feed(ask(server, max_tokens=9), 0.0)
        written = times(server)

    assert list(completion.tokens) == [2, 1, 1, 3, 2]
    assert written == pytest.approx([0.04, 0.06, 0.08, 0.14, 0.18], abs=0.01)


def test_requests_may_have_times_of_their_own(tmp_path: Path) -> None:
    """A list has one for each request, and the last for all that follow."""
    with serving(tmp_path, {"first_token": [0.0, 0.1], "first_chunk_tokens": 5}) as server:
        for _ in range(3):
            ask(server)
        log = server.log()

    assert [entry["writes"][0][1] for entry in log] == [5, 5, 5]
    firsts = [entry["writes"][0][0] - entry["arrived"] for entry in log]
    assert firsts == pytest.approx([0.0, 0.1, 0.1], abs=0.04)


def test_a_frozen_server_keeps_its_script(tmp_path: Path) -> None:
    """Nothing is written while it is frozen; what was due then comes at once, the rest on time."""
    script = {"first_token": 0.05, "gap": 0.05, "freeze_at": 0.075, "freeze_for": 0.15}
    with serving(tmp_path, script) as server:
        ask(server, max_tokens=6)
        written = times(server)

    assert written == pytest.approx([0.05, 0.225, 0.225, 0.225, 0.25, 0.3], abs=0.04)
    assert written[1] >= 0.22


def test_merged_events_have_the_stamp_of_their_write(tmp_path: Path) -> None:
    """Five tokens 20 ms apart in one write: one stamp, when the last was due."""
    with serving(tmp_path, {"first_token": 0.0, "gap": 0.02, "merge_writes": 5}) as server:
        ask(server)
        writes = server.log()[0]["writes"]

    assert len({at for at, _ in writes}) == 1
    assert writes[0][0] - server.log()[0]["arrived"] >= 0.08


def test_a_new_connection_may_be_slow(tmp_path: Path) -> None:
    """The client has connected and sent, and the server reads 150 ms later."""
    with serving(tmp_path, {"connect_delay": 0.15, "first_token": 0.0}) as server:
        sent = time.monotonic()
        ask(server)
        entry = server.log()[0]

    assert entry["arrived"] - sent >= 0.149
    assert entry["writes"][0][0] - entry["arrived"] < 0.1


# --- Bytes ------------------------------------------------------------------------------------------------


def test_a_chat_begins_with_a_role_and_ends_with_usage(tmp_path: Path) -> None:
    """Role, reasoning, content, usage: the counts run from 0 and only the last event has no choices."""
    with serving(tmp_path, {"reasoning": 2, "tokens_per_chunk": [1, 2, 1]}) as server:
        body = ask(server, CHAT)
        writes = server.log()[0]["writes"]

    assert deltas(body) == [
        {"role": "assistant", "content": ""},
        {"reasoning": " a"},
        {"reasoning": " a", "content": " a"},
        {"content": " a"},
        {"content": " a"},
    ]
    said = events(body)
    assert [event["usage"]["completion_tokens"] for event in said] == [0, 1, 3, 4, 5, 5]
    assert [event["choices"] for event in said][-1] == []
    assert {event["object"] for event in said} == {"chat.completion.chunk"}
    assert [tokens for _, tokens in writes] == [1, 2, 1, 1]
    completion = Completion()
    completion.feed(body, 0.0)
    assert (list(completion.tokens), completion.end(5, 0.0)) == ([1, 2, 1, 1], "")


def test_reasoning_has_two_names(tmp_path: Path) -> None:
    """Older servers say reasoning_content, some say both."""
    with serving(tmp_path, {"reasoning": 9, "reasoning_as": "reasoning reasoning_content"}) as server:
        body = ask(server, CHAT, max_tokens=1)

    assert deltas(body)[1] == {"reasoning": " a", "reasoning_content": " a"}


def test_usage_comes_as_asked(tmp_path: Path) -> None:
    """None, only at the end, or in every event."""
    with serving(tmp_path) as server:
        for path in (TEXT, CHAT):
            silent = events(ask(server, path, stream_options=None))
            closing_only = events(ask(server, path, stream_options={"include_usage": True}))
            assert not any("usage" in event for event in silent)
            assert ["usage" in event for event in closing_only] == [False] * (len(closing_only) - 1) + [True]


def test_an_answer_need_not_be_streamed(tmp_path: Path) -> None:
    """One JSON object with all tokens; `never_stream` gives it even to who asked for a stream."""
    (tmp_path / "b").mkdir()
    with serving(tmp_path, {"reasoning": 2}) as server:
        text, chat = whole(server), whole(server, CHAT)
    with serving(tmp_path / "b", {"never_stream": True}) as server:
        unasked = json.loads(ask(server))

    assert text["choices"][0]["text"] == unasked["choices"][0]["text"] == " a" * 5
    assert chat["choices"][0]["message"] == {"role": "assistant", "reasoning": " a" * 2, "content": " a" * 3}
    assert {said["usage"]["completion_tokens"] for said in (text, chat, unasked)} == {5}


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_text_is_written_as_utf_8_and_may_be_cut_inside_a_character(tmp_path: Path, path: str) -> None:
    """No escapes, as in vLLM; writes of three bytes give the same stream."""
    text = "é\u4e2d😀"
    with serving(tmp_path, {"text": text, "split_writes": 3}) as server:
        body = ask(server, path)

    assert body.count(text.encode()) == 5
    completion = Completion()
    completion.feed(body, 0.0)
    assert (sum(completion.tokens), completion.end(5, 0.0)) == (5, "")


@pytest.mark.parametrize(("behaviour", "newline"), [({}, b"\n"), ({"crlf": True}, b"\r\n"), ({"cr": True}, b"\r")])
def test_lines_end_in_three_ways(tmp_path: Path, behaviour: dict[str, Any], newline: bytes) -> None:
    """LF, CRLF or CR, for comments and blank lines too."""
    with serving(tmp_path, {"extras": True, **behaviour}) as server:
        body = ask(server)

    assert body.count(b": keep-alive" + newline * 2 + b"event: ping" + newline * 3 + b"data: {") == 5
    assert body.endswith(b"data: [DONE]" + newline * 2)
    assert set(body) & set(b"\r\n") == set(newline)


# --- Faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_faults_strike_both_endpoints(tmp_path: Path, path: str) -> None:
    """A 503, an error in the stream, a short output, a reset, an early close and a silence after two chunks."""
    faults = {
        "http_status": {"only": [1], "status": 503},
        "in_band_error": {"only": [2], "after": 2},
        "short_output": {"only": [3], "tokens": 2},
        "reset": {"only": [4], "after": 2},
        "early_close": {"only": [5], "after": 2},
        "silence": {"only": [6], "after": 2},
    }
    with serving(tmp_path, {"first_token": 0.01, "gap": 0.01, **faults}) as server:
        with posted(server, path) as refused:
            assert refused.status == 503
        in_band = ask(server, path)
        short = ask(server, path)
        with pytest.raises(ConnectionResetError):
            ask(server, path)
        with posted(server, path) as cut, pytest.raises(http.client.IncompleteRead):
            cut.read()
        with posted(server, path) as silent:
            assert any(b'"completion_tokens":2' in data for data in reads(silent))
        deadline = time.monotonic() + 10
        while len(server.log()) < 6 and time.monotonic() < deadline:
            time.sleep(0.02)
        log = server.log()

    assert events(in_band)[-1]["error"]["code"] == 500
    assert events(short)[-1]["usage"]["completion_tokens"] == 2
    assert [entry["outcome"] for entry in log] == [
        "refused", "in_band_error", "completed", "reset", "early_close", "client_left",
    ]  # fmt: skip
    assert [sum(n for _, n in entry["writes"]) for entry in log] == [0, 2, 2, 2, 2, 2]


def test_faults_strike_answers_that_are_not_streamed(tmp_path: Path) -> None:
    """What would be an error in the stream is a 500."""
    with serving(tmp_path, {"in_band_error": {"only": [1]}, "early_close": {"only": [2]}}) as server:
        with posted(server, stream=False, stream_options=None) as failed:
            assert failed.status == 500
        with pytest.raises(http.client.RemoteDisconnected):
            ask(server, stream=False, stream_options=None)


# --- Its own metrics --------------------------------------------------------------------------------------


def test_histograms_say_what_the_log_says(tmp_path: Path) -> None:
    """TTFT from arrival to write, a gap for each later chunk, end to end, and the wait for a free slot."""
    with serving(tmp_path, {"first_token": 0.03, "gap": 0.01}) as server:
        for path in (TEXT, CHAT):
            ask(server, path)
        seen, log = metrics(server), server.log()

    firsts = [entry["writes"][0][0] - entry["arrived"] for entry in log]
    spans = [entry["writes"][-1][0] - entry["writes"][0][0] for entry in log]
    assert seen["vllm:time_to_first_token_seconds_count"] == seen["vllm:e2e_request_latency_seconds_count"] == 2
    assert seen["vllm:inter_token_latency_seconds_count"] == 8
    assert seen["vllm:time_to_first_token_seconds_sum"] == pytest.approx(sum(firsts), abs=0.005)
    assert seen["vllm:inter_token_latency_seconds_sum"] == pytest.approx(sum(spans), abs=0.005)
    assert seen["vllm:e2e_request_latency_seconds_sum"] >= sum(firsts) + sum(spans)
    assert seen["vllm:request_queue_time_seconds_sum"] == 0


def test_buckets_are_cumulative(tmp_path: Path) -> None:
    """One TTFT of 30 ms or a little more: none up to 20 ms, one in each bucket from 80 ms or so on."""
    with serving(tmp_path, {"first_token": 0.03}) as server:
        ask(server)
        with urlopen(f"{server.url}/metrics", timeout=5) as answer:
            lines = [line for line in answer.read().decode().splitlines() if "first_token_seconds_bucket" in line]

    counts = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert (counts[:4], counts[-1]) == ([0, 0, 0, 0], 1)
    assert counts == sorted(counts)
    assert 'le="0.001"} 0.0' in lines[0]
    assert 'le="+Inf"} 1.0' in lines[-1]


def test_the_closing_event_has_the_requests_timing_when_asked(tmp_path: Path) -> None:
    """As --enable-per-request-metrics of vLLM: TTFT from being scheduled, decode time, mean ITL, in ms."""
    (tmp_path / "b").mkdir()
    with serving(tmp_path, {"first_token": 0.03, "gap": 0.02}, "--enable-per-request-metrics") as server:
        said = [events(ask(server, path))[-1]["metrics"] for path in (TEXT, CHAT)]
        said.append(whole(server)["metrics"])
    with serving(tmp_path / "b") as server:
        assert "metrics" not in events(ask(server))[-1]

    for timing in said:
        assert timing["time_to_first_token_ms"] == pytest.approx(30, abs=15)
        assert timing["generation_time_ms"] == pytest.approx(80, abs=15)
        assert timing["mean_itl_ms"] == pytest.approx(timing["generation_time_ms"] / 4)
        assert timing["queue_time_ms"] == 0
        total = timing["time_to_first_token_ms"] + timing["generation_time_ms"]
        assert timing["tokens_per_second"] == pytest.approx(5000 / total)


def test_the_wait_for_a_slot_is_queue_time(tmp_path: Path) -> None:
    """One slot, two requests: the second one waits for the end of the first, and its TTFT is without the wait."""
    flags = ("--max-num-seqs", "1", "--enable-per-request-metrics")
    with serving(tmp_path, {"step": 0.03}, *flags) as server:
        with posted(server, max_tokens=15) as first, posted(server) as second:
            timing = [events(b"".join(reads(answer)))[-1]["metrics"] for answer in (first, second)]
        queued = metrics(server)["vllm:request_queue_time_seconds_sum"]

    assert timing[0]["queue_time_ms"] < 80
    assert timing[1]["queue_time_ms"] > 80
    assert timing[1]["time_to_first_token_ms"] < 80
    assert queued == pytest.approx(sum(one["queue_time_ms"] for one in timing) / 1000)


def test_the_server_can_lie_about_its_ttft(tmp_path: Path) -> None:
    """A second more in the histogram and in the closing event than on the wire."""
    behaviour = {"first_token": 0.0, "metrics_lie": 1.0}
    with serving(tmp_path, behaviour, "--enable-per-request-metrics") as server:
        timing = events(ask(server))[-1]["metrics"]
        seen, entry = metrics(server), server.log()[0]

    assert timing["time_to_first_token_ms"] >= 1000
    assert seen["vllm:time_to_first_token_seconds_sum"] >= 1
    assert entry["writes"][0][0] - entry["arrived"] < 0.5


# --- Tokenizer --------------------------------------------------------------------------------------------


def test_the_tokenizer_gives_what_a_prompt_is_counted_as(tmp_path: Path) -> None:
    """A byte is a token: of a completion's prompt, or of all that a chat says."""
    with serving(tmp_path) as server:
        said = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cé"}]
        for path, body in ((TEXT, {"prompt": "abcé"}), (CHAT, {"messages": said})):
            with urlopen(f"{server.url}/tokenize", json.dumps(body).encode(), timeout=5) as answer:
                tokens = json.load(answer)["tokens"]

            assert bytes(tokens).decode() == "abcé"
            assert whole(server, path, **body)["usage"]["prompt_tokens"] == len(tokens)
