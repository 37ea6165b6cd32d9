"""What a person at the terminal sees of a running study; on stderr, because results go to stdout.

On a terminal a live view, elsewhere a line an event. A view that cannot be written (a closed stderr, a
broken pipe) is dropped in silence: it must not cost a study.
"""

import atexit
import io
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TextIO, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuner import slo as slos
from tuner.errors import FailureKind
from tuner.results import TrialResult, default_of, feasible, limits, recommend, told_apart
from tuner.serving import ServingConfig
from tuner.sinks.verdict import counts
from tuner.sinks.words import change, configuration, configuration_of, describe_slo, metric_name, plain, slo_state
from tuner.spec import StudySpec
from tuner.units import format_elapsed

REFRESHES_PER_SECOND = 1.0  # the load generator shares this host
LAST_TRIALS = 6


class Quiet(io.TextIOBase):
    """A text stream that forgets what it can no longer write."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream behind, which decides what may be drawn."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether somebody looks at it."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the descriptor, which rich asks for the terminal's size."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True: writing is always allowed and sometimes forgotten."""
        return True

    def write(self, text: str) -> int:
        """Write if that is still possible."""
        self._forgiving("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush if that is still possible."""
        self._forgiving("flush")

    def _forgiving(self, method: str, *arguments: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, method)(
                *(a.encode(self.encoding, "replace").decode(self.encoding) for a in arguments)
            )
        except (OSError, ValueError):
            self._stream = None


class ConsoleSink:
    """Shows a study while it runs; `study_ended` or `close` gives the terminal back."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=cast("TextIO", Quiet(stream or sys.stderr)), highlight=False, soft_wrap=False)
        self._live: Live | None = None
        self._spec: StudySpec | None = None
        self._results: Sequence[TrialResult] = ()
        self._session_start = self._trial_start = self._phase_start = time.perf_counter()
        self._durations: list[float] = []
        self._number: int | None = None
        self._trial = ""
        self._phase = ""
        self._expected: float | None = None

    def study_started(self, spec: StudySpec, results: Sequence[TrialResult]) -> None:
        """Show the study and what is already measured."""
        self._spec, self._results = spec, list(results)
        self._session_start = time.perf_counter()
        self._line(f"study {spec.name}: {_budget(spec)}; {self._promise()}")
        if done := sum(counts(r) for r in results):
            self._line(f"study {spec.name}: {done} trials are already measured")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                _View(self),
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                redirect_stdout=False,
            )
            atexit.register(self.close)
            self._live.start()

    def trial_started(self, number: int, config: ServingConfig, label: str) -> None:
        """Show which configuration is tried now."""
        self._trial_start = self._phase_start = time.perf_counter()
        default = default_of(self._results)
        words = label or configuration_of(told_apart(config, default))
        self._number, self._trial = number, f"trial {number} ({plain(words)})"
        self._phase, self._expected = "", None
        self._line(f"{self._trial}: {self._place()}")

    def phase(self, name: str, *, expected: float | None = None) -> None:
        """Show what the trial is doing."""
        self._phase_start = time.perf_counter()
        self._phase, self._expected = plain(name), expected
        about = "" if expected is None else f" (about {format_elapsed(expected)})"
        self._line(f"trial {self._number}: {self._phase}{about}")

    def trial_ended(self, result: TrialResult, results: Sequence[TrialResult]) -> None:
        """Show what came out."""
        self._results = list(results)
        if counts(result):
            self._durations.append(time.perf_counter() - self._trial_start)
        self._trial, self._phase, self._expected = "", "", None
        left = self._left()
        self._line(f"trial {result.number}: {self._outcome(result)}{'; ' + left if left else ''}")

    def study_ended(self, results: Sequence[TrialResult]) -> None:
        """Leave the terminal as it was."""
        self._results = list(results)
        took = format_elapsed(time.perf_counter() - self._session_start)
        n = sum(counts(r) for r in results)
        self.close()
        self._console.print(Text(f"study {self._spec.name if self._spec else ''}: {n} trials, {took} in this session"))

    def close(self) -> None:
        """End the live view; may be called twice."""
        live, self._live = self._live, None
        atexit.unregister(self.close)
        if live is not None:
            live.transient = True
            live.stop()

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.refresh()
        elif not self._console.is_terminal or self._console.is_dumb_terminal:
            print(text, file=self._console.file, flush=True)

    def _promise(self) -> str:
        asked = limits(self._spec.slo, self._results) if self._spec else ()
        return (
            "SLO " + ", ".join(describe_slo(slo) for slo in asked)
            if asked
            else "no SLO: the Pareto front is the result"
        )

    def _place(self) -> str:
        done = sum(counts(r) for r in self._results)
        total = self._spec.budget.trials if self._spec else None
        return f"{done + 1} of {total}" if total and done < total else f"{done} measured so far"

    def _left(self) -> str:
        """How long the study still takes, from the budget and the trials of this session."""
        if self._spec is None:
            return ""
        budget, known = self._spec.budget, []
        if budget.time is not None:
            known.append(max(0.0, budget.time - (time.perf_counter() - self._session_start)))
        if budget.trials is not None and self._durations:
            more = max(0, budget.trials - sum(counts(r) for r in self._results))
            known.append(max(0.0, more * statistics.median(self._durations) - self._elapsed_of_trial()))
        return f"about {format_elapsed(min(known))} left" if known else ""

    def _elapsed_of_trial(self) -> float:
        return time.perf_counter() - self._trial_start if self._trial else 0.0

    def _outcome(self, result: TrialResult) -> str:
        if result.same_as is not None:
            return f"same configuration as trial {result.same_as}, not measured again"
        if result.failure is not None:
            return f"failed ({result.failure.kind}): {plain(result.failure.message)}"
        spec = self._spec
        if spec is None:
            return "measured"
        values = [f"{metric_name(key)} {_value(key, result)}" for key in spec.objective_metrics]
        return ", ".join([*values, *self._states(result)])

    def _states(self, result: TrialResult) -> list[str]:
        asked = limits(self._spec.slo, self._results) if self._spec else ()
        states = [(slo, slo_state(slo, result)) for slo in asked]
        if states and all(state == "met" for _, state in states):
            return ["SLO met"]
        return [f"{slo.metric} {state}" for slo, state in states if state not in {"met", ""}]

    def view(self) -> RenderableType:
        """Return the live view as it is now."""
        spec = self._spec
        if spec is None:
            return Text("")
        now = time.perf_counter()
        head = [f"{spec.name}: {self._place()}", format_elapsed(now - self._session_start), self._left()]
        lines = [
            Text("  ".join(part for part in head if part), style="bold"),
            Text(self._now(now)),
            Text(self._promise()),
        ]
        lines += [Text(self._best())]
        return Group(*lines, *([self._table()] if self._results and self._console.width >= 50 else []))

    def _now(self, now: float) -> str:
        if not self._trial:
            return "choosing the next configuration"
        about = "" if self._expected is None else f" of about {format_elapsed(self._expected)}"
        return f"{self._trial}: {self._phase or 'starting'}, {format_elapsed(now - self._phase_start)}{about}"

    def _best(self) -> str:
        spec = self._spec
        if spec is None:
            return ""
        measured = [r for r in self._results if r.is_measured and r.same_as is None]
        if not measured:
            return "nothing measured yet"
        met = f"met by {len(feasible(measured))} of {len(measured)} so far; " if spec.slo else ""
        best, default = recommend(self._results, *spec.objective_metrics), default_of(self._results)
        if best is None:
            return f"{met or 'no '}no best yet" if met else "no best yet"
        words = "the default" if best is default else configuration(best, default)
        values = []
        for key in reversed(spec.objective_metrics):
            base = default.metrics.get(key) if default is not None and default is not best else None
            against = f" ({change(best.metrics[key], base)})" if base else ""
            values.append(f"{metric_name(key)} {_value(key, best)}{against}")
        return f"{met}best: trial {best.number} ({words}), {', '.join(values)}"

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        keys = self._spec.objective_metrics if self._spec else ()
        for heading in ("trial", "configuration", *(metric_name(key) for key in keys), ""):
            table.add_column(heading, overflow="fold", no_wrap=heading != "configuration")
        default = default_of(self._results)
        for r in [r for r in self._results if r.same_as is None][-LAST_TRIALS:]:
            state = f"failed: {r.failure.kind}" if r.failure is not None else ", ".join(self._states(r))
            style = "green" if state == "SLO met" else "red" if _is_fault(r) else ""
            words = r.label or configuration(r, default)
            values = [_value(key, r) for key in keys]
            table.add_row(*(Text(cell) for cell in (str(r.number), words, *values)), Text(state, style=style))
        return table


class _View:
    """Asks the sink anew at each refresh, so that times go on."""

    def __init__(self, sink: ConsoleSink) -> None:
        self._sink = sink

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._sink.view()


def _is_fault(result: TrialResult) -> bool:
    return result.failure is not None and result.failure.kind is not FailureKind.INTERRUPTED


def _value(key: str, result: TrialResult) -> str:
    return slos.describe(key, result.metrics[key]) if result.is_measured and key in result.metrics else "-"


def _budget(spec: StudySpec) -> str:
    parts = [f"{spec.budget.trials} trials"] if spec.budget.trials is not None else []
    parts += [format_elapsed(spec.budget.time)] if spec.budget.time is not None else []
    return " or ".join(parts)


def rendered(renderable: RenderableType) -> str:
    """Return what stdout is shown: in colours and as wide as the terminal, where it is one."""
    out = io.StringIO()
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 120
    Console(file=out, width=width, force_terminal=terminal, no_color=not terminal).print(renderable)
    return out.getvalue()


def say(text: str) -> None:
    """Say something on stderr, at once."""
    print(f"tune: {text}", file=sys.stderr, flush=True)
