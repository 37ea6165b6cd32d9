"""Azure's LLM inference traces of 2023 and 2024: CSV with a wall clock and two lengths, no prefixes.

Format: github.com/Azure/AzurePublicDataset. 2023 has seven fraction digits and no zone, 2024 six with an offset, or
none at all where the fraction is zero. The multimodal trace of 2025 has `NumImages` as well: what an image costs is
not in its tokens.
"""

from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Fields, Format, Head, Options, by_csv, column, instant, whole
from tuner.readers.source import Tally
from tuner.workload import Request

STAMP, PROMPT, OUTPUT = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES, MEDIA = "NumImages", "images in the prompt"


def _make(places: dict[str, int], _options: Options, _tally: Tally) -> Fields:
    at, prompt, output = (column(places, name) for name in COLUMNS)
    images = places.get(IMAGES)

    def fields(values: list[bytes], number: int) -> Request | str:
        input_len, output_len = whole(values[prompt], PROMPT), whole(values[output], OUTPUT)
        arrival = instant(values[at].decode())
        if images is not None and whole(values[images], IMAGES):
            return MEDIA
        if not input_len:
            return NO_PROMPT
        return Request(arrival, input_len, output_len, source_line=number) if output_len else NO_OUTPUT

    return fields


def _is_this(head: Head) -> bool:
    return not head.is_json and head.keys.issuperset(COLUMNS)


FORMAT = Format(
    name="azure",
    title="Azure LLM inference traces 2023, 2024: CSV of TIMESTAMP, ContextTokens, GeneratedTokens",
    is_this=_is_this,
    read=by_csv(_make),
)
