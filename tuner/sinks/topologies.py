"""The best of each topology side by side, and whether prefill on servers of its own (PD) pays here, and why.

Everything here is pure: a spec and results in, rows and sentences out. Every number in them was measured, and
each comparison is at equal GPUs: more of them would be faster in any arrangement. PD may lose.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tuner import slo as slos
from tuner.metrics import Metrics
from tuner.results import (
    NOISE,
    TrialResult,
    closest,
    default_of,
    differences,
    feasible,
    flat,
    front,
    knee,
    limits,
    recommend,
)
from tuner.serving import Topology
from tuner.sinks.words import change, configuration_of, metric_name, percent, slo_state
from tuner.slo import Slo
from tuner.spec import StudySpec
from tuner.units import format_ms

TAILS = ("itl_p99", "itl_p95", "itl_p90")
TRANSFER, SHARE = "kv_transfer_time_mean", "kv_transfer_share"
SECOND_TOKEN = ("itl_first_gap_mean", "itl_first_gap_p50")
UNCOUNTED = {"topology", "kv_buffer_device"}
DIFFERENCES = "differs from the default by"


class Outcome(StrEnum):
    """How the best PD trial stands to the best aggregated one, as the sentence begins."""

    BETTER = "PD pays here"
    WORSE = "PD does not pay here"
    TRADE = "PD is a trade here"
    SAME = "PD makes no difference beyond noise here"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a topology reached.

    Attributes:
        size: the GPUs it takes; its servers where these share a machine; None while it was not tried.
        best: the trial to serve with, else the closest to the SLO; None without numbers.
        n_measured: how many trials have numbers.
        failures: the kinds of failure, each with its count.
    """

    topology: Topology
    size: int | None
    best: TrialResult | None
    n_measured: int
    failures: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best of each topology as text: a heading, column names, and a row of cells for each."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """Return it for a terminal or a pipe, columns under each other."""
        grid = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        padded = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in grid]
        return [self.heading, *(f"  {line}".rstrip() for line in padded)]


def topologies_of(spec: StudySpec, results: Iterable[TrialResult]) -> list[Topology]:
    """Return the topologies of a study: those to be tried in their order, then others, such as a baseline's."""
    return list(dict.fromkeys([*spec.topologies, *(r.config.topology for r in results)]))


def shared(spec: StudySpec, results: Iterable[TrialResult]) -> str | None:
    """Return what the servers of a group shared, None where each had GPUs of its own."""
    if any(is_on_cpu(r) for r in results):
        return "one machine's cores"
    return "GPUs of one machine" if spec.share_devices else None


def n_gpus(result: TrialResult, *, share_devices: bool) -> int:
    """Return how many GPUs a trial took: none on a CPU, those of the largest server where all share them."""
    config = result.config
    if is_on_cpu(result):
        return 0
    return max(map(config.gpus_per_server, config.topology.roles)) if share_devices else config.n_gpus


def is_on_cpu(result: TrialResult) -> bool:
    """Return whether a trial ran without GPUs: builds for CPUs say so in their version or read VLLM_CPU_*."""
    return "cpu" in (result.vllm_version or "") or any(name.startswith("VLLM_CPU_") for name in result.config.env)


def _size(result: TrialResult, common: str | None) -> int:
    return result.config.topology.n_servers if common else result.config.n_gpus


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _at(size: int, common: str | None) -> str:
    return f"with {_many(size, 'server')} on one machine" if common else f"at {_many(size, 'GPU')}"


def best_of(results: Sequence[TrialResult], x: str, y: str) -> TrialResult | None:
    """Return the trial that stands for some: the one to serve with, else the closest to the SLO, else the knee."""
    return recommend(results, x, y) or closest(results) or knee(front(results, x, y), x, y)


def standings(spec: StudySpec, results: Sequence[TrialResult]) -> list[Standing]:
    """Return what each topology reached, in the order of the study."""
    own = [r for r in results if r.same_as is None]
    common = shared(spec, own)
    found = []
    for topology in topologies_of(spec, own):
        some = [r for r in own if r.config.topology == topology]
        best = best_of(some, *spec.objective_metrics)
        size = _size(best or some[0], common) if some else None
        found.append(Standing(topology, size, best, sum(r.is_measured for r in some), _kinds(some)))
    return found


