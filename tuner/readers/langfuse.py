"""Langfuse's observations: exported by its interface, its API, or its blob storage integration (JSON, JSONL, CSV).

Format: langfuse.com/docs, "blob storage export field reference", and the public API's `Observation`. Names are in camel
case from the API and in snake case from blob storage, which writes times without a zone, in UTC. As Langfuse does,
every kind of `usageDetails` whose name has "input" or "output" in it is counted: cached and reasoning tokens are kinds
of their own there. Older exports have `usage`, or the two counts beside it.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from tuner.readers.chat import glanced
from tuner.readers.clock import moment
from tuner.readers.format import (
    EMBEDDING,
    FAILED,
    NO_OUTPUT,
    NO_PROMPT,
    NOT_LLM,
    SEVERAL,
    Format,
    Head,
    Options,
    Row,
    instant,
)
from tuner.readers.lengths import Ruler
from tuner.readers.records import by_record
from tuner.readers.sessions import Calls, settled
from tuner.readers.source import Damaged, Source, Tally
from tuner.readers.table import Fields, Values, by_csv
from tuner.workload import MOST_TOKENS, Request, Tokens

COLUMNS = ("id", "trace_id", "type", "start_time", "usage_details")  # of a CSV of its own


class _Usage(msgspec.Struct):
    input: Tokens | None = None
    output: Tokens | None = None
    promptTokens: Tokens | None = None  # noqa: N815 (the API's names)
    completionTokens: Tokens | None = None  # noqa: N815
    unit: str | None = None


class _Parameters(msgspec.Struct):
    n: int | str | None = None


class _Observation(msgspec.Struct):
    id: str
    type: str
    startTime: str | None = None  # noqa: N815 (the API's names)
    start_time: str | None = None
    endTime: str | None = None  # noqa: N815
    end_time: str | None = None
    parentObservationId: str | None = None  # noqa: N815
    parent_observation_id: str | None = None
    sessionId: str | None = None  # noqa: N815
    session_id: str | None = None
    model: str | None = None
    providedModelName: str | None = None  # noqa: N815
    provided_model_name: str | None = None
    modelParameters: _Parameters | str | None = None  # noqa: N815
    model_parameters: _Parameters | str | None = None
    level: str | None = None
    usageDetails: dict[str, Tokens] | None = None  # noqa: N815
    usage_details: dict[str, Tokens] | None = None
    usage: _Usage | None = None
    promptTokens: Tokens | None = None  # noqa: N815
    completionTokens: Tokens | None = None  # noqa: N815
    input: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """Tokens of prompt and answer; where both are zero, nobody counted."""
        found = self._lengths
        return (None, None) if found == (0, 0) else found

    @property
    def _lengths(self) -> tuple[int | None, int | None]:
        if details := self.usageDetails or self.usage_details:
            return _sum(details, "input"), _sum(details, "output")
        usage = self.usage or _Usage()
        if usage.unit not in (None, "TOKENS"):
            return None, None
        prompts = (usage.input, usage.promptTokens, self.promptTokens)
        outputs = (usage.output, usage.completionTokens, self.completionTokens)
        return _first(prompts), _first(outputs)


NEEDED = dict.fromkeys(COLUMNS, str)
MAY_HAVE = dict.fromkeys((name for name in _Observation.__struct_fields__ if name not in COLUMNS), str)
NAMES = (*NEEDED, *MAY_HAVE)


class _Page(msgspec.Struct):
    data: list[msgspec.Raw] | None = None
    observations: list[msgspec.Raw] | None = None


def _sum(details: dict[str, int], word: str) -> int | None:
    kinds = [tokens for kind, tokens in details.items() if word in kind]
    if sum(kinds) > MOST_TOKENS:
        raise Damaged(f"usageDetails has more than {MOST_TOKENS:,} tokens of {word}")
    return sum(kinds) if kinds else None


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def _split(text: bytes) -> Iterable[bytes | msgspec.Raw]:
    """Return the observations of a JSON text: a list, the API's page or trace, or one."""
    page = _PAGE.decode(text)
    if isinstance(page, list):
        return page
    return page.data or page.observations or (text,)


def _make(options: Options, tally: Tally, calls: Calls) -> Row:
    decode, ruler = msgspec.json.Decoder(_Observation).decode, Ruler.of(options, tally)

    def row(record: bytes, number: int) -> Request | str:
        seen = decode(record)
        if outer := seen.parentObservationId or seen.parent_observation_id:
            calls.around[seen.id] = outer
        if reason := _useless(seen):
            return reason
        arrival = moment(seen.startTime or seen.start_time, "startTime")
        input_len, output_len = seen.lengths
        if input_len == 0:
            return NO_PROMPT
        if output_len is None:
            output_len = ruler.output(glanced(seen.output, is_counted=True), None)
        if not output_len:
            return NO_OUTPUT
        asked = glanced(seen.input, is_counted=input_len is None or options.tokenize is not None)
        found = ruler.prompt(asked, input_len, number)
        end = seen.endTime or seen.end_time
        calls.ends.append(instant(end) if end else None)
        return Request(
            arrival, found.input_len, output_len, found.block_ids, found.block_size, id=seen.id, prompt=found.prompt,
            session=seen.sessionId or seen.session_id or None, source_line=number,
            model=seen.model or seen.providedModelName or seen.provided_model_name or None,
        )  # fmt: skip

    return row


def _make_csv(options: Options, tally: Tally, calls: Calls) -> Fields:
    row = _make(options, tally, calls)

    def fields(values: Values, number: int) -> Request | str:
        said = {name: text for name, text in zip(NAMES, values, strict=True) if text}
        if "usage_details" in said:
            said["usage_details"] = msgspec.Raw(said["usage_details"].encode())
        return row(msgspec.json.encode(said), number)

    return fields


def _useless(seen: _Observation) -> str | None:
    if seen.type != "GENERATION":
        return EMBEDDING if seen.type == "EMBEDDING" else NOT_LLM
    if seen.level == "ERROR":
        return FAILED
    parameters = seen.modelParameters or seen.model_parameters
    if isinstance(parameters, str):
        parameters = msgspec.json.decode(parameters, type=_Parameters | None)
    return SEVERAL if parameters is not None and str(parameters.n or 1) != "1" else None


def _read(source: Source, options: Options, tally: Tally) -> Iterator[Request]:
    calls = Calls()
    is_json = source.head().lstrip()[:1] in (b"{", b"[")
    read = (
        by_record(_split, partial(_make, calls=calls))
        if is_json
        else by_csv(NEEDED, partial(_make_csv, calls=calls), MAY_HAVE)
    )
    yield from settled(list(read(source, options, tally)), calls, tally)


def _is_this(head: Head) -> bool:
    if not head.is_json:
        return head.keys.issuperset(COLUMNS)
    pages = [page for name in ("data", "observations") if isinstance(page := head.first.get(name), list)]
    inside = [frozenset(page[0]) for page in pages if page and isinstance(page[0], dict)]
    return any(map(_is_observation, [head.keys, *inside]))


def _is_observation(keys: frozenset[str]) -> bool:
    return {"id", "type", "traceId", "startTime"} <= keys or {"id", "type", "trace_id", "start_time"} <= keys


FORMAT = Format(
    name="langfuse",
    title="Langfuse observations, JSON, JSONL or CSV: type, startTime, endTime, usageDetails, sessionId, model",
    is_this=_is_this,
    read=_read,
    takes=frozenset({"tokenize", "template", "block_size", "keep_prompts"}),
)

_PAGE = msgspec.json.Decoder(_Page | list[msgspec.Raw])
