"""The prefix cache of a real vLLM: what it says of itself, and whether it hits what it could."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from tests.live.test_deployment_live import in_one_process
from tuner import tiny_model
from tuner import workload as workloads
from tuner.deployment.launcher import LocalLauncher
from tuner.replay import run
from tuner.replay.client import finish
from tuner.replay.warmth import look
from tuner.seams import Deployment, Replay
from tuner.workload import Workload

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
REPO = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 1024
# The smallest blocks that vLLM takes on a CPU, those of the trace as well; more than all prompts need.
BLOCK, BLOCKS = 32, 4096
# Of the recorded gaps: a request of these takes a second or two, so a prefix is there when it is asked for again.
PACE = 0.5


@pytest.fixture(scope="module")
def window() -> Workload:
    """Return a window of Mooncake's conversations with its history, faster, with short answers: prompts matter here."""
    found = workloads.load(REPO / "workloads/mooncake-conv-small")
    return replace(found, requests=tuple(changed(r, arrival=PACE * r.arrival, output_len=4) for r in found.requests))


@pytest.fixture(scope="module", params=["vllm", "vllm_next"])
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, window: Workload
) -> Iterator[Deployment]:
    """One server of each vLLM for all tests; a replay's salt is its own, so that nothing of another is hit."""
    command = (request.getfixturevalue(request.param), "serve")
    config = in_one_process(command, str(tiny_model.ensure()), block_size=BLOCK, num_gpu_blocks_override=BLOCKS)
    with LocalLauncher().launch(config, tmp_path_factory.mktemp("prefix")) as found:
        run.warm_up(found.url, config.model, window, duration=3.0, seed=1, vocab_size=VOCAB_SIZE)
        yield found


def replayed(deployment: Deployment, what: Workload, salt: str) -> Replay:
    """Warm what there is to be warmed, and replay."""
    how = {"salt": salt, "vocab_size": VOCAB_SIZE, "members": deployment.members}
    model = str(tiny_model.ensure())
    cache = run.warm_prefix(deployment.url, model, what, **how)  # type: ignore[arg-type]
    return run.replay(deployment.url, model, what, cache=cache, **how)  # type: ignore[arg-type]


def test_vllm_says_how_much_its_prefix_cache_holds(deployment: Deployment) -> None:
    """Block size and tokens stand among its metrics."""
    cache = finish(look(deployment.members))

    assert cache is not None
    assert (cache.block_size, cache.capacity, cache.parts) == (BLOCK, BLOCK * BLOCKS, 1)


@pytest.mark.parametrize(("temperature", "least"), [("cold", 0.04), ("warm", 0.18)])
def test_vllm_hits_what_it_could(deployment: Deployment, window: Workload, temperature: str, least: float) -> None:
    """Within two percent of the prompt tokens, without and after the history; each prompt is as long as recorded."""
    is_warm = temperature == "warm"
    seen = replayed(deployment, window if is_warm else replace(window, history=()), temperature)

    assert seen.records.is_completed.all(), seen.notes
    assert seen.records.prompt_tokens.tolist() == [row.input_len for row in window.requests]
    ideal = seen.server[f"prefix_hit_ideal_{temperature}_share"]
    assert ideal > least
    assert seen.server["prefix_hit_share"] == pytest.approx(ideal, abs=0.02)
