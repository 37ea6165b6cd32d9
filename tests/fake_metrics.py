"""Prometheus' text form, as the stand-in for `vllm serve` speaks it."""

from collections.abc import Iterator, Sequence


class Histogram:
    """One of vLLM's histograms."""

    def __init__(self, name: str, about: str, edges: Sequence[float]) -> None:
        self.name, self.about, self.edges = name, about, (*edges, float("inf"))
        self.buckets, self.sum, self.count = [0] * len(self.edges), 0.0, 0

    def observe(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1
        for i, edge in enumerate(self.edges):
            self.buckets[i] += value <= edge

    def lines(self, labels: str) -> Iterator[str]:
        yield f"# HELP vllm:{self.name} {self.about}\n# TYPE vllm:{self.name} histogram"
        for edge, count in zip(self.edges, self.buckets, strict=True):
            le = "+Inf" if edge == float("inf") else str(float(edge))
            yield f"vllm:{self.name}_bucket{with_label(labels, 'le', le)} {float(count)}"
        yield f"vllm:{self.name}_count{labels} {float(self.count)}"
        yield f"vllm:{self.name}_sum{labels} {self.sum}"


def with_label(labels: str, name: str, value: str) -> str:
    """Return labels, written as in Prometheus' text form, with one more at the end."""
    return f'{labels.removesuffix("}")},{name}="{value}"}}'


def gauge(name: str, labels: str, value: float) -> Iterator[str]:
    yield f"# HELP vllm:{name} A gauge.\n# TYPE vllm:{name} gauge"
    yield f"vllm:{name}{labels} {float(value)}"


def counter(name: str, *counted: tuple[str, float]) -> Iterator[str]:
    """Yield the lines of a counter: labels and value of each of its series."""
    yield f"# HELP vllm:{name}_total A counter.\n# TYPE vllm:{name}_total counter"
    for labels, value in counted:
        yield f"vllm:{name}_total{labels} {float(value)}\nvllm:{name}_created{labels} 1.7e+09"
