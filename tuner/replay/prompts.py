"""Make prompts as token ids: of the recorded length, sharing what the recorded prompts shared.

A block's tokens depend on the salt and the block's id only, so rows with the same leading ids have the same
leading tokens, in every process and every version. The method, for whoever wants to rebuild a prompt:

    key = 8 bytes of blake2b("SALT/block/ID"), little endian; "SALT/row/NUMBER" for a row without ids
    token i of the block = lowest + splitmix64(key, i + 1) mod span

and the first two tokens are the id itself, to the base of span, shifted by the key of "SALT", so that two
blocks never begin alike by chance. Text would drift in length; ids need no tokenizer.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.workload import Request

Ids = npt.NDArray[np.int64]

_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def ordinary_tokens(vocab_size: int) -> range:
    """Return ids that are neither special nor padding in the tokenizers people use.

    Special tokens are the first ones in some (a thousand in Mistral's) and the last in others (the last 1,300
    in DeepSeek's, the last 293 in Qwen's).
    """
    margin = min(2048, vocab_size // 8)
    return range(margin, vocab_size - margin)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one replay: another salt, other tokens."""

    salt: str
    vocab_size: int

    def token_ids(self, row: Request, number: int) -> Ids:
        """Return the prompt of the row with this number."""
        if row.block_ids is None or row.block_size is None:
            return self._content("row", number, row.input_len)
        sizes = [row.block_size] * (len(row.block_ids) - 1)
        sizes.append(row.input_len - sum(sizes))
        blocks = zip(row.block_ids, sizes, strict=True)
        return np.concatenate([self._content("block", block, size) for block, size in blocks])

    def _content(self, kind: str, number: int, size: int) -> Ids:
        tokens = ordinary_tokens(self.vocab_size)
        span, shift = len(tokens), _key(self.salt)
        drawn = (_splitmix64(_key(f"{self.salt}/{kind}/{number}"), size) % np.uint64(span)).astype(np.int64)
        encoded = [(number + shift) % span, (number // span + shift) % span]
        drawn[:2] = encoded[:size]
        return drawn + tokens.start

    def body(self, model: str, row: Request, number: int) -> bytes:
        """Return the JSON body of the request for this row."""
        if isinstance(row.prompt, str):
            prompt = json.dumps(row.prompt).encode()
        else:
            ids = self.token_ids(row, number) if row.prompt is None else np.array(row.prompt, dtype=np.int64)
            prompt = to_json(ids)
        rest = json.dumps(
            {
                "model": model,
                "max_tokens": row.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            separators=(",", ":"),
        ).encode()
        return b'{"prompt":' + prompt + b"," + rest[1:]


def to_json(ids: Ids) -> bytes:
    """Return ids as a JSON list; numbers are padded with spaces, so that numpy can lay them out at once."""
    if not len(ids):
        return b"[]"
    width = len(str(int(ids.max())))
    powers = 10 ** np.arange(width - 1, -1, -1)
    digits = ids[:, None] // powers
    text = np.full((len(ids), width + 1), ord(","), dtype=np.uint8)
    text[:, :width] = np.where((digits > 0) | (powers == 1), digits % 10 + ord("0"), ord(" "))
    return b"[" + text.tobytes()[:-1] + b"]"


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _splitmix64(key: int, count: int) -> npt.NDArray[np.uint64]:
    z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
