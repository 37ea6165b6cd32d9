"""The columns of a replay while it runs."""

from array import array

import numpy as np

from tuner.records import Floats, Records
from tuner.replay.stream import Completion

NEVER_SENT = "never_sent"
# What --enable-per-request-metrics of vLLM calls them, in milliseconds.
_SERVER = {
    "server_queue": "queue_time_ms",
    "server_prefill": "time_to_first_token_ms",
    "server_itl": "mean_itl_ms",
}


class Tape:
    """What became of each request; stamps are `time.perf_counter`'s, `due` is seconds after the anchor."""

    def __init__(self, due: Floats, input_len: list[int], output_len: list[int]) -> None:
        n = len(due)
        self.due, self.anchor = due, 0.0
        self.input_len, self.output_len = input_len, output_len
        self.sent, self.connect_wait, self.first_byte, self.ended = (np.full(n, np.nan) for _ in range(4))
        self.prompt_tokens, self.completion_tokens = np.full(n, np.nan), np.full(n, np.nan)
        self.server = {name: np.full(n, np.nan) for name in _SERVER}
        self.error = [NEVER_SENT] * n
        self.chunks: list[tuple[array[float], array[float]]] = [(array("d"), array("d"))] * n
        self.messages: dict[str, str] = {}
        self.finished = 0

    def end(self, row: int, answer: Completion, error: str, message: str, now: float) -> None:
        """Note how a request ended."""
        self.ended[row] = now
        self.prompt_tokens[row], self.completion_tokens[row] = answer.prompt_tokens, answer.completion_tokens
        self.chunks[row] = (answer.times, answer.tokens)
        self.error[row] = error
        self.finished += 1
        said = answer.server_metrics
        for name, theirs in _SERVER.items():
            if theirs in said:
                self.server[name][row] = said[theirs] / 1e3
        if error and (message or answer.message):
            self.messages.setdefault(error, message or answer.message)

    def records(self) -> Records:
        """Return what was seen, in seconds after the anchor."""
        counts = [len(times) for times, _ in self.chunks]
        return Records(
            due=self.due,
            sent=self.sent - self.anchor,
            connect_wait=self.connect_wait,
            first_byte=self.first_byte - self.anchor,
            ended=self.ended - self.anchor,
            input_len=np.array(self.input_len, dtype=np.int64),
            output_len=np.array(self.output_len, dtype=np.int64),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            error=np.array(self.error, dtype=np.str_),
            **self.server,
            chunk_time=np.concatenate([np.empty(0), *(times for times, _ in self.chunks)]) - self.anchor,
            chunk_tokens=np.concatenate([np.empty(0), *(tokens for _, tokens in self.chunks)]),
            chunk_start=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
        )