def _kinds(results: Iterable[TrialResult]) -> str:
    kinds = Counter(str(r.failure.kind) for r in results if r.failure is not None)
    return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())


def compared(spec: StudySpec, results: Sequence[TrialResult]) -> Comparison | None:
    """Return the best of each topology; None for a study of one, and before there are results."""
    own = [r for r in results if r.same_as is None]
    if not own or len(topologies_of(spec, own)) < 2:
        return None
    common, found = shared(spec, own), standings(spec, own)
    sizes = {s.size for s in found if s.size is not None}
    unit = "servers" if common else "GPUs"
    given = {unit} if len(sizes) > 1 else set()
    given |= ({"SLO"} if spec.slo else set()) | ({"KV transfer"} if any(s.topology.is_pd for s in found) else set())
    every = (
        "topology",
        unit,
        "trials",
        "best",
        *map(metric_name, spec.objective_metrics),
        "SLO",
        "KV transfer",
        DIFFERENCES,
    )
    columns = tuple(name for name in every if name not in {unit, "SLO", "KV transfer"} or name in given)
    heading = f"Best of each topology{'' if len(sizes) > 1 else ' ' + _at(min(sizes), common)}:"
    cells = [_cells(s, spec, own) | {unit: "" if s.size is None else str(s.size)} for s in found]
    return Comparison(heading, columns, tuple(tuple(row.get(name, "") for name in columns) for row in cells))


def _cells(standing: Standing, spec: StudySpec, own: Sequence[TrialResult]) -> dict[str, str]:
    """Return a row by the names of its columns."""
    best, topology = standing.best, standing.topology
    if best is None:
        failed = f"failed: {standing.failures}" if standing.failures else ""
        return {
            "topology": str(topology),
            "trials": "0",
            "best": "-",
            DIFFERENCES: failed or ("not tried" if standing.size is None else "not measured"),
        }
    changed = differences(best.config, default_of(own))
    transfer = format_ms(best.metrics[TRANSFER]) if TRANSFER in best.metrics else "not measured"
    return {
        "topology": str(topology),
        "trials": str(standing.n_measured),
        "best": f"trial {best.number}",
        **{
            metric_name(key): slos.describe(key, best.metrics[key]) if key in best.metrics else "not measured"
            for key in spec.objective_metrics
        },
        "SLO": "; ".join(_misses(limits(spec.slo, own), best)) or "met",
        "KV transfer": transfer if topology.is_pd else "",
        DIFFERENCES: configuration_of({name: value for name, value in changed.items() if name != "topology"}),
    }


def _misses(asked: Iterable[Slo], result: TrialResult) -> list[str]:
    states = [(slo.metric, slo_state(slo, result)) for slo in asked]
    return [f"{metric} {state}" for metric, state in states if state != "met"]


def pays(spec: StudySpec, results: Sequence[TrialResult]) -> list[str]:
    """Return whether PD pays, a sentence for each number of GPUs at which it was tried; none without PD."""
    own = [r for r in results if r.same_as is None]
    if not any(topology.is_pd for topology in topologies_of(spec, own)):
        return []
    common = shared(spec, own)
    by_size: dict[int, tuple[list[TrialResult], list[TrialResult]]] = {}
    for result in own:
        by_size.setdefault(_size(result, common), ([], []))[result.config.topology.is_pd].append(result)
    tried = {size: sides for size, sides in sorted(by_size.items()) if sides[1]}
    chosen = {size: sides for size, sides in tried.items() if sides[0]} or tried
    if not chosen:
        return ["Whether PD pays here is not known: no PD trial has been run."]
    asked, keys = limits(spec.slo, own), spec.objective_metrics
    return [_sentence(*sides, keys, asked, size=size, common=common) for size, sides in chosen.items()]


