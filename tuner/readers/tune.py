"""Our own `workload.jsonl`, read once more: to cut a window of it, or to merge what was recorded."""

from msgspec.structs import replace as changed

from tuner import workload
from tuner.readers.format import NO_OUTPUT, NO_PROMPT, Format, Head, Options, Row, by_line
from tuner.readers.source import Damaged, Tally
from tuner.workload import Request


def _make(_options: Options, _tally: Tally) -> Row:
    return _row


def _row(line: bytes, number: int) -> Request | str:
    found = workload.decoded(line)
    if not found.input_len:
        return NO_PROMPT
    if not found.output_len:
        return NO_OUTPUT
    if why := workload.mismatch(found):
        raise Damaged(why)
    return changed(found, source_line=number)


def _is_this(head: Head) -> bool:
    return head.is_json and {"arrival_s", "input_len", "output_len"} <= head.keys


FORMAT = Format(
    name="tune",
    title="a workload of ours, JSONL: arrival_s, input_len, output_len",
    is_this=_is_this,
    read=by_line(_make),
)
