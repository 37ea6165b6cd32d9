"""The CSV of simulators (Vidur, Sarathi, Splitwise): `arrived_at` in seconds, prefill and decode tokens.

Format: github.com/microsoft/vidur, data/processed_traces.
"""

from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Fields, Format, Head, Options, by_csv, column, number, whole
from tuner.readers.source import Tally
from tuner.workload import Request

STAMP, PROMPT, OUTPUT = COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")


def _make(places: dict[str, int], _options: Options, _tally: Tally) -> Fields:
    at, prompt, output = (column(places, name) for name in COLUMNS)

    def fields(values: list[bytes], line: int) -> Request | str:
        input_len, output_len = whole(values[prompt], PROMPT), whole(values[output], OUTPUT)
        arrival = number(values[at], STAMP)
        if not input_len:
            return NO_PROMPT
        return Request(arrival, input_len, output_len, source_line=line) if output_len else NO_OUTPUT

    return fields


def _is_this(head: Head) -> bool:
    return not head.is_json and head.keys.issuperset(COLUMNS)


FORMAT = Format(
    name="arrived-at",
    title="Vidur's and Splitwise's CSV: arrived_at (s), num_prefill_tokens, num_decode_tokens",
    is_this=_is_this,
    read=by_csv(_make),
)
