"""Little libraries that are loaded into tune and its children, compiled when they are first needed."""

import shutil
import subprocess
import threading
from pathlib import Path
from tempfile import mkdtemp

COMPILER = "cc"
_COMPILING = threading.Lock()
_COMPILED: dict[str, Path] = {}


def missing_compiler() -> str:
    """Return what this machine lacks to compile one, if anything."""
    return "" if shutil.which(COMPILER) else f"no {COMPILER}"


def compiled(name: str) -> Path:
    """Return the library made of NAME.c."""
    with _COMPILING:
        if name not in _COMPILED:
            made = Path(mkdtemp(prefix="tune-faults-shim-")) / f"{name}.so"
            source = Path(__file__).with_name(f"{name}.c")
            words = [COMPILER, "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl"]
            subprocess.run(words, check=True, timeout=60)
            _COMPILED[name] = made
        return _COMPILED[name]
