"""The GPUs of this host, as `nvidia-smi` tells them: which there are, how full, and who is on them."""

import os
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tuner.errors import HostError

MIB = 1024 * 1024
DEADLINE = 30.0
POLL = 0.25
# A driver, a display or a monitor may hold a little of a GPU that nobody computes on.
IDLE_MEMORY = 1024 * MIB
NOT_GIVEN_BACK = 256 * MIB


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU now.

    Attributes:
        index: its number by nvidia-smi, which is PCI bus order.
        memory_total, memory_free: bytes; None where the driver does not tell.
        processes: names of the programs that compute on it, by process id. Inside a container the driver may
            tell none, or the ids of the host.
    """

    index: int
    uuid: str
    name: str
    memory_total: int | None
    memory_free: int | None
    processes: Mapping[int, str]

    @property
    def memory_used(self) -> int | None:
        """Bytes in use, by whomever."""
        if self.memory_total is None or self.memory_free is None:
            return None
        return self.memory_total - self.memory_free


def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this host; none when there is no nvidia-smi.

    Raises:
        HostError: there is an nvidia-smi and it fails.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    programs: dict[str, dict[int, str]] = {}
    for uuid, pid, name in _query("compute-apps", "gpu_uuid,pid,process_name"):
        if pid.isdigit():
            programs.setdefault(uuid, {})[int(pid)] = name
    return tuple(
        Gpu(int(index), uuid, name, _mib(total), _mib(free), programs.get(uuid, {}))
        for index, uuid, name, total, free in _query("gpu", "index,uuid,name,memory.total,memory.free")
    )


def choose(gpus: Sequence[Gpu], n: int, wanted: Sequence[int] | None = None) -> tuple[Gpu, ...]:
    """Return `n` GPUs: those the user named, else those that are free, the emptiest first.

    Without a wish CUDA_VISIBLE_DEVICES limits the choice, as it would limit vLLM.

    Raises:
        HostError: there are not that many.
    """
    pool = [gpu for gpu in gpus if _is_visible(gpu)] if wanted is None else _named(gpus, wanted)
    if wanted is None:
        pool.sort(key=lambda gpu: (_is_busy(gpu), -(gpu.memory_free or 0), gpu.index))
    if len(pool) < n:
        raise HostError(
            f"{_count(n)} needed, {_count(len(pool))} there",
            hint="take a smaller topology, or name other GPUs with --gpus",
        )
    return tuple(pool[:n])


def require_free(gpus: Sequence[Gpu]) -> None:
    """Refuse GPUs that somebody else computes on: what is measured there would say nothing.

    Raises:
        HostError: one is busy.
    """
    for gpu in gpus:
        if _is_busy(gpu):
            who = ", ".join(f"pid {pid} ({name})" for pid, name in gpu.processes.items()) or "by an unlisted process"
            used = "" if gpu.memory_used is None else f", {gpu.memory_used / 2**30:.1f} GiB in use"
            raise HostError(
                f"GPU {gpu.index} ({gpu.name}) is busy: {who}{used}",
                hint="end that process, or choose other GPUs with --gpus, such as --gpus 1",
            )


def await_release(before: Sequence[Gpu], pids: Collection[int], patience: float) -> tuple[str, ...]:
    """Wait until processes of ours have left their GPUs; return what is still not given back, in words.

    Memory counts only where nobody else is listed: what a neighbour takes is not ours to judge.
    """
    deadline = time.monotonic() + patience
    while (left := _not_released(before, pids)) and time.monotonic() < deadline:
        time.sleep(POLL)
    return left


def _not_released(before: Sequence[Gpu], pids: Collection[int]) -> tuple[str, ...]:
    now = {gpu.uuid: gpu for gpu in list_gpus()}
    left = []
    for earlier in before:
        gpu = now.get(earlier.uuid)
        if gpu is None:
            left.append(f"GPU {earlier.index} is no longer listed by nvidia-smi")
            continue
        if ours := sorted(set(pids) & set(gpu.processes)):
            left.append(f"GPU {gpu.index} still has our pids {ours}")
        elif not gpu.processes and _grown(earlier, gpu) > NOT_GIVEN_BACK:
            left.append(f"GPU {gpu.index} did not get {_grown(earlier, gpu) / 2**30:.1f} GiB back")
    return tuple(left)


def _grown(earlier: Gpu, later: Gpu) -> int:
    if earlier.memory_used is None or later.memory_used is None:
        return 0
    return later.memory_used - earlier.memory_used


def _named(gpus: Sequence[Gpu], wanted: Sequence[int]) -> list[Gpu]:
    by_index = {gpu.index: gpu for gpu in gpus}
    if missing := [index for index in wanted if index not in by_index]:
        there = ", ".join(map(str, by_index)) or "none"
        raise HostError(f"no GPU {missing[0]} on this host (there: {there})", hint="see `nvidia-smi -L`")
    return [by_index[index] for index in wanted]


def _is_visible(gpu: Gpu) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)) for name in names)


def _is_busy(gpu: Gpu) -> bool:
    return bool(gpu.processes) or (gpu.memory_used or 0) > IDLE_MEMORY


def _count(n: int) -> str:
    return f"{n} GPU" if n == 1 else f"{n} GPUs"


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


def _query(what: str, fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"nvidia-smi does not answer: {error}", hint="run `nvidia-smi` yourself") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise HostError(
            f"nvidia-smi failed: {said[0] if said else f'exit {done.returncode}'}",
            hint="run `nvidia-smi` yourself",
        )
    n_fields = fields.count(",") + 1
    rows = [[cell.strip() for cell in line.split(",", n_fields - 1)] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == n_fields]
