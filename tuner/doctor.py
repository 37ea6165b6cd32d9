"""Is this host able to run a study? Each line is ok or says what to do."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import plan as plans
from tuner import spec as specs
from tuner import units
from tuner import workload as workloads
from tuner.deployment import gpu, host, probe, program
from tuner.errors import ExitCode, HostError, TunerError

LEAST_FREE_DISK = 2 << 30
LEAST_MEMORY = 4 << 30
BUSY_LOAD = 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, what was seen, and what mends it when it is not ok."""

    what: str
    seen: str
    mend: str | None = None
    exit_code: int = ExitCode.OK


def run(study: str | None, overrides: Mapping[str, Any]) -> int:
    """Print the report; return the exit code of the first thing that is not ok."""
    code = ExitCode.OK
    for finding in examine(study, overrides):
        mark = "ok  " if finding.mend is None else "MEND"
        print(f"{mark}  {finding.what}: {finding.seen}", flush=True)
        if finding.mend:
            print(f"      {finding.mend}", flush=True)
            code = code or finding.exit_code
    return code


def examine(study: str | None, overrides: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings as they are made; one failing check does not hide the next."""
    yield _python()
    yield _memory()
    yield _disk()
    yield _load()
    yield from _caught("GPUs", _gpus)
    yield from _caught("ports", _ports)
    yield from _study(study, overrides)


def _caught(what: str, check: Callable[[], Finding]) -> Iterator[Finding]:
    try:
        yield check()
    except TunerError as error:
        yield Finding(what, error.message, error.hint or "see above", error.exit_code)


def _python() -> Finding:
    return Finding("host", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
                           f"{os.cpu_count()} cores")  # fmt: skip


def _memory() -> Finding:
    available, total = host.memory()
    seen = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    short = available < LEAST_MEMORY
    return Finding("memory", seen, "a server of the smallest model needs 3 GiB: close something" if short else None,
                   ExitCode.HOST)  # fmt: skip


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    few = free < LEAST_FREE_DISK
    return Finding("disk", f"{free / 2**30:.0f} GiB free here", "free some disk space" if few else None, ExitCode.HOST)


def _load() -> Finding:
    busy = host.busy()
    seen = f"{busy:.0%} of the processors busy".replace("%", " %")
    mend = "something else is running; latencies measured beside it are not yours: stop it first"
    return Finding("quiet", seen, mend if busy > BUSY_LOAD else None, ExitCode.HOST)


def _gpus() -> Finding:
    found = gpu.list_gpus()
    if not found:
        return Finding("GPUs", "none (no nvidia-smi); a CPU build of vLLM will do for the quick start")
    names = ", ".join(f"{g.index}: {g.name}" for g in found)
    gpu.require_free(found)
    return Finding("GPUs", f"{names}; all free")


def _ports() -> Finding:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return Finding("ports", f"the system gives ports on 127.0.0.1, such as {probe_socket.getsockname()[1]}")


def _study(name: str | None, overrides: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        source, _note = plans.find_study(name)
        spec = specs.load(source, overrides)
    except TunerError as error:
        yield Finding("study", error.message, error.hint or "mend the study file", error.exit_code)
        yield from _caught("vLLM", lambda: _vllm(("vllm", "serve")))
        return
    budget = f"{spec.budget.trials} trials" if spec.budget.trials else units.format_elapsed(spec.budget.time or 0)
    told = ", ".join(map(str, spec.topologies)) or "auto"
    yield Finding("study", f"{source.name}: {spec.name}, {len(spec.search_space)} dimensions, topologies {told}, "
                           f"a budget of {budget}")  # fmt: skip
    yield from _caught("vLLM", lambda: _vllm(spec.vllm.command))
    yield from _caught("workload", lambda: _workload(spec, source))
    yield from _caught("plan", lambda: _plan(spec, source))


def _vllm(command: tuple[str, ...]) -> Finding:
    try:
        path = program.locate(command, os.environ)[0]
    except HostError as error:
        mend = f"install it ({sys.executable} -m pip install vllm) or run the README's first command for a CPU build"
        return Finding("vLLM", error.message, mend, ExitCode.HOST)
    found = probe.probe(command)
    warning = probe.version_warning(found.version)
    seen = f"{found.version} for {found.platform or 'an unknown platform'}, {len(found.flags)} flags, at {path}"
    return Finding("vLLM", f"{seen}{f' (note: {warning})' if warning else ''}")


def _workload(spec: specs.StudySpec, source: Path) -> Finding:
    found = workloads.load(specs.find_workload(spec.workload.path, source))
    return Finding("workload", f"{found.name}: {len(found.requests)} requests in {found.span:.0f} s, "
                               f"the longest {found.longest} tokens, sha256 {found.sha256[:12]}")  # fmt: skip


def _plan(spec: specs.StudySpec, source: Path) -> Finding:
    """Everything `tune run` checks before it starts a server: arguments, model, row lengths, GPUs."""
    rows = workloads.load(specs.find_workload(spec.workload.path, source))
    scaled = workloads.scale_rate(rows, spec.workload.rate_scale, spec.seed)
    plan = plans.check(spec, source, scaled, None)
    budget = plan.host.get("max_num_batched_tokens")
    length = plan.host.get("max_model_len")
    seen = (
        f"vLLM accepts the default of this study (max_num_batched_tokens {budget}, max_model_len {length}); "
        "model reachable; rows fit"
    )
    if any(topology.is_group for topology in plan.spec.topologies):
        seen += f"; topologies {', '.join(map(str, plan.spec.topologies))}, behind {plan.spec.router.command[0]}"
    if plan.gpus:
        seen += f"; on GPU {', '.join(map(str, plan.gpus))}"
    return Finding("plan", seen)
