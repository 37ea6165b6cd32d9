"""Measure what a trace of an hour costs before the clock starts, and a request while it runs.

    python -m benchmarks.replay.prompts [--rows 12000] [--tokens 12050] [--vocab-size 151936]

The rows have the lengths of Mooncake's conversation trace, of which there are 12,031 with 145 million tokens: 24 ids
of 512 tokens, in chains. Printed are the seconds of CPU and of wall that laying them out takes, the bytes on disk,
the process's peak of memory, and how long the event loop would stand still for a request that is read from disk.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np

from tuner.replay.connection import Target
from tuner.replay.load import Job, Load
from tuner.replay.prompts import Prompts
from tuner.replay.schedule import schedule
from tuner.workload import Request

BLOCK = 512
SAMPLE = 200


def job(rows: int, tokens: int, vocab_size: int) -> Job:
    """Return the job of sending so many prompts of about so many tokens, with a long tail as traces have it."""
    rng = np.random.default_rng(1)
    lengths = np.maximum(1, rng.lognormal(np.log(tokens) - 0.5, 1.0, rows)).astype(int)
    made = [
        Request(i * 0.3, int(n), 343, tuple(range(i * 300, i * 300 - (-n // BLOCK))), BLOCK)
        for i, n in enumerate(lengths)
    ]
    plan = schedule(made)
    return Job(Target("http://127.0.0.1:9"), "m", Prompts("benchmark", vocab_size), plan, np.arange(rows))


def peak() -> float:
    """Return the most memory that this process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def told(what: str, call: Callable[[int], object], rows: Iterable[int]) -> None:
    """Print how long a call takes in microseconds."""
    times = []
    for row in rows:
        started = time.perf_counter()
        call(row)
        times.append(time.perf_counter() - started)
    middle, tail, most = np.percentile(times, [50, 99, 100]) * 1e6
    print(f"{what}: {middle:.0f} us p50, {tail:.0f} p99, {most:.0f} at most")


def reading(load: Load) -> None:
    """Print what taking a request costs: from the kernel's memory, and where the kernel had dropped it from there."""
    requests = load.requests
    rows = np.random.default_rng(2).choice(len(requests), size=min(SAMPLE, len(requests) // 4), replace=False).tolist()
    told("taken from memory", requests.take, rows)
    if not requests.is_on_disk:
        return
    file = requests._file  # noqa: SLF001 (what the kernel does is asked of the file itself)
    assert file is not None
    os.fdatasync(file.fileno())
    for what, announce in (("dropped, from disk", False), ("dropped, and expected 250 ms before", True)):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if announce:
            told("expecting it, in a thread", lambda row: requests.expect(row, row + 1), rows)
            time.sleep(0.25)
        told(what, requests.take, rows)


def main() -> int:
    """Lay out, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--tokens", type=int, default=12_050)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    options = parser.parse_args()
    made = job(options.rows, options.tokens, options.vocab_size)
    tokens = sum(row.input_len for row in made.plan.rows)
    before, wall, cpu = peak(), time.perf_counter(), time.process_time()
    with made() as load:
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{options.rows:,} rows, {tokens / 1e6:,.0f} M tokens: {cpu:.1f} s of CPU, {wall:.1f} s, "
              f"{cpu / tokens * 1e9:.0f} ns a token")  # fmt: skip
        print(f"memory: {before:.0f} MiB with the rows, {peak():.0f} MiB at most")
        reading(load)
        print(f"memory, when requests were read: {peak():.0f} MiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
