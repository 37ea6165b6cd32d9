"""Measure how fast traces are read and imported, beside a plain loop over `json.loads`, and in how much memory.

    python -m benchmarks.readers                   # a million rows a format: about three minutes on an idle machine
    python -m benchmarks.readers --rows 50000 --pairs 1

The rows are those of the windows in tests/traces, again and again. The plain loop decodes the same rows as JSON objects
of the same keys, a line each, and keeps nothing. Each run is a process of its own, in turns which goes first.

reader  rows a second of the reader alone, over those of the plain loop (median of pairs, least and greatest)
import  the same for all of `tune import`: read, check, sort, write
peak    the greatest resident memory of an import, less that of an import of a tenth of the rows, a row
"""

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tuner import intake
from tuner.readers import formats
from tuner.readers.format import Options
from tuner.readers.source import Source, Tally

TRACES = Path(__file__).resolve().parents[2] / "tests" / "traces"
WINDOWS = {
    "mooncake": TRACES / "mooncake_conversation" / "conversation_first2000.jsonl",
    "azure": TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_conv_first3000.csv",
}
TIMEOUT = 1800.0


# --- What is timed, in a process of its own ---------------------------------------------------------------


def plain(trace: Path) -> int:
    """Decode each line; return how many there were."""
    rows = 0
    with trace.open(encoding="utf-8") as file:
        for line in file:
            json.loads(line)
            rows += 1
    return rows


def reader(trace: Path) -> int:
    """Read each row as `tune import` does, and keep none."""
    source = Source(trace)
    return sum(1 for _ in formats.recognise(source).read(source, Options(), Tally(source)))


def whole_import(trace: Path) -> int:
    """Make a workload of the trace, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=trace.parent) as folder:
        return intake.run(intake.wanted(trace, Path(folder) / "w")).read


TIMED: dict[str, Callable[[Path], int]] = {"plain": plain, "reader": reader, "import": whole_import}


def timed(what: str, trace: Path) -> tuple[float, int]:
    """Return rows a second, and the process's greatest resident memory in bytes."""
    words = [sys.executable, "-m", "benchmarks.readers", "--timed", what, str(trace)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    rate, peak = done.stdout.split()
    return float(rate), int(peak)


# --- The files --------------------------------------------------------------------------------------------


def write(name: str, rows: int, folder: Path) -> tuple[Path, Path]:
    """Write a trace of so many rows, and the same rows as JSON objects; return both."""
    window = WINDOWS[name]
    lines = window.read_bytes().splitlines(keepends=True)
    head = lines[:1] if window.suffix == ".csv" else []
    body = lines[len(head) :]
    trace = folder / f"{name}-{rows}{window.suffix}"
    objects = trace if not head else folder / f"{name}-{rows}.jsonl"
    _repeat(trace, head, body, rows)
    if head:
        (columns,) = csv.reader([head[0].decode()])
        values = csv.reader(line.decode() for line in body)
        as_json = [{c: int(v) if v.isdigit() else v for c, v in zip(columns, row, strict=True)} for row in values]
        _repeat(objects, [], [json.dumps(row).encode() + b"\n" for row in as_json], rows)
    return trace, objects


def _repeat(path: Path, head: Sequence[bytes], body: Sequence[bytes], rows: int) -> None:
    times, rest = divmod(rows, len(body))
    with path.open("wb") as file:
        file.writelines(head)
        for _ in range(times):
            file.writelines(body)
        file.writelines(body[:rest])


# --- The report -------------------------------------------------------------------------------------------


def ratios(what: str, trace: Path, objects: Path, pairs: int) -> list[float]:
    """Return rows a second over those of the plain loop, a pair each."""
    found = []
    for number in range(pairs):
        runs = [(what, trace), ("plain", objects)]
        rates = {name: timed(name, path)[0] for name, path in (runs[::-1] if number % 2 else runs)}
        found.append(rates[what] / rates["plain"])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the last line is RESULT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--timed", nargs=2, metavar=("WHAT", "TRACE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.timed:
        what, trace = options.timed
        started = time.perf_counter()
        rows = TIMED[what](Path(trace))
        rate = rows / (time.perf_counter() - started)
        print(rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return 0
    result = []
    with tempfile.TemporaryDirectory() as name:
        for kind in WINDOWS:
            trace, objects = write(kind, options.rows, Path(name))
            tenth, _ = write(kind, options.rows // 10, Path(name))
            for what in ("reader", "import"):
                found = ratios(what, trace, objects, options.pairs)
                middle = statistics.median(found)
                print(f"{kind} {what}: {middle:.2f}x of json.loads ({min(found):.2f}..{max(found):.2f})")
                result.append(f"{kind}_{what}_ratio={middle:.2f}")
            (rate, peak), (_, less) = timed("import", trace), timed("import", tenth)
            a_row = (peak - less) / (options.rows - options.rows // 10)
            print(f"{kind} import: {rate:,.0f} rows/s, peak {peak / 2**20:,.0f} MiB, {a_row:,.0f} bytes a row")
            result.append(f"{kind}_bytes_a_row={a_row:.0f}")
    print("RESULT", *result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
