"""What a trial found, in a form that survives on disk.

A TrialResult is complete before Optuna is told; sinks and reports read nothing else.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tuner import units
from tuner.errors import FailureKind
from tuner.metrics import Metrics
from tuner.outside import legible
from tuner.serving import ROUTER, SINGLE, Front, Json, Role, ServingConfig, Topology
from tuner.slo import Slo

NOISE = 0.02
"""Two measurements of one configuration differ by about this much; see README, "How sure is it?"."""

VARIABLE = r"[A-Za-z_]\w*"
KV_TRANSFER = "kv_transfer_config"
UNTOLD = (("kv_connector", "NixlConnector"), *(("kv_role", role.kv_role) for role in Role))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trial has no numbers."""

    kind: FailureKind
    message: str
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """One measured replay of a trial."""

    metrics: Metrics
    counters: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial of a study.

    Attributes:
        number: Optuna's trial number.
        config: what was asked of vLLM.
        params: what the sampler chose, by Optuna's parameter names; empty for baselines outside the space.
        label: "default" for vLLM's own default, "baseline" for the user's present configuration, else "".
        repeats: one entry a replay; empty when the trial failed.
        metrics: the median over repeats of each metric that every repeat has.
        excess: relative distance beyond each SLO's limit by SLO key; absent where not measurable.
        effective: engine arguments as the server resolved them, defaults included.
        cost: seconds spent by phase ("start", "warm_up", "replay", "stop").
        same_as: the earlier trial whose measurement this one shares.
        started, ended: wall clock, seconds since the epoch; labels only.
    """

    number: int
    config: ServingConfig
    params: Mapping[str, Json] = field(default_factory=dict)
    label: str = ""
    repeats: tuple[Repeat, ...] = ()
    metrics: Metrics = field(default_factory=dict)
    excess: Mapping[str, float] = field(default_factory=dict)
    slos_met: bool | None = None
    failure: Failure | None = None
    effective: Mapping[str, Json] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    same_as: int | None = None
    vllm_version: str | None = None
    started: float = 0.0
    ended: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether there are numbers of its own."""
        return self.failure is None and bool(self.metrics)


def combine(repeats: Sequence[Repeat]) -> dict[str, float]:
    """Return the median over repeats of every metric that each repeat has."""
    if not repeats:
        return {}
    common = set.intersection(*(set(r.metrics) for r in repeats))
    return {key: median([r.metrics[key] for r in repeats]) for key in repeats[0].metrics if key in common}


def median(values: Sequence[float]) -> float:
    """Return the median of a non-empty sequence."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def front(results: Iterable[TrialResult], x: str, y: str) -> list[TrialResult]:
    """Return the measured results that no other beats in both metrics (smaller is better), by `x`.

    Results that share a measurement count once. Lower bounds are not handled: objectives are latencies.
    """
    points = sorted(
        (r for r in results if r.is_measured and r.same_as is None and x in r.metrics and y in r.metrics),
        key=lambda r: (r.metrics[x], r.metrics[y], r.number),
    )
    best, chosen = math.inf, []
    for point in points:
        if point.metrics[y] < best:
            chosen.append(point)
            best = point.metrics[y]
    return chosen


def feasible(results: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the measured results that meet every SLO; all measured ones when the study has no SLO."""
    own = [r for r in results if r.is_measured and r.same_as is None]
    has_slos = any(r.slos_met is not None for r in own)
    return [r for r in own if r.slos_met or not has_slos]


def knee(points: Sequence[TrialResult], x: str, y: str) -> TrialResult | None:
    """Return the point of a front that bends it most: where the next step costs more than it gains.

    It is the point farthest below the chord between the front's ends, both axes logarithmic and scaled to
    the front's own extent, so that neither the unit nor the size of a metric counts. When none lies below
    the chord (two points, a front that bulges outwards) it is the point with the smallest product x * y:
    the end that wins more, relatively, than it loses.
    """
    if not points:
        return None
    logs = [(_log(p.metrics[x]), _log(p.metrics[y])) for p in points]
    (left, top), (right, bottom) = min(logs), max(logs)
    width, height = (right - left) or 1.0, (top - bottom) or 1.0

    def rank(index: int) -> tuple[float, float, int]:
        log_x, log_y = logs[index]
        below = 1 - (log_x - left) / width - (log_y - bottom) / height if len(points) > 1 else 0.0
        return -round(max(below, 0.0), 9), log_x + log_y, points[index].number

    return points[min(range(len(points)), key=rank)]


