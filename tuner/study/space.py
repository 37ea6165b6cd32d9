"""From a search space to a configuration vLLM accepts: suggest, then settle.

What is asked for, in this order (a conditional space; split like this it loses least to a narrow prior):

- `topology`: each aggregated topology by its name, and "pd" for all others together, or the name of the only other
  one. Not asked for when there is one answer.
- `pd_ratio`: which of several PD topologies, under "pd".
- The dimensions that apply. `prefiller.NAME` and `decoder.NAME` apply under PD only and go before NAME; NAME goes to
  every server without a role's own, and is not asked for under PD when both roles have one. A fraction is one of the
  role's value, else of the shared one.
- `kv_buffer_device`, under PD, when the study lists several.

vLLM refuses some combinations and ignores others. Both are settled here, server by server under PD, so that no trial
is lost to a rule that is known and no point is measured twice under two names. The rules, as vLLM 0.26 has them:

- `max_num_batched_tokens >= max_num_seqs` (config/scheduler.py, SchedulerConfig.verify_max_model_len).
  No more sequences than the budget has tokens can run in a step, so a larger count says nothing: it is
  lowered. A count the user fixed under engine_args stays, and the budget is raised to it.
- With chunked prefill off, `max_num_batched_tokens >= max_model_len` (same place): the budget is raised.
- A `long_prefill_token_threshold` at or above the budget never bites (v1/core/sched/scheduler.py takes
  the smaller of the two), nor does one of a whole prompt's length; 0.32 refuses one above max_model_len.
  Such a threshold is "off": the argument is not given.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import optuna
from optuna.trial import BaseTrial

from tuner import topologies as groups
from tuner.dimensions import Choice, Dimension, FloatRange, Fraction, IntRange
from tuner.serving import Json, Role, ServingConfig, Topology
from tuner.spec import StudySpec

PD = "pd"
BUDGET = "max_num_batched_tokens"
SEQS = "max_num_seqs"
THRESHOLD = "long_prefill_token_threshold"
CHUNKED = "enable_chunked_prefill"
GRID = 2  # points per octave of a log range of tokens: 512, 768, 1024, ...

Values = dict[str, Json]


def suggest(trial: BaseTrial, spec: StudySpec) -> tuple[Topology, Values]:
    """Ask the trial for a topology and a value of every dimension that applies."""
    topology = _suggest_topology(trial, spec)
    values: Values = {name: _suggest(trial, name, dimension) for name, dimension in applying(spec, topology).items()}
    if topology.is_pd and (devices := _devices(spec)):
        values[groups.DEVICE] = trial.suggest_categorical(groups.DEVICE, devices)
    return topology, values


def _suggest_topology(trial: BaseTrial, spec: StudySpec) -> Topology:
    kinds, ratios = _kinds(spec), _ratios(spec)
    kind = trial.suggest_categorical("topology", kinds) if len(kinds) > 1 else kinds[0]
    return Topology.parse(trial.suggest_categorical("pd_ratio", ratios) if kind == PD else kind)


def _ratios(spec: StudySpec) -> list[str]:
    return [str(t) for t in spec.topologies if t.is_pd]


def _kinds(spec: StudySpec) -> list[str]:
    several = len(_ratios(spec)) > 1
    return list(dict.fromkeys(PD if t.is_pd and several else str(t) for t in spec.topologies))


def _devices(spec: StudySpec) -> list[str]:
    """Return the devices to choose from; none when the study does not leave a choice."""
    listed = (spec.kv_transfer_config or {}).get(groups.DEVICE)
    return [str(device) for device in listed] if isinstance(listed, list) else []


def applying(spec: StudySpec, topology: Topology) -> dict[str, Dimension]:
    """Return the dimensions that say something of this topology, fractions of others last."""
    given = groups.by_role(spec.engine_args | dict.fromkeys(spec.search_space))
    both = set(given[Role.PREFILLER]) & set(given[Role.DECODER])
    shared = {name for name in spec.search_space if groups.split(name)[0] is Role.ANY}
    names = set(spec.search_space) - both if topology.is_pd else shared
    found = [(name, dimension) for name, dimension in spec.search_space.items() if name in names]
    return dict(sorted(found, key=lambda item: isinstance(item[1], Fraction)))


def _suggest(trial: BaseTrial, name: str, dimension: Dimension) -> Json:
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
            return {"fraction": share, "of": dimension.fraction_of}
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


def _per_octave(name: str, dimension: IntRange) -> int:
    return dimension.grid if dimension.grid is not None else (GRID if groups.split(name)[1] == BUDGET else 0)


def _snap(name: str, dimension: IntRange, value: int) -> int:
    per_octave = _per_octave(name, dimension)
    if not dimension.log or not per_octave:
        return value
    points = np.array(grid_points(dimension.low, dimension.high, per_octave))
    return int(points[np.argmin(np.abs(np.log(points) - np.log(value)))])


def resolve(topology: Topology, values: Mapping[str, Json], spec: StudySpec, host: Mapping[str, Json]) -> ServingConfig:
    """Return the configuration in its canonical form: what all roles are given alike is shared.

    Args:
        topology: as suggested.
        values: engine arguments as suggested, a role's with its prefix; None is "not given".
        spec: gives the fixed arguments, model, command, environment and front.
        host: what vLLM resolves its defaults to on this host; may lack names.
    """
    drawn = dict(values)
    device = drawn.pop(groups.DEVICE, None)
    settled = {role: _settle(_given(role, drawn, spec), _fixed(role, spec), host) for role in topology.roles}
    if topology.is_pd:
        for role, args in settled.items():
            args[groups.KV] = groups.kv_transfer_of(role, spec.kv_transfer_config or {}, device)
    shared, own = _parted(settled)
    return ServingConfig(
        model=spec.model, args=shared, env=spec.env, topology=topology, role_args=own, command=spec.vllm.command,
        front=spec.router,
    )  # fmt: skip


def _given(role: Role, drawn: Mapping[str, Json], spec: StudySpec) -> Values:
    """Return the arguments of a role's servers: fixed before drawn, shared before its own; the later one counts."""
    fixed, found = groups.by_role(spec.engine_args), groups.by_role(drawn)
    shared = fixed[Role.ANY] | found[Role.ANY]
    return shared if role is Role.ANY else shared | fixed[role] | found[role]


