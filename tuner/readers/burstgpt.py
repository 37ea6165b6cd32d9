"""BurstGPT's CSV: seconds, model, token counts; since release 2.0 with a session and a duration in between.

Format: github.com/HPMLL/BurstGPT. Rows of 0/0/0 tokens are failed calls. `Elapsed time` is whole seconds of somebody
else's service time, so that a session's think time is not known.
"""

from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Format, Head, Options
from tuner.readers.source import Tally
from tuner.readers.table import Fields, Values, by_csv
from tuner.workload import Request, Seconds, Tokens

COLUMNS = {"Timestamp": Seconds, "Model": str, "Request tokens": Tokens, "Response tokens": Tokens}
MAY_HAVE = {"Session ID": str}
FAILED = "failed call (no tokens at all)"


def _make(_options: Options, _tally: Tally) -> Fields:
    return _fields


def _fields(values: Values, line: int) -> Request | str:
    arrival, model, input_len, output_len, session = values
    if not input_len:
        return NO_PROMPT if output_len else FAILED
    if not output_len:
        return NO_OUTPUT
    return Request(arrival, input_len, output_len, session=session or None, model=model or None, source_line=line)


def _is_this(head: Head) -> bool:
    return not head.is_json and head.keys.issuperset(COLUMNS)


FORMAT = Format(
    name="burstgpt",
    title="BurstGPT CSV: Timestamp (s), Model, Request tokens, Response tokens; with or without Session ID",
    is_this=_is_this,
    read=by_csv(COLUMNS, _make, MAY_HAVE),
)
