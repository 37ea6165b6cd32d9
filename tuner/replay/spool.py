"""The requests of a load as bytes, made before the clock starts and read when they are due.

A trace of an hour may ask for a gigabyte of prompts. Beyond some tens of MiB they go to a file without a name, one
after the other, and each is read when it is sent: one of 84 KB takes 9 us while the kernel has it in memory, 115 us
and more from a disk, and 9 us again where the kernel was told in time (`python -m benchmarks.replay.prompts`).
"""

import os
import sys
import tempfile
from array import array
from pathlib import Path
from typing import IO, Self

from tuner.errors import HostError

MOST_IN_MEMORY = 32 << 20
ON_DISK = Path("/var/tmp")  # noqa: S108 (kept over reboots, so not in memory; the file has no name there)


class Spool:
    """Requests in the order in which they are added: in memory while they are few, then in a file without a name."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._ends = array("Q", [0])
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def is_on_disk(self) -> bool:
        """Whether they were too many for the memory."""
        return self._file is not None

    def add(self, request: bytes) -> None:
        """Lay a request behind the others.

        Raises:
            HostError: there is no room for it on disk.
        """
        self._ends.append(self._ends[-1] + len(request))
        self._kept.append(request)
        if self.is_on_disk or self._ends[-1] > MOST_IN_MEMORY:
            self._to_disk()

    def take(self, row: int) -> bytes:
        """Return a request, once: what was in memory is not any longer.

        Raises:
            HostError: the disk does not give it back.
        """
        if self._file is None:
            request, self._kept[row] = self._kept[row], b""
            return request
        start, end = self._ends[row : row + 2]
        try:
            return os.pread(self._file.fileno(), end - start, start)
        except OSError as error:
            raise HostError(
                f"{_folder()}: the replay's requests cannot be read back: {error.strerror}",
                hint="is the disk sound? TMPDIR names another folder",
            ) from error

    def expect(self, first: int, stop: int) -> None:
        """Have the kernel fetch the rows from `first` to before `stop`, in case it has dropped them from memory."""
        if self._file is not None and first < stop and sys.platform == "linux":
            start, end = self._ends[first], self._ends[stop]
            os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)

    def _to_disk(self) -> None:
        folder = _folder()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed on leaving)
            for request in self._kept:
                left = memoryview(request)
                while left:
                    left = left[self._file.write(left) :]
        except OSError as error:
            raise HostError(
                f"{folder}: no room for the replay's requests, {self._ends[-1] >> 20:,} MiB so far: {error.strerror}",
                hint="make room there, or set TMPDIR to a folder on a disk that has some",
            ) from error
        self._kept.clear()


def _folder() -> Path:
    """Return where large files may lie: as the user says, else on disk, since /tmp is memory on some hosts."""
    if "TMPDIR" not in os.environ and os.access(ON_DISK, os.W_OK):
        return ON_DISK
    return Path(tempfile.gettempdir())
