"""The YAML and the environment of a role, with where they come from."""

import io
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from tuner import __version__, slo
from tuner.outside import SECRET, legible
from tuner.results import TrialResult
from tuner.serving import Role, ServingConfig, to_config
from tuner.slo import Slo
from tuner.spec import StudySpec

ENV_HEAD = "# Environment of the exported vLLM server; secrets (HF_TOKEN, VLLM_API_KEY) come from your shell.\n"

# Each server of a group has its own; what starts it says which.
OF_ONE_SERVER = frozenset(
    {"CUDA_VISIBLE_DEVICES", "VLLM_PORT", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"}
)


def stem(role: Role) -> str:
    """Return how the files and servers of a role are called."""
    return "serve" if role is Role.ANY else str(role)


def serve_yaml(
    result: TrialResult, spec: StudySpec, slos: Sequence[Slo], facts: Mapping[str, str], role: Role = Role.ANY
) -> str:
    """Return the YAML of a role with its provenance in comments."""
    return commented(provenance(result, spec, slos, facts), to_config(result.config, role))


def commented(lines: Sequence[str], *documents: Mapping[str, Any]) -> str:
    """Return YAML documents under lines of comment."""
    yaml = YAML()
    yaml.width = 4096
    body = io.StringIO()
    for number, document in enumerate(documents):
        body.write("---\n" if number else "")
        yaml.dump(document, body)
    return "".join(f"{f'# {line}'.rstrip()}\n" for line in lines) + body.getvalue()


def text(value: object) -> str:
    """Return a value as quoted text: YAML 1.1, which Docker and Kubernetes read, takes a bare `on` for a boolean."""
    quoted: str = DoubleQuotedScalarString(str(value))
    return quoted


def provenance(result: TrialResult, spec: StudySpec, slos: Sequence[Slo], facts: Mapping[str, str]) -> list[str]:
    """Return the lines that say where the values come from."""
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
    lines += [f"{name}: {value}" for name, value in facts.items()]
    return [" ".join(legible(line).split()) for line in lines]


def _words(limit: Slo) -> str:
    return f"{limit.metric} {'>=' if limit.is_lower_bound else '<='} {limit.describe_limit()}"


def _state(limit: Slo, result: TrialResult) -> str:
    excess = result.excess.get(limit.metric)
    if excess is None:
        return "not measurable"
    return "met" if excess <= 0 else f"NOT met, {excess:.0%} beyond".replace("%", " %")


def serve_env(config: ServingConfig) -> str:
    """Return the environment as lines a POSIX shell sources."""
    return _sourced(config.env)


def shared_env(config: ServingConfig) -> dict[str, str]:
    """Return the environment that all servers of a group have in common, without secrets."""
    return {
        name: value
        for name, value in sorted(config.env.items())
        if name not in OF_ONE_SERVER and not SECRET.search(name)
    }


def group_env(config: ServingConfig) -> str:
    """Return the environment of each server of a group as lines a POSIX shell sources."""
    return _sourced(shared_env(config))


def _sourced(env: Mapping[str, str]) -> str:
    return ENV_HEAD + "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))