def _fixed(role: Role, spec: StudySpec) -> set[str]:
    """Return the names of a role's arguments that the user fixed."""
    fixed, searched = groups.by_role(spec.engine_args), groups.by_role(dict.fromkeys(spec.search_space))
    shared = set(fixed[Role.ANY])
    return shared if role is Role.ANY else (shared - set(searched[role])) | set(fixed[role])


def _parted(settled: Mapping[Role, Values]) -> tuple[Values, dict[Role, Values]]:
    """Return what all roles are given alike, and what else each is given."""
    if set(settled) == {Role.ANY}:
        return dict(settled[Role.ANY]), {}
    first, *others = settled.values()
    shared = {n: v for n, v in first.items() if all(n in args and _same(args[n], v) for args in others)}
    return shared, {role: {n: v for n, v in args.items() if n not in shared} for role, args in settled.items()}


def _same(one: Json, other: Json) -> bool:
    return type(one) is type(other) and one == other


def default_config(spec: StudySpec) -> ServingConfig:
    """Return vLLM's own default: the study's fixed arguments and nothing that the study varies.

    Of several topologies it is the first aggregated one, which is what an operator has before PD, else the first.
    """
    topology = next((t for t in spec.topologies if not t.is_pd), spec.topologies[0])
    return resolve(topology, {}, spec, {})


def _settle(args: Values, fixed: Collection[str], host: Mapping[str, Json]) -> Values:
    """Settle the arguments of one server."""
    args = dict(args)
    for name in [name for name in args if name != THRESHOLD]:
        _settle_fraction(args, name, host)
    _settle_budget(args, fixed, host)
    _settle_fraction(args, THRESHOLD, host)
    _settle_threshold(args, host)
    return args


def _settle_fraction(args: Values, name: str, host: Mapping[str, Json]) -> None:
    """Turn a share into a number; of what is not known it is no number, and the argument is not given."""
    share = args.get(name)
    if not isinstance(share, dict) or set(share) != {"fraction", "of"}:
        return
    whole = args.get(str(share["of"]), host.get(str(share["of"])))
    args[name] = _share(float(share["fraction"]), whole) if isinstance(whole, int | float) else None  # type: ignore[arg-type]