def recommend(results: Iterable[TrialResult], x: str, y: str, *, noise: float = NOISE) -> TrialResult | None:
    """Return the result to serve with: feasible, on the front's knee, fewest own arguments among ties.

    Ties are the feasible results within `noise` of the knee in both metrics: a difference that small is not
    worth an argument, so the one with the fewest differences from the default wins, then the knee itself.
    None when nothing is feasible.
    """
    every = list(results)
    candidates = feasible(every)
    best = knee(front(candidates, x, y), x, y)
    if best is None:
        return None
    default = default_of(every)
    ties = [r for r in candidates if all(_near(r, best, key, noise) for key in (x, y))]
    return min(ties, key=lambda r: (len(differences(r.config, default)), r is not best, r.number))


def _near(result: TrialResult, best: TrialResult, key: str, noise: float) -> bool:
    if key not in result.metrics:
        return False
    return abs(_log(result.metrics[key]) - _log(best.metrics[key])) <= math.log1p(noise) + 1e-12


def _log(value: float) -> float:
    return math.log(max(value, 1e-12))


def closest(results: Iterable[TrialResult]) -> TrialResult | None:
    """Return the measured result with the smallest worst excess: what to show when no SLO is met.

    An SLO that one trial could measure and another could not counts against the latter.
    """
    own = [r for r in results if r.is_measured and r.same_as is None and r.excess]
    known = {key for r in own for key in r.excess}
    ranked = sorted(own, key=lambda r: (len(known - set(r.excess)), max(r.excess.values()), r.number))
    return ranked[0] if ranked else None


def default_of(results: Iterable[TrialResult]) -> TrialResult | None:
    """Return the trial of vLLM's own default; a measured one when there are several."""
    marked = [r for r in results if r.label == "default"]
    return min(marked, key=lambda r: (not r.is_measured, r.number)) if marked else None


def limits(slos: Iterable[Slo], results: Iterable[TrialResult]) -> tuple[Slo, ...]:
    """Return SLOs with relative limits in numbers, once the default is measured."""
    default = default_of(results)
    known = default.metrics if default is not None and default.is_measured else {}
    return tuple(slo.against(known) for slo in slos)


def differences(config: ServingConfig, default: TrialResult | None) -> dict[str, Json]:
    """Return what sets a configuration apart from the default's, by vLLM's names, role first ("prefiller.x").

    None marks an argument that only the default gives. Without a default: everything that is given.
    """
    own, other = flat(config), {"topology": str(SINGLE)} if default is None else flat(default.config)
    changed = {name: value for name, value in own.items() if name not in other or other[name] != value}
    return changed | dict.fromkeys(sorted(set(other) - set(own)))


def told_apart(config: ServingConfig, default: TrialResult | None) -> dict[str, Json]:
    """Return the differences as a reader wants them: of a group the topology too, where it is the default's."""
    changed = differences(config, default)
    always: dict[str, Json] = {"topology": str(config.topology)} if config.topology.is_group else {}
    return always | changed


def flat(config: ServingConfig) -> dict[str, Json]:
    """Return topology, arguments and environment of a configuration under one flat set of names.

    Of how KV cache moves only what can differ is told, once for both roles (`kv_buffer_device`).
    """
    names: dict[str, Json] = {"topology": str(config.topology), **config.args}
    for role, args in config.role_args.items():
        prefix = "" if role is Role.ANY else f"{role}."
        names |= {f"{prefix}{name}": value for name, value in args.items() if name != KV_TRANSFER}
        if isinstance(transfer := args.get(KV_TRANSFER), dict):
            names |= {name: value for name, value in transfer.items() if (name, value) not in UNTOLD}
    return names | {f"env.{name}": value for name, value in config.env.items()}


