"""What MLflow is told about a study, as plain values: params, tags, metrics, the table, the dataset.

Pure: results in, dicts and text out; sinks/mlflow.py sends them. Names from outside are data here too:
keys keep to the letters that MLflow takes. What people read is in notes.py, where they review in view.py.
"""

import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tuner import units
from tuner.errors import FailureKind
from tuner.results import (
    KV_TRANSFER,
    TrialResult,
    feasible,
    flat,
    front,
    hypervolume,
    limits,
    recommend,
    told_apart,
)
from tuner.serving import Json, Role, to_config
from tuner.shape import describe, figures
from tuner.sinks.topologies import n_gpus
from tuner.sinks.verdict import notes_of, trial_table, verdict
from tuner.sinks.words import configuration, describe_slo, metric_name, plain
from tuner.spec import StudySpec
from tuner.workload import Workload

NOT_GIVEN = "not given"
OFF = {"long_prefill_token_threshold": "0"}  # what vLLM takes when the argument is not given
PREFIXES = tuple(f"{role}." for role in Role)
LONGEST_TAG, LONGEST_PARAM, LONGEST_DIGEST = 7900, 6000, 36
SHORT_NAMES = {
    "topology": "",
    "max_num_batched_tokens": "b",
    "long_prefill_token_threshold": "l",
    "max_num_seqs": "s",
}
SHAPE = {
    "requests": "requests",
    "span_s": "seconds",
    "request_rate": "requests per second",
    "input_len_p50": "prompt tokens p50",
    "input_len_p95": "prompt tokens p95",
    "output_len_p50": "output tokens p50",
    "output_len_p95": "output tokens p95",
}
COLUMNS = (("arrival_s", "double"), ("input_len", "long"), ("output_len", "long"))


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What identifies the traffic, and its observed shape."""

    name: str
    sha256: str
    shape: Mapping[str, float | int] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload) -> "WorkloadFacts":
        """Return the facts of a loaded workload."""
        return cls(workload.name, workload.sha256, figures(describe(workload.requests, workload.history)))


def metrics(result: TrialResult) -> Iterator[tuple[str, float, int]]:
    """Yield a trial's metrics as key, value and step: its own, each repeat's, excesses, what it cost."""
    if result.is_measured and result.same_as is None:
        yield from _finite(units.to_outside(result.metrics), "", 0)
        yield from _finite(result.excess, "slo_excess/", 0)
        for step, repeat in enumerate(result.repeats, start=1):
            yield from _finite(units.to_outside(repeat.metrics), "repeat/", step)
    if result.same_as is None:
        yield from _finite({f"{name}_ms": seconds * 1e3 for name, seconds in result.cost.items()}, "cost/", 0)


def _finite(values: Mapping[str, float], prefix: str, step: int) -> Iterator[tuple[str, float, int]]:
    """What is not a finite number is left out: MLflow turns infinity into 1.8e308, which ruins charts."""
    for name, value in values.items():
        if math.isfinite(value):
            yield key(f"{prefix}{name}"), float(value), step


def key(name: str) -> str:
    """Return a name in the letters that MLflow takes for params and metrics."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)


def metric_key(name: str) -> str:
    """Return the key that a metric has in MLflow."""
    return key(units.outside_key(name))


def params(result: TrialResult) -> dict[str, str]:
    """Return a trial's effective engine arguments under vLLM's names; under PD with their role in front."""
    config = result.config
    topology = config.topology
    given: dict[str, Json] = {
        "topology": str(topology),
        "pd_ratio": f"{topology.prefillers}:{topology.decoders}" if topology.is_pd else "none",
    }
    seen = {name: value for name, value in result.effective.items() if not name.startswith(PREFIXES)}
    every = {
        role: config.for_role(role) | seen | dict(config.role_args.get(role, {}) if topology.is_pd else {})
        for role in topology.roles
    }
    for role, args in every.items():
        prefix = "" if role is Role.ANY else f"{role}."
        alike = {n for n, v in args.items() if all(n in other and other[n] == v for other in every.values())}
        given |= {name if name in alike else f"{prefix}{name}": value for name, value in args.items()}
    given = {name: value for name, value in given.items() if not name.endswith(KV_TRANSFER)}
    given |= {name: value for name, value in flat(config).items() if name.startswith("env.")}
    given |= {name: value for name, value in result.effective.items() if name not in seen}
    return {key(name): _text(value)[:LONGEST_PARAM] for name, value in given.items()}


def group_params(result: TrialResult, *, share_devices: bool = False) -> dict[str, str]:
    """Return what tells groups of servers apart; a study of single servers has no use for it."""
    kind = "pd" if result.config.topology.is_pd else "aggregated"
    return {"topology.kind": kind, "n_gpus": str(n_gpus(result, share_devices=share_devices))}


