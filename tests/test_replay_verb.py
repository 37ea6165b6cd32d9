"""`tune replay`: flags, exit codes, and that every form of the result says what the records say."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from replay_data import Row, evenly, free_port, records, serving, workload

from tuner import assemble, measure
from tuner.errors import ExitCode, FailureKind, HostError, InvalidReplay, SpecError
from tuner.records import Records
from tuner.replay import attempts, gate, remote
from tuner.replay.calibrate import check_fits, scale_of
from tuner.replay.prompts import CHAT, DIGITS, PLAIN, WORDS, Prompts, Scale, merged, vocabulary_of
from tuner.seams import Measurement, Replay
from tuner.sinks import bench, replayed, timeline
from tuner.sinks.ticker import Ticker
from tuner.slo import parse
from tuner.workload import Request

pytestmark = [pytest.mark.timing, pytest.mark.once]

# From vLLM 0.26.0, vllm/benchmarks/serve.py: main_async and benchmark, percentile metrics ttft, tpot, itl, e2el.
BENCH_KEYS = set(
    "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency "  # noqa: SIM905
    "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    "output_throughput total_token_throughput input_lens output_lens ttfts itls start_times generated_texts errors "
    "max_output_tokens_per_s max_concurrent_requests rtfx".split()
) | {
    f"{statistic}_{name}_ms"
    for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
}


def tune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuner", "replay", *words],
        cwd=folder, env=os.environ | {"COLUMNS": "120"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def write_rows(folder: Path, count: int = 20, longest: int = 40) -> None:
    rows = [{"arrival_s": i * 0.03, "input_len": longest if i % 4 == 0 else 30, "output_len": 6} for i in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- The command on a server that works -------------------------------------------------------------------


@dataclass
class Done:
    """A replay that went well, and what it left."""

    folder: Path
    run: subprocess.CompletedProcess[str]

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.run.stdout)
        assert isinstance(found, dict)
        return found

    @property
    def records(self) -> Records:
        return Records.load(self.folder / "out" / "records.npz")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("replay")
    write_rows(folder, longest=1500)
    with serving(folder) as server:
        words = ("--slo", "ttft=5s,itl=1s", "--slo", "attainment=0.9", "--warm-up", "0.1s", "--json")
        files = ("-o", "out", "--bench-json", "bench/b.json")
        return Done(folder, tune(folder, "rows.jsonl", "--url", f"{server.url}/v1", *words, *files))


def test_a_replay_that_keeps_its_slo_exits_0(done: Done) -> None:
    """Results go to stdout, progress to stderr; the URL may end in /v1."""
    assert done.run.returncode == 0, done.run.stderr
    assert done.json["slos_met"] is True
    assert done.json["requests"] == {"offered": 20, "completed": 20, "failed": {}}
    assert "warm-up" in done.run.stderr
    assert "replay 1 of 1" in done.run.stderr


def test_the_json_says_what_the_records_say(done: Done) -> None:
    """Percentiles are numpy's over the kept records, in milliseconds."""
    seen, told = done.records, done.json["metrics"]
    firsts = seen.chunk_time[seen.chunk_start[:-1]]
    gaps = [np.diff(times) for times in np.split(seen.chunk_time, seen.chunk_start[1:-1])]
    expected = {
        "ttft_p50_ms": np.percentile(firsts - seen.due, 50),
        "ttft_p99_ms": np.percentile(firsts - seen.due, 99),
        "ttft_from_send_p95_ms": np.percentile(firsts - seen.sent, 95),
        "itl_p99_ms": np.percentile(np.concatenate(gaps), 99),
        "tpot_p90_ms": np.percentile([own.mean() for own in gaps], 90),
        "max_stall_max_ms": max(own.max() for own in gaps),
        "ttft_p50_ms.long": np.percentile((firsts - seen.due)[seen.input_len >= 1024], 50),
        "send_lag_max_ms": (seen.sent - seen.due).max(),
    }

    assert {key: told[key] for key in expected} == pytest.approx({key: v * 1e3 for key, v in expected.items()})
    assert done.json["client"]["send_lag_max_ms"] == pytest.approx(told["send_lag_max_ms"])
    assert json.loads((done.folder / "out" / "metrics.json").read_text()) == pytest.approx(told)


