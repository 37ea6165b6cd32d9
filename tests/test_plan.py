"""A study against this host: what auto means, which GPUs are taken, what vLLM is asked before anything starts."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from deployment_data import executable

from tuner import plan as plans
from tuner import spec as specs
from tuner import workload as workloads
from tuner.deployment import probe
from tuner.errors import HostError, SpecError
from tuner.plan import Plan

FAKE = Path(__file__).parent / "fake_vllm.py"
STUDY = f"""\
name: s
model: m
vllm: {{command: ["{FAKE}", serve]}}
engine_args: {{max_model_len: 4096}}
search_space:
  max_num_batched_tokens: [512, 1024]
workload: w
"""
NVIDIA_SMI = """#!/bin/sh
case "$1" in --query-gpu=*) cat "$(dirname "$0")/gpus" ;; esac
"""
Check = Callable[..., Plan]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return a function that plans the study with changes, on a host of some GPUs, the first `busy` of them taken."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"arrival_s": 0.1, "input_len": 10, "output_len": 4}\n')
    executable(tmp_path / "vllm-router", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def plan(there: int = 0, busy: int = 0, baseline: str | None = None, **changes: object) -> Plan:
        if there:
            free = [24_100 if number >= busy else 2_000 for number in range(there)]
            lines = [f"{number}, GPU-{number}, A GPU, 24564, {memory}\n" for number, memory in enumerate(free)]
            (tmp_path / "gpus").write_text("".join(lines))
            executable(tmp_path / "nvidia-smi", NVIDIA_SMI)
        source = tmp_path / "s.yaml"
        source.write_text(STUDY)
        return plans.check(specs.parse(STUDY, "s.yaml", changes), source, workloads.load(rows), baseline)

    return plan


@pytest.mark.parametrize(
    ("gpus", "busy", "size", "topologies"),
    [
        (4, 0, 1, "4x 1p3d 2p2d 3p1d"),
        (4, 1, 1, "3x 1p2d 2p1d"),
        (4, 0, 2, "2x 1p1d"),
        (2, 1, 1, "1x"),
        (0, 0, 1, "1x"),
    ],
)
def test_auto_is_what_the_free_gpus_allow(check: Check, gpus: int, busy: int, size: int, topologies: str) -> None:
    """Every split of the servers that fit; the plan holds the list, and says why."""
    found = check(gpus, busy, topologies="auto", **{"engine_args.tensor_parallel_size": size})

    assert " ".join(map(str, found.spec.topologies)) == topologies
    assert any(note.startswith("topologies: auto is ") for note in found.notes)
    assert specs.parse(specs.dump(found.spec), "study.yaml").topologies == found.spec.topologies


def test_auto_takes_the_gpus_that_the_study_names(check: Check) -> None:
    """Two of four."""
    found = check(4, topologies="auto", gpus=[1, 3])

    assert (" ".join(map(str, found.spec.topologies)), found.gpus) == ("2x 1p1d", (1, 3))


def test_auto_without_prefillers_refuses_their_arguments(check: Check) -> None:
    """What would do nothing on this host is told, not dropped."""
    with pytest.raises(SpecError, match=r"auto, here 1x: engine_args\.prefiller\.max_num_seqs: no topology"):
        check(1, topologies="auto", **{"engine_args.prefiller.max_num_seqs": 8})


def test_a_study_takes_the_gpus_of_all_servers(check: Check) -> None:
    """Sizes count, by role, and the GPUs must be there and free."""
    sizes = {"engine_args.prefiller.tensor_parallel_size": 2, "engine_args.pipeline_parallel_size": 1}

    assert check(4, topologies=["1p2d"], **sizes).gpus == (0, 1, 2, 3)
    with pytest.raises(HostError, match="4 GPUs needed, 3 GPUs there"):
        check(3, topologies=["4x"])
    with pytest.raises(HostError, match=r"GPU 0 .* is busy"):
        check(4, busy=1, topologies=["4x"])


def test_a_pair_on_one_gpu_is_refused_with_the_reason(check: Check) -> None:
    """There is nothing to disaggregate; whoever wants it says so."""
    with pytest.raises(SpecError, match=r"1p1d on one GPU: .*nothing to disaggregate.*chunked prefill is the lever"):
        check(4, topologies=["1p1d"], gpus=[2])


def test_servers_on_one_gpu_must_fit_its_memory(check: Check) -> None:
    """Two servers: at most half each, given or searched, by role or not; the plan marks what they share."""
    asked = {"topologies": ["1p1d"], "share_devices": True}

    with pytest.raises(
        SpecError, match=r"puts 2 servers on one GPU: gpu_memory_utilization may be at most 0\.5, and it"
    ):
        check(1, **asked)
    with pytest.raises(SpecError, match=r"at most 0\.5, and together they ask for 1\.20"):
        check(1, **asked, **{"engine_args.gpu_memory_utilization": 0.6})
    with pytest.raises(SpecError, match=r"together they ask for 1\.10"):
        check(1, **asked, **{"engine_args.gpu_memory_utilization": 0.3,
                             "search_space.decoder.gpu_memory_utilization": [0.5, 0.8]})  # fmt: skip
    found = check(1, **asked, **{"engine_args.gpu_memory_utilization": 0.45})
    assert found.gpus == (0,)
    assert "share_devices: the servers of 1p1d all run on GPU 0 and slow each other down" in found.notes


def test_without_a_gpu_the_servers_share_the_machine(check: Check) -> None:
    """No key is needed, and a note says so."""
    found = check(topologies=["2x", "1p1d"])

    assert found.gpus == ()
    assert any("share the cores" in note for note in found.notes)


def test_a_front_that_is_not_there_is_found_before_anything_starts(check: Check) -> None:
    """Only groups have one."""
    with pytest.raises(HostError, match="front of a group: no-router: no such program") as caught:
        check(topologies=["1p1d"], **{"front.command": "no-router"})
    assert caught.value.hint is not None
    assert "pip install vllm-router" in caught.value.hint
    check(**{"front.command": "no-router"})


def test_an_argument_that_vllm_lacks_is_named_with_its_role(check: Check) -> None:
    """A typing error behind a role's prefix, and a prefix that is no role."""
    with pytest.raises(SpecError, match=r'decoder.max_num_sequences: vLLM .* did you mean "decoder.max_num_seqs"'):
        check(topologies=["1p1d"], **{"engine_args.decoder.max_num_sequences": 8})
    with pytest.raises(SpecError, match="no role is called that"):
        check(engine_args={"worker.max_num_seqs": 8})


