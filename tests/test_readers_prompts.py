"""Files of prompts: arrivals drawn where there is no clock, units asked for, lengths counted by a named tokenizer."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader_data import BATCH, COUNTED, OURS, jsonl, letters, read, written

from tuner import tiny_model
from tuner.errors import SpecError
from tuner.readers import tokenizer
from tuner.readers.format import Options
from tuner.workload import encoded, load

PROMPTS = [{"prompt": f"Question {n}", "output_tokens": 5} for n in range(2000)]


# --- Without a clock --------------------------------------------------------------------------------------


def test_arrivals_are_drawn_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    """A Poisson process: gaps with the mean and the deviation of the rate, and a note that says so."""
    rows, tally = read(written(tmp_path, jsonl(*PROMPTS)), Options(tokenize=letters, rate=4.0, seed=3))
    gaps = np.diff([row.arrival for row in rows])

    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.25, rel=0.15)
    assert any("arrivals were drawn (Poisson, 4 a second, seed 3)" in note for note in tally.noted)


def test_a_seed_gives_the_same_arrivals(tmp_path: Path) -> None:
    """Same seed, same rows; another seed, others."""
    path = written(tmp_path, jsonl(*PROMPTS[:50]))

    def drawn(seed: int) -> list[float]:
        return [row.arrival for row in read(path, Options(tokenize=letters, rate=4.0, seed=seed))[0]]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("row", [BATCH, PROMPTS[0]], ids=["batch", "custom"])
@pytest.mark.parametrize(
    ("options", "says", "hint"),
    [
        (Options(tokenize=letters), "these requests have no arrival times", "--rate"),
        (Options(tokenize=letters, rate=0.0), "--rate 0 is no rate", "--rate"),
        (Options(rate=2.0), "prompts are text, whose tokens are to be counted", "--tokenizer"),
    ],
)
def test_what_such_a_file_needs_is_asked_for(
    tmp_path: Path, row: dict[str, Any], options: Options, says: str, hint: str
) -> None:
    """A rate and a tokenizer; the error says which, and how to give it."""
    path = written(tmp_path, jsonl(row))

    with pytest.raises(SpecError, match=re.escape(f"{path}: {says}")) as caught:
        read(path, options)
    assert hint in str(caught.value.hint)


def body(**changes: Any) -> dict[str, Any]:
    return {**BATCH, "body": {**BATCH["body"], **changes}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (BATCH, None),
        (body(max_tokens=None, max_completion_tokens=12), None),
        ({**BATCH, "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 12}}, None),
        ({**BATCH, "url": "/v1/completions", "body": {"prompt": [5, 6, 7], "max_tokens": 12}}, None),
        ({**BATCH, "url": "/v1/responses", "body": {"input": "Hi", "max_output_tokens": 12}}, None),
        (body(max_tokens=None), "no output length (max_tokens or max_completion_tokens)"),
        (body(n=2), "several answers to one prompt (n > 1)"),
        (body(messages=[]), "no prompt tokens"),
        (body(messages=[{"role": "user", "content": ""}]), "no prompt tokens"),
        (body(tools=[{}]), "no token counts, and tool calls in the prompt, whose tokens depend on the template"),
        (
            body(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]),
            "images, audio or files in the prompt",
        ),
        ({**BATCH, "url": "/v1/embeddings", "body": {"input": "Hi"}}, "embedding, no text is generated"),
        ({**BATCH, "url": "/v1/moderations", "body": {"input": "Hi"}}, "no call of a language model"),
        (
            {**BATCH, "url": "/v1/completions", "body": {"prompt": ["Hi", "Ho"], "max_tokens": 12}},
            "several prompts in one call",
        ),
    ],
)
def test_batch_lines_are_requests_with_a_length(tmp_path: Path, row: dict[str, Any], reason: str | None) -> None:
    """An answer is taken to be as long as it may be, which is noted; a line without a limit has no length."""
    rows, tally = read(written(tmp_path, jsonl(row)), COUNTED)

    assert next(iter(tally.dropped), None) == reason
    assert [(r.output_len, r.id, r.endpoint) for r in rows] == ([(12, "r1", row["url"])] if reason is None else [])
    assert any("as long as max_tokens allows" in note for note in tally.noted) == (reason is None)


def test_a_batchs_prompts_are_blocks_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    """Text of a completion is kept as the token ids that it is, when asked for."""
    path = written(tmp_path, jsonl({**BATCH, "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 12}}))

    (row,), _ = read(path, COUNTED)
    assert (row.input_len, row.block_ids, row.prompt) == (2, (0,), None)
    (row,), _ = read(path, Options(tokenize=letters, rate=2.0, keep_prompts=True))
    assert (row.input_len, row.block_ids, row.prompt) == (2, None, (ord("H"), ord("i")))


def test_more_tokens_than_a_row_may_have_are_damage(tmp_path: Path) -> None:
    """Counted lengths have the limit that recorded ones have."""
    path = written(tmp_path, jsonl(BATCH))

    with pytest.raises(
        SpecError, match=re.escape(f"{path}:1: 20,000,0") + r"\d\d tokens, where 10,000,000 are the most"
    ):
        read(path, replace(COUNTED, template=20_000_000))


def test_custom_prompts_are_kept_as_token_ids(tmp_path: Path) -> None:
    """The custom dataset of vLLM is made of prompts: they are what is replayed, of exactly the counted length."""
    (row,), tally = read(written(tmp_path, jsonl({"prompt": "Hello", "output_tokens": 5}, {"prompt": "Hi"})), COUNTED)

    assert (row.prompt, row.input_len, row.output_len) == (tuple(map(ord, "Hello")), 5, 5)
    assert dict(tally.dropped) == {"no output length (output_tokens)": 1}
    assert load(written(tmp_path, encoded(row), "w.jsonl")).requests[0].prompt == row.prompt


# --- With a clock of an unknown unit ----------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "seconds"), [(1.0, 250.5), (1e-3, 0.2505), (1e-6, 0.0002505)])
def test_the_unit_of_time_is_the_users(tmp_path: Path, unit: float, seconds: float) -> None:
    """250.5 is what the user says that it is."""
    options = Options(tokenize=letters, time_unit=unit)
    prompts, _ = read(written(tmp_path, jsonl({"timestamp": 250.5, "prompt": "Hi", "output_length": 5})), options)
    lengths = {"timestamp": 250.5, "input_length": 20, "output_length": 5, "hash_ids": [4, 5]}
    timed, _ = read(written(tmp_path, jsonl(lengths)), options, name="vllm-timed-trace")

    assert [row.arrival for row in (*prompts, *timed)] == [pytest.approx(seconds, abs=1e-9)] * 2
    assert (timed[0].block_ids, timed[0].block_size) == ((4, 5), 16)


@pytest.mark.parametrize("name", ["timed-prompts", "vllm-timed-trace"])
def test_a_unit_is_not_guessed(tmp_path: Path, name: str) -> None:
    """Without the user's word there is none."""
    path = written(tmp_path, jsonl({"timestamp": 0, "prompt": "Hi", "output_length": 5, "input_length": 1}))

    with pytest.raises(SpecError, match=re.escape(f"{path}: nothing says in which unit its times are")) as caught:
        read(path, COUNTED, name=name)
    assert "--time-unit" in str(caught.value.hint)


