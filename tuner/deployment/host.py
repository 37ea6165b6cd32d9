"""How full and how busy this host is."""

from pathlib import Path

import psutil


def memory() -> tuple[int, int]:
    """Return the bytes of memory that are available and that there are."""
    found = psutil.virtual_memory()
    return found.available, found.total


def busy(interval: float = 1.0) -> float:
    """Return the share of all processors that was busy over some seconds."""
    return float(psutil.cpu_percent(interval)) / 100


def size_of_weights(model: str) -> int:
    """Return the bytes of a model's weights; 0 when it is not a folder of this host, so that nothing is known."""
    folder = Path(model)
    if not folder.is_dir():
        return 0
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
