"""Measure load clients against a server of known timing: CPU per token, errors of TTFT and ITL, send lag.

    python -m benchmarks.replay [-o FILE.json]                       # about 25 minutes, on an idle machine
    python -m benchmarks.replay --only ours,floor --repeats 1        # about 3 minutes, installs nothing

The server has one core, a client with all its processes another. Streams are of 200 tokens, the first after
100 ms, one each 20 ms: at 50 requests a second that is 200 streams and 10,000 tokens a second. Each repeat draws
Poisson arrivals of its own, the same ones for every client, and the clients take turns.

    ours    tuner.replay.run.replay in a process of its own
    floor   a loop over epoll that parses nothing: what Python cannot beat by much in exactness here
    vllm, guidellm, aiperf    `vllm bench serve`, `guidellm run` and `aiperf profile`, from environments in --peers

us/token is the CPU time of the client's whole process tree between the sixth arrival and the last write, divided
by the tokens written then; outside is the rest: start-up, prompts, report. An error is the client's quantile less
that of the server's own log of the same requests, TTFT counted from the send. Lag is how late requests were sent,
by the client's own word (lag) or by the server's log against its earliest arrival (seen). Late is the server itself,
against its schedule. Cells are medians over repeats with the least and the greatest. What a client does not report
is absent.

The last line compares CPU per token at the highest rate; the ratio is the best peer's over ours.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.replay import peers
from benchmarks.replay.load import Load, Seen, evenly, poisson
from benchmarks.replay.measure import ROOT, Cores, cores, measure
from benchmarks.replay.peers import AbsentError, Client
from tuner import tiny_model

OWN, PEERS = ("ours", "floor"), ("vllm", "guidellm", "aiperf")
SECONDS = 30
ROW_GAP, ROWS = 0.001, 10_000

LEAST_ERROR, ERROR_FACTOR = 1.0, 1.5  # milliseconds; times the floor's
MOST_US_PER_TOKEN, MOST_OUTSIDE = 20.0, 1.0
SERVER_IN_TIME = 1.0  # milliseconds; on an idle machine its p99 is half of that

Run = dict[str, Any]


@dataclass(slots=True)
class Row:
    """The runs of one client under one load, or why there are none."""

    load: str
    client: str
    version: str | None = None
    runs: list[Run] = field(default_factory=list)
    absent: str | None = None

    def values(self, *path: str) -> list[float]:
        """Return one value a run, where it has one."""
        found = []
        for run in self.runs:
            value: Any = run
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found.append(float(value))
        return found

    def median(self, *path: str) -> float | None:
        """Return the median over runs, None where there is no value."""
        values = self.values(*path)
        return statistics.median(values) if values else None


# --- The clients ------------------------------------------------------------------------------------------


def ours() -> Client:
    """Return tune's own client."""

    def command(load: Load, url: str, out: Path) -> list[str]:
        trace = load.write_trace(out / "trace.jsonl")
        program = [sys.executable, "-m", "benchmarks.replay.ours"]
        return [*program, "--url", url, "--trace", str(trace), "--out", str(out / "seen.npz")]

    return Client("ours", command, _read, _import_path)


def floor() -> Client:
    """Return the least client."""

    def command(load: Load, url: str, out: Path) -> list[str]:
        trace, port = load.write_trace(out / "trace.jsonl"), url.rpartition(":")[2]
        program = [sys.executable, "-m", "benchmarks.replay.floor"]
        return [*program, "--port", port, "--trace", str(trace), "--out", str(out / "seen.npz")]

    return Client("floor", command, _read, _import_path)


def _read(out: Path) -> Seen:
    return Seen.load(out / "seen.npz")


def _import_path(_: Path) -> Mapping[str, str]:
    rest = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{rest}" if rest else str(ROOT)}


def clients(options: argparse.Namespace, work: Path) -> Iterator[tuple[str, Client | AbsentError]]:
    """Yield every client that was asked for, or why it cannot be had."""
    chosen = options.only or [*OWN, *PEERS]
    tokenizer = tiny_model.ensure(work / "tokenizer", hidden=64, layers=1) if set(chosen) & set(PEERS) else work
    for name in chosen:
        if name in OWN:
            yield name, ours() if name == "ours" else floor()
            continue
        try:
            yield name, peers.find(name, options.peers, options.vllm, tokenizer)
        except AbsentError as failure:
            yield name, failure


# --- The runs ---------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace, work: Path, where: Cores) -> Iterator[Row]:
    """Run everything; yield the rows of a load when it is done."""
    found = dict(clients(options, work))
    repeats = {name: options.repeats if name in OWN else options.peer_repeats for name in found}
    for rate in options.rate:
        count = options.requests or round(rate * SECONDS)

        def streams(repeat: int, rate: float = rate, count: int = count) -> Load:
            return Load(f"{rate:g} requests/s", poisson(rate, count, repeat))

        yield from _rows(streams, found, repeats, where, work)
    own = {name: client for name, client in found.items() if name in OWN}

    def rows(_: int) -> Load:
        return Load(f"{ROWS} rows at 1 ms", evenly(ROW_GAP, ROWS), prompt_tokens=10, output_tokens=1, ttft=0.005)

    if options.rows:
        yield from _rows(rows, own, repeats, where, work)


