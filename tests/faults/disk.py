"""Faults of the disk: full or read-only, by a shim that is loaded into tune and its children (disk.c)."""

import errno
import shutil
from pathlib import Path

from tests.faults.checks import Verdict, ended, nothing_left, nothing_lost
from tests.faults.processes import closed, goes_on
from tests.faults.project import MissedError, Project
from tests.faults.shims import compiled


def full(project: Project, verdict: Verdict) -> None:
    """No space left in mid-study: tune ends with words, and goes on when there is room again."""
    _in_mid_study(project, verdict, errno.ENOSPC)


def read_only(project: Project, verdict: Verdict) -> None:
    """The run folder becomes read-only: tune ends with words, and goes on when it may write again."""
    _in_mid_study(project, verdict, errno.EROFS)


def full_at_start(project: Project, verdict: Verdict) -> None:
    """Nothing can be written from the beginning: exit 4 with words, no server, and a later run is whole."""
    number = project.rng.choice([errno.ENOSPC, errno.EROFS])
    verdict.moment = f"{errno.errorcode[number]} before tune was started"
    flag = _prepare(project, number)
    flag.touch()
    tune = project.run()
    ended(tune, 4, says=r"tune: .*(disk|space|written|read-only|made)")
    _must_have_hit(flag)
    nothing_left(project, verdict)
    flag.unlink()
    shutil.rmtree(project.run_folder, ignore_errors=True)
    ended(project.run(), 0)
    closed(project, verdict)


def _in_mid_study(project: Project, verdict: Verdict, number: int) -> None:
    flag = _prepare(project, number)
    tune = project.run()
    verdict.moment = f"{errno.errorcode[number]} {project.moment(tune)}"
    project.note_finished()
    flag.touch()
    tune.end()
    _must_have_hit(flag)
    nothing_left(project, verdict)
    flag.unlink()
    nothing_lost(project, verdict)
    ended(tune, 4, says=r"tune: .*(disk|space|written|read-only|Read-only)")
    goes_on(project, verdict)


def _must_have_hit(flag: Path) -> None:
    if not flag.with_name(f"{flag.name}.hit").exists():
        raise MissedError("nothing was written any more")


def _prepare(project: Project, number: int) -> Path:
    flag = project.folder / "disk-fault"
    project.runs.mkdir(exist_ok=True)
    project.env |= {
        "LD_PRELOAD": str(compiled("disk")),
        "FAULT_DISK_FLAG": str(flag),
        "FAULT_DISK_PREFIX": str(project.runs),
        "FAULT_DISK_ERRNO": str(number),
    }
    return flag
