"""What the tests of deployment/ share: the little server, and a look at the process table of their own."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tuner.deployment.launcher import LocalLauncher
from tuner.serving import Front, Json, Role, ServingConfig, Topology

LITTLE = Path(__file__).parent / "data" / "little_server.py"
COMMAND = (sys.executable, str(LITTLE), "serve")


def little(behaviour: str = "serve", **more: Any) -> ServingConfig:
    """Return a configuration of the little server."""
    env = {"LITTLE": behaviour} | more.pop("env", {})
    return ServingConfig(**{"model": "m", "command": COMMAND, "env": env, **more})


def little_group(topology: str, args: dict[Role, dict[str, Json]] | None = None, **more: Any) -> ServingConfig:
    """Return a configuration of little servers behind a little front; `args` are those of one role."""
    group, given = Topology.parse(topology), args or {}
    by_role = {role: given.get(role, {}) | _transfer(role) for role in group.roles}
    front = Front(command=(*COMMAND, "front"))
    return little(topology=group, role_args=by_role, **{"front": front, **more})


def _transfer(role: Role) -> dict[str, Json]:
    return {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role.kv_role}} if role.kv_role else {}


def launcher(**more: Any) -> LocalLauncher:
    """Return a launcher with short patience."""
    return LocalLauncher(**({"start_timeout": 15.0, "stop_patience": 3.0} | more))


def marked(marker: str) -> set[int]:
    """Return the living processes with this marker in their environment."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("TUNE_DEPLOYMENT") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def wait_until(condition: Callable[[], Any], timeout: float = 10.0) -> Any:
    """Wait until a condition holds and return its value, or its last value at the deadline."""
    deadline = time.monotonic() + timeout
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def executable(path: Path, text: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def first_on_path(directory: Path) -> str:
    """Return a PATH that looks into `directory` first."""
    return f"{directory}{os.pathsep}{os.environ['PATH']}"
