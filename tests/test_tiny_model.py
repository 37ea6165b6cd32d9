"""The tiny model: the same bytes every time, readable by the libraries that vLLM loads it with."""

import hashlib
import json
import multiprocessing
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize
from tokenizers import Tokenizer

from tuner import tiny_model
from tuner.errors import HostError

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def small(directory: Path | None, *, seed: int = 0) -> Path:
    return tiny_model.ensure(directory, hidden=64, layers=2, seed=seed)


def digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    """Two models made apart are equal file by file, and a checkpoint is complete."""
    first, second = small(tmp_path / "a"), small(tmp_path / "b")

    assert digest(first) == digest(second)
    assert digest(first).keys() == FILES


def test_a_seed_changes_the_weights_and_not_the_tokenizer(tmp_path: Path) -> None:
    """Models of different seeds read the same text."""
    first, second = digest(small(tmp_path / "a")), digest(small(tmp_path / "b", seed=1))

    assert first["model.safetensors"] != second["model.safetensors"]
    assert first["tokenizer.json"] == second["tokenizer.json"]


def test_the_default_place_is_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a directory the model goes to XDG_CACHE_HOME, under its shape, readable by everybody."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    made = small(None)

    assert made == tmp_path / "tune/models/tiny-qwen2-h64-l2-s0"
    assert stat.S_IMODE(made.stat().st_mode) == 0o755


def test_a_second_call_keeps_what_is_there(tmp_path: Path) -> None:
    """A model is made once: its files are not written again."""
    made = small(tmp_path / "m")
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}

    small(made)

    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    """Neither a user's file nor a model of another shape is overwritten or taken for this one."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep me")
    other = small(tmp_path / "other", seed=5)

    for directory in (tmp_path / "notes", other):
        with pytest.raises(HostError, match="cannot put the tiny model"):
            small(directory)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "other"]


def test_processes_may_race(tmp_path: Path) -> None:
    """Several processes that ask at once all get the whole model, and leave nothing else behind."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        made = pool.map(small, [tmp_path / "m"] * 3)

    assert {directory.name for directory in made} == {"m"}
    assert digest(tmp_path / "m").keys() == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_safetensors_reads_the_weights(tmp_path: Path) -> None:
    """The file holds Qwen2's tensors as bfloat16: norms of one, biases of zero, the rest near std 0.25."""
    tensors = dict(deserialize((small(tmp_path / "m") / "model.safetensors").read_bytes()))

    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [1024, 64]
    assert bytes(tensors["model.norm.weight"]["data"]) == b"\x80\x3f" * 64
    assert bytes(tensors["model.layers.1.self_attn.q_proj.bias"]["data"]) == bytes(2 * 64)
    assert "lm_head.weight" not in tensors
    assert len(tensors) == 2 + 2 * 12


def test_bfloat16_rounds_to_nearest_even() -> None:
    """1 + 2**-8 lies between two bfloat16 numbers and goes to the even one, as does 1 + 3 * 2**-8."""
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -2.0], dtype=np.float32)

    assert [hex(bits) for bits in tiny_model._bfloat16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xc000"]


@pytest.mark.parametrize("text", ["Explain the token budget, please.", "  two  spaces\n", "héllo, 世界 🙂", ""])
def test_text_survives_the_tokenizer(tmp_path: Path, text: str) -> None:
    """Any text, known words or not, comes back as it went in."""
    tokenizer = Tokenizer.from_file(str(small(tmp_path / "m") / "tokenizer.json"))

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_token_is_one_the_model_has(tmp_path: Path) -> None:
    """The vocabulary is full: ids 0 to 1023, special tokens first, and ordinary text gets short."""
    made = small(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    config = json.loads((made / "config.json").read_text())

    assert sorted(tokenizer.get_vocab().values()) == list(range(config["vocab_size"]))
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|im_end|>"
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert len(tokenizer.encode(tiny_model.WORDS).ids) < len(tiny_model.WORDS) / 2
