"""The wall clock is stepped under tune and its servers (libfaketime); the monotonic one runs on."""

from pathlib import Path

from tests.faults.checks import BrokenError, Verdict
from tests.faults.processes import study_goes_on
from tests.faults.project import Project
from tests.faults.shims import compiled, missing_compiler
from tuner.sinks.runfolder import RunFolder

PLACES = ("usr/lib/*/faketime", "usr/lib/faketime", "usr/lib64/faketime")
STEPS = (-86400, -3600, -60, 60, 3600, 86400)


def library() -> Path | None:
    """Return libfaketime where it is installed."""
    return next((path for place in PLACES for path in Path("/").glob(f"{place}/libfaketimeMT.so.1")), None)


def missing() -> str:
    """Return what this machine lacks to step the clock, if anything."""
    return missing_compiler() or ("" if library() else "no libfaketime (apt install libfaketime)")


def stepped(project: Project, verdict: Verdict) -> None:
    """A step of the wall clock, either way, changes no measurement and ends no study."""
    offset = project.folder / "offset"
    offset.write_text("+0\n")
    project.env |= {
        "LD_PRELOAD": f"{compiled('clock')}:{library()}",
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    tune = project.run("--time", "10min")
    seconds = project.rng.choice(STEPS)
    verdict.moment = f"{project.moment(tune)}: {seconds:+} s"
    changed = offset.with_suffix(".new")
    changed.write_text(f"{seconds:+}\n")
    changed.replace(offset)
    study_goes_on(project, verdict, tune)
    for result in RunFolder(project.run_folder).read_all():
        for name, value in result.metrics.items():
            if name.startswith(("ttft", "itl", "e2el", "tpot")) and not 0 <= value < 60:
                raise BrokenError(f"trial {result.number}: {name} is {value} s")
