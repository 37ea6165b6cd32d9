"""What tests of readers share: a small file of each format, and how one is read."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.readers.format import Options
from tuner.readers.formats import FORMATS, recognise
from tuner.readers.source import Source, Tally
from tuner.workload import Request

TRACES = Path(__file__).with_name("traces")
DATA = Path(__file__).with_name("data")
MOONCAKE = TRACES / "mooncake_conversation" / "conversation_first2000.jsonl"
MOONCAKE_LATER = TRACES / "mooncake_conversation" / "conversation_t1200s_t1500s.jsonl"
SYNTHETIC = TRACES / "mooncake_synthetic" / "synthetic_first1000.jsonl"
CODE = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_code_first2000.csv"
CODE_END = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_code_last300.csv"
CONV = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_conv_first3000.csv"
BURST_1 = TRACES / "burstgpt" / "BurstGPT_1_first400.csv"
BURST_3 = TRACES / "burstgpt" / "BurstGPT_3_first59.csv"
SPLITWISE = TRACES / "splitwise_vidur_csv" / "splitwise_conv_first1000.csv"
SPANS = TRACES / "otel_genai_spans"
TRACELAB = TRACES / "tracelab_sample" / "round_trace.jsonl"
VLLM_SPANS = DATA / "llm_request_spans.jsonl"


def letters(text: str) -> list[int]:
    """Return a token for each letter: counts that can be checked by hand."""
    return [ord(letter) for letter in text]


@dataclass(frozen=True)
class Sample:
    """A small file of a format, and what its reading needs; `rows` of it are requests."""

    text: str
    rows: int
    options: Options = field(default_factory=Options)


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(
    what: Path | Source, options: Options | None = None, *, name: str | None = None, skip_damaged: bool = False
) -> tuple[list[Request], Tally]:
    """Return the rows of a file and what became of the others; the format is recognised unless it is named."""
    source = what if isinstance(what, Source) else Source(what)
    known = recognise(source) if name is None else FORMATS[name]
    tally = Tally(source, skip_damaged=skip_damaged)
    rows = list(known.read(source, options or Options(), tally))
    assert tally.read == tally.kept + tally.dropped.total()
    assert tally.kept == len(rows)
    return rows, tally


def written(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


CHAT = [{"role": "user", "content": "What is the capital of France?"}]
BAILIAN = [
    {"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 9, "type": "text",
     "turn": 1, "hash_ids": [1, 2, 3]},
    {"chat_id": 9, "parent_chat_id": 7, "timestamp": 61.114, "input_length": 64, "output_length": 5, "type": "text",
     "turn": 2, "hash_ids": [1, 2, 4, 5]},
    {"chat_id": 12, "parent_chat_id": 9, "timestamp": 70, "input_length": 16, "output_length": 0, "type": "search",
     "turn": 3, "hash_ids": [1]},
]  # fmt: skip
SPAN = {
    "trace_id": "t1", "span_id": "s1", "parent_span_id": None, "name": "chat m", "start_time": "2026-02-25T10:00:00.25",
    "end_time": "2026-02-25T10:00:02", "status": {"code": 1},
    "attributes": {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "session.id": "a",
                   "gen_ai.usage.input_tokens": 30, "gen_ai.usage.output_tokens": 6},
}  # fmt: skip
LITELLM = {
    "id": "c1", "trace_id": "x", "call_type": "acompletion", "status": "success", "prompt_tokens": 30,
    "completion_tokens": 6, "total_tokens": 36, "startTime": 1700000000.25, "endTime": 1700000001.5,
    "completionStartTime": 1700000000.5, "model": "m", "cache_hit": None, "messages": CHAT,
    "model_parameters": {"temperature": 0.5}, "response": {"choices": []},
}  # fmt: skip
LANGFUSE = {
    "id": "o1", "traceId": "x", "type": "GENERATION", "name": "chat", "startTime": "2026-02-25T10:00:00.250Z",
    "endTime": "2026-02-25T10:00:02.000Z", "completionStartTime": None, "model": "m", "level": "DEFAULT",
    "parentObservationId": None, "sessionId": "a", "input": CHAT, "output": {"role": "assistant", "content": "Paris."},
    "usageDetails": {"input": 20, "input_cached_tokens": 10, "output": 4, "output_reasoning_tokens": 2, "total": 36},
}  # fmt: skip
BATCH = {
    "custom_id": "r1", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": CHAT, "max_tokens": 12},
}  # fmt: skip
OURS = {"arrival_s": 0.35, "input_len": 40, "output_len": 6, "block_ids": [0, 1, 2], "block_size": 16, "id": "a",
        "session": "s", "think_time_s": 0.5}  # fmt: skip
COUNTED = Options(tokenize=letters, rate=2.0)

SAMPLES = {
    "mooncake": Sample(
        jsonl(*({"timestamp": 27482 + n, "input_length": 600, "output_length": 5, "hash_ids": [0, n]}
                for n in range(1, 4))), 3,
    ),
    "azure": Sample(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,10,5\n", 3,
    ),
    "burstgpt": Sample(
        "".join(BURST_3.read_text().splitlines(keepends=True)[:3]) + "19440170.5,s,1,GPT-4,0,0,0,log\n", 2,
    ),
    "arrived-at": Sample("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n", 2),
    "bailian": Sample(jsonl(*BAILIAN), 2),
    "tracelab": Sample("".join(TRACELAB.read_text().splitlines(keepends=True)[:3]), 3),
    "otel": Sample(jsonl(SPAN, {**SPAN, "span_id": "s2", "start_time": "2026-02-25T10:00:03"}), 2),
    "litellm": Sample(jsonl(LITELLM, {**LITELLM, "status": "failure"}), 1),
    "langfuse": Sample(jsonl(LANGFUSE, {**LANGFUSE, "id": "o2", "type": "SPAN"}), 1),
    "openai-batch": Sample(jsonl(BATCH, {**BATCH, "custom_id": "r2"}), 2, COUNTED),
    "tune": Sample(jsonl(OURS, {**OURS, "id": "b", "arrival_s": 1.5}), 2),
    "vllm-custom": Sample(jsonl({"prompt": "Hello there", "output_tokens": 5}, {"prompt": "Hi"}), 1, COUNTED),
    "timed-prompts": Sample(
        jsonl({"timestamp": 250, "prompt": "Hello there", "output_tokens": 5}), 1,
        Options(tokenize=letters, time_unit=1e-3),
    ),
    "vllm-timed-trace": Sample(
        jsonl({"timestamp": 0.25, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]},
              {"timestamp": 1, "input_length": 40, "output_length": 5}), 2, Options(time_unit=1.0),
    ),
}  # fmt: skip