def _sentence(
    aggregated: Sequence[TrialResult],
    pd: Sequence[TrialResult],
    keys: tuple[str, str],
    asked: Sequence[Slo],
    *,
    size: int,
    common: str | None,
) -> str:
    where = _at(size, common)
    pair = match(_with_numbers(pd, keys), _with_numbers(aggregated, keys), keys)
    if pair is None:
        absent = [
            _absence(side, name, keys)
            for side, name in ((pd, "PD"), (aggregated, "aggregated"))
            if not _with_numbers(side, keys)
        ]
        return f"Whether PD pays here {where} is not known: {', and '.join(absent)}."
    outcome = judge(*pair, keys)
    trials = " against ".join(
        f"{r.config.topology} (trial {r.number}, {_of(side)})" for r, side in zip(pair, (pd, aggregated), strict=True)
    )
    found = ", ".join([*_promise(asked, *pair), *(_against(key, *pair) for key in reversed(keys))])
    caveat = f"; the servers shared {common}, so this says nothing about separate GPUs" if common else ""
    return f"{outcome} {where}{_trade(outcome, *pair, keys)}, {trials}: {found}; why: {why(*pair, keys)}{caveat}."


def _of(side: Sequence[TrialResult]) -> str:
    """Say how many trials a best one was chosen from: one trial may have been an unlucky one."""
    n = sum(r.is_measured for r in side)
    return "its only one" if n == 1 else f"best of {n}"


def _with_numbers(results: Iterable[TrialResult], keys: tuple[str, str]) -> list[TrialResult]:
    return [r for r in results if r.is_measured and all(r.metrics.get(key, 0) > 0 for key in keys)]


def _absence(side: Sequence[TrialResult], name: str, keys: tuple[str, str]) -> str:
    """Say why a side has nothing to compare."""
    if not side:
        return f"no {name} trial was run"
    failed = [r for r in side if r.failure is not None]
    if len(failed) < len(side):
        measured = [r for r in side if r.failure is None]
        lost = [metric_name(key) for key in keys if not _with_numbers(measured, (key, key))]
        rest = f", {_many(len(failed), 'other')} failed ({_kinds(failed)})" if failed else ""
        return f"{' and '.join(lost or map(metric_name, keys))} could not be measured in any {name} trial{rest}"
    if len(side) == 1:
        return f"the only {name} trial failed ({_kinds(side)})"
    return f"all {len(side)} {name} trials failed ({_kinds(side)})"


def match(
    pd: Sequence[TrialResult], aggregated: Sequence[TrialResult], keys: tuple[str, str]
) -> tuple[TrialResult, TrialResult] | None:
    """Return the PD and the aggregated trial to compare, None when a side has none.

    They are each side's best. Where these trade one objective for the other, it may be only because each side's
    front bends elsewhere: when one side has a trial that beats the other's best, and not the other way round,
    that trial stands for it.
    """
    best, other = best_of(pd, *keys), best_of(aggregated, *keys)
    if best is None or other is None:
        return None
    if judge(best, other, keys) is Outcome.TRADE:
        wins = [r for r in feasible(pd) if judge(r, other, keys) is Outcome.BETTER]
        losses = [r for r in feasible(aggregated) if judge(best, r, keys) is Outcome.WORSE]
        if bool(wins) != bool(losses):
            return best_of(wins, *keys) or best, best_of(losses, *keys) or other
    return best, other


def judge(pd: TrialResult, aggregated: TrialResult, keys: tuple[str, str]) -> Outcome:
    """Return how two measured trials stand: one that meets the SLO beats one that does not, then objectives count."""
    if _is_met(pd) != _is_met(aggregated):
        return Outcome.BETTER if _is_met(pd) else Outcome.WORSE
    signs = {_sign(pd.metrics[key], aggregated.metrics[key]) for key in keys} - {0}
    if len(signs) != 1:
        return Outcome.TRADE if signs else Outcome.SAME
    return Outcome.BETTER if signs == {-1} else Outcome.WORSE


def _is_met(result: TrialResult) -> bool:
    return result.slos_met is not False


def _sign(value: float, base: float) -> int:
    """Return -1 or 1 when a value is below or above another by more than noise, else 0."""
    distance = math.log(max(value, 1e-12)) - math.log(max(base, 1e-12))
    return 0 if abs(distance) <= math.log1p(NOISE) + 1e-12 else int(math.copysign(1, distance))


