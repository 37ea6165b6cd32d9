"""What a person at the terminal sees, and that not seeing it hurts nobody."""

import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from study_data import budgets, failed, study

from tuner.errors import FailureKind
from tuner.results import TrialResult
from tuner.sinks.console import ConsoleSink
from tuner.spec import StudySpec


def drive(sink: ConsoleSink, spec: StudySpec | None = None, known: int = 0) -> None:
    """Tell a sink about the study of study_data, of which `known` trials were measured before."""
    results: list[TrialResult] = budgets()[:known]
    sink.study_started(spec or study(), results)
    for result in budgets()[known:]:
        sink.trial_started(result.number, result.config, result.label)
        sink.phase("starting", expected=31.0)
        sink.phase("replay 1 of 2")
        results.append(result)
        sink.trial_ended(result, results)
    sink.study_ended(results)


def lines(spec: StudySpec | None = None, known: int = 0) -> list[str]:
    out = io.StringIO()
    drive(ConsoleSink(out), spec, known)
    return re.sub(r"; about \d+ s left", "", out.getvalue()).splitlines()


class Terminal:
    """A pseudo-terminal that somebody looks at: what is written to `stream` is read at once into `shown`."""

    def __init__(self) -> None:
        self.master, slave = os.openpty()
        self.stream = os.fdopen(slave, "w")
        self.shown = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self.master, 1 << 16):
                self.shown += chunk.decode(errors="replace")

    def waits_for(self, text: str) -> bool:
        end = time.monotonic() + 5
        while text not in self.shown and time.monotonic() < end:
            time.sleep(0.02)
        return text in self.shown


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal; it is gone afterwards."""
    seen = Terminal()
    try:
        yield seen
    finally:
        with contextlib.suppress(OSError):
            seen.stream.close()
        seen.reader.join(5)
        os.close(seen.master)


def test_a_pipe_gets_a_line_an_event() -> None:
    """Start, phases and result of each trial, in order, complete when a reader looks."""
    text = lines()

    assert text[0] == "study quickstart: 8 trials; SLO ttft_p50.long <= 600 ms, itl_p99 = 0.33x of the default"
    assert text[1:5] == [
        "trial 0 (default): 1 of 8",
        "trial 0: starting (about 31 s)",
        "trial 0: replay 1 of 2",
        "trial 0: TTFT p50 long 471 ms, ITL p99 402 ms, itl_p99 missed by 203 %",
    ]
    assert "trial 4: TTFT p50 long 589 ms, ITL p99 101 ms, SLO met" in text
    assert "trial 5: failed (oom): out of memory" in text
    assert "trial 7: same configuration as trial 4, not measured again" in text
    assert text[-1].startswith("study quickstart: 8 trials, 0 s in this session")


def test_a_resumed_study_says_what_is_there() -> None:
    """Measured trials are counted, not measured again."""
    text = lines(known=5)

    assert text[1] == "study quickstart: 5 trials are already measured"
    assert text[2] == "trial 5 (max_num_batched_tokens 65536): 6 of 8"


def test_a_time_budget_has_an_end_too() -> None:
    """Without a number of trials the clock says how long it still takes."""
    out = io.StringIO()
    drive(ConsoleSink(out), study(budget={"time": "10min"}))

    assert "study quickstart: 10 min 00 s; SLO" in out.getvalue()
    assert "left" in out.getvalue()
    assert "of 8" not in out.getvalue()


def test_outside_text_cannot_drive_the_terminal() -> None:
    """Escape sequences in a server's message are not passed on."""
    out = io.StringIO()
    sink = ConsoleSink(out)
    sink.study_started(study(), [])
    sink.trial_ended(failed(0, FailureKind.CRASH, "\x1b[2Jgone\nlost"), [])

    assert "\x1b" not in out.getvalue()
    assert "failed (crash): [2Jgone lost" in out.getvalue()


def test_a_terminal_gets_a_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the study is, what runs now, the promise, the best so far and the last trials."""
    monkeypatch.setenv("COLUMNS", "200")
    with terminal() as seen:
        sink = ConsoleSink(seen.stream)
        sink.study_started(study(), budgets()[:5])
        sink.trial_started(6, budgets()[6].config, "")
        sink.phase("replay 1 of 2", expected=32.0)

        assert seen.waits_for("quickstart: 6 of 8")
        assert seen.waits_for("trial 6 (max_num_batched_tokens 128): replay 1 of 2, 0 s of about 32 s")
        assert seen.waits_for(
            "met by 1 of 5 so far; best: trial 4 (max_num_batched_tokens 256), ITL p99 101 ms (-75 %)"
        )
        sink.close()
        sink.close()
        assert seen.waits_for("\x1b[?25h"), "the cursor is back"


@pytest.mark.parametrize("columns", [1, 10, 40, 400])
def test_any_width_will_do(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny terminal gets less, not a traceback."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with terminal() as seen:
        drive(ConsoleSink(seen.stream))
        assert seen.waits_for("\x1b[?25h")


def test_a_terminal_that_goes_away_is_no_news() -> None:
    """The window is closed in the middle of a study: the stream fails, the study does not."""

    class Gone(io.StringIO):
        fails = False

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if self.fails:
                raise OSError(5, "Input/output error")
            return super().write(text)

    stream = Gone()
    sink = ConsoleSink(stream)
    sink.study_started(study(), [])
    stream.fails = True
    for result in budgets():
        sink.trial_started(result.number, result.config, result.label)
        sink.trial_ended(result, [result])
    sink.study_ended(budgets())


def test_a_broken_pipe_is_no_news() -> None:
    """`tune run ... 2>&1 | head -1` goes on measuring."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1)
    drive(ConsoleSink(stream))
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_closed_stream_is_no_news(tmp_path: Path) -> None:
    """Daemons close stderr."""
    stream = (tmp_path / "log").open("w")
    stream.close()

    drive(ConsoleSink(stream))


def test_an_old_terminal_without_unicode_gets_question_marks(tmp_path: Path) -> None:
    """What the encoding lacks is replaced."""
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as stream:
        sink = ConsoleSink(stream)
        sink.study_started(study(), [])
        sink.trial_ended(failed(0, FailureKind.CRASH, "naïve"), [])

    assert "na?ve" in path.read_text(encoding="ascii")
