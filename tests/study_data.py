"""A small study to draw, judge and log: five budgets as measured on a two-core host, and two failures."""

from collections.abc import Mapping
from typing import Any

from tuner import spec as specs
from tuner.errors import FailureKind
from tuner.results import Failure, Repeat, TrialResult
from tuner.serving import Json, Role, ServingConfig, Topology
from tuner.spec import StudySpec

X, Y = "ttft_p50.long", "itl_p99"
START = 1_790_000_000.0

STUDY = """
name: quickstart
model: tune/tiny-qwen2
engine_args: {max_model_len: 4096}
search_space:
  max_num_batched_tokens: {low: 64, high: 4096, log: true}
  long_prefill_token_threshold: {fraction_of: max_num_batched_tokens, low: 0.0625, high: 0.5}
workload: chat
objectives: {ttft: ttft_p50.long, itl: itl_p99}
slo: [ttft_p50.long=600ms, itl_p99=0.33x]
budget: {trials: 8}
"""


def study(text: str = STUDY, **overrides: Any) -> StudySpec:
    return specs.parse(text, "study.yaml", overrides)


def config(topology: str = "1x", env: Mapping[str, str] | None = None, **args: Json) -> ServingConfig:
    """A configuration; an argument of one role is written `prefiller__NAME`."""
    by_role: dict[Role, dict[str, Json]] = {}
    common: dict[str, Json] = {"max_model_len": 4096}
    for name, value in args.items():
        role, _, stem = name.rpartition("__")
        (by_role.setdefault(Role(role), {}) if role else common)[stem] = value
    return ServingConfig("tune/tiny-qwen2", common, env or {}, Topology.parse(topology), by_role)


def trial(
    number: int,
    x: float = 1.0,
    y: float = 1.0,
    *,
    limits: Mapping[str, float] | None = None,
    label: str = "",
    args: Mapping[str, Json] | None = None,
    topology: str = "1x",
    **more: Any,
) -> TrialResult:
    """A measured trial; `limits` are upper ones by metric, judged here as the study does."""
    metrics = {X: x, Y: y} | more.pop("metrics", {})
    excess = {key: (metrics[key] - limit) / limit for key, limit in (limits or {}).items() if key in metrics}
    met = all(excess.get(key, 1.0) <= 0 for key in limits) if limits else None
    repeats = more.pop("repeats", (Repeat({key: v * 0.98 for key, v in metrics.items()}), Repeat(metrics)))
    return TrialResult(
        number=number,
        config=config(topology, **(args or {})),
        label=label,
        metrics=metrics,
        excess=excess,
        slos_met=met,
        repeats=repeats,
        started=START + 80 * number,
        ended=START + 80 * number + 72,
        **more,
    )


def failed(
    number: int,
    kind: FailureKind = FailureKind.OOM,
    message: str = "out of memory",
    topology: str = "1x",
    **more: Any,
) -> TrialResult:
    """A trial without numbers."""
    return TrialResult(
        number=number,
        config=config(topology, max_num_batched_tokens=65536),
        failure=Failure(kind, message, ("torch.OutOfMemoryError: tried to allocate 20 GiB",)),
        started=START + 80 * number,
        ended=START + 80 * number + 20,
        **more,
    )


def budgets() -> list[TrialResult]:
    """Default, five budgets, a threshold, a repeat of a point and a failure; limits 600 ms and a third of 402 ms."""
    limits = {X: 0.600, Y: 0.33 * 0.402}

    def effective(budget: int, threshold: int = 0) -> dict[str, Any]:
        return {"effective": {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold,
                              "enable_chunked_prefill": True, "max_num_seqs": 32}}  # fmt: skip

    def at(number: int, x: float, y: float, budget: int, **more: Any) -> TrialResult:
        return trial(number, x, y, limits=limits, args={"max_num_batched_tokens": budget}, **effective(budget), **more)

    return [
        trial(0, 0.471, 0.402, limits=limits, label="default", **effective(2048)),
        at(1, 0.481, 0.425, 4096, label="baseline"),
        at(2, 0.490, 0.285, 1024),
        at(3, 0.512, 0.167, 512),
        at(4, 0.589, 0.101, 256),
        failed(5),
        at(6, 0.709, 0.061, 128),
        at(7, 0.589, 0.101, 256, same_as=4),
        trial(8, 0.618, 0.112, limits=limits, args={"long_prefill_token_threshold": 256}, **effective(2048, 256)),
    ]


def groups() -> list[TrialResult]:
    """Four GPUs in three arrangements: replicas miss the ITL limit of 60 ms, 1p3d meets both, 3p1d cannot transfer."""
    limits = {X: 0.600, Y: 0.060}

    def at(number: int, x: float, y: float, topology: str, label: str = "", **args: Json) -> TrialResult:
        moved = {"kv_transfer_time_mean": 0.012, "kv_transfer_share": 1.0} if "p" in topology else {}
        return trial(number, x, y, limits=limits, topology=topology, args=args, label=label, metrics=moved)

    return [
        at(0, 0.430, 0.108, "4x", "default"),
        at(1, 0.470, 0.074, "4x", max_num_batched_tokens=512),
        at(2, 0.520, 0.041, "1p3d", prefiller__max_num_batched_tokens=16384, decoder__max_num_seqs=64),
        at(3, 0.395, 0.066, "2p2d", prefiller__max_num_batched_tokens=8192),
        failed(4, FailureKind.NO_TRANSFER, "no KV cache was transferred", topology="3p1d"),
        at(5, 0.560, 0.038, "1p3d", prefiller__max_num_batched_tokens=4096, decoder__max_num_seqs=32),
    ]


GROUPS = study(slo=("ttft_p50.long=600ms", "itl_p99=60ms"), topologies=("4x", "2p2d", "1p3d", "3p1d"))