def _settle_budget(args: Values, fixed: Collection[str], host: Mapping[str, Json]) -> None:
    budget = args.get(BUDGET)
    if not isinstance(budget, int):
        return
    model_len = args.get("max_model_len", host.get("max_model_len"))
    if args.get(CHUNKED) is False and isinstance(model_len, int):
        budget = max(budget, model_len)
    seqs = args.get(SEQS, host.get(SEQS))
    if isinstance(seqs, int) and seqs > budget:
        if SEQS in fixed:
            budget = seqs
        else:
            args[SEQS] = budget
    args[BUDGET] = budget


def _settle_threshold(args: Values, host: Mapping[str, Json]) -> None:
    threshold = args.get(THRESHOLD)
    budget = args.get(BUDGET, host.get(BUDGET))
    model_len = args.get("max_model_len", host.get("max_model_len"))
    ceilings = [c for c in (budget, model_len) if isinstance(c, int)]
    if threshold == 0 or (isinstance(threshold, int) and any(threshold >= c for c in ceilings)):
        args[THRESHOLD] = None


def identity(config: ServingConfig, host: Mapping[str, Json]) -> str:
    """Return a key equal for configurations that make vLLM do the same on this host.

    An argument given its default value is the same as one not given, and a role's own is the same as a shared one.
    """
    effective = {
        role: {n: v for n, v in config.for_role(role).items() if n not in host or host[n] != v}
        for role in config.topology.roles
    }
    return replace(config, args={}, role_args=effective).key


def effective(config: ServingConfig, host: Mapping[str, Json]) -> dict[str, Json]:
    """Return what the engines run with, as far as it is known; where roles differ, under the role's prefix."""
    known = {role: dict(host) | config.for_role(role) for role in config.topology.roles}
    shared, own = _parted({role: {n: v for n, v in args.items() if n != groups.KV} for role, args in known.items()})
    return shared | {f"{role}.{name}": value for role, args in own.items() for name, value in args.items()}


def parameters_of(config: ServingConfig, spec: StudySpec, host: Mapping[str, Json]) -> dict[str, Json] | None:
    """Return the Optuna parameters that suggest this configuration, or None when it lies outside the space."""
    if config.topology not in spec.topologies:
        return None
    params = topology_parameters(config.topology, spec)
    own = groups.by_role(spec.engine_args | dict.fromkeys(spec.search_space))
    for name, dimension in applying(spec, config.topology).items():
        role, bare = groups.split(name)
        roles = config.topology.roles if role is Role.ANY else (role,)
        speaking = next(r for r in roles if role is not Role.ANY or r is Role.ANY or bare not in own[r])
        found = _parameter(name, bare, dimension, dict(host) | config.for_role(speaking))
        if found is None:
            return None
        params |= found
    if config.topology.is_pd and _devices(spec):
        transfer = config.for_role(Role.DECODER).get(groups.KV)
        params[groups.DEVICE] = transfer.get(groups.DEVICE) if isinstance(transfer, dict) else None
        if params[groups.DEVICE] not in _devices(spec):
            return None
    topology, values = suggest(optuna.trial.FixedTrial(dict(params)), spec)
    return params if identity(resolve(topology, values, spec, host), host) == identity(config, host) else None


def topology_parameters(topology: Topology, spec: StudySpec) -> dict[str, Json]:
    """Return the Optuna parameters that name a topology."""
    kinds, name = _kinds(spec), str(topology)
    params: dict[str, Json] = {} if name in kinds else {"pd_ratio": name}
    return ({"topology": name if name in kinds else PD} if len(kinds) > 1 else {}) | params


def _parameter(name: str, bare: str, dimension: Dimension, effective: Mapping[str, Json]) -> dict[str, Json] | None:
    value = effective.get(bare)
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
                per_octave = _per_octave(name, dimension)
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
    return [*_describe_topologies(spec), *lines]


def _describe_topologies(spec: StudySpec) -> list[str]:
    kinds, ratios, devices = _kinds(spec), _ratios(spec), _devices(spec)
    lines = [f"topology: one of {', '.join(kinds)}"] if len(kinds) > 1 else []
    under = f", where topology is {PD}" if len(kinds) > 1 else ""
    lines += [f"pd_ratio: one of {', '.join(ratios)}{under}"] if len(ratios) > 1 else []
    under = ", where prefill and decode are apart" if len(kinds) > 1 else ""
    return lines + ([f"{groups.DEVICE}: one of {', '.join(devices)}{under}"] if devices else [])
