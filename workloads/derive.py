"""Make the small demo workloads from windows of published traces: cut, thin and scale, and say so.

    python -m workloads.derive

The windows of the published files, unmodified, are in tests/traces, each folder with its licence text. The same files
give the same bytes. Nothing is drawn at random: what is thinned or spread follows from a hash of the row's line
number or of its prefix group, so a row's fate does not depend on its neighbours.
"""

import argparse
import hashlib
import io
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ruamel.yaml import YAML

from tuner.readers import formats
from tuner.readers.format import Options
from tuner.readers.source import Source, Tally

HERE = Path(__file__).parent
TRACES = HERE.parent / "tests" / "traces"
MAX_MODEL_LEN = 4096
LONG = 1024  # a prompt of at least this is of class `long`
QUANTILES = (5, 50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class Row:
    """One request, in the order of keys that workload.jsonl has."""

    arrival: float
    input_len: int
    output_len: int
    source_line: int
    block_ids: tuple[int, ...] = ()
    block_size: int | None = None

    def to_json(self) -> str:
        """Return the row as a line of workload.jsonl."""
        blocks = {"block_ids": self.block_ids, "block_size": self.block_size} if self.block_ids else {}
        return json.dumps(
            {
                "arrival_s": round(self.arrival, 6),
                "input_len": self.input_len,
                "output_len": self.output_len,
                **blocks,
                "source_line": self.source_line,
            }
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows kept of a source, and how many others were dropped for which reason."""

    rows: tuple[Row, ...]
    read: int
    dropped: Counter[str]

    def keep(self, reason: str, kept: Iterable[Row]) -> "Cut":
        """Return the cut with fewer rows; the others count as dropped for this reason."""
        rows = tuple(kept)
        return replace(self, rows=rows, dropped=self.dropped + Counter({reason: len(self.rows) - len(rows)}))

    def change(self, rows: Iterable[Row]) -> "Cut":
        """Return the cut with every row changed and none dropped."""
        changed = tuple(rows)
        if len(changed) != len(self.rows):
            raise ValueError("a change must not drop rows")
        return replace(self, rows=changed)


@dataclass(frozen=True, slots=True)
class Derived:
    """A workload: its files by name, the cuts they were made from, and the words for its card."""

    name: str
    title: str
    licence: str
    source: str
    transform: str
    rows: dict[str, tuple[Row, ...]]
    cuts: dict[str, dict[str, Cut]]
    is_scaled: bool = True


def recorded(path: Path) -> Cut:
    """Return the rows of a published trace; arrivals count from its first row."""
    source = Source(path)
    rows = list(formats.recognise(source).read(source, Options(), Tally(source)))
    return whole(
        Row(round(r.arrival - rows[0].arrival, 6), r.input_len, r.output_len, r.source_line or 0, r.block_ids or (),
            r.block_size)
        for r in rows
    )  # fmt: skip


def whole(rows: Iterable[Row]) -> Cut:
    """Return a source of which nothing has been dropped yet."""
    everything = tuple(rows)
    return Cut(everything, read=len(everything), dropped=Counter())


def window(cut: Cut, start: float, seconds: float) -> Cut:
    """Keep the rows that arrive in [start, start + seconds) and rebase them to 0."""
    kept = cut.keep("outside the window", (r for r in cut.rows if start <= r.arrival < start + seconds))
    return kept.change(replace(row, arrival=row.arrival - start) for row in kept.rows)


def fits(cut: Cut, max_model_len: int = MAX_MODEL_LEN) -> Cut:
    """Keep the rows that the server can take."""
    return cut.keep(
        f"input + output above {max_model_len:,} tokens",
        (row for row in cut.rows if row.input_len + row.output_len <= max_model_len),
    )


def chance(*key: object) -> float:
    """Return a number in [0, 1) that depends on the key only, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def merged(*cuts: Cut) -> tuple[Row, ...]:
    """Return the rows of several sources in order of arrival."""
    return tuple(sorted((row for cut in cuts for row in cut.rows), key=lambda row: row.arrival))


# Azure 2023: short prompts with long answers from the conversation trace, long prompts from the code trace.

CONV = "AzureLLMInferenceTrace_conv_first3000.csv"
CODE = "AzureLLMInferenceTrace_code_first2000.csv"
CONV_KEPT = 0.5
CONV_INPUT_SCALE = 8
CODE_BAND = (3000, 4800)
CODE_INPUT_SCALE = 2
OUTPUT_SCALE = 2
AZURE_SECONDS = 27.0
# file -> (start in the conversation trace, start in the code trace), s after each file's first row
AZURE_WINDOWS = {"workload": (60.0, 289.5), "confirm": (420.0, 615.0)}


def azure(traces: Path) -> Derived:
    """Return the chat-with-documents mix made from the two Azure traces."""
    folder = traces / "azure_llm_2023"
    conv, code = recorded(folder / CONV), recorded(folder / CODE)
    cuts = {
        name: {
            CONV: _azure_conversation(window(conv, conv_start, AZURE_SECONDS)),
            CODE: _azure_code(window(code, code_start, AZURE_SECONDS)),
        }
        for name, (conv_start, code_start) in AZURE_WINDOWS.items()
    }
    return Derived(
        name="azure-conv-2023-small",
        title="Azure 2023, conversations with long code prompts among them, SCALED for a CPU",
        licence="azure_llm_2023/LICENSE",
        source=azure_source(
            "`data/AzureLLMInferenceTrace_conv.csv` and\n  `data/AzureLLMInferenceTrace_code.csv`, "
            "of which the first 3,000 and the first 2,000 rows were read",
            f": of the conversation file for a prompt below\n  {LONG:,} tokens, of the code file for a longer one",
        ),
        transform=AZURE_TRANSFORM.replace(
            "{windows}",
            "; ".join(
                f"`{name}.jsonl` from {conv_start:g} s (conversation) and {code_start:g} s (code)"
                for name, (conv_start, code_start) in AZURE_WINDOWS.items()
            ),
        ),
        rows={name: merged(*of.values()) for name, of in cuts.items()},
        cuts=cuts,
    )


def _azure_conversation(cut: Cut) -> Cut:
    cut = cut.keep(
        f"thinned: {CONV_KEPT:.0%} kept, by a hash of the line number",
        (row for row in cut.rows if chance("conv", row.source_line) < CONV_KEPT),
    )
    return fits(cut.change(_scaled(row, CONV_INPUT_SCALE) for row in cut.rows))


def _azure_code(cut: Cut) -> Cut:
    low, high = CODE_BAND
    cut = cut.keep(
        f"prompt not of {low:,} to {high:,} tokens", (row for row in cut.rows if low <= row.input_len <= high)
    )
    return fits(cut.change(_scaled(row, CODE_INPUT_SCALE) for row in cut.rows))


def _scaled(row: Row, input_scale: int) -> Row:
    """Divide the lengths, rounding up."""
    return replace(row, input_len=-(-row.input_len // input_scale), output_len=-(-row.output_len // OUTPUT_SCALE))


# Azure 2023 as recorded, for a GPU and a model of 7 B: enough requests for a p99 in two minutes.

RECORDED_SECONDS, RECORDED_MODEL_LEN = 120.0, 8192
RECORDED_WINDOWS = {"workload": 60.0, "confirm": 360.0}


def azure_as_recorded(traces: Path) -> Derived:
    """Return two windows of the conversation trace, unchanged."""
    source = recorded(traces / "azure_llm_2023" / CONV)
    cuts = {
        name: {CONV: fits(window(source, start, RECORDED_SECONDS), RECORDED_MODEL_LEN)}
        for name, start in RECORDED_WINDOWS.items()
    }
    starts = "; ".join(f"`{name}.jsonl` from {start:g} s" for name, start in RECORDED_WINDOWS.items())
    return Derived(
        name="azure-conv-2023",
        title="Azure 2023, conversations as recorded",
        licence="azure_llm_2023/LICENSE",
        source=azure_source("`data/AzureLLMInferenceTrace_conv.csv`,\n  of which the first 3,000 rows were read", ""),
        transform=f"Window of {RECORDED_SECONDS:g} s of the trace, rebased to 0: {starts}. Nothing else.\n",
        rows={name: merged(*of.values()) for name, of in cuts.items()},
        cuts=cuts,
        is_scaled=False,
    )


def azure_source(files: str, source_line: str) -> str:
    """Return where an Azure 2023 workload comes from, in words."""
    return f"""\
- Trace: Azure LLM inference trace 2023, github.com/Azure/AzurePublicDataset at commit
  b469a113cedca53ddc3bdea71a143dc4b7d8700c, {files}.
- Licence: CC-BY-4.0, text in `LICENSE`. Changes were made; they are listed below.
- Attribution: Pratyush Patel, Esha Choukse, Chaojie Zhang, Aashaka Shah, Íñigo Goiri, Saeed Maleki, Ricardo
  Bianchini, "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024.
- `source_line` is the line in the published file, header included{source_line}.
"""


AZURE_TRANSFORM = f"""\
1. Window of {AZURE_SECONDS:g} s of each trace, rebased to 0 and laid over one another:
   {{windows}}.
   The two traces were recorded apart; that they run together is our doing. The code trace comes in bursts with
   minutes of silence between; windows of even arrivals were chosen, so that a short replay repeats well.
2. Conversation rows: {CONV_KEPT:.0%} kept, by a hash of the line number (no prefix is recorded, so none is torn).
3. Code rows: those with {CODE_BAND[0]:,} to {CODE_BAND[1]:,} prompt tokens kept.
4. Prompt length divided by {CONV_INPUT_SCALE} (conversation) or {CODE_INPUT_SCALE} (code), output length by \
{OUTPUT_SCALE} (both), rounded up.
5. Arrival times as recorded: no stretching, no jitter.
"""


# Mooncake: conversations with recorded prefix sharing, one sixteenth of the size.

MOONCAKE = "conversation_first2000.jsonl"
MOONCAKE_SCALE = 16
MOONCAKE_BLOCK = 512 // MOONCAKE_SCALE
MOONCAKE_OUTPUT_SCALE = 4
MOONCAKE_KEPT = 0.85
MOONCAKE_STEP = 3.0
MOONCAKE_SECONDS = 27.0
# file -> (start, length), s of the trace's clock
MOONCAKE_WINDOWS = {
    "workload": (435.0, MOONCAKE_SECONDS),
    "confirm": (630.0, MOONCAKE_SECONDS),
    "history": (375.0, 60.0),
}


def mooncake(traces: Path) -> Derived:
    """Return the conversations of Mooncake's trace, shrunk block by block."""
    source = recorded(traces / "mooncake_conversation" / MOONCAKE)
    cuts = {
        name: {MOONCAKE: _mooncake(window(source, start, seconds))}
        for name, (start, seconds) in MOONCAKE_WINDOWS.items()
    }
    return Derived(
        name="mooncake-conv-small",
        title="Mooncake conversations with their shared prefixes, SCALED for a CPU",
        licence="mooncake_conversation/LICENSE-APACHE",
        source=MOONCAKE_SOURCE,
        transform=MOONCAKE_TRANSFORM.replace(
            "{windows}",
            "; ".join(
                f"`{name}.jsonl` {start:g} to {start + seconds:g} s"
                for name, (start, seconds) in MOONCAKE_WINDOWS.items()
            ),
        ),
        rows={name: merged(*of.values()) for name, of in cuts.items()},
        cuts=cuts,
    )


def _mooncake(cut: Cut) -> Cut:
    cut = cut.keep("without output", (row for row in cut.rows if row.output_len > 0))
    cut = cut.keep(
        f"thinned: {MOONCAKE_KEPT:.0%} of the prefix groups kept",
        (row for row in cut.rows if chance("group", *row.block_ids[:2]) < MOONCAKE_KEPT),
    )
    cut = cut.change(
        replace(
            row,
            arrival=row.arrival + MOONCAKE_STEP * chance("spread", row.source_line),
            input_len=-(-row.input_len // MOONCAKE_SCALE),
            output_len=-(-row.output_len // MOONCAKE_OUTPUT_SCALE),
            block_size=MOONCAKE_BLOCK,
        )
        for row in cut.rows
    )
    return fits(cut)


MOONCAKE_SOURCE = """\
- Trace: Mooncake, FAST'25 release, github.com/kvcache-ai/Mooncake at commit
  3b5a594133958449a1feaf1c9e0fc1b553e34a28, `FAST25-release/traces/conversation_trace.jsonl`, of which the first
  2,000 lines were read.
- Licence: Apache-2.0, text in `LICENSE`. Changes were made; they are listed below.
- Attribution: Ruoyu Qin and others, "Mooncake: Trading more storage for less computation", FAST 2025.
- `source_line` is the line in the published file.
"""

MOONCAKE_TRANSFORM = f"""\
1. Window of the trace's clock, rebased to 0:
   {{windows}}.
   `history.jsonl` is what came just before `workload.jsonl`, on a clock of its own: its prompts are what a
   running server would have had in its cache.
2. Rows without output dropped. Of the prefix groups (the first two block ids) {MOONCAKE_KEPT:.0%} kept, by a hash:
   whole groups, so that the reuse inside a group stays.
3. Prompt length divided by {MOONCAKE_SCALE}, rounded up; block ids kept, each now {MOONCAKE_BLOCK} tokens
   instead of 512, so that the sharing of prefixes stays. Output length divided by {MOONCAKE_OUTPUT_SCALE}, rounded up.
4. The recorded clock moves in steps of 3 s, with about ten requests on each. Each row is SPREAD inside its
   step, by a hash of its line number: as recorded, the steps would decide every tail.
5. Rows with input + output above {MAX_MODEL_LEN:,} tokens after scaling dropped.
"""


# The card and the profile.


def observe(rows: Sequence[Row], text: str, before: Sequence[Row]) -> dict[str, Any]:
    """Return what profile.yaml says about one file."""
    arrivals = np.array([row.arrival for row in rows])
    span = float(arrivals[-1] - arrivals[0])
    return {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "rows": len(rows),
        "span_ms": round(span * 1e3, 3),
        "request_rate": round(len(rows) / span, 3),
        "iod_1s": round(_dispersion(arrivals, 1.0), 2),
        "iod_5s": round(_dispersion(arrivals, 5.0), 2),
        "input_len": _quantiles([row.input_len for row in rows]),
        "output_len": _quantiles([row.output_len for row in rows]),
        "total_input": sum(row.input_len for row in rows),
        "total_output": sum(row.output_len for row in rows),
        "classes": {name: _class(of) for name, of in _by_class(rows).items()},
        "ideal_prefix_hit": round(ideal_prefix_hit(rows), 4),
        **({"ideal_prefix_hit_after_history": round(ideal_prefix_hit(rows, before), 4)} if before else {}),
    }


def _by_class(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        "short": [row for row in rows if row.input_len < LONG],
        "long": [row for row in rows if row.input_len >= LONG],
    }


def _class(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "input_len": _quantiles([row.input_len for row in rows]),
        "output_len": _quantiles([row.output_len for row in rows]),
    }


def _quantiles(values: Sequence[int]) -> dict[str, int]:
    names = ["max" if q == 100 else f"p{q}" for q in QUANTILES]
    found = np.percentile(values, QUANTILES, method="inverted_cdf")
    return dict(zip(names, map(int, found), strict=True))


def _dispersion(arrivals: npt.NDArray[np.float64], bin_size: float) -> float:
    """Return variance / mean of the arrivals per full bin: 1 for Poisson."""
    bins = int(arrivals[-1] // bin_size)
    counts, _ = np.histogram(arrivals, bins=bins, range=(0, bins * bin_size))
    return float(counts.var() / counts.mean())


def ideal_prefix_hit(rows: Sequence[Row], before: Sequence[Row] = ()) -> float:
    """Return the share of prompt tokens in leading blocks seen earlier in the file, or in one before it."""
    seen = {block for row in before for block in row.block_ids}
    hit = 0
    for row in rows:
        known = itertools.takewhile(seen.__contains__, row.block_ids)
        hit += min(sum(row.block_size or 0 for _ in known), row.input_len)
        seen.update(row.block_ids)
    return hit / sum(row.input_len for row in rows)


SCALED = (
    "**This is a scaled workload.** It has the form of the recorded traffic and not its size: it is meant for",
    "the demonstration model on two CPU cores, and its numbers say nothing about anybody's production load.",
    "Windows, thinning and scales were chosen by measuring, until that model showed the trade of TTFT and ITL.",
)


def card(workload: Derived, observed: dict[str, dict[str, Any]]) -> str:
    """Return the README of a workload."""
    lines = [
        f"# {workload.title}",
        "",
        *(SCALED if workload.is_scaled else ("Lengths and arrival times are those of the trace.",)),
        "Written by `python -m workloads.derive`; do not edit by hand.",
        "",
        "## Source",
        "",
        workload.source,
        "## What was done to it",
        "",
        workload.transform,
        "Rows by fate:",
        "",
        "| file | source | rows read | dropped | kept |",
        "|---|---|---:|---|---:|",
        *(
            f"| `{name}.jsonl` | {source} | {cut.read:,} | {_dropped(cut)} | {len(cut.rows):,} |"
            for name, cuts in workload.cuts.items()
            for source, cut in cuts.items()
        ),
        "",
        "## Shape",
        "",
        *_shape_table(observed),
        "",
        f"Classes split at {LONG:,} prompt tokens. IoD: variance / mean of the arrivals per bin, 1 for Poisson.",
        "Ideal prefix hit: share of prompt tokens in leading blocks seen earlier in the file, cold start.",
        "",
        "## Fingerprints (SHA-256)",
        "",
        *(f"- `{name}.jsonl`: `{of['sha256']}`" for name, of in observed.items()),
        "",
    ]
    return "\n".join(lines)


def _dropped(cut: Cut) -> str:
    return "; ".join(f"{count:,} {reason}" for reason, count in cut.dropped.items() if count) or "none"


def _shape_table(observed: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| | " + " | ".join(f"`{name}.jsonl`" for name in observed) + " |"
    yield "|---|" + "---:|" * len(observed)
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "rows": lambda of: f"{of['rows']:,}",
        "span, s": lambda of: f"{of['span_ms'] / 1e3:.1f}",
        "rate, requests/s": lambda of: f"{of['request_rate']:.2f}",
        "IoD 1 s / 5 s": lambda of: f"{of['iod_1s']:.2f} / {of['iod_5s']:.2f}",
        "prompt tokens p5 / p50 / p90 / p99 / max": lambda of: _slashed(of["input_len"]),
        "output tokens p5 / p50 / p90 / p99 / max": lambda of: _slashed(of["output_len"]),
        "prompt tokens / output tokens, in all": lambda of: f"{of['total_input']:,} / {of['total_output']:,}",
        "short / long requests": lambda of: " / ".join(f"{of['classes'][c]['rows']}" for c in ("short", "long")),
        "long: prompt tokens": lambda of: _slashed(of["classes"]["long"]["input_len"]),
        "long: output tokens": lambda of: _slashed(of["classes"]["long"]["output_len"]),
        "ideal prefix hit": lambda of: f"{of['ideal_prefix_hit']:.3f}",
        "the same, after the history": lambda of: (
            f"{warm:.3f}" if (warm := of.get("ideal_prefix_hit_after_history")) is not None else ""
        ),
    }
    for label, figure in figures.items():
        cells = [figure(of) for of in observed.values()]
        if any(cells):
            yield f"| {label} | " + " | ".join(cells) + " |"


def _slashed(quantiles: dict[str, int]) -> str:
    return " / ".join(f"{value:,}" for value in quantiles.values())


def write(workload: Derived, traces: Path) -> Path:
    """Write a workload's folder: rows, card, licence, profile."""
    folder = HERE / workload.name
    folder.mkdir(exist_ok=True)
    texts = {name: "".join(f"{row.to_json()}\n" for row in rows) for name, rows in workload.rows.items()}
    history = workload.rows.get("history", ())
    observed = {
        name: observe(workload.rows[name], text, history if name == "workload" else ()) for name, text in texts.items()
    }
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card(workload, observed), encoding="utf-8")
    profile = io.StringIO()
    YAML().dump(
        {"name": workload.name, "scaled": workload.is_scaled, "class_boundary": LONG, "observed": observed}, profile
    )
    (folder / "profile.yaml").write_text(profile.getvalue(), encoding="utf-8")
    shutil.copyfile(traces / workload.licence, folder / "LICENSE")
    return folder


def write_all(traces: Path = TRACES) -> list[Path]:
    """Write every workload; return their folders."""
    return [write(make(traces), traces) for make in (azure, azure_as_recorded, mooncake)]


def main() -> None:
    """Write every workload."""
    parser = argparse.ArgumentParser(prog="python -m workloads.derive", description=main.__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the published traces")
    print(*write_all(parser.parse_args().traces), sep="\n")


if __name__ == "__main__":
    main()
