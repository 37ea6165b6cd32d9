"""What one process sends, and how it is laid out before the clock starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tuner.records import Floats, Ints
from tuner.replay.connection import Target
from tuner.replay.prompts import PLAIN, Prompts, Scale
from tuner.replay.schedule import Schedule, Turn
from tuner.replay.spool import Spool
from tuner.serving import Json

DRAIN_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one process sends: the requests' bytes, when they are due, and what is expected back.

    Attributes:
        target: where to.
        requests: each request's bytes, head and body; closed by who made them.
        due: seconds after the anchor, ascending.
        input_len, output_len: tokens, as recorded.
        turns: the rows that also wait for the answer to a row before them.
        request_timeout: seconds that one request may take, if it is limited.
        drain_timeout: seconds that requests may still run, and turns be sent, after the last recorded time.
    """

    target: Target
    requests: Spool
    due: Floats
    input_len: list[int]
    output_len: list[int]
    turns: Mapping[int, Turn] = field(default_factory=dict)
    request_timeout: float | None = None
    drain_timeout: float = DRAIN_TIMEOUT


@dataclass(frozen=True, slots=True)
class Job:
    """Rows and how they are sent; makes the load in the process that sends it.

    Attributes:
        target, model: where to, and the served model's name.
        prompts: of this replay.
        plan: the rows, and when.
        numbers: the place of each row in the whole schedule.
        extra_body, scale: see `Prompts.body`.
        request_timeout, drain_timeout: see `Load`.
    """

    target: Target
    model: str
    prompts: Prompts
    plan: Schedule
    numbers: Ints
    extra_body: Mapping[str, Json] | None = None
    scale: Scale = PLAIN
    request_timeout: float | None = None
    drain_timeout: float = DRAIN_TIMEOUT

    def part(self, rows: Ints) -> "Job":
        """Return the job of one process: these rows, ascending."""
        return replace(self, plan=self.plan.part(rows), numbers=self.numbers[rows])

    @contextmanager
    def __call__(self) -> Iterator[Load]:
        """Make every request's bytes, so that nothing is drawn or dumped while the clock runs; let go of them after.

        Raises:
            HostError: they are too many for the memory, and there is no room for them on disk.
        """
        rows, due = self.plan.rows, self.plan.due
        with Spool() as requests:
            for row, number in zip(rows, self.numbers.tolist(), strict=True):
                body = self.prompts.body(
                    self.model, row, number, endpoint=self.target.endpoint, extra_body=self.extra_body, scale=self.scale
                )
                requests.add(self.target.request(body))
            yield Load(
                self.target, requests, due, [row.input_len for row in rows], [row.output_len for row in rows],
                self.plan.turns, self.request_timeout, self.drain_timeout,
            )  # fmt: skip
