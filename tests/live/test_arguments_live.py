"""What vLLM itself makes of our command lines and files: its own parser and its own checks are the oracle."""

import json
import subprocess
from pathlib import Path

import numpy as np
import optuna
import pytest
from ruamel.yaml import YAML

from tuner import spec as specs
from tuner import tiny_model
from tuner.deployment.probe import probe
from tuner.deployment.program import interpreter
from tuner.serving import Json, ServingConfig, to_argv, to_config
from tuner.study import space

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

CONFIGURATIONS: list[dict[str, Json]] = [
    {},
    {"max_num_batched_tokens": 512, "max_num_seqs": 8, "enable_chunked_prefill": True},
    {"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_batched_tokens": 8192},
    {"enforce_eager": True, "long_prefill_token_threshold": 256, "scheduling_policy": "priority"},
    {"served_model_name": ["a", "b"], "gpu_memory_utilization": 0.85, "dtype": "bfloat16"},
    {
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "x"},
        "seed": 7,
    },
    {"async_scheduling": False, "disable_hybrid_kv_cache_manager": False, "trust_remote_code": False},
    {
        "limit_mm_per_prompt": {"image": 2},
        "override_generation_config": {"temperature": 0.5},
        "max_model_len": 2048,
    },
]

COMPARE = """
import dataclasses, json, sys
from vllm import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
root = FlexibleArgumentParser(prog="vllm")
ServeSubcommand().subparser_init(root.add_subparsers(dest="subparser"))
def engine(argv):
    args = root.parse_args(["serve", *argv])
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    found = AsyncEngineArgs.from_cli_args(args)
    plain = {f.name: str(getattr(found, f.name)) for f in dataclasses.fields(found)}
    plain["served"] = str(args.served_model_name)
    return plain
for case in json.load(open(sys.argv[1])):
    ours, file = engine(case["argv"]), engine(["--config", case["file"]])
    for drawn in ("kv_transfer_config",):  # carries ports drawn at random
        for side in (ours, file):
            side[drawn] = side[drawn].split("kv_port")[0]
    print(json.dumps({k: (ours[k], file[k]) for k in ours if ours[k] != file[k]}))
"""


def differences(vllm: str, tmp_path: Path) -> list[dict[str, list[str]]]:
    """Return, for each configuration, the engine arguments in which our YAML and our command line differ."""
    cases = []
    for number, args in enumerate(CONFIGURATIONS):
        config = ServingConfig("/some/model", args)
        file = tmp_path / f"{number}.yaml"
        with file.open("w") as out:
            YAML().dump(to_config(config), out)
        cases.append({"argv": to_argv(config)[2:], "file": str(file)})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    python = interpreter(vllm)
    assert python is not None
    done = subprocess.run(
        [python, "-c", COMPARE, str(tmp_path / "cases.json")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_yaml_and_command_line_make_the_same_engine_arguments(vllm: str, tmp_path: Path) -> None:
    """Booleans that are off, JSON, lists and floats survive the way through the file."""
    assert differences(vllm, tmp_path) == [{}] * len(CONFIGURATIONS)


def test_so_they_do_on_a_newer_vllm(vllm_next: str, tmp_path: Path) -> None:
    """0.32 reads the same files the same way."""
    assert differences(vllm_next, tmp_path) == [{}] * len(CONFIGURATIONS)


STUDY = """\
name: s
model: {model}
engine_args: {{max_model_len: 4096}}
search_space:
  max_num_batched_tokens: {{low: 16, high: 8192, log: true}}
  long_prefill_token_threshold: {{fraction_of: max_num_batched_tokens, low: 0.0625, high: 1.0}}
  max_num_seqs: [8, 32, 256]
  enable_chunked_prefill: [true, false]
workload: w
"""


def every_proposal(executable: str) -> tuple[list[str | None], list[dict[str, Json]]]:
    """Ask a vLLM to judge sixty random points of a wide space, settled by our rules."""
    spec = specs.parse(STUDY.format(model=tiny_model.ensure()), "s.yaml")
    command = (executable, "serve")
    host = dict(probe(command, [to_argv(space.default_config(spec))[2:]]).verdicts[0].values)
    rng, configs = np.random.default_rng(0), []
    for _ in range(60):
        topology, values = space.suggest(optuna.trial.FixedTrial(space.draw(spec, rng)), spec)
        configs.append(space.resolve(topology, values, spec, host))
    verdicts = probe(command, [to_argv(config)[2:] for config in configs]).verdicts
    asked = [dict(host) | dict(config.args) for config in configs]
    assert all(space.identity(c, host) for c in configs)
    return [v.reason for v in verdicts], [
        {n: (a[n], v.values[n]) for n in space_names(a) if v.values.get(n) != a[n]}
        for a, v in zip(asked, verdicts, strict=True)
    ]


def space_names(args: dict[str, Json]) -> list[str]:
    """Return the arguments whose resolved values are compared."""
    names = (
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
    )
    return [name for name in names if name in args]


def test_vllm_accepts_every_proposal_and_takes_it_as_meant(vllm: str) -> None:
    """No trial is lost to a rule of 0.26, and no value is changed behind our back."""
    reasons, changed = every_proposal(vllm)

    assert reasons == [None] * 60
    assert changed == [{}] * 60


def test_so_does_a_newer_vllm(vllm_next: str) -> None:
    """The canonical form of 0.26 is legal on 0.32 as well."""
    reasons, changed = every_proposal(vllm_next)

    assert reasons == [None] * 60
    assert changed == [{}] * 60
