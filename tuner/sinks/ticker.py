"""Says on stderr how far a replay is: a line a phase, and a count in between."""

import sys
import time
from typing import TextIO

from tuner.sinks.console import Quiet
from tuner.sinks.words import plain
from tuner.units import format_elapsed

SILENCE = 10.0  # between counts where nobody looks at it; a terminal sees each


class Ticker:
    """Answers for `seams.Progress`; `ended` leaves the cursor on a line of its own."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = Quiet(stream or sys.stderr)
        self._told = time.perf_counter()
        self._is_open = False

    def phase(self, name: str, *, expected: float | None = None) -> None:
        """Say that a phase begins."""
        self.ended()
        about = f" ({format_elapsed(expected)})" if expected else ""
        self._stream.write(f"tune: {plain(name)}{about}\n")
        self._stream.flush()
        self._told = time.perf_counter()

    def count(self, ended: int, offered: int) -> None:
        """Say how many requests have ended."""
        words = f"tune: {ended} of {offered} requests ended"
        if self._stream.isatty():
            self._stream.write(f"\r{words}")
            self._is_open = True
        elif time.perf_counter() - self._told >= SILENCE:
            self._stream.write(f"{words}\n")
            self._told = time.perf_counter()
        self._stream.flush()

    def ended(self) -> None:
        """Finish the line that counts."""
        if self._is_open:
            self._stream.write("\n")
            self._is_open = False
