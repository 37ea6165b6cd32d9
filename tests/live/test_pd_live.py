"""Prefillers and decoders on a real vLLM: real NixlConnector, real vllm-router, no GPU.

Nothing here looks at the clock; the studies that do are in test_topologies_live.py.
"""

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.deployment_data import is_alive
from tuner import spec as specs
from tuner import tiny_model
from tuner.deployment.launcher import Deployment, LocalLauncher
from tuner.errors import FailureKind, InvalidReplay, StartError
from tuner.replay import pairs, remote, run, transfer
from tuner.replay.prompts import ordinary_tokens, vocabulary_of
from tuner.seams import Member, Replay
from tuner.serving import Json, Role, ServingConfig, Topology
from tuner.workload import Request, Workload

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
REPO = Path(__file__).resolve().parents[2]
PLUGIN = REPO / "tuner" / "inside_vllm" / "nixl_idle"
FORGETFUL = (sys.executable, str(REPO / "tests" / "data" / "forgetful_front.py"))
BLOCK = 128  # tokens, in the CPU build
LENGTHS = (9, 130, 300, 777)
TOKENS = 24


@pytest.fixture(scope="module")
def model() -> str:
    """Return the folder of the tiny model."""
    return str(tiny_model.ensure())


def configuration(vllm: str, model: str, topology: str, **more: Any) -> ServingConfig:
    """Return the quick start's configuration as a group."""
    study = specs.load(REPO / "studies" / "cpu-quickstart.yaml", {})
    group = Topology.parse(topology)
    transfers: dict[Role, dict[str, Json]] = {
        role: {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role.kv_role}}
        for role in group.roles
        if role.kv_role
    }
    for role, args in more.pop("args", {}).items():
        transfers[role] = transfers.get(role, {}) | args
    return ServingConfig(model, study.engine_args, study.env, group, transfers, (vllm, "serve"), **more)


@contextmanager
def up(config: ServingConfig, directory: Path) -> Iterator[Deployment]:
    """Start a configuration; afterwards nothing of it is left."""
    with LocalLauncher(plugin=PLUGIN, start_timeout=240).launch(config, directory) as deployment:
        programs = [*deployment.servers, *([deployment.front] if deployment.front else [])]
        family = [psutil.Process(program.pid) for program in programs]
        family += [child for member in family for child in member.children(recursive=True)]
        yield deployment
    assert not [member for member in family if is_alive(member.pid)]


