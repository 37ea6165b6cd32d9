"""Faults of the Optuna storage: locked, lost while tune runs, lost between two sessions."""

import sqlite3
import time
from contextlib import closing

from tests.faults.checks import Verdict, ended, nothing_left, nothing_lost
from tests.faults.processes import closed, goes_on, kill, study_goes_on
from tests.faults.project import MissedError, Project

SHORT, LONG = 1.5, 45.0


def locked_for_a_moment(project: Project, verdict: Verdict) -> None:
    """Somebody looks into the database for a second or so: the study goes on."""
    tune = project.run()
    seconds = project.rng.uniform(0.5, SHORT)
    verdict.moment = f"{project.moment(tune)}, for {seconds:.1f} s"
    with closing(_lock(project)):
        time.sleep(seconds)
    study_goes_on(project, verdict, tune)


def stays_locked(project: Project, verdict: Verdict) -> None:
    """The database stays locked: tune ends with words, and goes on when it is free again."""
    tune = project.run()
    verdict.moment = project.moment(tune)
    with closing(_lock(project)):
        project.note_finished()
        deadline = time.monotonic() + LONG
        while tune.is_running() and time.monotonic() < deadline:
            time.sleep(0.1)
        verdict.moment += f", until tune ended or {LONG:g} s"
        was_patient = tune.is_running()
    if was_patient:
        study_goes_on(project, verdict, tune)
        return
    nothing_left(project, verdict)
    ended(tune, 4, says=r"tune: .*(locked|storage)")
    goes_on(project, verdict)


def lost_while_running(project: Project, verdict: Verdict) -> None:
    """The database is moved away under tune: it ends with words or goes on; put back, nothing is lost."""
    tune = project.run()
    verdict.moment = project.moment(tune)
    away = project.folder / "away.db"
    _move_away(project)
    project.note_finished()
    code = ended(tune, 0, 4, says="")
    nothing_left(project, verdict)
    if code == 0:
        raise MissedError("tune did not need it any more")
    ended(tune, 4, says=r"tune: .*storage")
    _put_back(project)
    assert not away.exists()
    goes_on(project, verdict)


def lost_between(project: Project, verdict: Verdict) -> None:
    """The database is lost between two sessions: resuming refuses, and does what it says when it is put back."""
    tune = project.run()
    tune.wait_until(lambda: len(project.results()) >= 1)
    verdict.moment = f"killed {project.moment(tune)}, then lost"
    kill(project, tune)
    nothing_left(project, verdict)
    _move_away(project)
    ended(project.resume(), 4, says=r"storage was lost[\s\S]*put the storage back")
    nothing_lost(project, verdict)
    _put_back(project)
    goes_on(project, verdict)


def damaged(project: Project, verdict: Verdict) -> None:
    """The database was cut short: resuming refuses with words, and the results can still be read."""
    tune = project.run()
    tune.wait_until(lambda: len(project.results()) >= 1)
    verdict.moment = f"killed {project.moment(tune)}, then cut short"
    kill(project, tune)
    nothing_left(project, verdict)
    whole = project.storage.read_bytes()
    project.storage.write_bytes(whole[: project.rng.randint(1, len(whole) - 1)])
    ended(project.resume(), 4, says=r"tune: .*storage")
    nothing_lost(project, verdict)
    ended(project.tune("show", f"runs/{project.run_folder.name}"), 0)
    for journal in project.run_folder.glob("optuna.db-*"):
        journal.unlink()
    project.storage.write_bytes(whole)
    goes_on(project, verdict)
    closed(project, verdict)


def _lock(project: Project) -> sqlite3.Connection:
    connection = sqlite3.connect(project.storage, timeout=5, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        connection.close()
        raise MissedError(f"the database could not be locked: {error}") from None
    return connection


def _move_away(project: Project) -> None:
    for file in project.run_folder.glob("optuna.db*"):
        file.rename(project.folder / f"away-{file.name}")


def _put_back(project: Project) -> None:
    for file in project.run_folder.glob("optuna.db*"):
        file.unlink()
    for file in project.folder.glob("away-optuna.db*"):
        file.rename(project.run_folder / file.name.removeprefix("away-"))