def _rows(
    load: Callable[[int], Load],
    found: Mapping[str, Client | AbsentError],
    repeats: Mapping[str, int],
    where: Cores,
    work: Path,
) -> list[Row]:
    """Let the clients take turns under a load that is drawn anew each time; a client that fails is out."""
    rows = [
        Row(load(0).name, name, absent=str(client))
        if isinstance(client, AbsentError)
        else Row(load(0).name, name, client.version)
        for name, client in found.items()
    ]
    for repeat in range(max(repeats.values(), default=0)):
        for row in rows:
            client = found[row.client]
            if row.absent or isinstance(client, AbsentError) or repeat >= repeats[row.client]:
                continue
            print(f"{row.load}: {row.client}, {repeat + 1} of {repeats[row.client]}", file=sys.stderr)
            try:
                row.runs.append(_measure(client, load(repeat), where, work))
            except AbsentError as failure:
                row.absent = str(failure)
    return rows


def _measure(client: Client, load: Load, where: Cores, work: Path) -> Run:
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    return measure(client, load, where, out)


# --- The report -------------------------------------------------------------------------------------------

COLUMNS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "us/token": (("us_per_token",), ".1f"),
    "core %": (("core_share",), ".0%"),
    "TTFT p50": (("ttft_error", "p50"), "+.2f"),
    "TTFT p99": (("ttft_error", "p99"), "+.2f"),
    "ITL p50": (("itl_error", "p50"), "+.2f"),
    "ITL p99": (("itl_error", "p99"), "+.2f"),
    "lag p99": (("lag", "p99"), ".2f"),
    "lag max": (("lag", "max"), ".2f"),
    "seen p99": (("lag_by_server", "p99"), ".2f"),
    "outside s": (("outside_cpu_s",), ".2f"),
    "late p50": (("server_late", "p50"), ".2f"),
    "late p99": (("server_late", "p99"), ".2f"),
    "late max": (("server_late", "max"), ".2f"),
}
EXACT = {
    "TTFT p99": (("exact", "ttft", "p99"), ".2f"),
    "TTFT max": (("exact", "ttft", "max"), ".2f"),
    "chunk p50": (("exact", "chunk", "p50"), ".2f"),
    "chunk p99": (("exact", "chunk", "p99"), ".2f"),
    "chunk max": (("exact", "chunk", "max"), ".2f"),
    "gap p99": (("exact", "gap", "p99"), ".2f"),
    "lag p50": (("lag", "p50"), ".2f"),
}
LAGS = {
    f"{which} {quantile}": ((f"lag_{which}_100", quantile), ".2f")
    for which in ("first", "last")
    for quantile in ("p50", "p99", "max")
} | {"lag p99": (("lag", "p99"), ".2f"), "lag max": (("lag", "max"), ".2f")}


