"""Study files: every mistake at once, each with its line."""

from pathlib import Path

import pytest

from tuner import spec
from tuner.dimensions import Choice, Fraction, IntRange
from tuner.errors import SpecError
from tuner.serving import Front, Role, Topology

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
        assert spec.parse(spec.dump(study), "dumped") == study
        assert spec.find_workload(study.workload.path, path)


GROUPS = """\
name: pd
model: m
topologies: [4x, 1p3d, 2p2d]
engine_args:
  max_model_len: 4096
  prefiller.max_num_batched_tokens: 8192
  "decoder.max_num_batched_tokens": 1024
search_space:
  decoder.max_num_seqs: [64, 256]
kv_transfer_config: {kv_buffer_device: [cpu, cuda], kv_connector_extra_config: {kv_lease_duration: 60}}
front: {policy: cache_aware, decode_policy: power_of_two}
workload: w
"""


def test_a_study_compares_topologies_and_gives_roles_arguments_of_their_own() -> None:
    """A role's key may be quoted or not; the file reads back to the same study."""
    study = spec.parse(GROUPS, "s.yaml")

    assert [str(t) for t in study.topologies] == ["4x", "1p3d", "2p2d"]
    assert study.fixed(Topology.parse("1p3d")).for_role(Role.DECODER) == {
        "max_model_len": 4096,
        "max_num_batched_tokens": 1024,
    }
    assert study.router == Front(policy="cache_aware", decode_policy="power_of_two")
    assert spec.parse(spec.dump(study), "dumped") == study


def test_auto_is_kept_until_the_host_is_known() -> None:
    """A study file does not know how many GPUs there are."""
    auto = spec.parse(GROUPS.replace("[4x, 1p3d, 2p2d]", "auto"), "s.yaml")

    assert auto.topologies == ()
    assert spec.parse(spec.dump(auto), "dumped") == auto


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[4x, 1p3d, 2p2d]", "[4x, 1p2d]", "s.yaml:3: topologies: comparisons at unequal GPUs are not"),
        ("max_model_len: 4096", "prefiller.tensor_parallel_size: 2", "4x takes 4, 1p3d takes 5, 2p2d takes 6"),
        ("[4x, 1p3d, 2p2d]", "[4x, 1p3d, 4x]", "s.yaml:3: topologies: 4x stands here twice"),
        ("[4x, 1p3d, 2p2d]", "[4y]", "s.yaml:3: topologies: '4y' is not a topology"),
        ("[4x, 1p3d, 2p2d]", "[]", "s.yaml:3: topologies: (): write a list"),
        ("[4x, 1p3d, 2p2d]", "4x", "s.yaml:3: topologies: '4x': write a list"),
        ("[4x, 1p3d, 2p2d]", "[4x]", "s.yaml:6: engine_args.prefiller.max_num_batched_tokens: no topology of"),
        ("decoder.max_num_seqs: [64", "decoder.tensor_parallel_size: [2", "s.yaml:9: search_space.decoder.tensor_"),
        ("decoder.max_num_seqs", "decode.max_num_seqs", 'no role "decode", did you mean "decoder.max_num_seqs"?'),
        ("prefiller.max_num_batched_tokens: 8192", "prefiller: {max_num_seqs: 8}", "write a role's argument as"),
        ("max_model_len: 4096", "decoder.api_key: canary", "decoder.api_key is a secret: export VLLM_API_KEY"),
        ("max_model_len: 4096", "decoder.port: 8000", "decoder.port is set by tune itself"),
        ("max_model_len: 4096", "kv_transfer_config: {kv_role: kv_both}", "under the study's key kv_transfer_config"),
        ("max_model_len: 4096", "decoder.kv_transfer_config.kv_role: a", "under the study's key kv_transfer_config"),
        ("{kv_buffer_device: [cpu, cuda],", "{kv_role: kv_both,", "s.yaml:10: kv_transfer_config: kv_role is set by"),
        ("[cpu, cuda]", "[cpu, cpu]", "s.yaml:10: kv_transfer_config: kv_buffer_device: ['cpu', 'cpu'] is neither"),
        ("cache_aware", "kv_aware", "s.yaml:11: front.policy: kv_aware needs the servers' KV events"),
        ("cache_aware", "fastest", "s.yaml:11: front.policy: input should be 'random'"),
        ("{policy: cache", "{polcy: cache", 's.yaml:11: front.polcy: unknown key, did you mean "policy"?'),
        ("[64, 256]", "{fraction_of: max_num_seqs, low: 0.1, high: 0.5}", "decoder.max_num_seqs: a fraction of itself"),
    ],
)  # fmt: skip
def test_a_mistake_about_topologies_is_named_with_its_line(old: str, new: str, message: str) -> None:
    """What cannot be compared, served or passed on is refused before anything starts; no value of a secret is told."""
    found = "\n".join(errors(GROUPS.replace(old, new)))

    assert message in found
    assert "canary" not in found


