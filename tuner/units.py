"""The one door between seconds inside and milliseconds outside.

Inside, durations are float seconds without a suffix. In files, MLflow and on the terminal they are
milliseconds, and keys end in `_ms`.
"""

import re
from collections.abc import Mapping

SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
DURATION_METRICS = (
    "ttft",
    "ttft_from_send",
    "itl",
    "icl",
    "tpot",
    "e2el",
    "max_stall",
    "itl_first_gap",
    "send_lag",
    "send_lag_drift",
    "send_gap_error",
    "timer_lag",
    "connect_wait",
    "turn_delay",
    "queue_time",
    "client_cpu_per_token",
    "kv_transfer_time",
    "server_ttft",
    "server_itl",
    "server_e2el",
    "server_queue",
    "server_prefill",
    "client_over_server_ttft",
)

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>us|ms|s|min|m|h)")


def parse_duration(text: str) -> float:
    """Return the seconds in a text such as "500ms", "1.5s" or "20min".

    Raises:
        ValueError: no unit, or not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 500ms or 1.5s")
    return float(match["number"]) * SECONDS_PER_UNIT[match["unit"]]


def format_ms(seconds: float) -> str:
    """Return seconds as text a person reads: "0.42 ms", "61.3 ms", "1,240 ms"."""
    ms = seconds * 1e3
    digits = 2 if ms < 10 else 1 if ms < 100 else 0
    return f"{ms:,.{digits}f} ms"


def format_elapsed(seconds: float) -> str:
    """Return seconds as "42 s", "3 min 05 s" or "2 h 07 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def family(key: str) -> str:
    """Return what a metric key measures: "ttft" of "ttft_p99.long"."""
    stem = key.split(".", 1)[0]
    return re.sub(r"_(p\d+(?:_\d+)?|mean|max|min|std)$", "", stem)


def is_duration(key: str) -> bool:
    """Return whether the metric of this key is a duration."""
    return family(key) in DURATION_METRICS


def outside_key(key: str) -> str:
    """Return the key a metric has outside Python: "ttft_p99.long" becomes "ttft_p99_ms.long"."""
    if not is_duration(key):
        return key
    stem, dot, scope = key.partition(".")
    return f"{stem}_ms{dot}{scope}"


def to_outside(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as they leave Python: durations in milliseconds under keys with `_ms`."""
    return {outside_key(k): v * 1e3 if is_duration(k) else v for k, v in metrics.items()}


def from_outside(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what `to_outside` wrote, in seconds again."""
    inside = {}
    for key, value in metrics.items():
        stem, dot, scope = key.partition(".")
        name = f"{stem.removesuffix('_ms')}{dot}{scope}"
        inside[name] = value / 1e3 if is_duration(name) else value
    return inside
