"""The CSV of simulators (Vidur, Sarathi, Splitwise): `arrived_at` in seconds, prefill and decode tokens.

Format: github.com/microsoft/vidur, data/processed_traces.
"""

from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Format, Head, Options
from tuner.readers.source import Tally
from tuner.readers.table import Fields, Values, by_csv
from tuner.workload import Request, Seconds, Tokens

COLUMNS = {"arrived_at": Seconds, "num_prefill_tokens": Tokens, "num_decode_tokens": Tokens}


def _make(_options: Options, _tally: Tally) -> Fields:
    return _fields


def _fields(values: Values, line: int) -> Request | str:
    arrival, input_len, output_len = values
    if not input_len:
        return NO_PROMPT
    return Request(arrival, input_len, output_len, source_line=line) if output_len else NO_OUTPUT


def _is_this(head: Head) -> bool:
    return not head.is_json and head.keys.issuperset(COLUMNS)


FORMAT = Format(
    name="arrived-at",
    title="Vidur's and Splitwise's CSV: arrived_at (s), num_prefill_tokens, num_decode_tokens",
    is_this=_is_this,
    read=by_csv(COLUMNS, _make),
)
