"""How much of a workload's prompts a prefix cache could have answered.

A server caches whole blocks of its own size, keyed by all tokens before them, and computes at least the last token
of a prompt itself. The ideal is what a cache that never forgets would hit, rows one after the other. Everything
here is pure: rows in, tokens out.
"""

from collections.abc import Iterable, Sequence

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
    cache = _Seen()
    for row in before:
        cache.shared(row)
    shared = np.fromiter((cache.shared(row) for row in rows), dtype=np.int64, count=len(rows))
    most = np.fromiter((row.input_len - 1 for row in rows), dtype=np.int64, count=len(rows))
    hits: Tokens = np.minimum(shared, most) // block_size * block_size
    return hits


class _Seen:
    """The prompts seen so far, as a tree of block ids.

    A block's tokens are a function of its id, so that two blocks with the same id and the same past share their
    beginning, as long as the shorter of the two; what follows is shared only where both are equally long.
    """

    def __init__(self) -> None:
        self._longest: dict[tuple[int, int], int] = {}  # (place, id): tokens
        self._next: dict[tuple[int, int, int], int] = {}  # (place, id, tokens): place

    def shared(self, row: Request) -> int:
        """Return how many leading tokens this prompt shares with one seen before, and have it seen."""
        if row.block_ids is None or row.block_size is None:
            return 0
        shared, place, left = 0, 0, row.input_len
        for block in row.block_ids:
            size = min(row.block_size, left)
            seen = self._longest.get((place, block), 0)
            shared += min(seen, size)
            if seen < size:
                self._longest[place, block] = size
            # A place that is new has nothing below it: from the first difference on, nothing is added.
            place = self._next.setdefault((place, block, size), len(self._next) + 1)
            left -= size
        return shared


def last_users(rows: Iterable[Request], before: Iterable[Request]) -> list[int]:
    """Return the places in `before` of those who used last what `rows` find in a boundless cache, in order.

    For each of the rows that is the last one with its longest prefix that was used before; the others leave nothing
    behind that is asked for. Needs memory for the blocks of `rows` only.
    """
    prefixes = _Prefixes()
    ends = [prefixes.add(row.block_ids or ()) for row in rows]
    for place, row in enumerate(before):
        prefixes.use(row.block_ids or (), place)
    return sorted({user for end in ends if (user := prefixes.last_user(end)) is not None})


class _Prefixes:
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

    def last_user(self, node: int) -> int | None:
        """Return who used the longest used prefix of the prompt that ends here, None if nobody did."""
        while node and self._user[node] < 0:
            node = self._parent[node]
        return self._user[node] if node else None
