"""Make prompts as token ids: of the recorded length, sharing what the recorded prompts shared.

A block's tokens depend on the salt and the block's id only, so rows with the same leading ids have the same
leading tokens, in every process and every version. The method, for whoever wants to rebuild a prompt:

    key = 8 bytes of blake2b("SALT/block/ID"), little endian; "SALT/row/NUMBER" for a row without ids
    token i of the block = lowest + splitmix64(key, i + 1) mod span

and the first two tokens are the id itself, to the base of span, shifted by the key of "SALT", so that two
blocks never begin alike by chance: ids below span differ in the first token, ids below its square in the first two,
and any two, such as hashes of 53 bits, are alike in none of a server's blocks of 16 tokens. Text would drift in
length; ids need no tokenizer.

A chat endpoint takes text only. There the tokens are words, drawn the same way from 64 of four letters, the id
first to the base of 64; from the ten digits where the server's tokenizer does not have these words, since digits
cost the same in every one. How many words make the recorded length, a `Scale` says that was measured at the server
(calibrate.py). Lengths are then right within a few tokens.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.serving import Json
from tuner.workload import Request

Ids = npt.NDArray[np.int64]

COMPLETIONS, CHAT = "completions", "chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}

LEAST_VOCABULARY = 32_000  # every usual model has more

# One token each in the usual vocabularies.
WORDS = (  # noqa: SIM905 (a list of 64 lines says no more)
    "time year work life hand part case week fact home room area book word game line "
    "city name team side kind head land face door body back food half road form rule "
    "plan view type cost rate town wall tree fire girl mind hour idea data list test "
    "lake file date page text note play step term care love loss size unit mark hall"
).split()
DIGITS = list("0123456789")
ID_BITS = 30  # of the id, at the beginning

_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def ordinary_tokens(vocab_size: int) -> range:
    """Return ids that are neither special nor padding in the tokenizers people use.

    Special tokens are the first ones in some (a thousand in Mistral's) and the last in others (the last 1,300
    in DeepSeek's, the last 293 in Qwen's).
    """
    margin = min(2048, vocab_size // 8)
    return range(margin, vocab_size - margin)


def vocabulary_of(model: str) -> int | None:
    """Return the vocabulary's size of a model whose folder is here, None where it is not or does not say."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int(config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Scale:
    """How a server counts text: tokens of an empty chat (its template), and tokens a word of an alphabet."""

    template: float = 0.0
    per_word: float = 1.0
    alphabet: tuple[str, ...] = tuple(WORDS)

    def words(self, tokens: int) -> int:
        """Return how many words make a prompt of so many tokens, or a little less."""
        return max(0, math.floor((tokens - self.template) / self.per_word + 1e-6))


PLAIN = Scale()


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

    def text(self, row: Request, number: int, scale: Scale = PLAIN) -> str:
        """Return the prompt of the row with this number in words."""
        count = max(1, round((row.input_len - scale.template) / scale.per_word))
        if row.block_ids is None or row.block_size is None:
            return " ".join(self._words(scale.alphabet, "row", number, count))
        ends = [min(count, scale.words(row.block_size * (i + 1))) for i in range(len(row.block_ids) - 1)]
        sizes = np.diff([0, *ends, count])
        blocks = zip(row.block_ids, sizes, strict=True)
        return " ".join(
            word for block, size in blocks for word in self._words(scale.alphabet, "block", block, int(size))
        )

    def _words(self, alphabet: Sequence[str], kind: str, number: int, size: int) -> list[str]:
        span, shift = len(alphabet), _key(self.salt)
        drawn = (_splitmix64(_key(f"{self.salt}/{kind}/{number}"), size) % np.uint64(span)).astype(np.int64)
        encoded = [(number // span**i + shift) % span for i in range(math.ceil(ID_BITS / math.log2(span)))]
        drawn[: len(encoded)] = encoded[:size]
        return [alphabet[i] for i in drawn]

    def body(
        self, model: str, row: Request, number: int, *, endpoint: str = COMPLETIONS,
        extra_body: Mapping[str, Json] | None = None, scale: Scale = PLAIN,
    ) -> bytes:  # fmt: skip
        """Return the JSON body of the request for this row.

        Args:
            model: the served model's name.
            row: what to ask for.
            number: the row's place in the schedule.
            endpoint: "completions" (token ids) or "chat" (text).
            extra_body: merged into the body; null removes a key (RFC 7396).
            scale: how the server counts text, for chat.
        """
        fields: dict[str, Json] = {
            "model": model,
            "max_tokens": row.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        rest = json.dumps(merged(fields, extra_body or {}), separators=(",", ":")).encode()
        return b"{" + self._asked(row, number, endpoint, scale) + b"," + rest[1:]

    def _asked(self, row: Request, number: int, endpoint: str, scale: Scale) -> bytes:
        if endpoint == CHAT:
            text = row.prompt if isinstance(row.prompt, str) else self.text(row, number, scale)
            return b'"messages":' + json.dumps(chat_messages(text)).encode()
        if isinstance(row.prompt, str):
            return b'"prompt":' + json.dumps(row.prompt).encode()
        ids = self.token_ids(row, number) if row.prompt is None else np.array(row.prompt, dtype=np.int64)
        return b'"prompt":' + to_json(ids)


def chat_messages(text: str) -> list[Json]:
    """Return what a chat endpoint is asked."""
    return [{"role": "user", "content": text}]


def merged(fields: Mapping[str, Json], extra: Mapping[str, Json]) -> dict[str, Json]:
    """Return fields with others merged in: objects key by key, null removes (RFC 7396)."""
    result = dict(fields)
    for name, value in extra.items():
        old = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = merged(old if isinstance(old, dict) else {}, value)
        else:
            result[name] = value
    return result


def to_json(ids: Ids) -> bytes:
    """Return ids as a JSON list; numbers are padded with spaces, so that numpy can lay them out at once."""
    if not len(ids):
        return b"[]"
    most = int(ids.max())
    width = len(str(most))
    # Column by column, 32 bits by a constant: a fifth of the time that 64 bits by an array of powers take.
    left: npt.NDArray[np.unsignedinteger[Any]] = ids.astype(np.uint32 if most < 1 << 32 else np.uint64)
    text = np.full((len(ids), width + 1), ord(","), dtype=np.uint8)
    for column in range(width - 1, -1, -1):
        rest = left // 10
        digits = (left - rest * 10).astype(np.uint8) + np.uint8(ord("0"))
        text[:, column] = digits if column == width - 1 else np.where(left > 0, digits, np.uint8(ord(" ")))
        left = rest
    return b"[" + text.tobytes()[:-1] + b"]"


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _splitmix64(key: int, count: int) -> npt.NDArray[np.uint64]:
    z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
