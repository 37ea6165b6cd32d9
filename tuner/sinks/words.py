"""The words in which a trial, a metric and an SLO are named for people.

Names from outside (arguments, messages) are data: control characters are dropped.
"""

import html
import json
import re

from tuner import units
from tuner.results import TrialResult, told_apart
from tuner.serving import Json
from tuner.slo import Slo

NAMES = {
    "ttft": "TTFT",
    "ttft_from_send": "TTFT from send",
    "itl": "ITL",
    "icl": "ICL",
    "tpot": "TPOT",
    "e2el": "E2EL",
    "max_stall": "longest stall",
    "itl_first_gap": "second token gap",
    "kv_transfer_time": "KV transfer time",
    "kv_transfer_bytes": "KV transfer bytes",
    "kv_transfer_share": "KV transfer share",
    "slo_attainment": "SLO attainment",
}
LONGEST_VALUE = 60


def metric_name(key: str) -> str:
    """Return a metric's name as a person reads it: "ttft_p50.long" becomes "TTFT p50 long"."""
    stem, _, scope = key.partition(".")
    family = units.family(key)
    statistic = stem.removeprefix(family).lstrip("_").replace("_", ".")
    words = [NAMES.get(family, family.replace("_", " ")), statistic, scope]
    return plain(" ".join(word for word in words if word))


def plain(text: object) -> str:
    """Return text from outside on one line, without characters that a terminal or a page obeys."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()


def markdown(text: object) -> str:
    """Return text from outside so that Markdown and HTML show it as it is."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", html.escape(plain(text), quote=False))


def describe_slo(slo: Slo) -> str:
    """Return an SLO as a person reads it: "ttft_p95 <= 500 ms", "itl_p99 <= 133 ms (0.33x)"."""
    if slo.limit is None:
        return f"{slo.metric} = {slo.describe_limit()}"
    relative = "" if slo.relative is None else f" ({slo.relative:g}x)"
    return f"{slo.metric} {'>=' if slo.is_lower_bound else '<='} {slo.describe_limit()}{relative}"


def configuration(result: TrialResult, default: TrialResult | None) -> str:
    """Return the arguments in which a trial differs from the default: "max_num_batched_tokens 256"."""
    return configuration_of(told_apart(result.config, default))


def configuration_of(changed: dict[str, Json]) -> str:
    """Return differences from the default as words."""
    words = [f"{name} not given" if value is None else f"{name} {_short(value)}" for name, value in changed.items()]
    return plain(", ".join(words)) or "the default's arguments"


def _short(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def percent(share: float) -> str:
    """Return a share as "24 %", "3.1 %", or from ten times on as "88 times"."""
    if share >= 10:
        return f"{share:,.0f} times"
    return f"{share:.0%}".replace("%", " %") if share >= 0.095 else f"{share:.1%}".replace("%", " %")


def change(value: float, base: float) -> str:
    """Return a relative change as a person reads it: "-74 %", "+27 %", "unchanged"."""
    share = value / base - 1
    return "unchanged" if abs(share) < 0.005 else f"{share:+.0%}".replace("%", " %")


def slo_state(slo: Slo, result: TrialResult) -> str:
    """Return how a trial stands to an SLO: "met", "missed by 24 %", "not measured", "" for a failed trial."""
    if not result.is_measured:
        return ""
    excess = result.excess.get(slo.metric, slo.excess(result.metrics))
    if excess is None:
        return "not measured"
    return "met" if excess <= 0 else f"missed by {percent(excess)}"
