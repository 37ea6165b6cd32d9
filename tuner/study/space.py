"""From a search space to a configuration vLLM accepts: suggest, then settle.

vLLM refuses some combinations and ignores others. Both are settled here, so that no trial is lost to a
rule that is known and no point is measured twice under two names. The rules, as vLLM 0.26 has them:

- `max_num_batched_tokens >= max_num_seqs` (config/scheduler.py, SchedulerConfig.verify_max_model_len).
  No more sequences than the budget has tokens can run in a step, so a larger count says nothing: it is
  lowered. A count the user fixed under engine_args stays, and the budget is raised to it.
- With chunked prefill off, `max_num_batched_tokens >= max_model_len` (same place): the budget is raised.
- A `long_prefill_token_threshold` at or above the budget never bites (v1/core/sched/scheduler.py takes
  the smaller of the two), nor does one of a whole prompt's length; 0.32 refuses one above max_model_len.
  Such a threshold is "off": the argument is not given.
"""

from collections.abc import Mapping

import numpy as np
import optuna
from optuna.trial import BaseTrial

from tuner.dimensions import Choice, Dimension, FloatRange, Fraction, IntRange
from tuner.serving import Json, ServingConfig, Topology
from tuner.spec import StudySpec

BUDGET = "max_num_batched_tokens"
SEQS = "max_num_seqs"
THRESHOLD = "long_prefill_token_threshold"
CHUNKED = "enable_chunked_prefill"
GRID = 2  # points per octave of a log range of tokens: 512, 768, 1024, ...

Values = dict[str, Json]


def suggest(trial: BaseTrial, spec: StudySpec) -> tuple[Topology, Values]:
    """Ask the trial for a topology and a value of every dimension that applies."""
    topology = spec.topologies[0]
    if len(spec.topologies) > 1:
        topology = Topology.parse(trial.suggest_categorical("topology", [str(t) for t in spec.topologies]))
    values: Values = {}
    for name, dimension in sorted(spec.search_space.items(), key=lambda item: isinstance(item[1], Fraction)):
        values[name] = _suggest(trial, name, dimension, values, spec)
    return topology, values


def _suggest(trial: BaseTrial, name: str, dimension: Dimension, values: Values, spec: StudySpec) -> Json:
    match dimension:
        case IntRange():
            drawn = trial.suggest_int(name, dimension.low, dimension.high, step=dimension.step, log=dimension.log)
            return _snap(name, dimension, drawn)
        case FloatRange():
            return trial.suggest_float(name, dimension.low, dimension.high, log=dimension.log)
        case Choice():
            return trial.suggest_categorical(name, list(dimension.values))
        case Fraction():
            if dimension.off and trial.suggest_categorical(f"{name}.is_on", [False, True]) is False:
                return None
            share = trial.suggest_float(f"{name}.fraction", dimension.low, dimension.high, log=True)
            whole = values.get(dimension.fraction_of, spec.engine_args.get(dimension.fraction_of))
            return {"fraction": share} if whole is None else _share(share, whole)
    raise TypeError(dimension)


def _share(share: float, whole: Json) -> int:
    """Return that share of a token count, in steps of 16 (vLLM's smallest block) where it is large enough."""
    tokens = share * float(whole)  # type: ignore[arg-type]
    return max(16, round(tokens / 16) * 16) if tokens >= 16 else max(1, round(tokens))


