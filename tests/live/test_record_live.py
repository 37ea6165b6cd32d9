"""`tune record` in front of a real vLLM: prompts, lengths and times are those that vLLM itself had."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_data import lines, post, posting, receive, recording, send, tune, until

from tests.live.test_deployment_live import in_one_process
from tests.test_record import prefix_tree, shared_blocks, shared_tokens
from tuner import tiny_model, workload
from tuner.deployment.launcher import LocalLauncher

pytestmark = [pytest.mark.live, pytest.mark.timing, pytest.mark.timeout(600)]

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of the tiny model."""
    config = in_one_process((vllm, "serve"), str(tiny_model.ensure()), served_model_name="m")
    with LocalLauncher().launch(config, tmp_path_factory.mktemp("vllm")) as deployment:
        yield deployment.url


def asked() -> list[tuple[str, dict[str, Any]]]:
    """Return requests of every form whose prompt vLLM can be asked for."""
    said = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "the water? " * 9}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    return [
        (TEXT, {"prompt": "the water of the world and the people in it " * 4}),
        (TEXT, {"prompt": ["one text in a list"]}),
        (TEXT, {"prompt": list(range(100, 150))}),
        (TEXT, {"prompt": "no special tokens", "add_special_tokens": False}),
        (CHAT, {"messages": said}),
        (CHAT, {"messages": parts}),
        (CHAT, {"messages": said, "tools": [tool], "tool_choice": "none"}),
        (CHAT, {"messages": [*said, {"role": "assistant", "content": "It is"}], "continue_final_message": True,
                "add_generation_prompt": False}),
        (CHAT, {"messages": said, "reasoning_effort": "low"}),
    ]  # fmt: skip


def test_recorded_prompts_are_the_tokens_that_vllm_had(server: str, tmp_path: Path) -> None:
    """Asked straight, vLLM returns the ids of each prompt; what was recorded through the tap is the same."""
    common = {"model": "m", "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    truth = []
    for path, body in asked():
        answer = json.loads(post(server, path, {**body, **common, "return_token_ids": True}).body)
        truth.append(answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"])
    with recording(tmp_path / "w", server, "--keep-prompts") as recorder:
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        for number, (path, body) in enumerate(asked()):
            post(recorder.url, path, {**body, **common, **(counted if number % 2 else {})})
        until(lambda: len(lines(tmp_path / "w" / "recording-0001.jsonl")) == 2 * len(truth))
        recorder.stop()

    assert recorder.summary()["hashed"] == "tokens"
    assert [row["prompt"] for row in recorder.rows()] == truth
    assert [(row["input_len"], row["output_len"]) for row in recorder.rows()] == [(len(ids), 3) for ids in truth]


def test_the_responses_api_is_recorded(server: str, tmp_path: Path) -> None:
    """Plain input has its ids; streamed or not, lengths are those of usage."""
    common = {"model": "m", "max_output_tokens": 4, "temperature": 0}
    with recording(tmp_path / "w", server) as recorder:
        for more in ({"input": "hello"}, {"input": "hello", "instructions": "Be short.", "stream": True}):
            got = post(recorder.url, RESPONSES, {**common, **more})
            assert got.status == 200, got.body
        until(lambda: len(lines(tmp_path / "w" / "recording-0001.jsonl")) == 4)
        recorder.stop()

    assert [row["endpoint"] for row in recorder.rows()] == ["responses"] * 2
    assert all(row["block_ids"] for row in recorder.rows())


def test_a_conversation_shares_what_vllm_caches(server: str, tmp_path: Path) -> None:
    """Each turn waited for the one before, and its ids begin with all whole blocks of that one's prompt."""
    said = [{"role": "user", "content": "tell me of the water and the world and the people in it " * 3}]
    with recording(tmp_path / "w", server) as recorder:
        for _ in range(4):
            body = {"model": "m", "messages": said, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
            answer = json.loads(post(recorder.url, CHAT, body).body)["choices"][0]["message"]
            said = [*said, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "go on"}]
            time.sleep(0.2)
        recorder.stop()
    rows = workload.load(recorder.folder).requests

    assert [row.parent for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert all(row.think_time is not None and 0.15 < row.think_time < 1 for row in rows[1:])
    shares = shared_blocks(rows)
    assert all(shares[i][i + 1] >= rows[i].input_len // 16 for i in range(3))


def test_a_cancelled_request_leaves_vllm(server: str, tmp_path: Path) -> None:
    """It is aborted there soon after its client has gone."""
    with recording(tmp_path / "w", server) as recorder:
        body = {"model": "m", "prompt": [5] * 20, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with send(recorder.url, posting(TEXT, body)) as sock:
            receive(sock, b"data: ")
            assert running(server) == 1
        until(lambda: running(server) == 0, patience=3)
        assert "not written: 1 (cancelled by the client)" in recorder.stop()


def running(server: str) -> float:
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        return sum(float(line.rsplit(" ", 1)[1]) for line in answer.read().decode().splitlines()
                   if line.startswith("vllm:num_requests_running"))  # fmt: skip


def test_a_replay_through_the_tap_records_what_was_sent(server: str, tmp_path: Path) -> None:
    """Arrivals within 5 ms of the sends, lengths equal, and the same pairs share the same number of blocks."""
    sent = prefix_tree(np.random.default_rng(5), count=40, gap=0.15)
    (tmp_path / "sent.jsonl").write_text(workload.to_jsonl(sent))
    with recording(tmp_path / "w", server, "--keep-prompts") as recorder:
        words = ("--url", recorder.url, "--warm-up", "0s", "--seed", "1", "-o", str(tmp_path / "out"))
        done = tune("replay", str(tmp_path / "sent.jsonl"), *words)
        assert done.returncode == 0, done.stderr
        recorder.stop()
    found = workload.load(recorder.folder).requests[-len(sent) :]  # a replay that was late is made once more
    sends = np.sort(np.load(tmp_path / "out" / "records.npz")["sent"])
    arrivals = np.array([row.arrival for row in found])

    assert [(row.input_len, row.output_len) for row in found] == [(row.input_len, row.output_len) for row in sent]
    late = arrivals - sends
    assert np.abs(late - np.median(late)).max() < 0.005
    assert shared_blocks(found) == shared_tokens([row.prompt for row in found if isinstance(row.prompt, tuple)])
