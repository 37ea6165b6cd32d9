"""How much of a workload's prompts a prefix cache could have answered.

A server caches whole blocks of its own size, keyed by all tokens before them, and computes at least the last token
of a prompt itself. The ideal is what a cache that never forgets would hit, rows one after the other. Everything
here is pure: rows in, tokens out.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tuner.workload import Request

Tokens = npt.NDArray[np.int64]


def ideal_hits(rows: Sequence[Request], block_size: int, before: Sequence[Request] = ()) -> Tokens:
    """Return, for each row, the prompt tokens that rows before it have left in a boundless cache.

    Args:
        rows: in order of arrival; those without block ids hit nothing and leave nothing.
        block_size: of the server's cache, in tokens; the trace's own blocks may be of any other size.
        before: what was cached when the first row came.
    """
    seen = Prefixes()
    for row in before:
        seen.add(row)
    shared = np.fromiter((seen.add(row) for row in rows), dtype=np.int64, count=len(rows))
    most = np.fromiter((row.input_len - 1 for row in rows), dtype=np.int64, count=len(rows))
    hits: Tokens = np.minimum(shared, most) // block_size * block_size
    return hits


class Prefixes:
    """The prompts of rows as a tree of block ids.

    A block's tokens are a function of its id, so that two blocks with the same id and the same past share their
    beginning, as long as the shorter of the two; what follows is shared only where both are equally long.
    """

    def __init__(self) -> None:
        self._longest: dict[tuple[int, int], int] = {}  # (place, id): tokens
        self._next: dict[tuple[int, int, int], int] = {}  # (place, id, tokens): place

    def add(self, row: Request) -> int:
        """Return how many leading tokens this prompt shares with one that is here, and have it here as well."""
        shared, place = 0, 0
        for block, size in _blocks(row):
            known = self._longest.get((place, block), 0)
            shared += min(known, size)
            if known < size:
                self._longest[place, block] = size
            # A place that is new has nothing below it: from the first difference on, nothing is added.
            place = self._next.setdefault((place, block, size), len(self._next) + 1)
        return shared

    def shared(self, row: Request) -> int:
        """Return how many leading tokens this prompt shares with one that is here."""
        shared, place = 0, 0
        for block, size in _blocks(row):
            shared += min(self._longest.get((place, block), 0), size)
            if (below := self._next.get((place, block, size))) is None:
                break
            place = below
        return shared


def _blocks(row: Request) -> Iterator[tuple[int, int]]:
    """Yield the ids of a prompt's blocks and how many tokens each has."""
    if row.block_ids is None or row.block_size is None:
        return
    left = row.input_len
    for block in row.block_ids:
        yield block, min(row.block_size, left)
        left -= row.block_size
