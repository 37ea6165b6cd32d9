"""Measure what the tap of `tune record` adds to TTFT, round by round, beside a relay that looks at nothing.

    python -m benchmarks.record                       # a minute and a half, on an idle machine
    TUNE_TEST_VLLM=.../vllm python -m benchmarks.record     # with a real vLLM too, a minute more

One request at a time, of the same kind: straight to the server, through a relay that hands bytes on and looks at none
(the least that a process in between adds on this machine), and through the tap; every other round backwards. The first
server is that of benchmarks.replay, whose first token is due 20 ms after a request was read, so that all that varies is
the way; it sends an answer's head at once, as vLLM 0.26 and 0.32 do (1.4 ms after a request). The second is a real vLLM
with the tiny model, when there is one. The third row has 16 streams open at once against the first server, with tune's
own client and the arithmetic of benchmarks.front: there the difference is one of quantiles.

The last line is of the first server: median and 99th percentile of the difference, and the relay's median.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.front import measure as fronting
from benchmarks.record import measure
from benchmarks.record.measure import Rounds
from benchmarks.replay import measure as replaying
from benchmarks.replay.__main__ import host, ours
from benchmarks.replay.load import Load
from benchmarks.replay.measure import Cores
from benchmarks.replay.server import MODEL

MOST_ADDED_TTFT_P50 = 1.0  # milliseconds
TTFT, ITL = 0.02, 0.005  # of the server of known timing
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 4
STREAMS = 16
Row = dict[str, Any]


def of_known_timing(options: argparse.Namespace, where: fronting.Places, work: Path) -> Iterator[Row]:
    """Yield the row of one request at a time, and that of many streams."""
    timing = Load("", (0.0,), PROMPT_TOKENS, OUTPUT_TOKENS, TTFT, ITL)
    with (
        replaying.serving(timing, where.server, head_at_once=True) as url,
        measure.tap(url, where.front, work) as (tapped, _),
        measure.relay(url, where.front) as relayed,
        replaying.on_core(where.client),
    ):
        yield row("known timing", asked(url, relayed, tapped, MODEL, options.rounds))
    if options.streams:
        (work / "many").mkdir()
        yield from _streams(options, where, work / "many")


def _streams(options: argparse.Namespace, where: fronting.Places, work: Path) -> Iterator[Row]:
    asked = [fronting.load(options.streams, options.seconds, seed) for seed in range(options.pairs)]
    timing = Load("", (0.0,), output_tokens=fronting.OUTPUT_TOKENS, ttft=fronting.TTFT, itl=fronting.ITL)
    with (
        replaying.serving(timing, where.server, head_at_once=True) as url,
        measure.tap(url, where.front, work) as (tapped, pid),
    ):
        there = fronting.Group([url], tapped, psutil.Process(pid))
        found = [
            fronting.pair(ours(), load, there, where, work, front_first=bool(number % 2))
            for number, load in enumerate(asked)
        ]
    added = {key: statistics.median(one["added"][key] for one in found) for key in fronting.KEYS}
    us_per_token = statistics.median(one[fronting.THROUGH]["front_us_per_token"] for one in found)
    yield {"server": f"{options.streams} streams", "rounds": len(found), **added, "us_per_token": us_per_token}


def of_vllm(options: argparse.Namespace, work: Path) -> Iterator[Row]:
    """Yield the row of a real vLLM."""
    with (
        measure.real_vllm(options.vllm, work) as (url, model),
        measure.tap(url, None, work) as (tapped, _),
        measure.relay(url, None) as relayed,
    ):
        yield row("vLLM", asked(url, relayed, tapped, model, options.rounds))


def asked(url: str, relayed: str, tapped: str, model: str, count: int) -> Rounds:
    """Ask the same each way."""
    return measure.rounds(url, relayed, tapped, model, count, prompt_tokens=PROMPT_TOKENS, tokens=OUTPUT_TOKENS)


def row(server: str, found: Rounds) -> Row:
    """Return what is told of the rounds, in milliseconds."""
    ways = {"ttft": found.added, "relay_ttft": found.least, "direct_ttft": found.direct}
    numbers = {f"{way}_p{q}": float(np.percentile(times, q)) * 1e3 for way, times in ways.items() for q in (50, 99)}
    return {"server": server, "rounds": len(found.direct), **numbers}


def table(rows: Sequence[Row]) -> str:
    """Return a line a row; what was not measured stays empty."""
    columns = list(dict.fromkeys(key for one in rows for key in one))
    lines = [columns, *([_cell(one.get(key)) for key in columns] for one in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = arguments().parse_args(argv)
    where = fronting.places()
    about = host(Cores(where.server, where.client))
    print(" ".join(f"{name}={value}" for name, value in about.items()))
    if where.note:
        print(f"note: {where.note.replace('front', 'tap')}")
    with tempfile.TemporaryDirectory(prefix="record-benchmark-") as work:
        rows = list(of_known_timing(options, where, Path(work)))
        if options.vllm:
            (Path(work) / "real").mkdir()
            rows += of_vllm(options, Path(work) / "real")
    if options.json:
        options.json.write_text(json.dumps({"host": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"\nadded by the tap (ms)\n{table(rows)}\n")
    first = rows[0]
    verdict = "PASS" if first["ttft_p50"] < MOST_ADDED_TTFT_P50 else "FAIL"
    print(f"{verdict} added TTFT p50 {first['ttft_p50']:+.3f} ms < {MOST_ADDED_TTFT_P50} ms")
    said = {"added_ttft_p50_ms": "ttft_p50", "added_ttft_p99_ms": "ttft_p99", "relay_ttft_p50_ms": "relay_ttft_p50"}
    print("RESULT", *(f"{name}={first[key]:.3f}" for name, key in said.items()))
    return 0


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="of requests, one at a time")
    parser.add_argument("--streams", type=int, default=STREAMS, help="open at once in the third row; 0: leave it out")
    parser.add_argument("--pairs", type=int, default=4, help="of runs with many streams, each both ways")
    parser.add_argument("--seconds", type=float, default=10.0, help="that requests are sent in each of them")
    parser.add_argument("--vllm", default=os.environ.get("TUNE_TEST_VLLM"), help="the program; default: TUNE_TEST_VLLM")
    parser.add_argument("--json", type=Path, help="every row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
