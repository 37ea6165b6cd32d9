"""Replay a trace with tune's own client and write what it saw."""

import argparse
import sys
from pathlib import Path

import numpy as np

from benchmarks.replay.load import Seen, workload
from benchmarks.replay.server import MODEL
from tuner import metrics
from tuner.records import Records
from tuner.replay import run

VOCAB_SIZE = 1024


def seen(records: Records) -> Seen:
    """Return the samples of completed requests; the lag is that of all that were sent."""
    lag = records.sent - records.due
    done = records.select(records.is_completed)
    counts = np.diff(done.chunk_start)
    return Seen(
        ttft=metrics.per_request(done, "ttft_from_send"),
        gaps=metrics.gaps(done, done.chunk_tokens).length,
        lag=lag[~np.isnan(lag)],
        offsets=done.chunk_time - np.repeat(done.sent, counts),
        counts=counts,
        ttft_from_due=metrics.per_request(done, "ttft"),
    )


def main() -> int:
    """Replay and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = workload(options.trace)
    replayed = run.replay(options.url, MODEL, rows, salt="benchmark", vocab_size=VOCAB_SIZE)
    for note in replayed.notes:
        print(note, file=sys.stderr)
    seen(replayed.records).save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
