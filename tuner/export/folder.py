"""An exported configuration on disk, and the line that starts it."""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import HostError, SpecError
from tuner.export.compose import compose_yaml
from tuner.export.files import ENV_HEAD, group_env, provenance, serve_env, serve_yaml, stem
from tuner.export.kubernetes import kubernetes_yaml
from tuner.export.llmd import llmd_values
from tuner.export.script import start_sh
from tuner.results import TrialResult
from tuner.serving import Role, ServingConfig
from tuner.slo import Slo
from tuner.spec import StudySpec

START, PLUGIN = "start.sh", "plugin"
ALL_FILES = (
    *(f"{stem(role)}.{kind}" for role in Role for kind in ("yaml", "env")),
    START, "compose.yaml", "kubernetes.yaml", "llm-d.values.yaml",
)  # fmt: skip
ON_CPU = (
    "Measured on a CPU, and this file asks for GPUs and an image for them: measure there before you rely on it, and",
    "take out what was meant for the CPU.",
)
OURS = (ENV_HEAD, "# Exported by tune ")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and the line that starts it."""

    files: tuple[Path, ...]
    start_line: str


def write(  # noqa: PLR0917 (what, of which study, where to)
    result: TrialResult,
    spec: StudySpec,
    slos: Sequence[Slo],
    out: Path,
    facts: Mapping[str, str],
    program: str | None = None,
    *,
    front_program: str | None = None,
    gpus: bool = False,
    plugin: Path | None = None,
) -> Exported:
    """Write a trial's configuration into a folder and return the line that starts it.

    One server is `serve.yaml` and `serve.env`; what a group is, the package says. What an earlier export of another
    topology left in the folder is removed.

    Args:
        result: the chosen trial.
        spec: its study.
        slos: the study's SLOs with their limits in numbers.
        out: folder, made if it is not there.
        facts: further lines of provenance, by name.
        program: how the reader's shell finds the command's program, where its bare name would not do.
        front_program: likewise for the front of a group.
        gpus: whether `start.sh` shares out GPUs; Docker and Kubernetes always do.
        plugin: folder of Python that `start.sh` puts on the servers' path, copied along.
    """
    config = result.config
    comments = provenance(result, spec, slos, facts)
    if config.topology.is_group:
        yamls = {role: serve_yaml(result, spec, slos, facts, role) for role in config.topology.roles}
        texts = _of_group(config, spec.name, yamls, comments, result.vllm_version)
        texts[START] = start_sh(
            config, comments,
            program=program, front_program=front_program, gpus=gpus, plugin=plugin is not None,
        )  # fmt: skip
    else:
        texts = {"serve.yaml": serve_yaml(result, spec, slos, facts), "serve.env": serve_env(config)}
    try:
        _put(out, texts, plugin if config.topology.is_group else None)
    except OSError as error:
        raise HostError(f"{out}: cannot be written: {error.strerror}", hint="give another folder with -o") from error
    files = tuple(out / name for name in texts)
    if config.topology.is_group:
        return Exported(files, shlex.join(["sh", str(out / START)]))
    return Exported(files, start_line(config, files[0], files[1], program))


def _of_group(
    config: ServingConfig, name: str, yamls: Mapping[Role, str], comments: Sequence[str], vllm_version: str | None
) -> dict[str, str]:
    """Return the files of a group that need no program of this host, by name."""
    texts: dict[str, str] = {}
    if any(name.startswith("VLLM_CPU_") for name in config.env):
        comments = [*comments, "", *ON_CPU]
    for role, content in yamls.items():
        texts |= {f"{stem(role)}.yaml": content, f"{stem(role)}.env": group_env(config)}
    return texts | {
        "compose.yaml": compose_yaml(config, comments, vllm_version),
        "kubernetes.yaml": kubernetes_yaml(config, name, yamls, comments, vllm_version),
        "llm-d.values.yaml": llmd_values(config, comments, vllm_version),
    }


def _put(out: Path, texts: Mapping[str, str], plugin: Path | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in (out / name for name in texts):
        # A link that leads nowhere yet would be written through.
        if file.is_symlink() or (file.exists() and not (file.is_file() and _is_ours(file))):
            raise SpecError(f"{file} is there and is no export of tune", hint="give another folder with -o")
    for name in ALL_FILES:
        if name not in texts and (out / name).is_file() and _is_ours(out / name):
            (out / name).unlink()
    for name, content in texts.items():
        (out / name).write_text(content, encoding="utf-8")
        if name == START:
            (out / name).chmod(0o755)
    if plugin is not None and plugin.resolve() != (out / PLUGIN).resolve():
        shutil.copytree(plugin, out / PLUGIN, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def _is_ours(file: Path) -> bool:
    return any(mark in file.read_text(encoding="utf-8", errors="replace") for mark in OURS)


def start_line(config: ServingConfig, yaml_file: Path, env_file: Path, program: str | None = None) -> str:
    """Return the shell line that starts the exported configuration of one server."""
    serve = shlex.join([program or config.command[0], *config.command[1:], "--config", str(yaml_file)])
    return f"( set -a; . {shlex.quote(_dotted(env_file))}; exec {serve} )" if config.env else serve


def _dotted(path: Path) -> str:
    """Return the path with a slash in it; the shell's `.` looks a bare name up on PATH."""
    return str(path) if "/" in str(path) else f"./{path}"
