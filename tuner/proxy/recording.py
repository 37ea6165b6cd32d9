"""A recording on disk: parts while it runs, a workload and a summary when it has ended.

recording-0001.jsonl and so on: one line when a request has ended (its row, without block ids) and one when its block
ids are known, each in one write, so that a kill loses no request that had ended. recording.json: the summary; while
recording, as of a few seconds ago. workload.jsonl: at the end, the rows in order of arrival with their block ids; the
parts are gone then.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
from msgspec.structs import replace as changed

from tuner.errors import HostError, SpecError
from tuner.workload import Request, encoded

SUMMARY, ROWS = "recording.json", "workload.jsonl"
PARTS = "recording-[0-9]*.jsonl"
NOT_IDENTIFIED = "the recorder ended before their tokens were known"
CUT_LINE = "cut off in the middle of its line"
MOST_OPEN = 64  # parts at once
ROOM = "is the disk full or read-only?"
UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}


class Summary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was recorded and what was not; requests = rows + all of `not_written`.

    Attributes:
        hashed: what block ids were made of: "tokens" that the server's tokenizer gave, or "text".
        started: wall clock of the first row's arrival, in ISO's form.
        not_written: how many requests have no row, by reason.
        without_block_ids: how many rows have none, by reason.
        ended: false while recording, and after a kill.
        was_cut: it was killed: requests that were not written in the last seconds are not counted.
    """

    tune: str
    upstream: str
    hashed: str
    block_size: int
    keeps_prompts: bool
    ended: bool
    started: str | None = None
    rows: int = 0
    requests: int = 0
    not_written: dict[str, int] = {}
    without_block_ids: dict[str, int] = {}
    was_cut: bool = False


class Identity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a row only after the server's tokenizer was asked."""

    id: str
    block_ids: tuple[int, ...] | None = None
    block_size: int | None = None
    prompt: str | tuple[int, ...] | None = None


class _Line(msgspec.Struct):
    """What tells a row from an identity, and orders the rows."""

    id: str
    arrival_s: float | None = None


