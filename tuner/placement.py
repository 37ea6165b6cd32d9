"""Which devices the servers of a study take: what `topologies: auto` means here, what fits, and who shares."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tuner import document
from tuner import topologies as groups
from tuner.deployment import gpu
from tuner.deployment.gpu import Gpu
from tuner.dimensions import Choice, FloatRange, IntRange
from tuner.errors import HostError, SpecError
from tuner.serving import SINGLE, Role, Topology
from tuner.spec import StudySpec

MEMORY = "gpu_memory_utilization"


def resolve_auto(spec: StudySpec, seen: Sequence[Gpu]) -> tuple[StudySpec, tuple[str, ...]]:
    """Return the study with "auto" replaced by what this host allows, and what to say about it.

    Raises:
        SpecError: the study says something of roles that "auto" does not bring here.
    """
    if spec.topologies:
        return spec, ()
    if not seen:
        note = ("topologies: auto is 1x here: on a CPU the whole machine counts as one device; "
                "topologies that the study names share its cores")  # fmt: skip
        return spec.with_topologies(groups.of_slots(1)), (note,)
    n = len(spec.gpus) if spec.gpus is not None else len(_free(seen))
    size = spec.n_gpus(SINGLE)
    found = groups.of_slots(n // size)
    note = f"topologies: auto is {', '.join(map(str, found))} here: {_gpus(n)}, {size} a server"
    return spec.with_topologies(found), (note,)


def choose(spec: StudySpec, source: Path, seen: Sequence[Gpu]) -> tuple[int, ...]:
    """Return the indices of the GPUs to use; they must be free. None on a CPU.

    Raises:
        HostError: they are not there or not free.
        SpecError: a group on one GPU that the study does not want shared, or that does not fit its memory.
    """
    if not seen:
        return ()
    several = [topology for topology in spec.topologies if topology.is_group]
    if several and not spec.share_devices and _reachable(seen, spec.gpus) == 1:
        raise SpecError(
            f"{document.where(source, 'topologies')}: topologies: {several[0]} on one GPU: replicas and a PD pair "
            "need two devices; on one there is nothing to disaggregate, and chunked prefill is the lever",
            hint="take 1x with max_num_batched_tokens searched, or more GPUs; share_devices: true tries it anyway",
        )
    if spec.share_devices:
        for topology in several:
            _check_memory(spec, source, topology)
    chosen = gpu.choose(seen, max(map(spec.n_gpus, spec.topologies)), spec.gpus)
    gpu.require_free(chosen)
    return tuple(g.index for g in chosen)


def notes(spec: StudySpec, gpus: Sequence[int]) -> tuple[str, ...]:
    """Return what to say where the servers of a group share what they run on."""
    several = [str(topology) for topology in spec.topologies if topology.is_group]
    if not several:
        return ()
    if not gpus:
        return (f"no GPU: the servers of {', '.join(several)} share the cores and the memory of this machine",)
    if spec.share_devices:
        on = "GPU " + ", ".join(map(str, gpus))
        return (f"share_devices: the servers of {', '.join(several)} all run on {on} and slow each other down",)
    return ()


def _check_memory(spec: StudySpec, source: Path, topology: Topology) -> None:
    """Refuse servers that together take more memory than the device they share has."""
    shares = {role: _share(spec, role) for role in topology.roles}
    wanted = [topology.count(role) * share for role, share in shares.items() if share is not None]
    if len(wanted) == len(shares) and sum(wanted) <= 1.0 + 1e-9:
        return
    most = int(100 / topology.n_servers) / 100
    given = "it is not given" if len(wanted) < len(shares) else f"together they ask for {sum(wanted):.2f}"
    where = document.where(source, "share_devices")
    raise SpecError(
        f"{where}: share_devices: {topology} puts {topology.n_servers} servers on one GPU: "
        f"{MEMORY} may be at most {most:g}, and {given}", hint=f"engine_args: {{{MEMORY}: {most:g}}}",
    )  # fmt: skip


def _share(spec: StudySpec, role: Role) -> float | None:
    """Return the most that a role's server takes of its device's memory, None where vLLM decides."""
    for name in (f"{role}.{MEMORY}", MEMORY):
        match spec.search_space.get(name):
            case IntRange() | FloatRange() as dimension:
                return float(dimension.high)
            case Choice() as dimension:
                return max((float(v) for v in dimension.values if isinstance(v, int | float)), default=None)
        if isinstance(value := spec.engine_args.get(name), int | float):
            return float(value)
    return None


def _reachable(seen: Sequence[Gpu], wanted: Sequence[int] | None) -> int:
    """Return how many GPUs there are to choose from."""
    for n in range(len(seen), 0, -1):
        with suppress(HostError):
            return len(gpu.choose(seen, n, wanted))
    return 0


def _free(seen: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that nobody computes on, of those vLLM would see."""
    for n in range(_reachable(seen, None), 0, -1):
        chosen = gpu.choose(seen, n)
        with suppress(HostError):
            gpu.require_free(chosen)
            return chosen
    return ()


def _gpus(n: int) -> str:
    return f"{n} GPU" if n == 1 else f"{n} GPUs"
