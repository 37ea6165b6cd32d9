"""A file from somebody else, read a line at a time in bounded memory."""

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, cast

from tuner.errors import SpecError
from tuner.outside import legible

LONGEST_LINE = 64 * 2**20
LONGEST_DOCUMENT = 256 * 2**20
GZIP = b"\x1f\x8b"
UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


class Damaged(Exception):  # noqa: N818 (a row, not a mistake)
    """A row that cannot be what its format says; the message says why."""


class Dropped(Exception):  # noqa: N818 (a row, not a mistake)
    """A row that is no request to replay; the message is the reason, one of few, as they are counted by it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A trace's file, plain or gzip, UTF-8 with or without a mark, with any line ends."""

    path: Path

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, without their ends, with their numbers from 1.

        Raises:
            SpecError: the file cannot be read, is no UTF-8 text, or has a line that is too long.
        """
        with self._open() as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    raise self.refused(number, f"a line of more than {LONGEST_LINE >> 20} MiB", "is this a trace?")
                if number == 1:
                    line = self._without_mark(line)  # noqa: PLW2901
                if line and not line.isspace():
                    yield number, line.rstrip(b"\r\n")

    def whole(self) -> bytes:
        """Return the whole file, for formats that are one document.

        Raises:
            SpecError: the file cannot be read, or is too large for that.
        """
        with self._open() as file:
            text = file.read(LONGEST_DOCUMENT + 1)
        if len(text) > LONGEST_DOCUMENT:
            raise SpecError(
                f"{self.path}: one document of more than {LONGEST_DOCUMENT >> 20} MiB",
                hint="export it a record a line, or in parts",
            )
        return self._without_mark(text)

    def head(self, size: int = 2**20) -> bytes:
        """Return the beginning, to recognise a format by."""
        with self._open() as file:
            return self._without_mark(file.read(size))

    def refused(self, number: int | None, why: str, hint: str | None = None) -> SpecError:
        """Return the error that names file and line."""
        where = f"{self.path}:{number}" if number is not None else str(self.path)
        return SpecError(f"{where}: {legible(why)}", hint=hint)

    def _without_mark(self, text: bytes) -> bytes:
        if text.startswith(UTF16_MARKS):
            raise self.refused(1, "UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8")
        return text.removeprefix(UTF8_MARK)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise SpecError(
                f"{self.path}: no file that can be read twice", hint="write what a pipe holds to a file first"
            )
        try:
            with self.path.open("rb") as plain:
                is_zipped = plain.read(2) == GZIP
                plain.seek(0)
                if not is_zipped:
                    yield plain
                    return
                with gzip.open(plain) as unzipped:
                    yield cast("IO[bytes]", unzipped)
        except (OSError, EOFError, zlib.error) as error:
            raise SpecError(
                f"{self.path}: cannot be read: {getattr(error, 'strerror', None) or error}", hint=_hint(error)
            ) from error


def _hint(error: BaseException) -> str | None:
    return (
        "the gzip file is cut off or damaged" if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) else None
    )


@dataclass(slots=True)
class Tally:
    """What became of the rows of a source.

    Attributes:
        source: the file.
        skip_damaged: whether a damaged row is dropped and counted; else it ends the reading.
        read: rows that the source has.
        dropped: how many were not taken, by reason.
        notes: what is odd but taken: how often, and the first line with it.
    """

    source: Source
    skip_damaged: bool = False
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Rows that were taken."""
        return self.read - self.dropped.total()

    def drop(self, reason: str) -> None:
        """Count a row that is not taken."""
        self.dropped[reason] += 1

    def note(self, words: str, number: int) -> None:
        """Count something odd."""
        count, first = self.notes.get(words, (0, number))
        self.notes[words] = (count + 1, first)

    def damaged(self, number: int, error: Exception) -> None:
        """Count a row that cannot be read, or refuse the file for it.

        Raises:
            SpecError: damaged rows are not to be skipped; names file and line.
        """
        why = str(error).replace(" - at `$.", ": `").replace("`$[...]", "`")
        if not self.skip_damaged:
            raise self.source.refused(number, why, "mend the line, or drop and count such rows: --skip-damaged")
        self.drop("damaged")
        self.note(f"damaged rows, the first one: {legible(why)[:160]}", number)

    @property
    def noted(self) -> list[str]:
        """The notes in words."""
        return [f"{words} ({count:,}x, first on line {first})" for words, (count, first) in self.notes.items()]