def grid_points(low: int, high: int, per_octave: int) -> list[int]:
    """Return the points of a log grid between two bounds, both included: 128, 192, 256, 384, ..."""
    points = {low, high}
    for octave in range(low.bit_length() + high.bit_length() + 1):
        base = 1 << octave
        points |= {base + base * i // per_octave for i in range(per_octave)}
    return sorted(p for p in points if low <= p <= high)


def _snap(name: str, dimension: IntRange, value: int) -> int:
    per_octave = dimension.grid if dimension.grid is not None else (GRID if name == BUDGET else 0)
    if not dimension.log or not per_octave:
        return value
    points = np.array(grid_points(dimension.low, dimension.high, per_octave))
    return int(points[np.argmin(np.abs(np.log(points) - np.log(value)))])


def resolve(topology: Topology, values: Mapping[str, Json], spec: StudySpec, host: Mapping[str, Json]) -> ServingConfig:
    """Return the configuration in its canonical form.

    Args:
        topology: as suggested.
        values: engine arguments as suggested; None is "not given".
        spec: gives the fixed arguments, model, command and environment.
        host: what vLLM resolves its defaults to on this host; may lack names.
    """
    args: Values = dict(spec.engine_args) | dict(values)
    _settle_budget(args, spec, host)
    _settle_threshold(args, host)
    return ServingConfig(model=spec.model, args=args, env=spec.env, topology=topology, command=spec.vllm.command)


def default_config(spec: StudySpec) -> ServingConfig:
    """Return vLLM's own default: the study's fixed arguments and nothing that the study varies."""
    return resolve(spec.topologies[0], {}, spec, {})


def _settle_budget(args: Values, spec: StudySpec, host: Mapping[str, Json]) -> None:
    budget = args.get(BUDGET)
    if not isinstance(budget, int):
        return
    model_len = args.get("max_model_len", host.get("max_model_len"))
    if args.get(CHUNKED) is False and isinstance(model_len, int):
        budget = max(budget, model_len)
    seqs = args.get(SEQS, host.get(SEQS))
    if isinstance(seqs, int) and seqs > budget:
        if SEQS in spec.engine_args:
            budget = seqs
        else:
            args[SEQS] = budget
    args[BUDGET] = budget


def _settle_threshold(args: Values, host: Mapping[str, Json]) -> None:
    threshold = args.get(THRESHOLD)
    budget = args.get(BUDGET, host.get(BUDGET))
    if isinstance(threshold, dict):
        threshold = _share(float(threshold["fraction"]), budget) if isinstance(budget, int) else None  # type: ignore[arg-type]
        args[THRESHOLD] = threshold
    model_len = args.get("max_model_len", host.get("max_model_len"))
    ceilings = [c for c in (budget, model_len) if isinstance(c, int)]
    if threshold == 0 or (isinstance(threshold, int) and any(threshold >= c for c in ceilings)):
        args[THRESHOLD] = None


def identity(config: ServingConfig, host: Mapping[str, Json]) -> str:
    """Return a key equal for configurations that make vLLM do the same on this host.

    An argument given its default value is the same as one not given.
    """
    args = {name: value for name, value in config.args.items() if name not in host or host[name] != value}
    return ServingConfig(config.model, args, config.env, config.topology, config.role_args, config.command).key


def parameters_of(config: ServingConfig, spec: StudySpec, host: Mapping[str, Json]) -> dict[str, Json] | None:
    """Return the Optuna parameters that suggest this configuration, or None when it lies outside the space."""
    effective = dict(host) | dict(config.args)
    params: dict[str, Json] = {}
    if len(spec.topologies) > 1:
        params["topology"] = str(config.topology)
    for name, dimension in spec.search_space.items():
        found = _parameter(name, dimension, effective)
        if found is None:
            return None
        params |= found
    topology, values = suggest(optuna.trial.FixedTrial(dict(params)), spec)
    return params if identity(resolve(topology, values, spec, host), host) == identity(config, host) else None


def _parameter(name: str, dimension: Dimension, effective: Mapping[str, Json]) -> dict[str, Json] | None:
    value = effective.get(name)
    match dimension:
        case IntRange() | FloatRange():
            inside = isinstance(value, int | float) and dimension.low <= value <= dimension.high
            return {name: value} if inside else None
        case Choice():
            return {name: value} if value in dimension.values else None
        case Fraction():
            if value in (None, 0):
                return {f"{name}.is_on": False} if dimension.off else None
            whole = effective.get(dimension.fraction_of)
            if not isinstance(value, int) or not isinstance(whole, int):
                return None
            share = value / whole
            on: dict[str, Json] = {f"{name}.is_on": True} if dimension.off else {}
            return on | {f"{name}.fraction": share} if dimension.low <= share <= dimension.high else None
    return None


def draw(spec: StudySpec, rng: np.random.Generator) -> dict[str, Json]:
    """Return the Optuna parameters of a random point of the space."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=int(rng.integers(1 << 31))))
    trial = study.ask()
    suggest(trial, spec)
    return dict(trial.params)


def describe(spec: StudySpec) -> list[str]:
    """Return a line a dimension, in words."""
    lines = []
    for name, dimension in spec.search_space.items():
        match dimension:
            case IntRange():
                per_octave = dimension.grid if dimension.grid is not None else (GRID if name == BUDGET else 0)
                scale = f", log scale, {per_octave} points per octave" if dimension.log and per_octave else (
                    ", log scale" if dimension.log else "")  # fmt: skip
                lines.append(f"{name}: {dimension.low} to {dimension.high}{scale}")
            case FloatRange():
                lines.append(f"{name}: {dimension.low:g} to {dimension.high:g}{', log scale' if dimension.log else ''}")
            case Choice():
                lines.append(f"{name}: one of {', '.join(str(v) for v in dimension.values)}")
            case Fraction():
                off = "off, or " if dimension.off else ""
                lines.append(
                    f"{name}: {off}{dimension.low:g} to {dimension.high:g} of {dimension.fraction_of}, log scale"
                )
    if len(spec.topologies) > 1:
        lines.append(f"topology: one of {', '.join(str(t) for t in spec.topologies)}")
    return lines
