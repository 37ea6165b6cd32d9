"""Files that vLLM itself makes or reads: its spans, and its bench's custom dataset, are the oracle."""

import json
import subprocess
from pathlib import Path

import pytest
from reader_data import jsonl, read, written

from tuner import tiny_model
from tuner.deployment.program import interpreter
from tuner.readers import tokenizer
from tuner.readers.format import Options

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

# Made-up requests go through vLLM's own tracing and OpenTelemetry's encoder to the JSON of OTLP.
SPANS = """
import base64, json, sys
from types import SimpleNamespace as Some
from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine.output_processor import OutputProcessor
memory, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))
trace.set_tracer_provider(provider)
for arrival, prompt, output, n in json.loads(sys.argv[1]):
    stats = Some(arrival_time=arrival, queued_ts=10.0, scheduled_ts=10.01, first_token_ts=10.2, last_token_ts=11.0,
                 first_token_latency=0.2, num_generation_tokens=output)
    request = Some(stats=stats, prompt_token_ids=[1] * prompt, prompt_embeds=None, external_req_id="cmpl-1", top_p=1.0,
                   max_tokens_param=64, temperature=0.7, n=n)
    OutputProcessor.do_tracing(None, Some(trace_headers=None), request, Some(iteration_timestamp=arrival + 1.0))
print(json.dumps(MessageToDict(encode_spans(memory.get_finished_spans()))))
"""

# Reads the file without pandas, which a plain vLLM does not bring; all else is the bench's.
CUSTOM = """
import json, sys
from transformers import AutoTokenizer
from vllm.benchmarks.datasets import CustomDataset
class Custom(CustomDataset):
    def load_data(self):
        self.data = [json.loads(line) for line in open(self.dataset_path)]
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
found = Custom(dataset_path=sys.argv[1]).sample(tokenizer, 0, skip_chat_template=True)
print(json.dumps([[one.prompt_len, one.expected_output_len] for one in found]))
"""


def said(vllm: str, code: str, *arguments: str) -> str:
    """Return the last line that code printed under vLLM's own Python."""
    python = interpreter(vllm)
    assert python is not None
    done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("which", ["vllm", "vllm_next"])
def test_spans_that_vllm_makes_are_its_requests(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Arrivals to the microsecond and lengths of vLLM's `llm_request` spans; several answers are no request."""
    made = [(1700000000.25, 120, 30, 1), (1700000000.123456, 77, 1, 1), (1700000001.5, 40, 8, 2)]
    rows, tally = read(written(tmp_path, said(request.getfixturevalue(which), SPANS, json.dumps(made))))

    assert [(round(r.arrival * 1e6), r.input_len, r.output_len) for r in rows] == [
        (round(arrival * 1e6), prompt, output) for arrival, prompt, output, _ in made[:2]
    ]
    assert dict(tally.dropped) == {"several answers to one prompt (n > 1)": 1}


@pytest.mark.parametrize("which", ["vllm", "vllm_next"])
def test_custom_prompts_are_as_long_as_vllms_bench_counts(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The same file, the same tokenizer: the lengths that vllm bench would send without a chat template."""
    model = tiny_model.ensure(tmp_path / "model", hidden=64, layers=1)
    texts = ["Hello there", "The quick brown fox, 1234 times", "summarise the latency budget  ", "é中😀"]
    prompts = [{"prompt": text, "output_tokens": number} for number, text in enumerate(texts, start=1)]
    path = written(tmp_path, jsonl(*prompts), "prompts.jsonl")
    rows, _ = read(path, Options(tokenize=tokenizer.load(str(model)), rate=1.0))

    expected = json.loads(said(request.getfixturevalue(which), CUSTOM, str(path), str(model)))
    assert [[row.input_len, row.output_len] for row in rows] == expected
