"""Block ids of prompts: prompts that begin with the same tokens begin with the same ids.

Ids are numbered by their first appearance, so that a workload that is passed on holds no hash of a prompt, which
could be held against guesses of it.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

BLOCK = 16  # tokens; vLLM's default, so that every block that it can share is one


@dataclass(slots=True)
class Blocks:
    """The ids of the prompts seen so far.

    Attributes:
        size: tokens of a block.
    """

    size: int = BLOCK
    _known: dict[bytes, int] = field(default_factory=dict)

    def of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return a prompt's ids: each stands for its block and all before it; the last block may be partial."""
        text, width = array("q", tokens).tobytes(), 8 * self.size
        chain, ids = b"", []
        for start in range(0, len(text), width):
            chain = hashlib.blake2b(chain + text[start : start + width], digest_size=16).digest()
            ids.append(self._known.setdefault(chain, len(self._known)))
        return tuple(ids)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive ids at the end of a prompt, and the run before them: a whole prompt, shared with others in part.

    Attributes:
        first: the first id of this run.
        length: how many ids it has.
        before: how many ids the runs before it have.
        rest: the last of them.
    """

    first: int
    length: int
    before: int = 0
    rest: Self | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids of the prompt, in order."""
        runs: list[Run] = []
        run: Run | None = self
        while run is not None:
            runs.append(run)
            run = run.rest
        found: list[int] = []
        for run in reversed(runs):
            found.extend(range(run.first, run.first + run.length))
        return tuple(found)

    def extended(self, shared: int, first: int, length: int) -> Self:
        """Return the prompt that has this one's `shared` leading ids, then `length` new ones from `first` on."""
        cls = type(self)
        run: Self | None = self
        while run is not None and run.before >= shared:
            run = run.rest
        if run is None:
            return cls(first, length)
        return cls(first, length, shared, replace(run, length=shared - run.before))