def _promise(asked: Sequence[Slo], pd: TrialResult, aggregated: TrialResult) -> list[str]:
    if _is_met(pd) and _is_met(aggregated):
        return []
    if _is_met(pd) == _is_met(aggregated):
        return ["neither meets the SLO"]
    met, missed = (pd, aggregated) if _is_met(pd) else (aggregated, pd)
    excesses = [missed.excess.get(slo.metric, math.inf) for slo in asked]
    near = ", within noise" if max(excesses, default=math.inf) <= NOISE else ""
    misses = "; ".join(_misses(asked, missed))
    return [f"{met.config.topology} meets the SLO and {missed.config.topology} does not ({misses}{near})"]


def _against(key: str, pd: TrialResult, aggregated: TrialResult) -> str:
    value, base = pd.metrics[key], aggregated.metrics[key]
    values = " against ".join(slos.describe(key, v) for v in (value, base))
    return f"{metric_name(key)} {change(value, base)} ({values})"


def _trade(outcome: Outcome, pd: TrialResult, aggregated: TrialResult, keys: tuple[str, str]) -> str:
    if outcome is not Outcome.TRADE:
        return ""
    won, lost = sorted(keys, key=lambda key: _sign(pd.metrics[key], aggregated.metrics[key]))
    return f" (better {metric_name(won)}, worse {metric_name(lost)})"


def why(pd: TrialResult, aggregated: TrialResult, keys: tuple[str, str]) -> str:
    """Return what splitting took away from decoding, and what the transfer cost, as far as both were measured."""
    x, y = keys
    tail = y if re.search(r"_p9\d", y) else _common(TAILS, pd.metrics, aggregated.metrics) or y
    ttft = _common(("ttft_mean",), pd.metrics, aggregated.metrics) or x
    parts = [_interference(tail, pd, aggregated), _transfer(ttft, pd, aggregated), *_second_token(pd, aggregated)]
    return ", ".join([*parts, *_what_else(pd, aggregated)])


def _what_else(pd: TrialResult, aggregated: TrialResult) -> list[str]:
    """Name the arguments in which the two differ beside the topology: they have their part in every difference."""
    one, other = flat(pd.config), flat(aggregated.config)
    names = sorted({name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} - UNCOUNTED)
    return [f"and they differ in {', '.join(names)} too"] if names else []


def _common(keys: Iterable[str], one: Metrics, other: Metrics) -> str | None:
    return next((key for key in keys if key in one and key in other), None)


def _interference(tail: str, pd: TrialResult, aggregated: TrialResult) -> str:
    value, base = pd.metrics[tail], aggregated.metrics[tail]
    name, gap = metric_name(tail), format_ms(abs(base - value))
    return {
        -1: f"{name} is {gap} shorter where no prefill runs beside decoding",
        0: f"{name} shows no interference that PD removed",
        1: f"{name} is {gap} longer, although no prefill runs beside decoding",
    }[_sign(value, base)]


def _transfer(ttft: str, pd: TrialResult, aggregated: TrialResult) -> str:
    if TRANSFER not in pd.metrics:
        return "what KV transfer costs was not measured"
    name, cost, share = metric_name(ttft), pd.metrics[TRANSFER], pd.metrics.get(SHARE, 1.0)
    said = f"KV transfer costs {format_ms(cost)} a request"
    said += f" ({percent(share)} of the requests had one)" if share < 0.995 else ""
    sign, rise = _sign(pd.metrics[ttft], aggregated.metrics[ttft]), pd.metrics[ttft] - aggregated.metrics[ttft]
    if sign == 0:
        return f"{said}, which {name} does not show"
    if sign < 0:
        return f"{said}, and yet {name} is {format_ms(-rise)} shorter"
    if cost >= rise:
        return f"{said}, no less than the {format_ms(rise)} that {name} rises by"
    topology = pd.config.topology
    servers = f"{topology.prefillers} of {topology.n_servers} servers prefill"
    return f"{said}, {percent(cost / rise)} of the {format_ms(rise)} that {name} rises by ({servers})"


def _second_token(pd: TrialResult, aggregated: TrialResult) -> list[str]:
    key = _common(SECOND_TOKEN, pd.metrics, aggregated.metrics)
    if key is None or (sign := _sign(pd.metrics[key], aggregated.metrics[key])) == 0:
        return []
    gap = format_ms(abs(pd.metrics[key] - aggregated.metrics[key]))
    then = f"{'later' if sign > 0 else 'sooner'} than with {aggregated.config.topology}"
    return [f"the second token follows the first {gap} {then} ({metric_name(key)})"]
