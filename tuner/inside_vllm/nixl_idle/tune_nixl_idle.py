"""A vLLM plugin for hosts whose CPU is the device: let NIXL wait without spinning, and pin nothing.

vLLM loads it through the entry point beside it when this folder is on PYTHONPATH. Two things are changed:

- NIXL's Python API starts its progress thread with a delay of 0 between polls (`nixl_cu13/_api.py`,
  `pthrDelay`), which keeps one core busy for as long as the server lives. On a GPU host a core is cheap; here it
  is the one that computes. Any delay above 0 makes the thread sleep.
- vLLM's NIXL worker on the CPU platform binds its main thread to the last core of each NUMA node
  (`nixl/base_worker.py`), so that all servers of a host meet on one core. Without a topology it binds nothing.
"""

from typing import Any

POLL_MICROSECONDS = 1000


def register() -> None:
    """Be called by vLLM in each of its processes."""
    from vllm.platforms import current_platform  # noqa: PLC0415 (vLLM's own Python, at a time of its choosing)

    if not current_platform.is_cpu():
        return
    type(current_platform).discover_numa_topology = classmethod(lambda _: [])
    try:
        import nixl  # noqa: F401, PLC0415 (chooses among its builds for CUDA 12 and 13)
        from nixl import _api  # noqa: PLC0415
    except ImportError:  # a server that transfers nothing does without
        return
    bindings = _api.nixlBind
    make = bindings.nixlAgent
    if getattr(make, "is_patient", False):
        return

    def patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = POLL_MICROSECONDS
        return make(name, config)

    patient_agent.is_patient = True  # type: ignore[attr-defined]
    bindings.nixlAgent = patient_agent
