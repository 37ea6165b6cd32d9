"""Azure's LLM inference traces of 2023 and 2024: CSV with a wall clock and two lengths, no prefixes.

Format: github.com/Azure/AzurePublicDataset. 2023 has seven fraction digits and no zone, 2024 six with an offset, or
none at all where the fraction is zero. The multimodal trace of 2025 has `NumImages` as well: what an image costs is
not in its tokens.
"""

from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Format, Head, Options, instant
from tuner.readers.source import Tally
from tuner.readers.table import Fields, Values, by_csv
from tuner.workload import Request, Tokens

COLUMNS = {"TIMESTAMP": str, "ContextTokens": Tokens, "GeneratedTokens": Tokens}
MAY_HAVE = {"NumImages": Tokens}
MEDIA = "images in the prompt"


def _make(_options: Options, _tally: Tally) -> Fields:
    return _fields


def _fields(values: Values, line: int) -> Request | str:
    stamp, input_len, output_len, images = values
    arrival = instant(stamp)
    if images:
        return MEDIA
    if not input_len:
        return NO_PROMPT
    return Request(arrival, input_len, output_len, source_line=line) if output_len else NO_OUTPUT


def _is_this(head: Head) -> bool:
    return not head.is_json and head.keys.issuperset(COLUMNS)


FORMAT = Format(
    name="azure",
    title="Azure LLM inference traces 2023, 2024: CSV of TIMESTAMP, ContextTokens, GeneratedTokens",
    is_this=_is_this,
    read=by_csv(COLUMNS, _make, MAY_HAVE),
)