@pytest.fixture(scope="module")
def pair(vllm: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A prefiller, a decoder and vllm-router."""
    with up(configuration(vllm, model, "1p1d"), tmp_path_factory.mktemp("pair")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def single(vllm: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One server with the same weights."""
    with up(configuration(vllm, model, "1x"), tmp_path_factory.mktemp("single")) as deployment:
        yield deployment


def prompt(model: str, length: int, seed: int) -> list[int]:
    """Return ordinary tokens that no cache has seen."""
    tokens = ordinary_tokens(vocabulary_of(model) or 0)
    return [int(token) for token in np.random.default_rng(seed).integers(tokens.start, tokens.stop, length)]


def greedy(url: str, model: str, tokens: list[int]) -> list[int]:
    """Return the ids that a server, or a group, makes of a prompt at temperature 0."""
    body: dict[str, Json] = {"model": model, "prompt": tokens, "temperature": 0, "max_tokens": TOKENS}  # type: ignore[dict-item]
    answer = remote.ask(f"{url}/v1/completions", body | {"ignore_eos": True, "return_token_ids": True}, deadline=120)
    return list(answer["choices"][0]["token_ids"])


def load(model: str, url: str, members: tuple[Member, ...], deployment: Deployment, *, salt: str) -> Replay:
    """Replay twelve requests, four of them at once."""
    rows = tuple(Request(0.5 * (i // 4), LENGTHS[1 + i % 3], 8) for i in range(12))
    return run.replay(
        url, model, Workload("twelve", rows, sha256=""), salt=salt, vocab_size=vocabulary_of(model) or 0,
        members=members, check_alive=deployment.check_alive,
    )  # fmt: skip


def test_output_through_a_pair_is_that_of_one_server(pair: Deployment, single: Deployment, model: str) -> None:
    """One request at a time, prompts within a block and beyond: token for token the same."""
    for seed, length in enumerate(LENGTHS):
        tokens = prompt(model, length, seed)
        expected = greedy(single.url, model, tokens)
        assert greedy(pair.url, model, tokens) == expected
        assert len(set(expected)) > TOKENS // 3  # a model that repeats itself would prove little


def test_under_load_every_prompt_is_transferred(pair: Deployment, model: str) -> None:
    """The decoder computes none, no lease runs out, and the bytes are the KV cache's own: whole blocks."""
    pairs.warm(pair.members, model, seed=1, vocab_size=vocabulary_of(model) or 0, check_alive=pair.check_alive)
    seen = load(model, pair.url, pair.members, pair, salt="load")
    transfer.judge(seen)

    assert seen.records.is_completed.all()
    assert seen.server["kv_transfer_share"] == 1
    assert seen.server["decoder_computed_tokens"] == 0
    assert seen.server["kv_leases_expired"] == 0
    shape = json.loads((Path(model) / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    of_a_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * 2  # keys and values, bfloat16
    blocks = np.ceil(seen.records.input_len / BLOCK)
    assert seen.server["kv_transfer_bytes_mean"] == pytest.approx(float(blocks.mean()) * BLOCK * of_a_token)
    assert 0 < seen.server["kv_transfer_time_mean"] < 1


def test_a_front_that_forgets_the_parameters_is_found_out(pair: Deployment, model: str, tmp_path: Path) -> None:
    """It answers everything, and the decoder's counters tell that this was not PD."""
    with forgetful(pair, tmp_path) as url:
        seen = load(model, url, pair.members, pair, salt="forgetful")
    assert seen.records.is_completed.all()
    with pytest.raises(InvalidReplay, match="this was not PD: the decoders computed") as caught:
        transfer.judge(seen)

    assert caught.value.kind is FailureKind.NO_TRANSFER
    transfer.judge(load(model, pair.url, pair.members, pair, salt="honest again"))


@contextmanager
def forgetful(pair: Deployment, tmp_path: Path) -> Iterator[str]:
    """Put the forgetful front before the servers of a pair."""
    from tuner.deployment.group import Group, Start
    from tuner.deployment.guardian import Guardian
    from tuner.deployment.ports import reserved

    with Guardian() as guardian, reserved("127.0.0.1") as port:
        group = Group(guardian, tmp_path, patience=5)
        argv = [*FORGETFUL, "--host", "127.0.0.1", "--port", str(port.port), "--decode", pair.members[1].url]
        front = group.start(Start("the front", None, argv, {}, "127.0.0.1", [port], tmp_path / "front.log"))
        try:
            group.await_ready(30)
            yield front.url
        finally:
            group.end()


class Liar(BaseHTTPRequestHandler):
    """Passes requests on to a prefiller and gives another side-channel port than it said."""

    prefiller = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = remote.ask(self.prefiller + self.path, json.loads(body), deadline=60)
        answer["kv_transfer_params"]["remote_port"] -= 1
        answer["kv_transfer_params"]["remote_engine_id"] = "nobody"
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def test_a_wrong_side_channel_port_is_no_transfer(pair: Deployment, model: str) -> None:
    """The decoder cannot reach the prefiller: found out before the clock, in bounded time; the pair lives on."""
    vocab_size = vocabulary_of(model) or 0
    liar = ThreadingHTTPServer(("127.0.0.1", 0), type("LiarOfOne", (Liar,), {"prefiller": pair.members[0].url}))
    threading.Thread(target=liar.serve_forever, daemon=True).start()
    members = (Member(Role.PREFILLER, f"http://127.0.0.1:{liar.server_port}"), pair.members[1])
    began = time.monotonic()
    with pytest.raises(InvalidReplay, match="decoder 0 cannot fetch from prefiller 0") as caught:
        pairs.warm(members, model, seed=2, vocab_size=vocab_size, check_alive=pair.check_alive)
    liar.shutdown()
    liar.server_close()

    assert caught.value.kind is FailureKind.NO_TRANSFER
    assert time.monotonic() - began < 90
    pairs.warm(pair.members, model, seed=3, vocab_size=vocab_size, check_alive=pair.check_alive)


def test_a_decoder_that_never_comes_up_ends_the_group(vllm: str, model: str, tmp_path: Path) -> None:
    """Its cache does not hold one request: vLLM's own line, the decoder's name, nothing left of the prefiller."""
    config = configuration(vllm, model, "1p1d", args={Role.DECODER: {"num_gpu_blocks_override": 8}})
    with pytest.raises(StartError, match=r"decoder 0: .*KV cache is needed") as caught, up(config, tmp_path):
        pass

    assert caught.value.kind is FailureKind.OOM
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert mine == []


def test_a_pair_of_the_next_version_transfers_too(vllm_next: str, model: str, tmp_path: Path) -> None:
    """0.32: a pair, its output that of its prefiller alone, every prompt token from outside."""
    with up(configuration(vllm_next, model, "1p1d"), tmp_path) as deployment:
        pairs.warm(
            deployment.members, model, seed=4, vocab_size=vocabulary_of(model) or 0,
            check_alive=deployment.check_alive,
        )  # fmt: skip
        tokens = prompt(model, 500, 5)
        assert greedy(deployment.url, model, tokens) == greedy(deployment.members[0].url, model, tokens)
        seen = load(model, deployment.url, deployment.members, deployment, salt="next")
        transfer.judge(seen)
        with urllib.request.urlopen(deployment.members[1].metrics_url, timeout=10) as answer:
            assert b"vllm:nixl_xfer_time_seconds_count" in answer.read()

    assert seen.server["kv_transfer_share"] == 1
    assert seen.server["decoder_computed_tokens"] == 0
