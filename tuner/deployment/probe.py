"""Ask the installed vLLM, once per study: its version, its flags, and what it makes of some command lines.

A `vllm` that is a Python script is asked in full: its own Python runs inside_vllm/probe_vllm.py. Anything
else (a container, a wrapper, another program with vLLM's flags) is asked by `--version` and `--help=all`;
then no command line is judged before it is started.
"""

import difflib
import json
import re
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.deployment import failures, process, program
from tuner.deployment.family import MARKER, Family
from tuner.errors import HostError
from tuner.serving import Json, argument

SCRIPT = Path(__file__).resolve().parent.parent / "inside_vllm" / "probe_vllm.py"
DEADLINE = 180.0
TESTED_VERSIONS = ("0.26", "0.32")
NOTHING: Mapping[str, str] = {}

_FLAG = re.compile(r"^  (?:-\w+(?: [^,\s]+)?, )?(?P<flags>--[a-z].*)$")
_CHOICES = re.compile(r" \{([^{}]*)\}")
_DEFAULT = re.compile(r"\(default:\s+([^()]*)\)")
_VERSION = re.compile(r"\d+\.\d+[\w.+]*")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `vllm serve`.

    Attributes:
        name: as an argument, "max_num_seqs".
        kind: "bool", "int", "float", "str", "json" or a list of one, "list[str]"; None when only the help
            text was there to read.
        choices: the allowed values, if they are listed.
        default: what the parser holds when the flag is not given; the engine may replace None by a value.
    """

    name: str
    kind: str | None = None
    choices: tuple[Json, ...] = ()
    default: Json = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What vLLM makes of a command line: why it refuses it, or the values it resolves to."""

    reason: str | None = None
    values: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """What the installed vLLM says of itself.

    Attributes:
        version: "0.26.0".
        platform: "cpu", "cuda", "rocm", ...; None when only the help text was there to read.
        flags: by argument name.
        verdicts: one for each argv asked about, in order; empty when only the help text was there to read.
    """

    version: str
    platform: str | None
    flags: Mapping[str, Flag]
    verdicts: tuple[Verdict, ...] = ()


def probe(
    command: Sequence[str],
    argvs: Iterable[Sequence[str]] = (),
    *,
    env: Mapping[str, str] = NOTHING,
    timeout: float = DEADLINE,
) -> Probe:
    """Return what the vLLM that `command` starts says of itself and of each argv (the model, then flags).

    Args:
        command: the words before the model, such as ("vllm", "serve").
        argvs: command lines to judge, without the command.
        env: set beside the inherited environment, as for the server.
        timeout: seconds for each program that is run.

    Raises:
        HostError: no such program, or it cannot say.
    """
    environment = process.environment(process.settings(env), uuid.uuid4().hex)
    located = program.locate(command, environment)
    python = program.interpreter(located[0]) if list(command[1:]) == ["serve"] else None
    if python is not None and Path(located[0]).name == "vllm":
        return _ask_vllm(python, [list(argv) for argv in argvs], environment, timeout)
    return _read_help(located, environment, timeout)