def test_kv_transfer_needs_somebody_to_transfer() -> None:
    """A key that would do nothing is a mistake."""
    assert (
        "s.yaml:11: kv_transfer_config: no topology"
        in errors(GOOD + "kv_transfer_config: {kv_buffer_device: cpu}\n")[0]
    )


def test_servers_that_share_devices_are_counted_once() -> None:
    """On shared devices 1x and 1p1d take the same GPU; auto would give each server its own."""
    shared = GOOD + "topologies: [1x, 1p1d]\nshare_devices: true\n"

    assert {spec.parse(shared, "s.yaml").n_gpus(t) for t in spec.parse(shared, "s.yaml").topologies} == {1}
    assert "share_devices: name the topologies" in errors(shared.replace("[1x, 1p1d]", "auto"))[0]


def test_a_flag_sets_a_roles_argument() -> None:
    """--set engine_args.decoder.max_num_seqs=8 is one key, not a mapping in a mapping."""
    study = spec.parse(
        GROUPS, "s.yaml", {"engine_args.decoder.max_model_len": 8, "search_space.decoder.max_num_seqs": [1, 2]}
    )

    assert study.engine_args["decoder.max_model_len"] == 8
    assert study.search_space["decoder.max_num_seqs"] == Choice(values=(1, 2))


def test_policies_that_meet_one_replica_are_refused() -> None:
    """Replicas under a policy that goes by text would be measured one by one; prefillers and decoders are not."""
    body = "name: x\nmodel: m\nworkload: w\ntopologies: [{}]\nfront: {{policy: consistent_hash}}\n"
    with pytest.raises(SpecError, match=r"front\.policy: consistent_hash sends every prompt of token ids to the same"):
        spec.parse(body.format("2x"), "s.yaml")

    assert spec.parse(body.format("1p1d"), "s.yaml").router.policy == "consistent_hash"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpus: [1, 1]", "GPU 1 stands here twice"),
        ("engine_args: {tensor_parallel_size: 0}", "0 is no number of GPUs"),
        ("engine_args: {tensor_parallel_size: '2'}", "'2' is no number of GPUs"),
        ("env: {VLLM_NIXL_SIDE_CHANNEL_PORT: '5700'}", "is set by tune"),
        ("kv_transfer_config: {kv_connector: LMCacheConnectorV1}", "only NixlConnector is taken"),
    ],
)
def test_what_would_put_servers_on_each_other_is_refused(line: str, words: str) -> None:
    """One GPU for two servers, sizes that are none, a side channel for all, a connector that proves nothing."""
    with pytest.raises(SpecError, match=words):
        spec.parse(f"name: x\nmodel: m\nworkload: w\ntopologies: [1p1d]\n{line}\n", "s.yaml")


def test_a_recording_that_was_cut_off_is_no_workload_yet(tmp_path: Path) -> None:
    """Whoever names it is told how to make one of it."""
    (tmp_path / "recording-0001.jsonl").write_text("")

    with pytest.raises(SpecError) as caught:
        spec.find_workload(str(tmp_path), None)
    assert caught.value.hint == f"make a workload of it: tune record --finish {tmp_path}"