def test_each_slo_is_told_with_its_value_and_limit(done: Done) -> None:
    """In milliseconds where it is a duration, as a share where it is one."""
    ttft, itl, share = done.json["slo"]

    assert (ttft["metric"], ttft["limit_ms"], ttft["is_met"]) == ("ttft_p99_ms", 5000, True)
    assert itl["value_ms"] == pytest.approx(done.json["metrics"]["itl_p99_ms"])
    assert (share["metric"], share["limit"], share["value"]) == ("slo_attainment", 0.9, 1.0)


def test_the_bench_file_has_the_keys_of_vllm(done: Done) -> None:
    """Exactly those of `vllm bench serve --save-result --save-detailed`, with vLLM's meaning."""
    told, seen = json.loads((done.folder / "bench" / "b.json").read_text()), done.records

    assert set(told) == BENCH_KEYS
    assert (told["backend"], told["model_id"], told["completed"], told["failed"]) == ("openai", "m", 20, 0)
    assert told["total_output_tokens"] == 120
    assert told["ttfts"] == pytest.approx(list(seen.chunk_time[seen.chunk_start[:-1]] - seen.sent))
    assert told["p99_ttft_ms"] == pytest.approx(np.percentile(told["ttfts"], 99) * 1e3)
    assert [len(gaps) for gaps in told["itls"]] == [5] * 20
    assert told["output_throughput"] == pytest.approx(120 / told["duration"])
    assert told["generated_texts"] is None


def test_the_picture_is_a_readable_png(done: Done) -> None:
    """It is 1000 x 800."""
    assert imread(done.folder / "out" / "replay.png").shape[:2] == (800, 1000)


def test_a_missed_slo_exits_3_and_an_absent_number_says_why(tmp_path: Path) -> None:
    """Failures reach into the tail: "-" with the reason, and the failure's kind."""
    write_rows(tmp_path)
    with serving(tmp_path, {"http_status": {"every": 5, "status": 503}}) as server:
        ended = tune(tmp_path, "rows.jsonl", "--url", server.url, "--slo", "ttft=1s", "--warm-up", "0s")

    assert ended.returncode == 3, ended.stderr
    assert "offered 20, completed 16, failed 4 http_503" in ended.stdout
    assert "ttft_p99 <= 1,000 ms: not measurable, which counts as missed" in ended.stdout
    assert "4 of 20 requests failed: percentiles above p78 are absent" in ended.stdout
    assert "vocab-size" in ended.stdout


