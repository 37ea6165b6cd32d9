"""What the first words of a command stand for: a program, a container, a script of some Python."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.errors import HostError

CONTAINER_ENGINES = {"docker", "podman", "nerdctl"}


def locate(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command with the full path of its program: on PATH, or beside the Python that runs tune.

    Raises:
        HostError: there is no such program.
    """
    name, *rest = command
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([env.get("PATH", os.defpath), beside]))
    if found is None:
        hint = "see README, Install; or say where it is: command: [/path/to/vllm, serve]" if name == "vllm" else None
        raise HostError(f"{name}: no such program", hint=hint)
    return [os.path.abspath(found), *rest]  # noqa: PTH100 (a link to a program may depend on its own place)


def as_typed(name: str) -> str:
    """Return how a program is called from the user's shell: by its name if that is found, else by its path."""
    beside = Path(sys.executable).parent / name
    if "/" in name or shutil.which(name) is not None or not beside.exists():
        return name
    here = os.path.relpath(beside)
    return here if not here.startswith("..") else str(beside)


def starts_container(command: Sequence[str]) -> bool:
    """Whether the command starts a container, which then is not among our processes."""
    words = [Path(word).name for word in command]
    engines = [index for index, word in enumerate(words) if word in CONTAINER_ENGINES]
    return bool(engines) and "run" in words[engines[0] + 1 :]


def interpreter(program: str) -> str | None:
    """Return the Python that a script runs under, by its first lines; None when it is no such script."""
    try:
        with Path(program).open("rb") as file:
            head = file.read(1024).decode(errors="replace").splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and Path(words[0]).name == "env":
        words = [found] if len(words) > 1 and (found := shutil.which(words[-1])) else []
    elif words[:1] == ["/bin/sh"] and len(head) > 1:
        # pip and uv write this where the path is too long, or has spaces, for a first line
        match = re.match(r"'''exec' (?:'([^']+)'|\"([^\"]+)\"|(\S+)) ", head[1])
        words = [next(filter(None, match.groups()))] if match else []
    if not words or not re.match(r"(python|pypy)", Path(words[0]).name):
        return None
    return words[0]
