"""BurstGPT's CSV: seconds, model, token counts; since release 2.0 with a session and a duration in between.

Format: github.com/HPMLL/BurstGPT. Rows of 0/0/0 tokens are failed calls. `Elapsed time` is whole seconds of somebody
else's service time, so that a session's think time is not known.
"""

from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Fields, Format, Head, Options, by_csv, column, number, whole
from tuner.readers.source import Tally
from tuner.workload import Request

STAMP, MODEL, PROMPT, OUTPUT = COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
SESSION = "Session ID"
FAILED = "failed call (no tokens at all)"


def _make(places: dict[str, int], _options: Options, _tally: Tally) -> Fields:
    at, model, prompt, output = (column(places, name) for name in COLUMNS)
    session = places.get(SESSION)

    def fields(values: list[bytes], line: int) -> Request | str:
        input_len, output_len = whole(values[prompt], PROMPT), whole(values[output], OUTPUT)
        arrival = number(values[at], STAMP)
        if not input_len:
            return NO_PROMPT if output_len else FAILED
        if not output_len:
            return NO_OUTPUT
        return Request(
            arrival, input_len, output_len, model=values[model].decode() or None, source_line=line,
            session=None if session is None else values[session].decode() or None,
        )  # fmt: skip

    return fields


def _is_this(head: Head) -> bool:
    return not head.is_json and head.keys.issuperset(COLUMNS)


FORMAT = Format(
    name="burstgpt",
    title="BurstGPT CSV: Timestamp (s), Model, Request tokens, Response tokens; with or without Session ID",
    is_this=_is_this,
    read=by_csv(_make),
)
