"""Rows on disk between two passes over a trace, and what must be known of all of them in memory."""

import mmap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

import numpy as np

from tuner.transforms import Columns, Ints
from tuner.workload import FIRST_MARK, Request, encoded, group_of, relabelled, trusted, unused_mark


@dataclass(slots=True)
class Spool:
    """Rows in a file of their own, in the trace's order; 32 bytes of each in memory.

    Attributes:
        file: where the rows are, a line each.
        greatest_block: the largest block id, -1 without any.
        mark: what is in no name of a row.
        has_prompts: whether a row has somebody's text, as it is or as token ids.
    """

    file: IO[bytes]
    greatest_block: int = -1
    mark: str = FIRST_MARK
    has_prompts: bool = False
    _arrival: "array[float]" = field(default_factory=lambda: array("d"))
    _input_len: "array[int]" = field(default_factory=lambda: array("i"))
    _output_len: "array[int]" = field(default_factory=lambda: array("i"))
    _group: "array[int]" = field(default_factory=lambda: array("q"))
    _end: "array[int]" = field(default_factory=lambda: array("q", [0]))
    _groups: dict[object, int] = field(default_factory=dict)
    _alone: int = 0

    def __len__(self) -> int:
        return len(self._arrival)

    def add(self, row: Request) -> None:
        """Keep a row."""
        line = encoded(row)
        self.file.write(line)
        self._end.append(self._end[-1] + len(line))
        self._arrival.append(row.arrival)
        self._input_len.append(row.input_len)
        self._output_len.append(row.output_len)
        self._group.append(self._group_of(row))
        self.mark = unused_mark(row, self.mark)
        if row.prompt is not None:
            self.has_prompts = True
        if row.block_ids:
            self.greatest_block = max(self.greatest_block, max(row.block_ids))  # noqa: PLW3301 (faster so)

    def _group_of(self, row: Request) -> int:
        """Return the number of the row's group."""
        key = group_of(row)
        if key is not None:
            return self._groups.setdefault(key, len(self._groups))
        self._alone -= 1
        return self._alone

    def sorted(self) -> tuple[Ints, Columns]:
        """Return the rows' places in order of arrival, ties as in the trace, and columns in that order.

        Arrivals count from the first one and are exact to the microsecond.
        """
        arrival = np.frombuffer(self._arrival)
        place = np.argsort(arrival, kind="stable")
        since = np.round(arrival[place] - arrival[place[0]], 6)
        input_len, output_len = (
            np.frombuffer(values, dtype=np.int32)[place].astype(np.int64)
            for values in (self._input_len, self._output_len)
        )
        return place, Columns(since, input_len, output_len, np.frombuffer(self._group, dtype=np.int64)[place])

    def lines(self, place: Ints, copy: Ints) -> Iterator[bytes]:
        """Yield the rows at these places, encoded; what is shared within a copy is shared with no other copy."""
        self.file.flush()
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as rows:
            for at, number in zip(place.tolist(), copy.tolist(), strict=True):
                line = rows[self._end[at] : self._end[at + 1]]
                yield line if not number else self._copied(line, number)

    def rows(self, place: Ints, copy: Ints) -> Iterator[Request]:
        """Yield the rows of these lines."""
        return map(trusted, self.lines(place, copy))

    def _copied(self, line: bytes, number: int) -> bytes:
        return encoded(relabelled(trusted(line), number, self.greatest_block + 1, self.mark))
