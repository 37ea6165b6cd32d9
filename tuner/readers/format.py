"""What a format is: how it is recognised, and how its rows become requests.

A reader yields `Request`s whose `arrival` is in seconds on the trace's own clock, whatever its zero: whoever
keeps rows rebases them. As seconds since 1970 a float64 is exact to a quarter of a microsecond, so that a
difference rounded to microseconds is the recorded one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from tuner.readers.source import Damaged, Dropped, Source, Tally
from tuner.workload import Request, miscounted

EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (for times without a zone)
EPOCH_UTC = EPOCH.replace(tzinfo=UTC)
fromisoformat = datetime.fromisoformat
NO_PROMPT, NO_OUTPUT = "no prompt tokens", "no output tokens"
SEVERAL = "several answers to one prompt (n > 1)"
FAILED = "failed call"
NOT_LLM = "no call of a language model"
EMBEDDING = "embedding, no text is generated"
DAMAGE = (Damaged, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user says of a trace that it does not say itself; None where nothing was said.

    Attributes:
        block_size: tokens of one block id.
        time_unit: seconds a unit of the clock, for formats that leave it open.
        rate: requests a second, for formats without a clock.
        seed: of arrivals that are drawn.
        tokenize: counts the tokens of text, and gives their ids.
        template: how many tokens a chat's template adds to those of its messages, with `tokenize`.
        keep_prompts: keep a prompt, as the token ids of its text; else it becomes block ids.
    """

    block_size: int | None = None
    time_unit: float | None = None
    rate: float | None = None
    seed: int = 0
    tokenize: Tokenize | None = None
    template: int = 0
    keep_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, as formats are recognised by it.

    Attributes:
        keys: of the first row: a JSON object's, or a CSV's header.
        is_json: which of the two it is.
        first: the first JSON object whole, or nothing.
    """

    keys: frozenset[str]
    is_json: bool
    first: dict[str, object] = field(default_factory=dict)


Read = Callable[[Source, Options, Tally], Iterator[Request]]


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format.

    Attributes:
        name: as `--format` takes it.
        title: what it is, for a list.
        is_this: whether a file that begins so is certainly of this format.
        read: yields its rows in the file's order, counting all of them in the tally.
        takes: which options mean something here.
    """

    name: str
    title: str
    is_this: Callable[[Head], bool]
    read: Read
    takes: frozenset[str] = frozenset()


Row = Callable[[bytes, int], Request | str]


def by_line(make: Callable[[Options, Tally], Row]) -> Read:
    """Return the reader of a format with a JSON object a line.

    Args:
        make: returns the function from a line and its number to a request, or to the reason why it is dropped
            (which may also be raised); what that raises as `Damaged` or msgspec's error is a damaged row.
    """

    def read(source: Source, options: Options, tally: Tally) -> Iterator[Request]:
        return taken(source.lines(), make(options, tally), tally)

    return read


def taken(records: Iterable[tuple[int, bytes]], row: Row, tally: Tally) -> Iterator[Request]:
    """Yield what becomes a request of numbered records; all are counted in the tally, by reason where they do not."""
    for number, record in records:
        tally.read += 1
        try:
            found = row(record, number)
        except Dropped as reason:
            found = str(reason)
        except DAMAGE as error:
            tally.damaged(number, error)
            continue
        if isinstance(found, str):
            tally.drop(found)
        else:
            yield found


def instant(text: str) -> float:
    """Return an ISO 8601 time as seconds since 1970, cut to microseconds; without a zone it is taken as UTC.

    Raises:
        Damaged: it is none.
    """
    try:
        when = fromisoformat(text)
    except ValueError:
        raise Damaged(f"no time of ISO 8601: {text[:40]!r}") from None
    return (when - (EPOCH if when.tzinfo is None else EPOCH_UTC)).total_seconds()


def check_blocks(count: int, input_len: int, block_size: int) -> None:
    """Refuse block ids that are not those of a prompt of so many tokens.

    Raises:
        Damaged: says how many it should have.
    """
    if why := miscounted(count, input_len, block_size):
        raise Damaged(why)
