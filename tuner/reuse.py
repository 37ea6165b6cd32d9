"""How much of a workload's prompts a prefix cache could have answered.

A server caches whole blocks of its own size, keyed by all tokens before them, and computes at least the last token
of a prompt itself. The ideal is what a cache that never forgets would hit, rows one after the other. Everything
here is pure: rows in, tokens out.
"""

from collections.abc import Iterable, Iterator, Sequence

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


def last_users(rows: Iterable[Request], before: Iterable[Request]) -> list[int]:
    """Return the places in `before` of those who used last what `rows` find in a boundless cache, in order.

    For each of the rows that is the last one with its longest prefix that was used before; the others leave nothing
    behind that is asked for. Needs memory for the blocks of `rows` only.
    """
    users = _Users()
    ends = [users.add(row.block_ids or ()) for row in rows]
    for place, row in enumerate(before):
        users.use(row.block_ids or (), place)
    return sorted({user for end in ends if (user := users.last(end)) is not None})


class _Users:
    """Prompts as a tree of block ids, and who used each prefix last."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._parent, self._user = [0], [-1]

    def add(self, blocks: Sequence[int]) -> int:
        """Add a prompt; return its end."""
        node = 0
        for block in blocks:
            following = self._nodes.setdefault((node, block), len(self._parent))
            if following == len(self._parent):
                self._parent.append(node)
                self._user.append(-1)
            node = following
        return node

    def use(self, blocks: Sequence[int], user: int) -> None:
        """Note that a prompt uses the prefixes that it has in common with those added."""
        node = 0
        for block in blocks:
            following = self._nodes.get((node, block))
            if following is None:
                return
            self._user[following] = user
            node = following

    def last(self, node: int) -> int | None:
        """Return who used the longest used prefix of the prompt that ends here, None if nobody did."""
        while node and self._user[node] < 0:
            node = self._parent[node]
        return self._user[node] if node else None
