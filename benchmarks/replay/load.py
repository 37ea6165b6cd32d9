"""What is asked of a client, and what it says it saw."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tuner.workload import Request, Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PROMPT_TOKENS, OUTPUT_TOKENS = 100, 200
HASH_BLOCK = 16  # `vllm bench serve` makes its prompts of blocks of this size


@dataclass(frozen=True, slots=True)
class Load:
    """A schedule of equal requests against a server of known timing; durations are seconds."""

    name: str
    due: tuple[float, ...]
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    ttft: float = 0.1
    itl: float = 0.02

    @property
    def duration(self) -> float:
        """Seconds from the first send to the last token of a server that is never late."""
        return self.due[-1] + self.ttft + (self.output_tokens - 1) * self.itl

    def write_trace(self, path: Path, *, unit: float = 1.0) -> Path:
        """Write the schedule as a Mooncake trace, which every client reads; times are in `unit` seconds."""
        with path.open("w", encoding="utf-8") as file:
            for number, due in enumerate(self.due):
                blocks = -(-self.prompt_tokens // HASH_BLOCK)
                row: dict[str, float | list[int]] = {
                    "timestamp": round(due / unit, 6),
                    "input_length": self.prompt_tokens,
                    "output_length": self.output_tokens,
                }
                if unit == 1.0:  # those who count in milliseconds take blocks of 512
                    row["hash_ids"] = list(range(number * blocks, (number + 1) * blocks))
                file.write(json.dumps(row) + "\n")
        return path


def poisson(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Return the times of `count` arrivals at `rate` a second, the first at zero."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    return tuple(float(due) for due in np.cumsum(gaps) - gaps[0])


def evenly(gap: float, count: int) -> tuple[float, ...]:
    """Return times `gap` seconds apart."""
    return tuple(number * gap for number in range(count))


def read_trace(path: Path) -> Iterator[tuple[float, int, int]]:
    """Yield when each row is due, its prompt's length and its output's."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["timestamp"], row["input_length"], row["output_length"]


def workload(path: Path) -> Workload:
    """Return a trace as the workload that `tuner` replays."""
    rows = (Request(arrival, input_len, output_len) for arrival, input_len, output_len in read_trace(path))
    return Workload(path.stem, tuple(rows), sha256="")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client reports of the requests that it completed; durations are seconds.

    Attributes:
        ttft: from its own send to the first token, one a request.
        gaps: between chunks, pooled; None when the client does not report them.
        lag: how late each request was sent, in order of the schedule, where the client says so.
        offsets: each chunk's arrival after its request's send, request after request in order of the schedule,
            with `counts` chunks a request; where the client says so.
        ttft_from_due: from the scheduled send, where the client says so.
    """

    ttft: Floats
    gaps: Floats | None = None
    lag: Floats | None = None
    offsets: Floats | None = None
    counts: Ints | None = None
    ttft_from_due: Floats | None = None

    def save(self, path: Path) -> None:
        """Write it for `load`."""
        columns = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        with path.open("wb") as file:
            np.savez(file, **columns)

    @classmethod
    def load(cls, path: Path) -> "Seen":
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as columns:
            return cls(**{name: columns[name] for name in columns.files})