def test_repeats_are_kept_apart_and_told_as_their_median(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a folder and a line of the bench file."""
    lines = tmp_path / "b.json"
    with serving(tmp_path) as server:
        asked = measure.Wanted(server.url, evenly(4, 0.02), repeats=2, warm_up=0.0)
        assert assemble.replay(asked, tmp_path / "out", lines, as_json=True) == ExitCode.OK

    found = json.loads(capsys.readouterr().out)
    each = [repeat["metrics"]["ttft_p50_ms"] for repeat in found["repeats"]]
    assert found["metrics"]["ttft_p50_ms"] == pytest.approx(sum(each) / 2)
    assert found["requests"]["offered"] == 8
    assert [(tmp_path / "out" / f"repeat-{n}" / "replay.png").is_file() for n in (1, 2)] == [True, True]
    assert len(lines.read_text().splitlines()) == 2


# --- The command where it must not go on ------------------------------------------------------------------


def test_nobody_at_the_url_exits_4_before_the_clock_starts(tmp_path: Path) -> None:
    """One line that says where nobody answers; no empty folder is left."""
    write_rows(tmp_path)
    ended = tune(tmp_path, "rows.jsonl", "--url", f"http://127.0.0.1:{free_port()}", "-o", "out")

    assert (ended.returncode, ended.stdout) == (4, "")
    assert "nobody answers" in ended.stderr
    assert "warm-up" not in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_replay_that_says_nothing_exits_4_with_the_reason(tmp_path: Path) -> None:
    """Nothing completed: no table of nothing."""
    asked = measure.Wanted(url="", workload=evenly(4, 0.01), warm_up=0.0)
    with serving(tmp_path, {"http_status": {"every": 1, "status": 500}}) as server, pytest.raises(InvalidReplay) as e:
        measure.run(replace(asked, url=server.url), Ticker(io.StringIO()), lambda *_: None)

    assert e.value.exit_code == ExitCode.HOST
    assert "none of 4 requests completed: 4 http_500" in e.value.message


def test_several_models_are_listed_with_exit_2(tmp_path: Path) -> None:
    """Which one is the user's to say; a name that is not among them is refused as well."""
    with serving(tmp_path, None, "--served-model-name", "a", "b") as server:
        offered = remote.models(server.url)

    assert remote.choose(offered, "b").name == "b"
    for name in (None, "c"):
        with pytest.raises(SpecError) as e:
            remote.choose(offered, name)
        assert (e.value.exit_code, str(e.value.hint)[-4:]) == (ExitCode.USAGE, "a, b")


def test_a_row_longer_than_the_model_takes_is_refused_before_the_clock(tmp_path: Path) -> None:
    """The server says how much it takes."""
    asked = measure.Wanted(url="", workload=evenly(2, 0.01, input_len=5000))
    with serving(tmp_path, None, "--max-model-len", "4096") as server, pytest.raises(SpecError, match="4096"):
        measure.run(replace(asked, url=server.url), Ticker(io.StringIO()), lambda *_: None)


def test_progress_is_a_line_a_phase_and_silent_between() -> None:
    """Where nobody looks at a terminal."""
    stream = io.StringIO()
    ticker = Ticker(stream)
    ticker.phase("warm-up", expected=5)
    ticker.count(1, 20)
    ticker.ended()

    assert stream.getvalue() == "tune: warm-up (5 s)\n"


def test_nothing_is_measured_for_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A replay of an hour is not lost to a wrong path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be made"):
        assemble.replay(measure.Wanted("http://127.0.0.1:1", evenly(1, 1.0)), tmp_path / "file", None, as_json=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"slo": ["itl=0.33x"]}, "relative to the default"),
        ({"slo": ["itl=50"]}, "of what"),
        ({"warm_up": "5"}, "--warm-up 5"),
        ({"request_timeout": "0s"}, "above zero"),
        ({"repeats": 0}, "--repeats 0"),
        ({"endpoint": "responses"}, "no such endpoint"),
        ({"sessions": "backwards"}, "--sessions backwards"),
        ({"extra_body": "[1]"}, "not a JSON object"),
        ({"extra_body": '{"stream": false}'}, "stream is the replay's own"),
        ({"url": "127.0.0.1:8000"}, "not a URL"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    """Before anybody is asked anything."""
    write_rows(tmp_path)
    with pytest.raises(SpecError, match=words):
        measure.wanted(str(tmp_path / "rows.jsonl"), **({"url": "http://127.0.0.1:1"} | flags))


def test_a_replay_tells_what_was_done_to_its_rows(tmp_path: Path) -> None:
    """What an import wrote beside the rows goes before what is done to them now."""
    write_rows(tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path / "workload.jsonl")
    (tmp_path / "source.json").write_text('{"transforms": ["SCALED: outputs divided by 4"]}')
    asked = measure.wanted(str(tmp_path), "http://127.0.0.1:1", rate_scale=2.0)

    assert [words.partition(" ")[0] for words in asked.workload.transforms] == ["SCALED:", "rate"]


def test_a_late_replay_is_made_again_once() -> None:
    """The second attempt counts when it is on time; late twice is the host's fault; other faults are not repeated."""
    seen = Replay(records(Row([1.0])), 1.0, {}, {}, (), ("seen",))
    late = InvalidReplay(FailureKind.CLIENT_LAG, "late")

    def after(*outcomes: InvalidReplay | None) -> tuple[list[int], Replay]:
        left, made = list(outcomes), []

        def once(attempt: int) -> Replay:
            made.append(attempt)
            return seen

        def judge(_: Replay) -> tuple[str, ...]:
            if (error := left.pop(0)) is not None:
                raise error
            return ("careful",)

        return made, attempts.valid(once, judge)

    assert after(None) == ([1], replace(seen, notes=("seen", "careful")))
    assert after(late, None)[0] == [1, 2]
    with pytest.raises(InvalidReplay) as twice:
        after(late, late)
    assert twice.value.exit_code == ExitCode.HOST
    with pytest.raises(InvalidReplay, match="off"):
        after(InvalidReplay(FailureKind.LENGTHS_OFF, "off"), None)


# --- Chat -------------------------------------------------------------------------------------------------


@dataclass
class Stub:
    """A server of another make: it knows words of the fourth letter on as one token, others letter by letter."""

    url: str = ""
    knows_all: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        if "messages" not in body:
            return len(body["prompt"])
        words = body["messages"][0]["content"].split()
        return 11 + sum(1 if word >= "d" or self.knows_all else 2 * len(word) for word in words)


@pytest.fixture
def stub() -> Iterator[Stub]:
    found = Stub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            models = {"data": [{"id": "other", "object": "model"}]}
            self.whole(200 if self.path == "/v1/models" else 404, json.dumps(models).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.bodies.append(body)
            usage = {"prompt_tokens": found.prompt_tokens(body), "completion_tokens": body["max_tokens"]}
            if not body.get("stream"):
                self.whole(200, json.dumps({"choices": [], "usage": usage}).encode())
                return
            is_chat = "messages" in body
            role = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] * is_chat
            word = {"delta": {"content": " a"}} if is_chat else {"text": " a"}
            events = [*role, *[{"choices": [word]}] * body["max_tokens"], {"choices": [], "usage": usage}]
            data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            self.whole(200, data + b"data: [DONE]\n\n", "text/event-stream")

        def whole(self, status: int, data: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def test_chat_sends_text_of_about_the_recorded_length(stub: Stub, tmp_path: Path) -> None:
    """Requests before the clock tell how the server counts; what is left of a difference is a note."""
    write_rows(tmp_path, count=8, longest=900)
    ended = tune(tmp_path, "rows.jsonl", "--url", stub.url, "--endpoint", "chat", "--warm-up", "0s", "--json")

    assert ended.returncode == 0, ended.stderr
    measured = [body for body in stub.bodies if body.get("stream")]
    assert len(stub.bodies) == 4 + len(measured)
    assert sorted(stub.prompt_tokens(body) for body in measured) == pytest.approx([30] * 6 + [900] * 2, abs=1)
    assert {body["max_tokens"] for body in measured} == {6}
    assert any("off the recorded lengths by" in note for note in json.loads(ended.stdout)["notes"])
    assert "11 tokens for an empty chat" in ended.stderr


def test_a_chat_without_the_recorded_prompts_says_so(stub: Stub, tmp_path: Path) -> None:
    """Token ids cannot be sent there: the text that was has their lengths only."""
    rows = [{"arrival_s": i / 10, "input_len": 30, "output_len": 6, "prompt": [9] * 30} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = tune(tmp_path, "rows.jsonl", "--url", stub.url, "--endpoint", "chat", "--warm-up", "0s", "--json")

    assert [note for note in json.loads(ended.stdout)["notes"] if note.startswith("4 prompts are token ids")]


def test_null_removes_a_key_from_every_request(stub: Stub, tmp_path: Path) -> None:
    """Also one inside another; what else is given is added."""
    write_rows(tmp_path, count=4)
    extra = '{"ignore_eos": null, "stream_options": {"continuous_usage_stats": null}, "top_k": 5}'
    ended = tune(tmp_path, "rows.jsonl", "--url", stub.url, "--extra-body", extra, "--warm-up", "0.1s")

    assert ended.returncode == 0, ended.stderr
    assert len(stub.bodies) == 8  # four to warm up
    for body in stub.bodies:
        assert "ignore_eos" not in body
        assert (body["stream_options"], body["top_k"]) == ({"include_usage": True}, 5)


def test_calibration_takes_words_that_are_a_token_each(stub: Stub) -> None:
    """Two requests for one token; keys of the user's own go with them."""
    stub.knows_all = True
    scale = scale_of(stub.url, "other", {"top_k": 5, "stream_options": None})

    assert (scale.per_word, scale.template, scale.alphabet) == (1, 11, tuple(WORDS))
    assert [(body["top_k"], body["max_tokens"]) for body in stub.bodies] == [(5, 1), (5, 1)]


def test_calibration_takes_digits_where_words_are_unequal(stub: Stub) -> None:
    """Each costs the same, so that text of so many digits is of so many tokens."""
    assert scale_of(stub.url, "other", {}) == Scale(11, 2, tuple(DIGITS))


def test_prompts_shorter_than_the_template_are_refused() -> None:
    """No text is that short."""
    scale = Scale(template=11, per_word=1)

    check_fits(evenly(2, 0.1, input_len=12), scale)
    with pytest.raises(SpecError, match="2 prompts are shorter than 12 tokens"):
        check_fits(evenly(2, 0.1, input_len=5), scale)


def test_a_server_without_chat_is_said_to_have_none(tmp_path: Path) -> None:
    """What it answered is in the message."""
    with serving(tmp_path) as server, pytest.raises(HostError, match=r"chat/completions: the server answers \d+"):
        scale_of(server.url, "no such model", {})


def test_text_shares_what_the_recorded_prompts_shared() -> None:
    """The same leading blocks are the same words; rows without ids never begin alike, whatever their number."""
    prompts, scale = Prompts("salt", 1024), Scale(template=10, per_word=1.25)

    def text(row: Request, number: int = 0) -> list[str]:
        return prompts.text(row, number, scale).split()

    one, other = text(Request(0, 150, 5, (7, 8, 9), 64)), text(Request(0, 170, 5, (7, 8, 10), 64), 1)
    shared = int((128 - 10) / 1.25)
    assert one[:shared] == other[:shared]
    assert one[shared] != other[shared]
    assert len(one) * 1.25 + 10 == pytest.approx(150, abs=1)
    alone = [tuple(text(Request(0, 100, 5), number)[:3]) for number in range(500)]
    assert len(set(alone)) == 500
    assert set(one) <= set(WORDS)
    assert prompts.text(Request(0, 100, 5), 3) != Prompts("other", 1024).text(Request(0, 100, 5), 3)


def test_words_differ() -> None:
    """So that an id to the base of 64 is unique."""
    assert (len(WORDS), len(set(WORDS))) == (64, 64)


def test_digits_tell_rows_apart_as_well() -> None:
    """Ten of them hold every id; the first ones differ for neighbours."""
    made = {Prompts("s", 1024).text(Request(0, 11, 5), n, Scale(alphabet=tuple(DIGITS)))[:20] for n in range(300)}

    assert len(made) == 300


def test_a_completion_without_extras_is_what_it_always_was() -> None:
    """Byte for byte."""
    row = Request(0, 3, 5, prompt=(11, 12, 13))

    assert Prompts("s", 1024).body("m", row, 0) == (
        b'{"prompt":[11,12,13],"model":"m","max_tokens":5,"temperature":0,"ignore_eos":true,"stream":true,'
        b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}}'
    )


def test_merging_goes_key_by_key() -> None:
    """RFC 7396: objects are merged, null removes, the rest replaces; the original stays."""
    fields = {"a": {"b": 1, "c": 2}, "d": 3}

    assert merged(fields, {"a": {"c": None, "e": 4}, "d": {"f": None}}) == {"a": {"b": 1, "e": 4}, "d": {}}
    assert fields == {"a": {"b": 1, "c": 2}, "d": 3}


def test_a_chat_prompt_may_be_off_by_five_tokens_or_two_percent() -> None:
    """And no more; a completion's must be exact."""
    rows = records(*(Row([1.0, 1.1], input_len=n) for n in (100, 1000)))

    def judge(off: tuple[int, int], endpoint: str) -> None:
        seen = replace(rows, prompt_tokens=rows.prompt_tokens + np.array(off))
        gate.judge(Replay(seen, 1.0, {}, {}, ()), endpoint=endpoint)

    judge((5, -20), CHAT)
    for off, endpoint in (((6, 0), CHAT), ((0, 21), CHAT), ((1, 0), "completions")):
        with pytest.raises(InvalidReplay, match="another prompt length"):
            judge(off, endpoint)


def test_the_vocabulary_is_read_where_the_model_lies(tmp_path: Path) -> None:
    """Also of a model of several parts; unknown is None."""
    config = tmp_path / "config.json"
    for content, size in (('{"vocab_size": 99}', 99), ('{"text_config": {"vocab_size": 7}}', 7), ("{}", None)):
        config.write_text(content)
        assert vocabulary_of(str(tmp_path)) == size
    assert vocabulary_of("Qwen/Qwen3-0.6B") is None


# --- The forms of a result --------------------------------------------------------------------------------


def measurement(seen: Replay, *slos: str) -> Measurement:
    limits = tuple(parse(slo) for slo in slos)
    numbers = measure._numbers(seen, limits)
    work = workload(Request(0, 10, 3))
    return Measurement("http://h", "m", "chat", work, 0, limits, (seen,), (numbers,), numbers.metrics, (), 0.0)


def test_bench_leaves_open_what_was_not_measured() -> None:
    """Null where vLLM writes 0: a request without a token, rates of no time; failures reach no statistic."""
    failed = Row(due=1.0, error="http_503", output_len=3, usage=False)
    seen = Replay(records(Row([1.0], output_len=1), failed), 1.0, {}, {}, ())
    told = bench.to_bench(measurement(seen))

    assert (told["ttfts"], told["output_lens"], told["itls"]) == ([1.0, None], [1, None], [[], []])
    assert (told["errors"], told["backend"]) == (["", "http_503"], "openai-chat")
    assert (told["mean_itl_ms"], told["p99_tpot_ms"], told["request_goodput"]) == (None, None, None)
    assert (told["p99_ttft_ms"], told["max_concurrent_requests"]) == (1000.0, 1)


def test_bench_counts_as_vllm_does() -> None:
    """By hand: a chunk of two tokens is one gap; TPOT is over all tokens but one; the peak is of a second."""
    seen = Replay(records(Row([1.0, 1.5, 2.5], [1, 1, 2], sent=0.5), Row([2.75], due=2.5)), 2.5, {}, {}, ())
    told = bench.to_bench(measurement(seen, "ttft=1s"))

    assert told["itls"][0] == [0.5, 1.0]
    assert (told["mean_ttft_ms"], told["mean_tpot_ms"], told["mean_e2el_ms"]) == (375.0, 500.0, 1125.0)
    assert (told["max_output_tokens_per_s"], told["max_concurrent_requests"]) == (3.0, 2)
    assert (told["duration"], told["request_goodput"]) == (2.75, 2 / 2.75)


def test_the_clients_own_facts_are_told_whatever_they_are() -> None:
    """Lags in milliseconds, shares as shares, unknown ones as numbers."""
    facts = {"send_lag_p50": 0.001, "send_lag_p99": 0.002, "timer_lag_max": 0.0123, "client_cpu_share": 0.25, "n": 2.0}
    found = measurement(Replay(records(Row([1.0, 2.0])), 1.0, {}, {}, (0.001,), client=facts))

    told = replayed.to_json(found)["client"]
    assert told["timer_lag_max_ms"] == pytest.approx(12.3)
    assert (told["client_cpu_share"], told["n"]) == (0.25, 2.0)
    (line,) = [text.plain for text in replayed._facts("Client", replayed.client_facts(found))]
    assert "send lag p50 1.00 ms, p99 2.00 ms" in line
    assert "25.0 %" in line


def test_requests_in_flight_rise_and_fall() -> None:
    """Sent and not ended; a request that was never sent is none."""
    never = Row(sent=float("nan"), error="never_sent", output_len=1, usage=False)
    times, running = timeline.in_flight(records(Row([2.0], sent=0.0), Row([3.0], sent=1.0), never))

    assert (times.tolist(), running.tolist()) == ([0, 1, 2, 3], [1, 2, 1, 0])


def test_a_picture_is_drawn_of_a_single_token_as_well() -> None:
    """No gap, no window, one failure: still a PNG."""
    failed = Row(due=0.0, error="refused", output_len=1, usage=False)
    seen = Replay(records(Row([0.5], output_len=1), failed), 0.0, {}, {}, ())

    assert timeline.figure_png(seen, [parse("ttft=1s"), parse("max_stall=1s")], title="t").startswith(b"\x89PNG")


@pytest.mark.parametrize(("span", "width"), [(26.4, 0.5), (600, 10), (1.0, 0.02), (3600, 50)])
def test_bins_are_round(span: float, width: float) -> None:
    """About forty to a hundred of them."""
    assert timeline.bin_width(span) == pytest.approx(width)


def test_plain_scale_is_a_word_a_token() -> None:
    """What text is before a server was asked."""
    assert PLAIN.words(12) == 12