def params_of_all(results: Sequence[TrialResult], *, share_devices: bool = False) -> dict[int, dict[str, str]]:
    """Return each trial's params by number, every name on every trial: charts drop a run that lacks one."""
    has_groups = any(r.config.topology.is_group for r in results)
    own = {r.number: params(r) | (group_params(r, share_devices=share_devices) if has_groups else {}) for r in results}
    names = sorted({name for some in own.values() for name in some})
    return {r.number: {name: own[r.number].get(name, _absent(name, r)) for name in names} for r in results}


def _absent(name: str, result: TrialResult) -> str:
    """Say what vLLM takes for an argument that a trial lacks, where it has servers that would read it."""
    role, _, stem = name.rpartition(".")
    is_read = (role or str(Role.ANY)) in result.config.topology.roles
    return OFF.get(stem, NOT_GIVEN) if is_read else NOT_GIVEN


def _text(value: Json) -> str:
    return plain(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


def tags(result: TrialResult, default: TrialResult | None) -> dict[str, str]:
    """Return the tags of a trial that later trials do not change."""
    own = {
        "mlflow.runName": run_name(result, default),
        "tune.role": plain(result.label) or "candidate",
        "tune.outcome": outcome(result),
        "tune.slo": {True: "met", False: "missed", None: "none"}[result.slos_met],
        "tune.configuration": configuration(result, default),
    }
    if result.failure is not None:
        own |= {
            "tune.failure": str(result.failure.kind),
            "tune.failure_message": plain(result.failure.message),
        }
    if result.same_as is not None:
        own["tune.same_as"] = str(result.same_as)
    if result.vllm_version:
        own["tune.vllm_version"] = plain(result.vllm_version)
    if notes := notes_of([result]):
        own["tune.notes"] = "; ".join(notes)
    return {name: value[:LONGEST_TAG] for name, value in own.items()}


def standing(spec: StudySpec, result: TrialResult, results: Sequence[TrialResult]) -> dict[str, str]:
    """Return the tags of a trial that change as others come in."""
    x, y = spec.objective_metrics
    best = recommend(results, x, y)
    on_front = any(r.number == result.number for r in front(results, x, y))
    is_best = best is not None and best.number == result.number
    return {"tune.pareto": "yes" if on_front else "no", "tune.recommended": "yes" if is_best else "no"}


def outcome(result: TrialResult) -> str:
    """Return "ok", "failed", "interrupted" or "same_as"."""
    if result.failure is not None:
        return "interrupted" if result.failure.kind is FailureKind.INTERRUPTED else "failed"
    return "ok" if result.same_as is None else "same_as"


def status(result: TrialResult) -> str:
    """Return MLflow's status of a trial: FAILED has a red icon."""
    return {"failed": "FAILED", "interrupted": "KILLED"}.get(outcome(result), "FINISHED")


def run_name(result: TrialResult, default: TrialResult | None) -> str:
    """Return what a trial is called in the UI, which cuts after about 18 characters: what differs, short."""
    if result.label:
        return plain(f"t{result.number:02d} {result.label}")
    words = [_in_short(name, value) for name, value in told_apart(result.config, default).items()]
    return plain(f"t{result.number:02d} {' '.join(words) or 'as default'}")[:250]


def _in_short(name: str, value: Json) -> str:
    role, dot, stem = name.rpartition(".")
    short = f"{role[:1]}{dot}{SHORT_NAMES.get(stem, stem)}"
    if value is None:
        return f"no-{short}"
    return f"{short}{_text(value)}" if stem in SHORT_NAMES else f"{short}={_text(value)}"


def study_params(spec: StudySpec, workload: WorkloadFacts, vllm_version: str | None) -> dict[str, str]:
    """Return what a study fixed from the start; what a resumed study may change is a tag instead."""
    x, y = spec.objective_metrics
    own = {
        "model": spec.model,
        "workload": workload.name,
        "workload_sha256": workload.sha256,
        "rate_scale": f"{spec.workload.rate_scale:g}",
        "objectives": f"{x}, {y}",
        "slo": ", ".join(slo.text for slo in spec.slo) or "none",
        "sampler": spec.sampler,
        "seed": str(spec.seed),
        "repeats": str(spec.repeats),
        "topologies": ", ".join(str(t) for t in spec.topologies),
        **({"vllm_version": vllm_version} if vllm_version else {}),
    }
    own |= {f"engine_args.{name}": _text(value) for name, value in spec.engine_args.items()}
    own |= {f"search_space.{name}": _text(d.model_dump(mode="json")) for name, d in spec.search_space.items()}
    return {key(name): plain(value)[:LONGEST_PARAM] for name, value in own.items()}


def study_tags(spec: StudySpec, results: Sequence[TrialResult]) -> dict[str, str]:
    """Return where a study stands."""
    parts = [f"{spec.budget.trials} trials"] if spec.budget.trials is not None else []
    parts += [units.format_elapsed(spec.budget.time)] if spec.budget.time is not None else []
    own = {
        "tune.budget": " or ".join(parts),
        "tune.slo_limits": ", ".join(describe_slo(slo) for slo in limits(spec.slo, results)) or "none",
        "tune.slo": "none" if not spec.slo else "met" if feasible(results) else "missed",
        "tune.verdict": verdict(spec, results).splitlines()[0],
    }
    return {name: value[:LONGEST_TAG] for name, value in own.items()}


def progress(spec: StudySpec, results: Sequence[TrialResult]) -> Iterator[tuple[str, float, float, int]]:
    """Yield the study's metrics as key, value, time and trial number.

    Each value depends on the trials up to its own only, so that none changes later.
    """
    x, y = spec.objective_metrics
    own = [r for r in results if r.same_as is None]
    for count, result in enumerate(own, start=1):
        for name, value in _progress(spec, own[:count], x, y).items():
            yield key(name), value, result.ended, result.number


def _progress(spec: StudySpec, so_far: Sequence[TrialResult], x: str, y: str) -> dict[str, float]:
    met = feasible(so_far)
    points = [r for r in met if _is_point(r, x, y)]
    values = {"feasible_trials": float(len(met))}
    if points:
        best = {name: min(r.metrics[name] for r in points) for name in (x, y)}
        values |= {f"best_{name}": value for name, value in units.to_outside(best).items()}
    if (corner := _corner(spec, so_far)) is not None:
        logs = [(math.log(r.metrics[x]), math.log(r.metrics[y])) for r in points]
        values["hypervolume"] = hypervolume(logs, corner)
    return values


def _is_point(result: TrialResult, x: str, y: str) -> bool:
    return result.is_measured and result.metrics.get(x, 0) > 0 and result.metrics.get(y, 0) > 0


def _corner(spec: StudySpec, so_far: Sequence[TrialResult]) -> tuple[float, float] | None:
    """Logs of the point from which the front's area counts: SLO limits, else twice the first measured."""
    x, y = spec.objective_metrics
    first = next((r for r in so_far if _is_point(r, x, y)), None)
    if first is None:
        return None
    asked = {slo.metric: slo.limit for slo in limits(spec.slo, so_far) if slo.limit and not slo.is_lower_bound}
    return math.log(asked.get(x) or 2 * first.metrics[x]), math.log(asked.get(y) or 2 * first.metrics[y])


def dataset(workload: WorkloadFacts) -> dict[str, str]:
    """Return the workload as the fields of an MLflow data set."""
    name = plain(workload.name)[:500]
    return {
        "name": name,
        "digest": workload.sha256[:LONGEST_DIGEST],
        "source": json.dumps({"workload": name, "sha256": workload.sha256}),
        "schema": json.dumps({"mlflow_colspec": [{"name": n, "type": t, "required": True} for n, t in COLUMNS]}),
        "profile": json.dumps(dict(workload.shape)),
    }


def table(spec: StudySpec, results: Sequence[TrialResult]) -> dict[str, Any]:
    """Return the trials in the split form that MLflow's UI shows as a table.

    Names of columns have no dot: the UI takes them for paths and shows nothing.
    """
    names = spec.objective_metrics
    units_of = [" (ms)" if units.is_duration(name) else "" for name in names]
    columns = [
        "trial",
        "marks",
        *(f"{metric_name(n)}{unit}" for n, unit in zip(names, units_of, strict=True)),
    ]
    columns += [*(f"SLO {slo.metric}" for slo in spec.slo), "differs from the default by", "failure"]
    rows = []
    for row in trial_table(spec, results):
        values = [_rounded(name, value) for name, value in zip(names, (row.x, row.y), strict=True)]
        marks = ", ".join(row.marks)
        rows.append([row.number, marks, *values, *row.slo, row.configuration, row.failure or ""])
    return {"columns": [column.replace(".", " ") for column in columns], "data": rows}


def _rounded(name: str, value: float | None) -> float | None:
    return None if value is None else round(value * (1e3 if units.is_duration(name) else 1), 3)


def short_model(model: str) -> str:
    """Return a model's name on a hub as it is, and of a folder the last part alone."""
    return Path(model).name if model.startswith(("/", ".")) else model


def has_ui() -> bool:
    """Return whether the full MLflow, with its UI, is installed here."""
    try:
        return bool(metadata.version("mlflow"))
    except metadata.PackageNotFoundError:
        return False


def config_yaml(result: TrialResult, role: Role) -> str:
    """Return a trial's configuration as `vllm serve --config` takes it."""
    out = io.StringIO()
    YAML().dump(to_config(result.config, role), out)
    return f"# trial {result.number}; use: vllm serve --config FILE\n{out.getvalue()}"


def stamp(seconds: float) -> int:
    """Return MLflow's milliseconds since the epoch."""
    return round(seconds * 1e3)
