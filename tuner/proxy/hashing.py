"""Identities of prompts that say which prompts begin alike, and nothing else.

Every digest is keyed with a salt that is drawn for one recording and never written: two recordings cannot be
joined by their ids, and nobody can look up whether a known text was among the prompts.
"""

import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

BLOCK_SIZE = 16  # tokens; divides the block size of every engine that matters
BYTES_PER_BLOCK = 4 * BLOCK_SIZE  # of text, where tokens are not known: English has about four letters a token
ID_BITS = 53  # exact in every reader of JSON
TOKEN_BYTES = array("q").itemsize
BEYOND = b""  # what follows a text's end in the chain: no piece of a text is empty, so no text can pass for it


@dataclass(frozen=True, slots=True)
class Salt:
    """The key of one recording's digests; it lives in memory only."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def digest(self, *parts: bytes) -> bytes:
        """Return 16 bytes that depend on the parts and on where one ends."""
        state = blake2b(key=self.key, digest_size=16)
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    def name(self, text: str) -> str:
        """Return what stands in a file in place of a name that must not."""
        return self.digest(text.encode(errors="surrogatepass")).hex()

    def chain(self, units: Iterable[bytes]) -> Iterator[bytes]:
        """Yield a digest for each unit that depends on it and on all before it."""
        last = b""
        for unit in units:
            last = self.digest(last, unit)
            yield last


def blocks_of_tokens(salt: Salt, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return an id for each block of 16 tokens and one for what is left over.

    Prompts share leading ids exactly as far as they share whole leading blocks; two prompts that end in the same
    partial block after the same tokens share its id too.
    """
    step = BLOCK_SIZE * TOKEN_BYTES
    return tuple(_ids(salt.chain(_pieces(array("q", tokens).tobytes(), step))))


def blocks_of_text(salt: Salt, text: bytes, input_len: int) -> tuple[int, ...]:
    """Return as many ids as `input_len` tokens have blocks, where only the text is known.

    A block is 64 bytes of text, about 16 tokens of English: prompts share leading ids as far as they share leading
    text by that measure. Where the text has more of them than there are ids, the last id stands for all the rest;
    where it has fewer, those that are missing stand for the text's end, and depend on all of it.
    """
    count = -(-input_len // BLOCK_SIZE)
    whole = (count - 1) * BYTES_PER_BLOCK
    pieces = [*_pieces(text[:whole], BYTES_PER_BLOCK), *([text[whole:]] if len(text) > whole else [])]
    pieces += [BEYOND] * (count - len(pieces))
    return tuple(_ids(salt.chain(pieces)))


def _pieces(data: bytes, step: int) -> Iterator[bytes]:
    return (data[start : start + step] for start in range(0, len(data), step))


def _ids(digests: Iterable[bytes]) -> Iterator[int]:
    return (int.from_bytes(digest[:8], "little") >> (64 - ID_BITS) for digest in digests)
