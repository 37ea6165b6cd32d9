"""--baseline: what the user runs today, from a YAML or a command line."""

from pathlib import Path

import pytest

from tuner import baseline
from tuner.errors import SpecError
from tuner.serving import ServingConfig, to_argv, to_config

DEFAULT = ServingConfig("m", {"max_model_len": 4096}, {"A": "1"}, command=("vllm", "serve"))


def test_a_command_line_is_read_with_types() -> None:
    """Numbers are numbers, switches booleans; where it listens is dropped."""
    found = baseline.read(
        "vllm serve m --max-num-seqs 64 --no-enable-chunked-prefill --port=8000 --enforce-eager", DEFAULT
    )

    assert dict(found.args) == {"max_num_seqs": 64, "enable_chunked_prefill": False, "enforce_eager": True}
    assert (found.model, dict(found.env)) == ("m", {"A": "1"})


def test_a_yaml_is_read_as_vllm_reads_it(tmp_path: Path) -> None:
    """no-NAME: true is off; NAME: false is dropped, as vLLM drops it."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nmax-num-batched-tokens: 4096\nno-enable-prefix-caching: true\nenforce-eager: false\n")

    assert dict(baseline.read(str(file), DEFAULT).args) == {
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
    }


def test_what_we_write_reads_back(tmp_path: Path) -> None:
    """An exported configuration can be the next study's baseline."""
    config = ServingConfig("m", {"max_num_seqs": 8, "enable_chunked_prefill": False, "enforce_eager": True})
    file = tmp_path / "serve.yaml"
    file.write_text(
        "".join(f"{k}: {str(v).lower() if isinstance(v, bool) else v}\n" for k, v in to_config(config).items())
    )
    command = " ".join(to_argv(config))

    assert baseline.read(str(file), DEFAULT).args == config.args == baseline.read(command, DEFAULT).args


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm serve other --max-num-seqs 8", "serves 'other'"),
        ("missing.yaml", "cannot be read"),
        ("vllm serve m --api-key abc", "is a secret"),
        ("vllm serve m stray", "neither a flag nor a file"),
        ("vllm serve 'm", "not a command line"),
    ],
)
def test_what_cannot_be_a_baseline_is_refused(text: str, message: str) -> None:
    """Before any server starts, and a secret is not repeated."""
    with pytest.raises(SpecError, match=message) as caught:
        baseline.read(text, DEFAULT)
    assert "abc" not in str(caught.value)
