"""What a format is: how it is recognised, and how its rows become requests.

A reader yields `Request`s whose `arrival` is in seconds on the trace's own clock, whatever its zero: whoever
keeps rows rebases them. As seconds since 1970 a float64 is exact to a quarter of a microsecond, so that a
difference rounded to microseconds is the recorded one.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from tuner.readers.source import Damaged, Dropped, Source, Tally
from tuner.workload import LATEST, MOST_TOKENS, Request

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, msgspec.Meta(ge=-LATEST, le=LATEST)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (for times without a zone)
EPOCH_UTC = EPOCH.replace(tzinfo=UTC)
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
Fields = Callable[[list[bytes], int], Request | str]


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


def by_csv(make: Callable[[dict[str, int], Options, Tally], Fields]) -> Read:
    """Return the reader of a CSV with a header; columns are found by name, wherever they stand.

    Args:
        make: takes the place of each column and returns the function from fields and line number to a request, or
            to the reason why it is dropped.
    """

    def read(source: Source, options: Options, tally: Tally) -> Iterator[Request]:
        lines = source.lines()
        first = next(lines, None)
        if first is None:
            return
        try:
            header = [name.decode().strip() for name in split(first[1])]
            row = make({name: place for place, name in enumerate(header)}, options, tally)
        except Damaged as error:
            raise source.refused(first[0], str(error), "the first line names the columns") from error
        width = len(header)

        def whole_row(line: bytes, number: int) -> Request | str:
            values = line.split(b",") if b'"' not in line else split(line)
            if len(values) != width:
                raise Damaged(f"{len(values)} fields, where the header has {width}")
            return row(values, number)

        yield from taken(lines, whole_row, tally)

    return read


def split(line: bytes) -> list[bytes]:
    """Return the fields of a CSV's line; a quoted field ends where its line does.

    Raises:
        Damaged: a quote is left open.
    """
    try:
        return [field.encode() for field in next(csv.reader([line.decode()], strict=True), [])]
    except (csv.Error, UnicodeDecodeError) as error:
        raise Damaged(f"no CSV: {error}") from error


def whole(text: bytes, name: str) -> int:
    """Return a CSV field as a count of tokens.

    Raises:
        Damaged: it is none.
    """
    if text.isdigit() and len(text) <= 8 and (count := int(text)) <= MOST_TOKENS:
        return count
    raise Damaged(f"{name} must be a whole number of tokens from 0 to {MOST_TOKENS:,}, not {_said(text)}")


def number(text: bytes, name: str) -> float:
    """Return a CSV field as a number of seconds.

    Raises:
        Damaged: it is none, or no time that there is.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) <= LATEST:
        raise Damaged(f"{name} must be a number of seconds, not {_said(text)}")
    return value


def instant(text: str) -> float:
    """Return an ISO 8601 time as seconds since 1970, cut to microseconds; without a zone it is taken as UTC.

    Raises:
        Damaged: it is none.
    """
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise Damaged(f"no time of ISO 8601: {text[:40]!r}") from None
    return (when - (EPOCH if when.tzinfo is None else EPOCH_UTC)).total_seconds()


def _said(text: bytes) -> str:
    return repr(text[:40].decode(errors="replace"))


def column(places: dict[str, int], name: str) -> int:
    """Return where a CSV's column stands.

    Raises:
        Damaged: it has none of this name.
    """
    if name not in places:
        raise Damaged(f"no column {name!r}; the columns are {', '.join(map(repr, places))[:200]}")
    return places[name]


def check_blocks(count: int, input_len: int, block_size: int) -> None:
    """Refuse block ids that are not those of a prompt of so many tokens.

    Raises:
        Damaged: says how many it should have.
    """
    needed = -(-input_len // block_size)
    if count != needed:
        raise Damaged(f"{count} block ids for {input_len} tokens, which are {needed} blocks of {block_size}")