def test_vllm_is_asked_about_each_role_and_the_refused_one_is_named(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default first, whose answer is the host's, then each role of the first PD topology, then the baseline."""
    asked: list[list[str]] = []

    def answer(command: Sequence[str], argvs: Sequence[list[str]], **_more: object) -> probe.Probe:
        asked.extend(argvs)
        flags = {name: probe.Flag(name) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
        verdicts = [probe.Verdict("too large" if "99" in argv else None, {"max_num_seqs": 7}) for argv in argvs]
        return probe.Probe("0.26.0", "cpu", flags, tuple(verdicts))

    monkeypatch.setattr(probe, "probe", answer)
    found = check(topologies=["2x", "1p1d"], baseline="vllm serve m --max-num-seqs 9",
                  **{"engine_args.decoder.max_num_seqs": 8})  # fmt: skip

    assert [("--kv-transfer-config" in argv, "8" in argv, "9" in argv) for argv in asked] == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (False, False, True),
    ]
    assert found.host == {"max_num_seqs": 7}
    with pytest.raises(SpecError, match=r"s\.yaml: a decoder of 1p1d: vLLM 0\.26\.0 refuses it: too large"):
        check(topologies=["2x", "1p1d"], **{"engine_args.decoder.max_num_seqs": 99})


def test_the_baseline_of_a_group_keeps_topology_and_front(check: Check) -> None:
    """What the user runs today, behind the same front; under PD it transfers KV all the same."""
    changes = {"front.policy": "random", "engine_args.decoder.max_num_seqs": 8}
    aggregated = check(topologies=["1p1d", "2x"], baseline="--max-num-seqs 9", **changes).baseline
    apart = check(topologies=["1p1d"], baseline="--max-num-seqs 9", **changes).baseline

    assert aggregated is not None
    assert apart is not None
    assert (str(aggregated.topology), dict(aggregated.args)) == ("2x", {"max_num_seqs": 9})
    assert aggregated.front.policy == apart.front.policy == "random"
    assert {role: set(args) for role, args in apart.role_args.items()} == {
        "prefiller": {"kv_transfer_config"},
        "decoder": {"kv_transfer_config"},
    }


def test_a_dry_run_shows_each_roles_command_and_the_fronts(check: Check) -> None:
    """A group is several commands; the ports are examples."""
    told = plans.describe(check(topologies=["2x", "1p1d"], **{"engine_args.decoder.max_num_seqs": 8}))
    lines = [line.strip() for line in told.splitlines()]

    assert lines[lines.index("# trial 0, vLLM's own default") + 1] == "# 2 x server"
    decoder = lines[lines.index("# 1 x decoder") + 1]
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"})
    assert decoder.endswith(f"serve m --max-model-len 4096 --kv-transfer-config '{transfer}' --max-num-seqs 8")
    assert "vllm-router --worker-urls http://127.0.0.1:8001 http://127.0.0.1:8002 --policy round_robin" in told
    assert "--prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002" in told
