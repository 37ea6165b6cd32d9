"""Make a tiny random Qwen2 model that a real vLLM serves on a CPU, so that tune can be tried anywhere.

The model talks nonsense, but it costs time the way a large one does: narrow and deep, so that a step has a
price of its own and a long prompt stalls the running streams. It is made from a seed and from the text in
this file, without torch and without a download; the same arguments give the same bytes.

    python -m tuner.tiny_model [OUT]
"""

import argparse
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tuner.errors import HostError

VOCAB_SIZE = 1024
MAX_POSITION_EMBEDDINGS = 8192
HEAD_DIM = 64
# With the usual 0.02 the next token would hardly depend on the prompt; with 0.25 greedy output varies.
INIT_STD = 0.25

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, EOS_ID = 0, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the tokenizer learns from: common words, so that ordinary text makes about one token per two to four
# letters. A change here is another tokenizer and needs another name in `default_directory`.
WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any like my now
over such our man me even most made after also did many off before must well back through years much where
your way down should because long each just state those people too mr how little good world make very year
still see own work men day get here between both life being under three never know same last another while
us might great go come since against right came take used himself few house use place during high without
again home around small however found thought went say part once general upon school every does got united
left number course war until always away something fact water though less public put think almost hand
enough far took head yet government system set better told nothing night end why called find going look
asked later point knew next program city business give group toward young days let room within children side
social given present several order national second possible rather per face among form important often
things looked early white case become large need big four felt along god save best church ever least power
light thing family interest want members mind country area others done turned although open service certain
kind began different door thus help sense means whole matter question answer please write explain compare
summarise describe token prompt request server latency budget prefill decode schedule batch queue model
stream first measure median
"""

Weights = npt.NDArray[np.uint16]


def default_directory(*, hidden: int = 128, layers: int = 24, seed: int = 0) -> Path:
    """Return where `ensure` keeps this model when it is not told otherwise."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "tune" / "models" / f"tiny-qwen2-h{hidden}-l{layers}-s{seed}"


def ensure(directory: Path | None = None, *, hidden: int = 128, layers: int = 24, seed: int = 0) -> Path:
    """Return a directory that holds the model, making it when it is not there.

    The directory appears at once and whole, so two processes may ask for it together.

    Raises:
        HostError: the directory holds something else.
    """
    target = directory or default_directory(hidden=hidden, layers=layers, seed=seed)
    documents = _documents(hidden, layers, seed)
    if _holds(target, documents):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        made.chmod(0o755)  # mkdtemp's 0700 would keep a server of another user out
        for name, text in documents.items():
            (made / name).write_text(text, encoding="utf-8")
        (made / "model.safetensors").write_bytes(_safetensors(dict(_weights(hidden, layers, seed))))
        os.replace(made, target)  # noqa: PTH105 (the name says that an empty directory may be in the way)
    except OSError as error:
        if not _holds(target, documents):
            raise HostError(
                f"cannot put the tiny model in {target}: {error.strerror}",
                hint="name a directory that does not exist yet, or remove this one",
            ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _holds(directory: Path, documents: dict[str, str]) -> bool:
    """Return whether a directory holds the model of these documents, and not another one."""
    return (directory / "model.safetensors").is_file() and all(
        (directory / name).is_file() and (directory / name).read_text(encoding="utf-8") == text
        for name, text in documents.items()
    )


def _documents(hidden: int, layers: int, seed: int) -> dict[str, str]:
    """Return every file of the checkpoint but the weights, by name."""
    documents = {
        "config.json": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // HEAD_DIM,
            "num_key_value_heads": _kv_heads(hidden),
            "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
            "vocab_size": VOCAB_SIZE,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "initializer_range": INIT_STD,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
            "tune_seed": seed,
        },
        "generation_config.json": {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[EOS_ID],
            "pad_token": SPECIAL_TOKENS[PAD_ID],
            "model_max_length": MAX_POSITION_EMBEDDINGS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    return {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in documents.items()}


def _kv_heads(hidden: int) -> int:
    return max(1, hidden // (2 * HEAD_DIM))


# The tokenizer: byte-level BPE, trained here, so that no library's version changes its bytes.


def _tokenizer() -> dict[str, object]:
    """Return tokenizer.json: the special tokens, the 256 bytes, then merges learnt from WORDS."""
    alphabet = _byte_alphabet()
    spellings = [text for word in WORDS.split() for text in (f" {word}", word.capitalize())]
    merges = _learn_merges(
        [[alphabet[byte] for byte in text.encode()] for text in spellings],
        VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet),
    )
    tokens = [*SPECIAL_TOKENS, *sorted(alphabet.values()), *(left + right for left, right in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": True} for number, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def _byte_alphabet() -> dict[int, str]:
    """Return GPT-2's printable stand-in for each of the 256 bytes, which byte-level BPE is written in."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _learn_merges(words: list[list[str]], count: int) -> list[tuple[str, str]]:
    """Return the `count` most frequent pairs, each merged before the next is looked for; ties by spelling.

    No token is made twice: two ways to spell one token would leave a hole in the vocabulary.
    """
    merges: list[tuple[str, str]] = []
    known: set[str] = set()
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word) if "".join(pair) not in known)
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        known.add("".join(best))
        words = [_merge(word, best) for word in words]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


# The weights: bfloat16, which numpy does not have, as the upper halves of float32.


def _weights(hidden: int, layers: int, seed: int) -> Iterator[tuple[str, Weights]]:
    """Yield every tensor by the name Qwen2 gives it; the output layer is the embedding (tied)."""
    random = np.random.Generator(np.random.PCG64(seed))

    def drawn(*shape: int) -> Weights:
        return _bfloat16(random.standard_normal(shape, dtype=np.float32) * np.float32(INIT_STD))

    def constant(value: float, size: int) -> Weights:
        return _bfloat16(np.full(size, value, dtype=np.float32))

    keys = _kv_heads(hidden) * HEAD_DIM
    yield "model.embed_tokens.weight", drawn(VOCAB_SIZE, hidden)
    for number in range(layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", constant(1, hidden)
        for name, size in (("q", hidden), ("k", keys), ("v", keys)):
            yield f"{layer}.self_attn.{name}_proj.weight", drawn(size, hidden)
            yield f"{layer}.self_attn.{name}_proj.bias", constant(0, size)
        yield f"{layer}.self_attn.o_proj.weight", drawn(hidden, hidden)
        yield f"{layer}.post_attention_layernorm.weight", constant(1, hidden)
        yield f"{layer}.mlp.gate_proj.weight", drawn(2 * hidden, hidden)
        yield f"{layer}.mlp.up_proj.weight", drawn(2 * hidden, hidden)
        yield f"{layer}.mlp.down_proj.weight", drawn(hidden, 2 * hidden)
    yield "model.norm.weight", constant(1, hidden)


def _bfloat16(values: npt.NDArray[np.float32]) -> Weights:
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _safetensors(tensors: dict[str, Weights]) -> bytes:
    """Return a safetensors file: header length, JSON header padded to 8 bytes, then the tensors in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensor.tobytes() for tensor in tensors.values())])


def main() -> None:
    """Make the model and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m tuner.tiny_model", description=main.__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="directory to make; default: tune's cache")
    parser.add_argument("--hidden", type=int, default=128, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(ensure(given.out, hidden=given.hidden, layers=given.layers, seed=given.seed))


if __name__ == "__main__":
    main()
