"""Measure what vllm-router adds to TTFT and ITL before replicas of known timing, and its CPU per token.

    python -m benchmarks.front [--json FILE]                          # about 17 minutes, on an idle machine
    python -m benchmarks.front --streams 16 --pairs 3 --seconds 20    # about 3 minutes

The servers are those of benchmarks.replay: streams of 100 tokens, the first after 100 ms, one each 20 ms. The client
is `tuner.replay.run.replay` in a process of its own, with Poisson arrivals that keep about `--streams` streams open.
Each pair sends the same arrivals twice, straight to one server and through the front to all of them, in turns which
goes first.

added    the client's quantile less that of the servers' own logs, through the front less directly: a server that
         was late is not the front's doing, nor is what the client itself adds
moved    how far a single gap is from the same gap in the server's log (p99), through the front less directly: it holds
         on a machine whose quantiles do not
us/token CPU time of the front's process over the run, start-up of the client included, by the tokens that passed

Cells are medians over pairs with the least and the greatest. The last line is of 16 streams and the policy that `tune`
takes unless told otherwise; what was not measured is absent.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.front.measure import (
    DIRECT,
    KEYS,
    MOVED,
    OUTPUT_TOKENS,
    THROUGH,
    Numbers,
    Places,
    group,
    load,
    pair,
    places,
)
from benchmarks.replay.__main__ import SERVER_IN_TIME, host, ours
from benchmarks.replay.measure import Cores
from benchmarks.replay.peers import AbsentError
from tuner.serving import ROUTER

STREAMS, RESULT_STREAMS = (1, 16, 64), 16
MOST_ADDED_ITL_P99 = 0.5  # milliseconds
WARM_UP = 1.0  # seconds of load on each way before the first pair


@dataclass(slots=True)
class Row:
    """The pairs of one level and policy, or why there are none."""

    policy: str
    streams: int
    pairs: list[dict[str, Numbers]] = field(default_factory=list)
    absent: str | None = None

    def values(self, part: str, key: str) -> list[float]:
        """Return one value a pair."""
        return [one[part][key] for one in self.pairs]

    def median(self, part: str, key: str) -> float | None:
        """Return the median over pairs, None where there is none."""
        values = self.values(part, key)
        return statistics.median(values) if values else None


def measured(options: argparse.Namespace, router: str, where: Places, work: Path) -> Iterator[Row]:
    """Yield each row when it is done; a front serves one row."""
    client = ours()
    for policy in options.policy:
        for streams in options.streams:
            row = Row(policy, streams)
            try:
                with group([router], policy, options.replicas, where, work) as there:
                    pair(client, load(streams, WARM_UP, 0, options.tokens), there, where, work, front_first=False)
                    for number in range(options.pairs):
                        print(f"{policy}, {streams} streams: {number + 1} of {options.pairs}", file=sys.stderr)
                        asked = load(streams, options.seconds, number + 1, options.tokens)
                        row.pairs.append(pair(client, asked, there, where, work, front_first=bool(number % 2)))
            except AbsentError as failure:
                row.absent = str(failure)
            yield row


# --- The report -------------------------------------------------------------------------------------------

COLUMNS: Mapping[str, tuple[str, str, str]] = {
    **{f"added {key.replace('_', ' ').upper()}": ("added", key, "+.3f") for key in KEYS},
    "moved P99": ("added", MOVED, "+.3f"),
    "us/token": (THROUGH, "front_us_per_token", ".1f"),
    "direct TTFT P50": (DIRECT, "ttft_p50", ".2f"),
    "direct ITL P99": (DIRECT, "itl_p99", ".2f"),
    "late P99": (THROUGH, "server_late_p99", ".2f"),
}


def table(rows: Sequence[Row]) -> str:
    """Return medians, with the range over pairs below each."""
    lines = [["policy", "streams", "pairs", *COLUMNS]]
    for row in rows:
        if not row.pairs:
            continue
        cells = [row.values(part, key) for part, key, _ in COLUMNS.values()]
        forms = [form for *_, form in COLUMNS.values()]
        middle = [format(statistics.median(cell), form) for cell, form in zip(cells, forms, strict=True)]
        lines.append([row.policy, str(row.streams), str(len(row.pairs)), *middle])
        if len(row.pairs) > 1:
            spread = [f"{min(cell):{form}}..{max(cell):{form}}" for cell, form in zip(cells, forms, strict=True)]
            lines.append(["", "", "", *spread])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, *(f"{row.policy}, {row.streams}: absent: {row.absent}" for row in rows if row.absent)])


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what a reader should know before believing the table, and whether the target is met."""
    for row in rows:
        late = row.median(THROUGH, "server_late_p99")
        if late is not None and late > SERVER_IN_TIME:
            words = f"the servers were late by {late:.1f} ms (p99): is the machine idle?"
            yield f"note: {row.policy}, {row.streams} streams: {words}"
        itl = row.median("added", "itl_p99")
        if row.streams == RESULT_STREAMS and itl is not None:
            verdict = "PASS" if itl < MOST_ADDED_ITL_P99 else "FAIL"
            words = f"added ITL p99 {itl:+.3f} ms < {MOST_ADDED_ITL_P99} ms"
            yield f"{verdict} {row.policy}, {row.streams} streams: {words}"


def result_line(rows: Sequence[Row]) -> str:
    """Return the line of the level and the policy that count."""
    row = next((row for row in rows if (row.policy, row.streams) == (ROUTER.policy, RESULT_STREAMS)), None)

    def one(key: str) -> str:
        value = row.median("added", key) if row is not None else None
        return "absent" if value is None else f"{value:.3f}"

    return f"RESULT added_ttft_p50_ms={one('ttft_p50')} added_itl_p99_ms={one('itl_p99')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = arguments().parse_args(argv)
    if (router := shutil.which(options.router)) is None:
        print(f"there is no {options.router}: pip install vllm-router, or --router PATH", file=sys.stderr)
        return 2
    where = places()
    about: dict[str, Any] = host(Cores(where.server, where.client)) | {"front_core": where.front}
    print(" ".join(f"{name}={value}" for name, value in about.items()))
    if where.note:
        print(f"note: {where.note}")
    with tempfile.TemporaryDirectory(prefix="front-benchmark-") as work:
        rows = list(measured(options, router, where, Path(work)))
    if options.json:
        whole = {"host": about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"\nadded by the front before {options.replicas} replicas (ms), its CPU, and the runs it is taken from (ms)")
    print(table(rows))
    print()
    for line in notes(rows):
        print(line)
    print(result_line(rows))
    return 0


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(sys.executable).with_name("vllm-router")
    parser.add_argument("--streams", type=_numbers, default=list(STREAMS), help="open at once: 1,16,64")
    parser.add_argument("--pairs", type=int, default=5, help="of a level")
    parser.add_argument("--seconds", type=float, default=30.0, help="that requests are sent in each run")
    parser.add_argument("--tokens", type=int, default=OUTPUT_TOKENS, help="of each stream")
    parser.add_argument("--policy", type=_words, default=[ROUTER.policy], help="some of vllm-router's, by commas")
    parser.add_argument("--replicas", type=int, default=2, help="behind the front")
    parser.add_argument("--router", default=str(beside) if beside.exists() else "vllm-router", help="the program")
    parser.add_argument("--json", type=Path, help="every pair")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