@dataclass(slots=True)
class Parts:
    """Lines that reach the disk one write each, in files of a size; closes itself."""

    folder: Path
    rotate: int
    mode: int = 0o644
    _number: int = 0
    _size: int = 0
    _file: int | None = None

    def append(self, line: bytes) -> None:
        """Write a line; where that fails nothing of it is left.

        Raises:
            OSError: it could not be written.
        """
        is_full = self._size and self._size + len(line) > self.rotate
        file = self._opened() if self._file is None or is_full else self._file
        try:
            _write_at_once(file, line)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, self._size)
            raise
        self._size += len(line)

    def _opened(self) -> int:
        """Go on in a new file.

        Raises:
            OSError: it cannot be made.
        """
        path = self.folder / f"recording-{self._number + 1:04}.jsonl"
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, self.mode)
        self.close()
        self._file, self._number, self._size = opened, self._number + 1, 0
        return opened

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write_at_once(file: int, line: bytes) -> None:
    if os.write(file, line) < len(line):  # a signal or a limit; what is left of it tells
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def parse_size(text: str) -> int:
    """Return the bytes in a text such as "64MB".

    Raises:
        SpecError: not a size.
    """
    match = re.fullmatch(r"(\d+)\s*(kB|MB|GB)", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise SpecError(f"--rotate {text}: not a size", hint="write for example --rotate 64MB")
    return int(match[1]) * {unit.lower(): size for unit, size in UNITS.items()}[match[2].lower()]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder for this process; the kernel lets go of it however the process ends.

    Raises:
        SpecError: another recorder has it.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # it is not there, or its file system knows no locks
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SpecError(
                    f"{folder}: another tune is recording there", hint="end that one first, or name another folder"
                ) from None
        yield


@contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """Make an empty folder for a recording, and keep it for this process.

    Raises:
        SpecError: something is in it, or another recorder has it.
        HostError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"-o {folder}: cannot be made: {error.strerror}", hint="give another folder") from error
    with held(folder):
        _check_empty(folder)
        yield


def _check_empty(folder: Path) -> None:
    try:
        there = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise HostError(f"-o {folder}: cannot be read: {error.strerror}", hint="give another folder") from error
    if any(folder.glob(PARTS)):
        raise SpecError(
            f"-o {folder}: holds a recording that was cut off; a new one has a salt of its own and cannot go on there",
            hint=f"make a workload of it: tune record --finish {folder}; or name another folder",
        )
    if there:
        raise SpecError(f"-o {folder}: holds {there[0]} already", hint="name a folder that is empty or not there")
    if not os.access(folder, os.W_OK):
        raise HostError(f"-o {folder}: cannot be written", hint="give another folder")


def write_summary(folder: Path, summary: Summary) -> None:
    """Write the summary, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"
    with _replacing(folder / SUMMARY, 0o644) as file:
        file.write(text)


def read_summary(folder: Path) -> Summary:
    """Return a recording's summary.

    Raises:
        SpecError: there is none, or it is not one.
    """
    path = folder / SUMMARY
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise SpecError(
            f"{path}: not a recording's summary: {error}", hint="name a folder of tune record -o"
        ) from error


def finish(folder: Path, counted: Summary | None = None) -> Summary:
    """Make a workload of a recording's parts, and return what is in it.

    Parts go only when the workload is whole on disk, so it may be cut off and done again. Where there are no rows, all
    that the recorder made goes.

    Args:
        folder: where the parts are.
        counted: the recorder's own counts; without, those that a killed recorder wrote last.

    Raises:
        SpecError: there is no recording in the folder.
        HostError: the disk is full or the folder cannot be written.
    """
    summary = counted or _of_a_killed_one(folder)
    try:
        if not summary.ended:
            summary = _merged(folder, summary)
        for part in folder.glob(PARTS):
            part.unlink()
    except OSError as error:
        raise HostError(
            f"{folder}: the workload cannot be written: {error.strerror}",
            hint=f"what was recorded is kept; when there is room: tune record --finish {folder} ({ROOM})",
        ) from error
    return summary


def _of_a_killed_one(folder: Path) -> Summary:
    """Return what a recorder wrote last; one that had ended was not cut off."""
    summary = read_summary(folder)
    return summary if summary.ended else changed(summary, was_cut=True)


def _merged(folder: Path, summary: Summary) -> Summary:
    index = _Index.of(folder)
    lacking = _write_rows(folder / ROWS, index) if index.rows else 0
    missing = lacking - sum(summary.without_block_ids.values())
    without = summary.without_block_ids | ({NOT_IDENTIFIED: missing} if missing > 0 else {})
    unwritten = summary.not_written | ({CUT_LINE: index.cut} if index.cut else {})
    done = changed(
        summary, rows=len(index.rows), requests=len(index.rows) + sum(unwritten.values()), not_written=unwritten,
        without_block_ids=without, ended=True,
    )  # fmt: skip
    if index.rows:
        write_summary(folder, done)
    else:
        clear(folder)
    return done


def _write_rows(path: Path, index: "_Index") -> int:
    """Write the rows in order of arrival; return how many have no block ids."""
    lacking = 0
    with _replacing(path, index.mode) as file:
        for row in index.sorted_rows():
            file.write(encoded(row))
            lacking += row.block_ids is None
    return lacking


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a line is: rows may hold thousands of ids and do not fit in memory all at once."""

    part: int
    start: int
    length: int


@dataclass(slots=True)
class _Index:
    """The lines of all parts: rows by arrival, identities by their row's id."""

    parts: list[Path]
    rows: list[tuple[float, int, str, _Place]] = field(default_factory=list)
    identities: dict[str, _Place] = field(default_factory=dict)
    cut: int = 0

    @classmethod
    def of(cls, folder: Path) -> "_Index":
        index = cls(sorted(folder.glob(PARTS)))
        for number, part in enumerate(index.parts):
            with part.open("rb") as file:
                start = 0
                for line in file:
                    index._add(line, _Place(number, start, len(line)))
                    start += len(line)
        index.rows.sort(key=lambda row: row[:2])
        return index

    @property
    def mode(self) -> int:
        return self.parts[0].stat().st_mode & 0o777

    def _add(self, line: bytes, place: _Place) -> None:
        try:
            seen = msgspec.json.decode(line, type=_Line)
            msgspec.json.decode(line, type=Identity if seen.arrival_s is None else Request)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.cut += 1
            return
        if seen.arrival_s is None:
            self.identities[seen.id] = place
        else:
            self.rows.append((seen.arrival_s, len(self.rows), seen.id, place))

    def sorted_rows(self) -> Iterator[Request]:
        """Yield the rows in order of arrival, each with what is known of it."""
        with _Lines(self.parts) as lines:
            for _, _, name, place in self.rows:
                row = msgspec.json.decode(lines.at(place), type=Request)
                if (known := self.identities.get(name)) is not None:
                    more = msgspec.json.decode(lines.at(known), type=Identity)
                    row = changed(row, block_ids=more.block_ids, block_size=more.block_size, prompt=more.prompt)
                yield row


@dataclass(slots=True)
class _Lines:
    """The lines of parts, of which there may be more than a process may have open; closes itself."""

    parts: list[Path]
    _open: dict[int, BinaryIO] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def at(self, place: _Place) -> bytes:
        """Return the line at a place."""
        file = self._open.get(place.part) or self._opened(place.part)
        file.seek(place.start)
        return file.read(place.length)

    def _opened(self, part: int) -> BinaryIO:
        if len(self._open) == MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        file = self._open[part] = self.parts[part].open("rb")
        return file


@contextmanager
def _replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Give a file that takes its name when it is whole and on the disk."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove what a recorder made, and the folder when that was all."""
    with suppress(OSError):
        for path in (*folder.glob(PARTS), folder / SUMMARY):
            path.unlink(missing_ok=True)
        folder.rmdir()