def table(title: str, rows: Sequence[Row], columns: Mapping[str, tuple[tuple[str, ...], str]]) -> str:
    """Return a table of medians, with the range over runs below each."""
    lines = [["client", "runs", "done", *columns]]
    for row in rows:
        if not row.runs:
            continue
        served, offered = sum(row.values("served")), sum(row.values("offered"))
        cells = [(cell(row, path, form), spread(row, path, form)) for path, form in columns.values()]
        lines.append([row.client, str(len(row.runs)), f"{served:.0f}/{offered:.0f}", *(median for median, _ in cells)])
        if len(row.runs) > 1:
            lines.append(["", "", "", *(least for _, least in cells)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([title, *text, *(f"{row.client}: absent: {row.absent}" for row in rows if row.absent)])


def cell(row: Row, path: Sequence[str], form: str) -> str:
    """Return a median as text."""
    value = row.median(*path)
    return "absent" if value is None else format(value, form)


def spread(row: Row, path: Sequence[str], form: str) -> str:
    """Return the least and the greatest as text."""
    values = row.values(*path)
    return f"{format(min(values), form)}..{format(max(values), form)}" if values else ""


def checks(rows: Sequence[Row], top: str) -> Iterator[tuple[str, bool]]:
    """Yield what tune's client is held to, and whether it is so."""
    for row in rows:
        if row.client != "ours" or row.median("itl_error", "p99") is None:  # the rows of one token are only shown
            continue
        least = next((r for r in rows if r.client == "floor" and r.load == row.load), None)
        for name in ("ttft", "itl"):
            found = row.median(f"{name}_error", "p99")
            if found is None:
                continue
            best = least.median(f"{name}_error", "p99") if least is not None else None
            limit = max(LEAST_ERROR, ERROR_FACTOR * abs(best or 0.0))
            words = f"(floor {best:+.2f})" if best is not None else "(no floor)"
            yield f"{row.load}: {name.upper()} p99 error {found:+.2f} ms <= {limit:.2f} ms {words}", abs(found) <= limit
        if (outside := row.median("outside_cpu_s")) is not None:
            yield f"{row.load}: start-up and report {outside:.2f} s CPU < {MOST_OUTSIDE:g} s", outside < MOST_OUTSIDE
        # The figure is one of 10,000 tokens/s: with less to do, more of the cost is waking up.
        if row.load == top and (cost := row.median("us_per_token")) is not None:
            yield f"{row.load}: {cost:.1f} us/token <= {MOST_US_PER_TOKEN:g}", cost <= MOST_US_PER_TOKEN


def result_line(rows: Sequence[Row]) -> str:
    """Return the comparison under one load."""
    costs = {row.client: cost for row in rows if (cost := row.median("us_per_token")) is not None}
    own = costs.get("ours")
    best = min((name for name in costs if name in PEERS), key=costs.__getitem__, default=None)
    peer = costs[best] if best else None
    ratio = f"{peer / own:.2f}" if own and peer else "absent"
    return (
        f"RESULT ours_us_per_token={'absent' if own is None else f'{own:.1f}'} best_peer={best or 'absent'} "
        f"best_peer_us_per_token={'absent' if peer is None else f'{peer:.1f}'} ratio={ratio}"
    )


def report(rows: Sequence[Row], top: str) -> None:
    """Print every table, the checks and the result."""
    for load in dict.fromkeys(row.load for row in rows):
        there = [row for row in rows if row.load == load]
        if any(row.values("lag_first_100", "p50") and not row.values("itl", "p50") for row in there):
            print(table(f"\n{load}, 1 token each: lag of the first and the last 100 (ms)", there, LAGS))
            continue
        print(
            table(
                f"\n{load}, streams of 20 ms gaps: cost (outside: s of CPU), errors, lag and lateness (ms)",
                there,
                COLUMNS,
            )
        )
        own = [row for row in there if row.values("exact", "ttft", "p99")]
        if own:
            print(table("\nthe same, request by request and chunk by chunk (ms)", own, EXACT))
    print()
    for name, version in {row.client: row.version for row in rows if row.runs and row.version}.items():
        pinned = peers.PINS[name][0].partition("==")[2]
        print(f"{name} {version}" + ("" if version.partition("+")[0] == pinned else f", not the pinned {pinned}"))
    for row in rows:
        late = row.median("server_late", "p99")
        if late is not None and late > SERVER_IN_TIME:
            print(f"note: {row.load}: {row.client}: the server was late by {late:.1f} ms (p99): is the machine idle?")
    for words, is_met in checks(rows, top):
        print(f"{'PASS' if is_met else 'FAIL'} {words}")
    for row in rows:
        if row.load == top and row.absent:
            print(f"absent: {row.client}: {row.absent}")
    print(result_line([row for row in rows if row.load == top]))


def host(where: Cores) -> dict[str, Any]:
    """Return what the numbers were measured on."""
    models = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "server_core": where.server,
        "client_core": where.client,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def main() -> int:
    """Measure and report."""
    options = arguments().parse_args()
    where = cores()
    print(" ".join(f"{name}={value}" for name, value in host(where).items()))
    if where.note:
        print(f"note: {where.note}")
    with tempfile.TemporaryDirectory(prefix="replay-benchmark-") as work:
        rows = list(measured(options, Path(work), where))
    if options.output:
        whole = {"host": host(where), "rows": [vars_of(row) for row in rows]}
        options.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    report(rows, f"{max(options.rate):g} requests/s")
    return 0


def vars_of(row: Row) -> dict[str, Any]:
    """Return a row for JSON; what is absent is left out."""
    columns = {name: getattr(row, name) for name in row.__slots__}
    return {name: value for name, value in columns.items() if value is not None}


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(sys.executable).with_name("vllm")
    parser.add_argument("--rate", type=_rates, default=[25.0, 50.0], help="requests a second: 25,50")
    parser.add_argument("--requests", type=int, help=f"a run; default: {SECONDS} seconds of them")
    parser.add_argument("--repeats", type=int, default=5, help="of ours and floor")
    parser.add_argument("--peer-repeats", type=int, default=2)
    parser.add_argument("--only", type=_names, help=f"some of {','.join((*OWN, *PEERS))}")
    parser.add_argument("--no-rows", dest="rows", action="store_false", help=f"leave out the {ROWS} rows at 1 ms")
    parser.add_argument("--peers", type=Path, default=Path(".bench"), help="where peers are or get installed")
    parser.add_argument("--vllm", type=Path, default=beside, help="the vllm of `vllm bench serve`")
    parser.add_argument("-o", "--output", type=Path, help="every run as JSON")
    return parser


def _rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - {*OWN, *PEERS}):
        raise argparse.ArgumentTypeError(f"no client {unknown[0]!r}; there are {', '.join((*OWN, *PEERS))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