# --- Ours -------------------------------------------------------------------------------------------------


def test_a_workload_of_ours_is_read_as_it_is(tmp_path: Path) -> None:
    """Every field comes back, with the line it now comes from."""
    full = {**OURS, "parent": "z", "model": "m", "endpoint": "chat", "source_line": 77}
    said = jsonl(full, {"arrival_s": 1.0, "input_len": 3, "output_len": 2, "prompt": [5, 6, 7]})
    rows, _ = read(written(tmp_path, said))

    assert [json.loads(encoded(row)) for row in rows] == [
        {**full, "source_line": 1}, {**json.loads(said.splitlines()[1]), "source_line": 2},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": None}, "block_ids need a block_size"),
        ({"block_ids": [1]}, "1 block ids for 40 tokens"),
        ({"prompt": [1, 2]}, "the prompt has 2 token ids, input_len says 40"),
        ({"speed": 1}, "unknown field `speed`"),
    ],
)
def test_rows_of_ours_that_contradict_themselves_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    """As when a workload is loaded."""
    path = written(tmp_path, jsonl(OURS, {**OURS, **changes}))

    with pytest.raises(SpecError, match=rf"{re.escape(str(path))}:2: .*{re.escape(says)}"):
        read(path)


# --- Tokenizers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.ensure(tmp_path_factory.mktemp("model") / "tiny", hidden=64, layers=1)


def test_a_models_folder_or_its_file_is_a_tokenizer(model: Path) -> None:
    """Both give the ids that the library itself gives, without special tokens."""
    from tokenizers import Tokenizer

    text = "Please explain the latency budget."
    expected = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    assert list(tokenizer.load(str(model))(text)) == expected
    assert list(tokenizer.load(str(model / "tokenizer.json"))(text)) == expected
    assert 1 < len(expected) < len(text)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, a file that is none, a path that is not there, a model that cannot be reached."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    broken = written(tmp_path, "{}", "tokenizer.json")
    (tmp_path / "empty").mkdir()

    for name in (str(tmp_path / "empty"), str(broken), str(tmp_path / "none"), "./none", "nobody/such-a-model-is-not"):
        with pytest.raises(SpecError, match=re.escape(f"--tokenizer {name}: ")) as caught:
            tokenizer.load(name)
        assert caught.value.hint


def test_a_missing_library_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting is optional; who asks for it is told what to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(SpecError, match="tokenizers is not installed") as caught:
        tokenizer.load(str(model))
    assert "pip install tokenizers" in str(caught.value.hint)