def unknown_arguments(found: Probe, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the names this vLLM has no flag for, each with names it may have been meant as."""
    return {
        name: tuple(difflib.get_close_matches(name, found.flags, n=3, cutoff=0.75))
        for name in names
        if name.split(".")[0] not in found.flags and name.removeprefix("no_") not in found.flags
    }


def version_warning(version: str) -> str | None:
    """Return what to tell the user of a version that tune was not tested with, or None."""
    if (found := _minor(version)) is None:
        return f"vLLM {version}: not a release; tune is tested with {_tested()}"
    if any(_minor(tested) == found for tested in TESTED_VERSIONS):
        return None
    tested = [_minor(tested) or (0, 0) for tested in TESTED_VERSIONS]
    if found > max(tested):
        return f"vLLM {version} is newer than the versions tune is tested with ({_tested()})"
    if found < min(tested):
        return f"vLLM {version} is older than the versions tune is tested with ({_tested()})"
    return None


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _tested() -> str:
    return " and ".join(TESTED_VERSIONS)


def _ask_vllm(python: str, argvs: list[list[str]], env: Mapping[str, str], timeout: float) -> Probe:
    with tempfile.TemporaryDirectory(prefix="tune-probe-") as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        request.write_text(json.dumps({"argvs": argvs}), encoding="utf-8")
        code, output = _run([python, str(SCRIPT), str(request), str(answer)], env, timeout)
        if not answer.exists():
            why = failures.diagnose(output, code)
            raise HostError(
                f"{python}: vLLM does not load: {why.message}",
                hint=f"see what `{python} -c 'import vllm'` says",
            )
        return _from_json(json.loads(answer.read_text(encoding="utf-8")))


def _from_json(data: Mapping[str, Any]) -> Probe:
    flags = [Flag(f["name"], f["kind"], tuple(f["choices"]), f["default"]) for f in data["flags"]]
    return Probe(
        version=data["version"],
        platform=data["platform"],
        flags={flag.name: flag for flag in flags},
        verdicts=tuple(_verdict(entry) for entry in data["verdicts"]),
    )


def _verdict(entry: Mapping[str, Any]) -> Verdict:
    if "reason" in entry:
        return Verdict(reason=failures.in_one_line(entry["reason"].splitlines()))
    return Verdict(values=entry["values"])


def _read_help(command: list[str], env: Mapping[str, str], timeout: float) -> Probe:
    bare = command[:-1] if command[-1] == "serve" else command
    version = _VERSION.findall(_text([*bare, "--version"], env, timeout))
    flags = read_help(_text([*command, "--help=all"], env, timeout))
    if not version or not flags:
        raise HostError(
            f"{' '.join(command)}: does not answer --version and --help=all as vLLM does",
            hint="command must start a vLLM, its model and flags follow",
        )
    return Probe(version=version[-1], platform=None, flags={flag.name: flag for flag in flags})


def read_help(text: str) -> list[Flag]:
    """Return the flags that a `--help=all` lists."""
    blocks: list[str] = []
    for line in text.splitlines():
        if (match := _FLAG.match(line)) is not None:
            blocks.append(match["flags"])
        elif blocks:
            blocks[-1] += f"  {line.strip()}" if line.startswith("   ") else "\n"
    flags = [_read_flag(block.partition("\n")[0]) for block in blocks]
    return [flag for flag in flags if flag.name != "help"]


def _read_flag(text: str) -> Flag:
    """Read "--scheduling-policy {fcfs,priority}  The policy. (default: fcfs)" or "--grpc  Be one."."""
    dashed = re.split(r"[\s,]", text, maxsplit=1)[0]
    is_switch = f"--no-{dashed[2:]}" in text or re.match(r"--\S+(?:  |$)", text) is not None
    choices = _CHOICES.match(text.removeprefix(dashed))
    default = _DEFAULT.search(text)
    return Flag(
        argument(dashed),
        "bool" if is_switch else None,
        tuple(_value(choice) for choice in choices[1].split(",")) if choices else (),
        _value(default[1]) if default else None,
    )


def _value(text: str) -> Json:
    known: dict[str, Json] = {"None": None, "True": True, "False": False}
    if text in known:
        return known[text]
    try:
        value: Json = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float) else text


def _text(command: list[str], env: Mapping[str, str], timeout: float) -> str:
    return _run(command, env, timeout)[1]


def _run(command: list[str], env: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Return the exit code and all output of a program; past the deadline it is ended, children included."""
    family = Family(env[MARKER])
    with tempfile.TemporaryFile() as output:
        try:
            running = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"{command[0]}: {error.strerror or error}") from error
        try:
            family.lead(running.pid)
            code = running.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise HostError(f"{' '.join(command)}: no answer within {timeout:g} s") from error
        finally:
            if running.returncode is None:
                family.end(patience=2.0)
                running.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")
