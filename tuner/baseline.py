"""The configuration a user runs today, as a YAML of `vllm serve --config` or as a command line."""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from tuner import document
from tuner.errors import SpecError
from tuner.outside import WITH_PASSWORD
from tuner.serving import SECRET_ARGUMENTS, Json, ServingConfig, argument
from tuner.topologies import KV

IGNORED = {
    "host",
    "port",
    "uds",
    "served_model_name",
    "uvicorn_log_level",
    "disable_log_requests",
    "enable_log_requests",
}


def read(text: str, default: ServingConfig) -> ServingConfig:
    """Return the baseline given to `--baseline`: a YAML file's path, or a command line in quotes.

    Its arguments replace those of the study, for all servers of a group alike; model, command, environment, topology
    and front are the study's default's. Where it listens is tune's business.

    Raises:
        SpecError: neither a file nor a command line, or for another model.
    """
    path = Path(text)
    looks_like_file = path.suffix in {".yaml", ".yml"} and " " not in text
    args = _from_yaml(path) if path.is_file() or looks_like_file else _from_command(text)
    model = args.pop("model", args.pop("model_tag", None))
    if model is not None and model != default.model:
        raise SpecError(
            f"--baseline: it serves {model!r}, the study {default.model!r}", hint="compare configurations of one model"
        )
    kept = {name: value for name, value in args.items() if name not in IGNORED}
    for name in kept:
        if (variable := SECRET_ARGUMENTS.get(name)) is not None:
            raise SpecError(f"--baseline: {name} is a secret", hint=f"remove it and export {variable} in the shell")
        if WITH_PASSWORD.search(json.dumps(args[name], default=str)):
            raise SpecError(f"--baseline: {name} has a password in it", hint="it would be written down and shown")
    if not kept:
        raise SpecError("--baseline: it has no arguments", hint="trial 0 is vLLM's own default in any case")
    own = {
        role: {name: value for name, value in args.items() if name == KV} for role, args in default.role_args.items()
    }
    return replace(default, args=kept, role_args=own)


def _from_yaml(path: Path) -> dict[str, Json]:
    try:
        data = YAML(typ="safe").load(document.text_of(path))
        document.check_size(data)
    except MarkedYAMLError as error:  # its own words quote the lines around, and with them what is secret
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"--baseline {path}:{line}: not YAML: {error.problem}") from error
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        raise SpecError(f"--baseline {path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(
            f"--baseline {path}: not a mapping of arguments", hint="the YAML that vllm serve --config takes"
        )
    args: dict[str, Json] = {}
    for key, value in data.items():
        name = argument(str(key))
        if name.startswith("no_") and value is True:
            args[name.removeprefix("no_")] = False
        elif value is not False:  # vLLM drops a false from its config file
            args[name] = value
    return args


def _from_command(text: str) -> dict[str, Json]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"--baseline: not a command line: {error}") from error
    words = words[words.index("serve") + 1 :] if "serve" in words else words
    args: dict[str, Json] = {}
    if words and not words[0].startswith("-"):
        args["model"] = words.pop(0)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise SpecError(
                f"--baseline: {word.partition('=')[0]!r} is neither a flag nor a file",
                hint="give a YAML file or a command line such as 'vllm serve MODEL --max-num-seqs 64'",
            )
        name, equals, inline = word.partition("=")
        values = [inline] if equals else _values(words)
        args |= _typed(argument(name), values)
    return args


def _values(words: list[str]) -> list[str]:
    values = []
    while words and not words[0].startswith("--"):
        if re.fullmatch(r"-[a-z]+", words[0]):
            raise SpecError(f"--baseline: {words[0]}: write the flag in its long form, such as --tensor-parallel-size")
        values.append(words.pop(0))
    return values


def _typed(name: str, values: Iterable[str]) -> dict[str, Json]:
    scalars = [_scalar(value) for value in values]
    if not scalars:
        return {name.removeprefix("no_"): not name.startswith("no_")}
    return {name: scalars[0] if len(scalars) == 1 else scalars}


def _scalar(text: str) -> Json:
    try:
        value = YAML(typ="safe").load(text)
    except YAMLError:
        return text
    return value if isinstance(value, bool | int | float | dict) else text
