"""A chosen trial as files that `vllm serve --config` takes as they are, with where they come from."""

import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ruamel.yaml import YAML

from tuner import __version__, results, slo
from tuner.errors import HostError, SpecError
from tuner.results import TrialResult
from tuner.serving import ServingConfig, to_config
from tuner.slo import Slo
from tuner.spec import StudySpec

PICKS = ("best", "knee", "ttft", "itl")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and the line that starts it."""

    files: tuple[Path, ...]
    start_line: str


def pick(found: Sequence[TrialResult], spec: StudySpec, choice: str) -> TrialResult:
    """Return the trial a user asks for: "best", "knee", "ttft", "itl" or a trial number.

    "best" is the recommended trial or, when no trial met the SLO, the closest one; "knee" is the knee of the
    whole front, "ttft" and "itl" its ends.

    Raises:
        SpecError: no such trial, or nothing was measured.
    """
    x, y = spec.objective_metrics
    measured = [r for r in found if r.is_measured]
    if not measured:
        raise SpecError("nothing to export: no trial was measured", hint="tune show RUN lists why")
    if choice.isdecimal():
        return _numbered(found, int(choice))
    if choice not in PICKS:
        raise SpecError(f"--pick {choice}: unknown", hint=f"one of {', '.join(PICKS)} or a trial number")
    if choice == "best" and (found_best := best(found, spec)) is not None:
        return found_best
    front = results.front(measured, x, y)
    if not front:
        raise SpecError(f"no trial has both {x} and {y}", hint="choose a trial by its number: --pick 3")
    if choice in {"ttft", "itl"}:
        return front[0] if choice == "ttft" else front[-1]
    return results.knee(front, x, y) or front[0]


def best(found: Sequence[TrialResult], spec: StudySpec) -> TrialResult | None:
    """Return the recommended trial or, when no trial met the SLO, the closest; None when there is neither."""
    measured = [r for r in found if r.is_measured]
    return results.recommend(measured, *spec.objective_metrics) or results.closest(measured)


def _numbered(found: Sequence[TrialResult], number: int) -> TrialResult:
    result = next((r for r in found if r.number == number), None)
    if result is None:
        raise SpecError(f"--pick {number}: no such trial", hint=f"there are {', '.join(str(r.number) for r in found)}")
    if result.failure is not None:
        raise SpecError(
            f"--pick {number}: this trial failed ({result.failure.kind})", hint="choose one that was measured"
        )
    return result


def write(  # noqa: PLR0917 (what, of which study, where to)
    result: TrialResult,
    spec: StudySpec,
    slos: Sequence[Slo],
    out: Path,
    facts: Mapping[str, str],
    program: str | None = None,
) -> Exported:
    """Write `serve.yaml` and `serve.env` into a folder and return the line that starts the server.

    Args:
        result: the chosen trial.
        spec: its study.
        slos: the study's SLOs with their limits in numbers.
        out: folder, made if it is not there.
        facts: further lines of provenance, by name.
        program: how the reader's shell finds the command's program, where its bare name would not do.
    """
    yaml_file, env_file = out / "serve.yaml", out / "serve.env"
    try:
        out.mkdir(parents=True, exist_ok=True)
        yaml_file.write_text(serve_yaml(result, spec, slos, facts), encoding="utf-8")
        env_file.write_text(serve_env(result.config), encoding="utf-8")
    except OSError as error:
        raise HostError(f"{out}: cannot be written: {error.strerror}", hint="give another folder with -o") from error
    return Exported((yaml_file, env_file), start_line(result.config, yaml_file, env_file, program))


def start_line(config: ServingConfig, yaml_file: Path, env_file: Path, program: str | None = None) -> str:
    """Return the shell line that starts the exported configuration."""
    serve = shlex.join([program or config.command[0], *config.command[1:], "--config", str(yaml_file)])
    return f"( set -a; . {shlex.quote(_dotted(env_file))}; exec {serve} )" if config.env else serve


def _dotted(path: Path) -> str:
    """Return the path with a slash in it; the shell's `.` looks a bare name up on PATH."""
    return str(path) if "/" in str(path) else f"./{path}"


def serve_yaml(result: TrialResult, spec: StudySpec, slos: Sequence[Slo], facts: Mapping[str, str]) -> str:
    """Return the YAML with its provenance in comments."""
    yaml = YAML()
    yaml.width = 4096
    body = io.StringIO()
    yaml.dump(to_config(result.config), body)
    lines = [*_provenance(result, spec, slos), *(f"{name}: {value}" for name, value in facts.items())]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return f"{comments}{body.getvalue()}"


def _provenance(result: TrialResult, spec: StudySpec, slos: Sequence[Slo]) -> list[str]:
    when = datetime.fromtimestamp(result.ended, UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        f"Exported by tune {__version__}: trial {result.number} of study {spec.name}, measured {when}"
        + (f" on vLLM {result.vllm_version}." if result.vllm_version else "."),
    ]
    lines += [
        f"Measured {metric}: {slo.describe(metric, result.metrics[metric])}"
        for metric in spec.objective_metrics
        if metric in result.metrics
    ]
    lines += [f"SLO {_words(limit)}: {_state(limit, result)}" for limit in slos]
    return lines


def _words(limit: Slo) -> str:
    return f"{limit.metric} {'>=' if limit.is_lower_bound else '<='} {limit.describe_limit()}"


def _state(limit: Slo, result: TrialResult) -> str:
    excess = result.excess.get(limit.metric)
    if excess is None:
        return "not measurable"
    return "met" if excess <= 0 else f"NOT met, {excess:.0%} beyond".replace("%", " %")


def serve_env(config: ServingConfig) -> str:
    """Return the environment as lines a POSIX shell sources."""
    head = "# Environment of the exported vLLM server; secrets (HF_TOKEN, VLLM_API_KEY) come from your shell.\n"
    return head + "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(config.env.items()))
