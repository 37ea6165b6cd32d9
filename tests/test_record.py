"""`tune record` as a whole: what it leaves on disk, whatever happens to it."""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_data import (
    HOLD,
    Recorder,
    ask,
    chunk,
    event,
    lines,
    post,
    posting,
    receive,
    recording,
    send,
    stream_head,
    tune,
    until,
    upstream,
    whole,
)
from replay_data import FakeServer, free_port, serving

from tests.faults.shims import compiled, missing_compiler
from tuner import workload

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CANARY, KEY, WHO = "xylophone-canary-42", "sk-canary-key-4242", "alice-canary"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with serving(tmp_path_factory.mktemp("server"), {"first_token": 0.02, "gap": 0.002, "log_prompts": True}) as made:
        yield made


def parts_of(recorder: Recorder) -> list[dict[str, Any]]:
    return [line for part in sorted(recorder.folder.glob("recording-*.jsonl")) for line in lines(part)]


def rows_written(recorder: Recorder) -> int:
    return sum("arrival_s" in line for line in parts_of(recorder))


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


# --- What is written --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left(server: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, str]:
    """A recording of a conversation, of a prompt of token ids, and of what makes no row."""
    key = {"Authorization": f"Bearer {KEY}", "X-Session-Id": WHO}
    with recording(tmp_path_factory.mktemp("left") / "w", f"{server.url}/v1") as recorder:
        said = [{"role": "system", "content": f"{CANARY} " * 3}, {"role": "user", "content": "hello"}]
        for turn in range(3):
            asked = {"model": "m", "messages": said, "max_tokens": 4 + turn}
            answer = json.loads(post(recorder.url, CHAT, asked, Authorization=key["Authorization"]).body)
            said = [*said, answer["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        post(recorder.url, TEXT, {"prompt": list(range(33)), "max_tokens": 3, **counted}, **key)
        post(recorder.url, TEXT, {"prompt": CANARY, "max_tokens": 3, "stream": True}, **key)
        post(recorder.url, CHAT, {"model": "nobody", "messages": []}, **key)
        ask(recorder.url, "GET", "/metrics")
        until(lambda: len(parts_of(recorder)) == 8)
        return recorder, recorder.stop()


def test_each_request_is_a_row_or_has_a_reason(left: tuple[Recorder, str]) -> None:
    """Four rows of seven requests, and what became of the other three; printed and kept."""
    recorder, said = left
    summary = recorder.summary()

    assert recorder.process.returncode == 0, recorder.errors.read_text()
    assert (summary["requests"], summary["rows"], summary["hashed"]) == (7, 4, "tokens")
    assert sorted(summary["not_written"].values()) == [1, 1, 1]
    assert "requests: 7, of which 4 are rows" in said
    assert "not written: 1 (no usage in the stream: ask for stream_options.include_usage)" in said
    assert "not written: 1 (answered with status 404)" in said
    files = {path.name for path in recorder.folder.iterdir()}
    assert files == {"recording.json", "workload.jsonl", "README.md", "card.png"}


def test_lengths_and_turns_are_the_servers(left: tuple[Recorder, str]) -> None:
    """Each turn's prompt is longer than the one before and shares its ids; the third turn waited for the second."""
    rows = workload.load(left[0].folder).requests
    turns = rows[:3]

    assert [row.output_len for row in rows] == [4, 5, 6, 3]
    assert (rows[3].input_len, rows[3].endpoint, turns[0].endpoint, turns[0].model) == (33, "completions", "chat", "m")
    assert [row.parent for row in turns] == [None, turns[0].id, turns[1].id]
    assert len({row.session for row in turns}) == 1
    for before, after in pairwise(turns):
        assert after.think_time is not None
        assert 0 <= after.think_time < 1
        whole_blocks = before.input_len // 16
        assert (before.block_ids or ())[:whole_blocks] == (after.block_ids or ())[:whole_blocks]


def test_no_prompt_and_no_key_reaches_the_disk(left: tuple[Recorder, str]) -> None:
    """Not what was said, not who said it, not with which key: neither in files nor in words."""
    recorder, said = left
    found = on_disk(recorder.folder.parent) + said.encode()

    assert b"arrival_s" in found
    for secret in (CANARY, KEY, WHO, "hello"):
        assert secret.encode() not in found


def test_parts_hold_no_prompt_while_it_records(server: FakeServer, tmp_path: Path) -> None:
    """Nor does a recording that was killed, before anything is tidied up."""
    with recording(tmp_path / "w", server.url) as recorder:
        key = {"Authorization": f"Bearer {KEY}"}
        post(recorder.url, CHAT, {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2}, **key)
        until(lambda: len(parts_of(recorder)) == 2)
        recorder.process.kill()
        found = on_disk(tmp_path)

    assert b"block_ids" in found
    assert CANARY.encode() not in found
    assert KEY.encode() not in found


def test_prompts_are_kept_when_asked_for(server: FakeServer, tmp_path: Path) -> None:
    """As token ids that can be replayed, in a file that only the user reads."""
    with recording(tmp_path / "w", server.url, "--keep-prompts") as recorder:
        post(recorder.url, CHAT, {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2})
        until(lambda: len(parts_of(recorder)) == 2)
        recorder.stop()

    assert bytes(recorder.rows()[0]["prompt"]).decode() == CANARY
    assert (recorder.folder / "workload.jsonl").stat().st_mode & 0o777 == 0o600
    assert workload.load(recorder.folder).requests[0].prompt is not None


def test_two_recordings_of_the_same_traffic_cannot_be_joined(server: FakeServer, tmp_path: Path) -> None:
    """Nothing but lengths and times is common to them: no block id, no session."""
    found = []
    for name in ("one", "other"):
        with recording(tmp_path / name, server.url) as recorder:
            asked = {"messages": [{"role": "user", "content": CANARY * 5}], "max_tokens": 2}
            post(recorder.url, CHAT, asked, **{"X-Session-Id": WHO})
            until(lambda recorder=recorder: len(parts_of(recorder)) == 2)
            recorder.stop()
        found.append(recorder.rows()[0])

    assert not set(found[0]["block_ids"]) & set(found[1]["block_ids"])
    assert found[0]["session"] != found[1]["session"]


def test_without_a_tokenizer_ids_are_of_the_text(tmp_path: Path) -> None:
    """As many as the tokens have blocks, equal as far as the text is, and marked."""
    with serving(tmp_path, {"tokenizer": False}) as server, recording(tmp_path / "w", server.url) as recorder:
        for end in ("one", "other"):
            post(recorder.url, TEXT, {"prompt": "word " * 100 + end, "max_tokens": 2})
        until(lambda: len(parts_of(recorder)) == 4)
        assert "block ids of text" in recorder.stop()
    one, other = recorder.rows()

    assert recorder.summary()["hashed"] == "text"
    assert [len(row["block_ids"]) == -(-row["input_len"] // 16) for row in (one, other)] == [True, True]
    assert one["block_ids"][:7] == other["block_ids"][:7]
    assert one["block_ids"][8] != other["block_ids"][8]


# --- When it ends -----------------------------------------------------------------------------------------


def test_kill_9_loses_only_what_was_open(server: FakeServer, tmp_path: Path) -> None:
    """Every request that had ended is a row afterwards; the next recording there is refused, --finish makes it."""
    folder = tmp_path / "w"
    with recording(folder, server.url) as recorder:
        with ThreadPoolExecutor(4) as clients:
            asked = [{"prompt": f"number {i}", "max_tokens": 3} for i in range(40)]
            list(clients.map(lambda body: post(recorder.url, TEXT, body), asked))
        with send(recorder.url, posting(TEXT, {"prompt": "open", "max_tokens": 4000})):
            until(lambda: rows_written(recorder) == 40)
            os.killpg(recorder.process.pid, signal.SIGKILL)
            recorder.process.wait()
    refused = tune("record", "--upstream", server.url, "--port", "0", "-o", str(folder))
    finished = tune("record", "--finish", str(folder))

    assert refused.returncode == 2
    assert f"tune record --finish {folder}" in refused.stderr
    assert finished.returncode == 0, finished.stderr
    assert len(workload.load(folder).requests) == 40
    assert recorder.summary()["was_cut"] is True


def test_a_folder_that_is_being_recorded_into_is_nobody_elses(server: FakeServer, tmp_path: Path) -> None:
    """Neither a second recorder nor --finish touches it: what came after that would be lost."""
    folder = tmp_path / "w"
    with recording(folder, server.url) as recorder:
        post(recorder.url, TEXT, {"prompt": "before", "max_tokens": 2})
        until(lambda: rows_written(recorder) == 1)
        others = [
            tune("record", "--upstream", server.url, "--port", "0", "-o", str(folder)),
            tune("record", "--finish", str(folder)),
        ]
        post(recorder.url, TEXT, {"prompt": "after", "max_tokens": 2})
        until(lambda: rows_written(recorder) == 2)
        recorder.stop()

    assert [other.returncode for other in others] == [2, 2]
    assert all("another tune is recording there" in other.stderr for other in others)
    assert len(recorder.rows()) == 2


def test_a_killed_recorder_without_rows_leaves_nothing_to_keep(server: FakeServer, tmp_path: Path) -> None:
    """--finish says so and clears the folder for the next one."""
    with recording(tmp_path / "w", server.url) as recorder:
        recorder.process.kill()
        recorder.process.wait()
    finished = tune("record", "--finish", str(tmp_path / "w"))

    assert "nothing was recorded" in finished.stdout
    assert not (tmp_path / "w").exists()


def test_parts_rotate(server: FakeServer, tmp_path: Path) -> None:
    """No part is larger than was said, and none of the rows is lost between two."""
    with recording(tmp_path / "w", server.url, "--rotate", "1kB") as recorder:
        for i in range(20):
            post(recorder.url, TEXT, {"prompt": f"number {i}", "max_tokens": 2})
        until(lambda: len(parts_of(recorder)) == 40)
        sizes = [path.stat().st_size for path in recorder.folder.glob("recording-*.jsonl")]
        recorder.stop()

    assert len(sizes) > 2
    assert max(sizes) <= 1000
    assert len(recorder.rows()) == 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_open_requests_end(tmp_path: Path, number: int) -> None:
    """Nobody new is let in, what is open is answered and recorded, and it exits 0."""
    with serving(tmp_path, {"first_token": 1.0}) as server, recording(tmp_path / "w", server.url) as recorder:
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(post, recorder.url, TEXT, {"prompt": "a", "max_tokens": 1})
            time.sleep(0.3)
            recorder.process.send_signal(number)
            until(lambda: "open" in recorder.errors.read_text())
            with pytest.raises(OSError, match="refused"):
                ask(recorder.url, "GET", "/metrics")
            assert answer.result().status == 200
        recorder.process.communicate(timeout=10)

    assert recorder.process.returncode == 0
    assert len(recorder.rows()) == 1


def test_the_second_signal_cuts_them_off(tmp_path: Path) -> None:
    """A request that would never end is counted, and the rows are there."""
    with upstream() as server, recording(tmp_path / "w", server.url) as recorder:
        answer = {"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        server.answers[TEXT] = [whole(200, json.dumps(answer).encode())]
        server.answers[CHAT] = [HOLD]
        post(recorder.url, TEXT, {"prompt": [1, 2, 3]})
        with send(recorder.url, posting(CHAT, {"messages": []})):
            until(lambda: any(CHAT in heard.line for heard in server.heard))
            recorder.process.send_signal(signal.SIGINT)
            until(lambda: "open" in recorder.errors.read_text())
            began = time.perf_counter()
            said = recorder.stop()

    assert time.perf_counter() - began < 5
    assert "not written: 1 (cut off when the recorder ended)" in said
    assert (recorder.process.returncode, len(recorder.rows())) == (0, 1)


def test_a_tokenizer_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    """Rows are on disk when their answers have ended; without the tokens they have no block ids, and that is said."""
    answer = {"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    with upstream() as server:
        server.answers["/tokenize"] = [whole(200, b'{"tokens": [5]}')]
        server.answers[TEXT] = [whole(200, json.dumps(answer).encode())]
        with recording(tmp_path / "w", server.url) as recorder:
            server.answers["/tokenize"] = [HOLD]
            for _ in range(5):
                post(recorder.url, TEXT, {"prompt": "abc"})
            until(lambda: rows_written(recorder) == 5, patience=2)
            recorder.process.send_signal(signal.SIGINT)
            until(lambda: "5 prompts wait for the tokenizer" in recorder.errors.read_text())
            said = recorder.stop()

    assert "without block ids: 5 (the recorder ended before their tokens were known)" in said
    assert len(recorder.rows()) == 5


def test_a_client_that_leaves_at_done_is_recorded(tmp_path: Path) -> None:
    """Many read no further; the answer was whole, although the connection's framing had not ended."""
    last = {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    with upstream() as server, recording(tmp_path / "w", server.url) as recorder:
        server.answers[TEXT] = [stream_head(), chunk(event(last)), chunk(event("[DONE]")), HOLD]
        with send(recorder.url, posting(TEXT, {"prompt": [1, 2, 3], "stream": True})) as sock:
            receive(sock, b"[DONE]")
        until(lambda: rows_written(recorder) == 1)
        assert "not written" not in recorder.stop()


def test_cancelled_and_broken_requests_are_counted(tmp_path: Path) -> None:
    """Each by what happened to it; none is a row."""
    some = [stream_head(), chunk(event({"choices": []}))]
    with upstream() as server, recording(tmp_path / "w", server.url) as recorder:
        server.answers[CHAT] = [*some, HOLD]
        with send(recorder.url, posting(CHAT, {"stream": True})) as sock:
            receive(sock, b"choices")
        server.answers[CHAT] = some
        with send(recorder.url, posting(CHAT, {"stream": True})) as sock:
            receive(sock, b"choices")
            assert sock.recv(100) == b""
        server.answers[CHAT] = []
        assert post(recorder.url, CHAT, {}).status == 502
        time.sleep(0.2)
        said = recorder.stop()

    for why in ("cancelled by the client", "the server broke off", "the server could not be reached"):
        assert f"not written: 1 ({why})" in said
    assert "nothing was recorded" in said
    assert not recorder.folder.exists()


def test_a_server_that_goes_away_is_a_502(tmp_path: Path) -> None:
    """The tap outlives its upstream, and says whose fault it is."""
    with recording_of_a_server_that_is_gone(tmp_path) as recorder:
        got = post(recorder.url, TEXT, {"prompt": "a"})

    assert got.status == 502
    assert "no answer from http://127.0.0.1" in json.loads(got.body)["error"]["message"]


@contextmanager
def recording_of_a_server_that_is_gone(folder: Path) -> Iterator[Recorder]:
    with ExitStack() as stack:
        with serving(folder) as server:
            recorder = stack.enter_context(recording(folder / "w", server.url))
        yield recorder


@pytest.mark.skipif(bool(missing_compiler()), reason="no compiler for the shim")
def test_a_full_disk_stops_no_traffic(server: FakeServer, tmp_path: Path) -> None:
    """It is said once, requests pass and are counted, what was written stays, and the exit code is 4."""
    flag = tmp_path / "full"
    env = {"LD_PRELOAD": str(compiled("disk")), "FAULT_DISK_FLAG": str(flag), "FAULT_DISK_PREFIX": str(tmp_path / "w"),
           "FAULT_DISK_ERRNO": str(errno.ENOSPC)}  # fmt: skip
    with recording(tmp_path / "w", server.url, env=env) as recorder:
        asked = {"prompt": "a", "max_tokens": 2}
        post(recorder.url, TEXT, asked)
        until(lambda: len(parts_of(recorder)) == 2)
        flag.touch()
        assert [post(recorder.url, TEXT, asked).status for _ in range(3)] == [200] * 3
        until(lambda: "No space left" in recorder.errors.read_text())
        recorder.stop()
        complaint = recorder.errors.read_text()
    flag.unlink()
    finished = tune("record", "--finish", str(tmp_path / "w"))

    assert recorder.process.returncode == 4
    assert complaint.count("requests still pass") == 1
    assert "tune record --finish" in complaint
    assert finished.returncode == 0, finished.stderr
    assert len(recorder.rows()) == 1


# --- Before it begins -------------------------------------------------------------------------------------


def test_a_server_that_does_not_answer_is_an_error_at_once(tmp_path: Path) -> None:
    """Exit 4 with what to look at, before anything listens or is written."""
    done = tune("record", "--upstream", f"http://127.0.0.1:{free_port()}", "-o", str(tmp_path / "w"))

    assert done.returncode == 4
    assert "is the server up, and --upstream right?" in done.stderr
    assert not (tmp_path / "w").exists()


def test_a_taken_port_is_an_error(server: FakeServer, tmp_path: Path) -> None:
    """Exit 4, and no folder is left."""
    port = server.url.rsplit(":", 1)[1]
    done = tune("record", "--upstream", server.url, "--port", port, "-o", str(tmp_path / "w"))

    assert (done.returncode, (tmp_path / "w").exists()) == (4, False)
    assert f"--port {port}: cannot listen" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [((), "--upstream and -o are needed"), (("--upstream", "127.0.0.1:8000", "-o", "w"), "not a URL of a server"),
     (("--upstream", "http://me:pw@x", "-o", "w"), "has a user in it"),
     (("--upstream", "http://127.0.0.1:1/?api_key=abcdefgh", "-o", "w"), "api_key=*** not a URL of a server"),
     (("--upstream", "http://x", "-o", "w", "--rotate", "64"), "not a size"),
     (("--finish", "nowhere"), "not a recording's summary"), (("--finish", "w", "-o", "x"), "--finish goes alone")],
)  # fmt: skip
def test_wrong_flags_are_told(words: tuple[str, ...], says: str) -> None:
    """Exit 2, and what to write instead."""
    done = tune("record", *words)

    assert done.returncode == 2
    assert says in done.stderr


def test_it_listens_on_the_loopback_interface_unless_told_otherwise(server: FakeServer, tmp_path: Path) -> None:
    """Nobody but this host reaches the server through it."""
    with recording(tmp_path / "w", server.url) as recorder:
        port = int(recorder.url.rsplit(":", 1)[1])
        table = Path(f"/proc/{recorder.process.pid}/net/tcp").read_text() + (
            Path(f"/proc/{recorder.process.pid}/net/tcp6").read_text()
        )
    listening = re.findall(rf"\s([0-9A-F]+):{port:04X} \S+ 0A", table)

    assert listening == ["0100007F"]


# --- Record, then replay ----------------------------------------------------------------------------------


def shared_blocks(rows: Sequence[workload.Request]) -> list[list[int]]:
    """Return how many leading blocks each pair of rows shares, by their ids."""
    ids = [row.block_ids or () for row in rows]
    return [[next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) for b in ids]
            for a in ids]  # fmt: skip


def shared_tokens(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the same of prompts: whole blocks, and a tail where two prompts are equal."""

    def one(a: Sequence[int], b: Sequence[int]) -> int:
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return -(-common // 16) if len(a) == len(b) == common else common // 16

    return [[one(a, b) for b in prompts] for a in prompts]


def prefix_tree(rng: np.random.Generator, count: int = 80, gap: float = 0.025) -> list[workload.Request]:
    """Return rows whose prompts branch off one another after whole blocks, as many seconds apart on average."""
    rows: list[workload.Request] = []
    fresh = iter(range(1, 10_000))
    arrivals = np.cumsum(rng.exponential(gap, count))
    for arrival in arrivals - arrivals[0]:
        before = rows[rng.integers(len(rows))].block_ids or () if rows and rng.random() < 0.7 else ()
        blocks = [*before[: rng.integers(1, 5)], *(next(fresh) for _ in range(rng.integers(1, 4)))]
        length = 16 * (len(blocks) - 1) + int(rng.integers(1, 17))
        rows.append(workload.Request(round(float(arrival), 6), length, int(rng.integers(1, 8)), tuple(blocks), 16))
    return rows


@pytest.mark.timing
def test_a_replay_through_the_tap_records_what_was_sent(tmp_path: Path) -> None:
    """Arrivals within 5 ms of the sends, lengths equal, and the same pairs share the same number of blocks."""
    sent = prefix_tree(np.random.default_rng(3))
    (tmp_path / "sent.jsonl").write_text(workload.to_jsonl(sent))
    behaviour = {"first_token": 0.02, "gap": 0.005, "log_prompts": True}
    with serving(tmp_path, behaviour) as server, recording(tmp_path / "w", server.url) as recorder:
        words = ("--url", recorder.url, "--warm-up", "0s", "--seed", "1", "--vocab-size", "500")
        done = tune("replay", str(tmp_path / "sent.jsonl"), *words, "-o", str(tmp_path / "out"))
        assert done.returncode == 0, done.stderr
        recorder.stop()
        prompts = [entry["prompt"] for entry in server.log()][-len(sent) :]
    found = workload.load(recorder.folder).requests[-len(sent) :]  # a replay that was late is made once more
    records = np.load(tmp_path / "out" / "records.npz")
    sends = np.sort(records["sent"])

    assert [(row.input_len, row.output_len) for row in found] == [(row.input_len, row.output_len) for row in sent]
    arrivals = np.array([row.arrival for row in found])
    late = arrivals - sends
    assert np.abs(late - np.median(late)).max() < 0.005
    assert shared_blocks(found) == shared_tokens(prompts)
    assert sum(map(sum, shared_blocks(found))) > sum(len(row.block_ids or ()) for row in found)