def hypervolume(points: Iterable[tuple[float, float]], reference: tuple[float, float]) -> float:
    """Return the area that points dominate inside the reference corner; smaller coordinates are better."""
    area, ceiling = 0.0, reference[1]
    for x, y in sorted(points):
        if x < reference[0] and y < ceiling:
            area += (reference[0] - x) * (ceiling - y)
            ceiling = y
    return area


def config_to_json(config: ServingConfig) -> dict[str, Any]:
    """Return a configuration as plain data."""
    return {
        "model": config.model,
        "command": list(config.command),
        "topology": str(config.topology),
        "args": dict(config.args),
        "role_args": {str(role): dict(args) for role, args in config.role_args.items()},
        "env": dict(config.env),
        "front": asdict(config.front),
    }


def config_from_json(data: Mapping[str, Any]) -> ServingConfig:
    """Return the configuration that `config_to_json` wrote.

    Raises:
        ValueError: a variable's name that would be code where a shell sources it; the study's own are checked there.
    """
    if odd := [name for name in data["env"] if not re.fullmatch(VARIABLE, name, re.ASCII)]:
        raise ValueError(f"{odd[0]!r} is no name for an environment variable")
    return ServingConfig(
        model=str(data["model"]),
        command=tuple(map(str, data["command"])),
        topology=Topology.parse(data["topology"]),
        args=data["args"],
        role_args={Role(role): args for role, args in data["role_args"].items()},
        env={name: str(value) for name, value in data["env"].items()},
        front=_front_from_json(before) if (before := data.get("front")) else ROUTER,
    )


def _front_from_json(data: Mapping[str, Any]) -> Front:
    return Front(**dict(data) | {"command": tuple(map(str, data["command"]))})


def to_json(result: TrialResult) -> str:
    """Return the text of `result.json`: durations in milliseconds under keys with `_ms`."""
    data: dict[str, Any] = {
        "number": result.number,
        "label": result.label,
        "config": config_to_json(result.config),
        "params": dict(result.params),
        "effective": dict(result.effective),
        "vllm_version": result.vllm_version,
        "metrics": units.to_outside(result.metrics),
        "excess": dict(result.excess),
        "slos_met": result.slos_met,
        "repeats": [
            {"metrics": units.to_outside(r.metrics), "counters": dict(r.counters), "notes": list(r.notes)}
            for r in result.repeats
        ],
        "failure": result.failure
        and {"kind": str(result.failure.kind), "message": result.failure.message, "log": list(result.failure.log)},
        "same_as": result.same_as,
        "cost_ms": {name: seconds * 1e3 for name, seconds in result.cost.items()},
        "started": result.started,
        "ended": result.ended,
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> TrialResult:
    """Return the result that `to_json` wrote.

    Raises:
        ValueError, KeyError: the text is not such a result.
    """
    data = json.loads(text, parse_constant=_refuse)
    failure = data["failure"]
    return TrialResult(
        number=int(data["number"]),
        label=legible(str(data["label"])),
        config=config_from_json(data["config"]),
        params=data["params"],
        effective=data["effective"],
        vllm_version=data["vllm_version"],
        metrics=units.from_outside(data["metrics"]),
        excess={str(name): float(value) for name, value in data["excess"].items()},
        slos_met=data["slos_met"],
        repeats=tuple(
            Repeat(units.from_outside(r["metrics"]), r["counters"], tuple(r["notes"])) for r in data["repeats"]
        ),
        failure=failure and _failure_from_json(failure),
        same_as=data["same_as"],
        cost={name: ms / 1e3 for name, ms in data["cost_ms"].items()},
        started=data["started"],
        ended=data["ended"],
    )


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no measurement")


def _failure_from_json(data: Mapping[str, Any]) -> Failure:
    return Failure(FailureKind(data["kind"]), str(data["message"]), tuple(map(str, data["log"])))
