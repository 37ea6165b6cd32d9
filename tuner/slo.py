"""Service level objectives: one grammar with three uses: constraint, verdict and per-request test.

ttft=500ms  itl_p99<=50ms  ttft_p90.long=0.8s  itl_p99=0.33x  attainment=0.99  request_throughput=2/s
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tuner import units
from tuner.errors import SpecError

LATENCIES = ("ttft", "itl", "icl", "tpot", "e2el", "max_stall")
RATES = ("request_throughput", "output_throughput", "request_goodput")
SHARES = ("slo_attainment",)
DEFAULT_STATISTIC = "p99"

_SLO = re.compile(r"(?P<name>[a-z][a-z0-9_]*)(?:\.(?P<scope>[A-Za-z][\w-]*))?\s*(?P<op><=|>=|==|=|<|>)\s*(?P<limit>.+)")
_STATISTIC = re.compile(r"p\d{1,2}(?:_\d+)?|mean|max")


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit on one metric, such as ttft_p99 at most 0.5 s.

    Attributes:
        metric: the metric's key, class included: "ttft_p90.long".
        limit: in seconds, per second or as a share; None while it is still relative.
        relative: the limit as a multiple of what the default measured, or None.
        text: as the user wrote it.
    """

    metric: str
    limit: float | None
    relative: float | None = None
    text: str = ""

    @property
    def is_lower_bound(self) -> bool:
        """Direction belongs to the metric: latency at most, share and rate at least."""
        return not units.is_duration(self.metric)

    def against(self, default: Mapping[str, float]) -> "Slo":
        """Return this SLO with its limit in numbers, given what the default measured."""
        if self.relative is None or self.metric not in default:
            return self
        return replace(self, limit=self.relative * default[self.metric])

    def excess(self, metrics: Mapping[str, float]) -> float | None:
        """Return the relative distance beyond the limit: zero or less is met, None is not measurable."""
        if self.limit is None or self.metric not in metrics:
            return None
        distance = (metrics[self.metric] - self.limit) / self.limit
        return -distance if self.is_lower_bound else distance

    def describe_limit(self) -> str:
        """Return the limit as a person reads it."""
        if self.limit is None:
            return f"{self.relative:g}x of the default"
        return describe(self.metric, self.limit)


def describe(metric: str, value: float) -> str:
    """Return a metric's value with its unit: "61.3 ms", "97.2 %", "1.84/s"."""
    if units.is_duration(metric):
        return units.format_ms(value)
    if units.family(metric) in SHARES:
        return f"{value:.1%}".replace("%", " %")
    return f"{value:.3g}/s"


def parse(text: str, *, classes: Iterable[str] = ("short", "long")) -> Slo:
    """Return the SLO a user wrote.

    Raises:
        SpecError: not an SLO; the message shows the right spelling.
    """
    match = _SLO.fullmatch(text.strip())
    if match is None:
        raise _wrong(text, "an SLO is METRIC=LIMIT", "write for example ttft=500ms or itl_p99=50ms")
    name, scope, limit = match["name"], match["scope"], match["limit"].strip()
    metric = _metric(text, name)
    if scope is not None:
        if not units.is_duration(metric):
            raise _wrong(text, f"{metric} has no classes", f"leave out .{scope}")
        if scope not in set(classes):
            raise _wrong(text, f"no class {scope!r}", f"the classes are: {', '.join(classes)}")
        metric = f"{metric}.{scope}"
    slo = _limit(text, metric, limit)
    if (match["op"] in {">=", ">"}) != slo.is_lower_bound and match["op"] not in {"=", "=="}:
        right = ">=" if slo.is_lower_bound else "<="
        raise _wrong(text, f"{metric} is a limit from the other side", f"write {metric}{right}{limit}")
    return slo


def _metric(text: str, name: str) -> str:
    if name in {"attainment", "slo_attainment"}:
        return "slo_attainment"
    if name in {"goodput", "request_goodput"}:
        return "request_goodput"
    if name in RATES:
        return name
    if name in LATENCIES:
        return f"{name}_{DEFAULT_STATISTIC}"
    stem, _, statistic = name.rpartition("_")
    if name.endswith("_" + statistic) and re.search(r"_p\d+_\d+$", name):
        stem, _, statistic = name.partition("_p")
        statistic = "p" + statistic
    if stem in LATENCIES and _STATISTIC.fullmatch(statistic) and statistic != "p0":
        return name
    if stem in LATENCIES:
        raise _wrong(
            text, f"{statistic!r} is not a statistic", f"write {stem}_p99, {stem}_p95, {stem}_p50 or {stem}_mean"
        )
    known = [*LATENCIES, *RATES, "attainment"]
    close = difflib.get_close_matches(name.split("_", maxsplit=1)[0], known, n=1) or difflib.get_close_matches(
        name, known, n=1
    )
    hint = f"did you mean {close[0]!r}?" if close else f"the metrics are: {', '.join(known)}"
    raise _wrong(text, f"unknown metric {name!r}", hint)


def _limit(text: str, metric: str, limit: str) -> Slo:
    if match := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*x", limit):
        return _positive(text, Slo(metric, None, float(match[1]), text))
    if units.is_duration(metric):
        return _positive(text, Slo(metric, _duration(text, metric, limit), None, text))
    if units.family(metric) in SHARES:
        return _share(text, metric, limit)
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*/\s*s", limit)
    if match is None:
        raise _wrong(text, f"{limit!r} is not a rate", f"write {metric}=2/s")
    return _positive(text, Slo(metric, float(match[1]), None, text))


def _duration(text: str, metric: str, limit: str) -> float:
    try:
        return units.parse_duration(limit)
    except ValueError:
        if re.fullmatch(r"\d+(?:\.\d*)?|\.\d+", limit):
            raise _wrong(text, f"{limit} of what?", f"write {metric}={limit}ms or {metric}={limit}s") from None
        raise _wrong(text, f"{limit!r} is not a duration", f"write for example {metric}=500ms") from None


def _share(text: str, metric: str, limit: str) -> Slo:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", limit)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 < share <= 1:
        raise _wrong(text, f"{limit!r} is not a share", "write attainment=0.99 or attainment=99%")
    return Slo(metric, share, None, text)


def _positive(text: str, slo: Slo) -> Slo:
    if not (slo.limit or slo.relative):
        raise _wrong(text, "a limit must be above zero", "write for example ttft=500ms")
    return slo


def _wrong(text: str, what: str, hint: str) -> SpecError:
    return SpecError(f"--slo {text}: {what}", hint=hint)
