"""Measure every budget with repeats and draw TTFT and ITL over the budget.

    python -m benchmarks.tradeoff [--runs DIR] [--out docs/tradeoff.png]      # about 11 minutes
    python -m benchmarks.tradeoff --run runs/tradeoff --out docs/tradeoff.png # draw what is measured

The last line gives the smallest budget against the default, as ratios of medians over repeats.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tuner.results import TrialResult
from tuner.sinks.runfolder import RunFolder

STUDY = Path(__file__).with_name("study.yaml")
METRICS = {"ttft_p50.long": "TTFT p50 of long prompts (ms)", "itl_p99": "ITL p99, all tokens (ms)"}
BUDGET = "max_num_batched_tokens"


def main() -> int:
    """Measure if asked, draw, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--run", type=Path, help="a run folder that is measured already")
    parser.add_argument("--out", type=Path, default=Path("docs/tradeoff.png"))
    options = parser.parse_args()
    run = options.run or measure(options.runs)
    results = sorted((r for r in RunFolder.open(run).read_all() if r.is_measured and r.same_as is None), key=budget)
    draw(results, options.out)
    for result in results:
        values = {m: [round(r.metrics[m] * 1e3, 1) for r in result.repeats] for m in METRICS}
        print(f"{budget(result):6}  " + "  ".join(f"{m}: {v} ms" for m, v in values.items()))
    smallest, default = results[0], next(r for r in results if r.label == "default")
    ratios = (f"{m.replace('.', '_')}_ratio={smallest.metrics[m] / default.metrics[m]:.2f}" for m in METRICS)
    print(f"RESULT budget={budget(smallest)} against={budget(default)} {' '.join(ratios)}")
    return 0


def measure(runs: Path) -> Path:
    """Run the study; return its run folder."""
    before = set(runs.glob("tradeoff*"))
    subprocess.run([sys.executable, "-m", "tuner", "run", str(STUDY), "--runs", str(runs)], check=True)
    return next(iter(set(runs.glob("tradeoff*")) - before))


def budget(result: TrialResult) -> int:
    """Return the token budget a trial ran with."""
    value = result.effective[BUDGET]
    assert isinstance(value, int)
    return value


def draw(results: Sequence[TrialResult], out: Path) -> None:
    """Draw each metric over the budget, a dot a repeat, a line through the medians."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (metric, title) in zip(figure.subplots(1, 2), METRICS.items(), strict=True):
        budgets = [budget(r) for r in results]
        axes.plot(budgets, [r.metrics[metric] * 1e3 for r in results], color="tab:blue", zorder=1)
        for result in results:
            values = [r.metrics[metric] * 1e3 for r in result.repeats]
            color = "tab:orange" if result.label == "default" else "tab:blue"
            axes.scatter([budget(result)] * len(values), values, color=color, s=22, zorder=2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(b) for b in budgets])
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{BUDGET} (orange: vLLM's default)")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
