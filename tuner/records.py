"""What happened to each request of a replay, as columns; the same from a real server and from a simulated one."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Records:
    """What happened to each offered request, as columns; times are seconds after the replay's anchor.

    Columns of length n (requests, in order of the schedule); NaN where it did not happen or is not known:
        due: scheduled send; of a turn, when its user could ask it, where that was later than recorded.
        sent: request written.  ended: last byte, error or give-up.
        connect_wait: seconds of the time until `sent` in which there was no connection.
        first_byte: the answer's status and headers were there.
        input_len, output_len: tokens asked for.
        prompt_tokens, completion_tokens: as the server's usage reported them.
        error: "" for a completed request, else its kind ("refused", "http_503", "timeout", "short", ...).
        server_queue, server_prefill, server_itl: seconds in the scheduler's queue, from there to the first token,
            and the mean gap after it, as the server says (vLLM does with --enable-per-request-metrics).
    Columns of length m (chunks that carried tokens, request after request):
        chunk_time: arrival.  chunk_tokens: tokens in it, NaN where the server did not say.
        chunk_start: length n + 1; the chunks of request i are chunk_start[i]:chunk_start[i + 1].
    """

    due: Floats
    sent: Floats
    connect_wait: Floats
    first_byte: Floats
    ended: Floats
    input_len: Ints
    output_len: Ints
    prompt_tokens: Floats
    completion_tokens: Floats
    error: Texts
    server_queue: Floats
    server_prefill: Floats
    server_itl: Floats
    chunk_time: Floats
    chunk_tokens: Floats
    chunk_start: Ints

    def __len__(self) -> int:
        return len(self.due)

    @property
    def is_completed(self) -> Bools:
        """Which requests completed."""
        return np.asarray(self.error == "", dtype=bool)

    @property
    def send_lag(self) -> Floats:
        """How late the client was with each request: what the schedule and a missing connection do not explain."""
        return self.sent - self.due - self.connect_wait

    def select(self, keep: Bools) -> "Records":
        """Return the records of some of the requests."""
        counts = np.diff(self.chunk_start)
        columns = {f.name: getattr(self, f.name)[keep] for f in fields(self) if not f.name.startswith("chunk_")}
        kept = np.repeat(keep, counts)
        return Records(
            **columns,
            chunk_time=self.chunk_time[kept],
            chunk_tokens=self.chunk_tokens[kept],
            chunk_start=np.concatenate([[0], np.cumsum(counts[keep])]),
        )

    def reorder(self, order: Ints) -> "Records":
        """Return the records with request order[i] at place i."""
        counts = np.diff(self.chunk_start)
        start = np.concatenate([[0], np.cumsum(counts[order])])
        # Chunk j of the request at place i comes from that request's own first chunk, j further on.
        source = np.arange(start[-1]) + np.repeat(self.chunk_start[:-1][order] - start[:-1], counts[order])
        columns = {f.name: getattr(self, f.name)[order] for f in fields(self) if not f.name.startswith("chunk_")}
        return Records(
            **columns, chunk_time=self.chunk_time[source], chunk_tokens=self.chunk_tokens[source], chunk_start=start
        )

    def save(self, path: Path) -> None:
        """Write the records as a compressed .npz without pickles."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        with path.open("wb") as file:
            np.savez_compressed(file, **columns)

    @classmethod
    def load(cls, path: Path) -> "Records":
        """Read what `save` wrote; columns that an older version did not write are unknown."""
        with np.load(path, allow_pickle=False) as columns:
            unknown = np.full(len(columns["due"]), np.nan)
            return cls(**{f.name: columns.get(f.name, unknown) for f in fields(cls)})

    @classmethod
    def concatenate(cls, parts: "Sequence[Records]") -> "Records":
        """Return the records of several loads as those of one, in this order."""
        columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)}
        counts = np.concatenate([np.diff(part.chunk_start) for part in parts])
        return cls(**columns | {"chunk_start": np.concatenate([[0], np.cumsum(counts)])})
