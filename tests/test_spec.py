"""Study files: every mistake at once, each with its line."""

from pathlib import Path

import pytest

from tuner import spec
from tuner.dimensions import Choice, Fraction, IntRange
from tuner.errors import SpecError

GOOD = """\
name: chat
model: org/model
engine_args: {max_model_len: 4096, enforce_eager: true}
search_space:
  max_num_batched_tokens: {low: 128, high: 4096, log: true}
  long_prefill_token_threshold: {fraction_of: max_num_batched_tokens, low: 0.05, high: 0.5}
  enable_chunked_prefill: [true, false]
workload: chat
slo: [ttft=500ms, itl_p99=0.33x]
budget: {trials: 8, time: 20min}
"""


def errors(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        spec.parse(text, "s.yaml")
    return caught.value.message.splitlines()


def test_a_study_keeps_vllms_names_and_types() -> None:
    """Arguments arrive under vLLM's names with the types of the YAML."""
    study = spec.parse(GOOD, "s.yaml")

    assert study.engine_args == {"max_model_len": 4096, "enforce_eager": True}
    assert study.search_space["max_num_batched_tokens"] == IntRange(low=128, high=4096, log=True)
    assert isinstance(study.search_space["long_prefill_token_threshold"], Fraction)
    assert study.search_space["enable_chunked_prefill"] == Choice(values=(True, False))
    assert (study.budget.trials, study.budget.time) == (8, 1200.0)
    assert study.objective_metrics == ("ttft_p99", "itl_p99")


def test_dump_and_parse_are_inverse() -> None:
    """The study.yaml of a run folder reads back to the same study."""
    study = spec.parse(GOOD, "s.yaml")

    assert spec.parse(spec.dump(study), "dumped") == study


def test_all_mistakes_are_reported_at_once_with_their_lines() -> None:
    """Five mistakes, five lines, each naming file and line."""
    text = (
        GOOD.replace("model: org/model", "modle: org/model")
        .replace("high: 4096, log", "hgih: 4096, log")
        .replace("trials: 8", "trials: 0")
        .replace("ttft=500ms", "ttft=500")
    )

    found = errors(text)

    assert "s.yaml:1: model: missing" in found
    assert 's.yaml:2: modle: unknown key, did you mean "model"?' in found
    assert 's.yaml:5: search_space.max_num_batched_tokens.hgih: unknown key, did you mean "high"?' in found
    assert any(line.startswith("s.yaml:9: slo.0: ttft=500: 500 of what?") for line in found)
    assert any(line.startswith("s.yaml:10: budget.trials:") for line in found)


def test_a_duplicate_key_is_refused() -> None:
    """YAML would keep the last of two equal keys in silence."""
    assert errors(GOOD + "model: other\n") == ["s.yaml:11: the key 'model' stands here twice"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("env: {HF_TOKEN: abc}", "HF_TOKEN looks like a secret"),
        ("env: {MY_API_KEY: abc}", "MY_API_KEY looks like a secret"),
    ],
)
def test_secrets_come_from_the_environment_only(line: str, message: str) -> None:
    """A token in a study file would end in run folders and exports."""
    found = errors(GOOD + line + "\n")

    assert message in found[0]
    assert "abc" not in "".join(found)


def test_an_api_key_is_no_engine_argument() -> None:
    """It would be on the command line and in the exported YAML."""
    assert "is a secret" in errors(GOOD.replace("enforce_eager: true", "api_key: abc"))[0]


def test_dashes_are_corrected() -> None:
    """One spelling everywhere: underscores."""
    found = errors(GOOD.replace("max_model_len: 4096", "max-model-len: 4096"))

    assert found == ['s.yaml:3: engine_args: max-model-len: write it with underscores, "max_model_len"']


def test_an_argument_is_fixed_or_searched_not_both() -> None:
    """A name under both would make one of them a lie."""
    found = errors(GOOD.replace("enforce_eager: true", "enable_chunked_prefill: true"))

    assert "keep one" in found[0]


def test_a_number_is_not_read_from_text() -> None:
    """The text "4096" in quotes is a mistake, not an int."""
    assert "valid integer" in errors(GOOD.replace("high: 4096", "high: '4096'"))[0]


def test_a_fixed_value_in_the_space_is_sent_to_engine_args() -> None:
    """A dimension with one value is no dimension."""
    found = errors(GOOD.replace("[true, false]", "5"))

    assert "under engine_args" in found[0]


def test_flags_override_the_file_and_are_named_in_errors() -> None:
    """An error in a flag's value names the flag, not a line of the file."""
    study = spec.parse(GOOD, "s.yaml", {"budget.trials": 3, "workload.rate_scale": 0.5})

    assert (study.budget.trials, study.workload.rate_scale, study.workload.path) == (3, 0.5, "chat")
    with pytest.raises(SpecError, match=r"--set engine_args.max-seqs"):
        spec.parse(GOOD, "s.yaml", {"engine_args.max-seqs": 3})


def test_without_a_space_the_two_dials_are_searched() -> None:
    """The default space is what the tool is for."""
    text = "\n".join(line for line in GOOD.splitlines() if not line.startswith((" ", "search_space")))

    assert set(spec.parse(text, "s.yaml").search_space) == {"max_num_batched_tokens", "long_prefill_token_threshold"}


def test_a_workload_is_found_by_name_and_a_wrong_name_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are looked up under workloads/ near the study."""
    (tmp_path / "workloads" / "chat").mkdir(parents=True)
    (tmp_path / "workloads" / "chat" / "workload.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)

    assert spec.find_workload("chat", None) == (tmp_path / "workloads" / "chat").resolve()
    with pytest.raises(SpecError, match="not found") as caught:
        spec.find_workload("chatt", None)
    assert caught.value.hint == "did you mean 'chat'?"


def test_the_same_metric_is_limited_once() -> None:
    """Two limits on one metric: one of them is a mistake."""
    assert "itl_p99 is limited twice" in errors(GOOD.replace("ttft=500ms", "itl=50ms"))[0]


def test_every_study_that_is_shipped_is_valid() -> None:
    """studies/*.yaml parse and name a workload that is there."""
    shipped = sorted((Path(__file__).parent.parent / "studies").glob("*.yaml"))

    assert shipped
    for path in shipped:
        study = spec.load(path)
        assert spec.find_workload(study.workload.path, path)
