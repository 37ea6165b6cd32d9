"""How full and how busy this host is."""

import psutil


def memory() -> tuple[int, int]:
    """Return the bytes of memory that are available and that there are."""
    found = psutil.virtual_memory()
    return found.available, found.total


def busy(interval: float = 1.0) -> float:
    """Return the share of all processors that was busy over some seconds."""
    return float(psutil.cpu_percent(interval)) / 100
