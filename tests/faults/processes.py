"""Faults of processes: what is killed, and what the user interrupts."""

import signal
import time
from collections.abc import Callable

import psutil

from tests.faults.checks import Verdict, complete, ended, nothing_left, nothing_lost
from tests.faults.project import POLL, BrokenError, MissedError, Project, Tune

GUARDIAN = "tuner.deployment.guardian"
ENGINES = ("VLLM::EngineCore", "fake-vllm-child")
INTERRUPTED = r"tune: interrupted[\s\S]*--resume runs/study"


def kill_tune(project: Project, verdict: Verdict) -> None:
    """`kill -9` of tune: its guardian ends the servers, and the run goes on."""
    tune = project.run()
    verdict.moment = project.moment(tune)
    kill(project, tune)
    nothing_left(project, verdict)
    goes_on(project, verdict)


def kill_tune_early(project: Project, verdict: Verdict) -> None:
    """`kill -9` before the first trial is measured: between any two steps of the beginning."""
    tune = project.run()
    tune.wait_until(project.run_folder.is_dir)
    delay = project.rng.uniform(0, 1.5)
    verdict.moment = f"{delay * 1000:.0f} ms after the run folder was made"
    time.sleep(delay)
    kill(project, tune)
    nothing_left(project, verdict)
    if (project.run_folder / "plan.json").exists():
        goes_on(project, verdict)
        return
    ended(project.resume(), 2, says=r"tune: .*(plan|workload|study)")
    verdict.moment += ", before the plan was written: refused, and begun anew"
    (project.run_folder).rename(project.runs / "cut-off")
    ended(project.run(), 0)
    complete(project, verdict)


def kill_tune_and_guardian(project: Project, verdict: Verdict) -> None:
    """`kill -9` of both leaves the server; resuming ends it and says so."""
    tune = project.run()
    verdict.moment = project.moment(tune, "warm-up", "replay")
    guardian = _descendant(tune, lambda process: GUARDIAN in process.cmdline())
    server = project.server_process(tune)
    guardian.kill()
    kill(project, tune)
    if not server.is_running():
        raise MissedError("the server had ended")
    goes_on(project, verdict, says=rf"ended process {server.pid}, left over")


def kill_guardian(project: Project, verdict: Verdict) -> None:
    """Without its guardian tune goes on or says that it is gone; it leaves nothing."""
    tune = project.run()
    verdict.moment = project.moment(tune, "starting", "warm-up", "replay")
    _descendant(tune, lambda process: GUARDIAN in process.cmdline()).kill()
    project.note_finished()
    if ended(tune, 0, 4) == 4:
        nothing_left(project, verdict)
        goes_on(project, verdict)
        return
    nothing_left(project, verdict)
    closed(project, verdict)


def kill_server(project: Project, verdict: Verdict) -> None:
    """`kill -9` of the API server is a trial that says so; the study goes on."""
    tune = project.run()
    verdict.moment = project.moment(tune, "warm-up", "replay")
    _kill_one(project, project.server_process(tune))
    study_goes_on(project, verdict, tune, says=r"trial \d+: failed.*SIGKILL", failures=1)


def kill_engine(project: Project, verdict: Verdict) -> None:
    """`kill -9` of the engine core ends its API server, and the trial says so."""
    tune = project.run()
    verdict.moment = project.moment(tune, "warm-up", "replay")
    server = project.server_process(tune)
    engines = [child for child in server.children() if any(name in " ".join(child.cmdline()) for name in ENGINES)]
    if not engines:
        raise MissedError("the server has no engine process")
    _kill_one(project, engines[0])
    study_goes_on(project, verdict, tune, says=r"trial \d+: failed.*engine core.*SIGKILL", failures=1)


def sigint_once(project: Project, verdict: Verdict) -> None:
    """Ctrl-C keeps what is measured, ends the server and says how to go on."""
    tune = project.run()
    verdict.moment = project.moment(tune)
    project.note_shared_memory()
    tune.signal(signal.SIGINT)
    _interrupted(project, verdict, tune)


def sigint_twice(project: Project, verdict: Verdict) -> None:
    """Ctrl-C again, while the server is being ended, ends it faster and loses nothing."""
    tune = project.run()
    moment = project.moment(tune)
    delay = project.rng.uniform(0, 0.3)
    verdict.moment = f"{moment}, and {delay * 1000:.0f} ms later"
    project.note_shared_memory()
    tune.signal(signal.SIGINT)
    time.sleep(delay)
    tune.signal(signal.SIGINT)
    _interrupted(project, verdict, tune)


def _interrupted(project: Project, verdict: Verdict, tune: Tune) -> None:
    code = ended(tune, 0, 130, says="", patience=30)
    nothing_left(project, verdict)
    project.note_finished()
    if code == 0:
        raise MissedError("the study was over")
    ended(tune, 130, says=INTERRUPTED)
    goes_on(project, verdict)


def goes_on(project: Project, verdict: Verdict, *, says: str = "", failures: int = 0, mirrored: bool = True) -> None:
    """Resume: the study reaches its end, with every finished trial and all records in agreement."""
    project.note_finished()
    nothing_lost(project, verdict)
    ended(project.resume(), 0, says=says)
    closed(project, verdict, failures=failures, mirrored=mirrored)


def closed(project: Project, verdict: Verdict, *, failures: int = 0, mirrored: bool = True) -> None:
    """The study has ended: nothing is left, nothing is lost, all records agree."""
    nothing_left(project, verdict)
    nothing_lost(project, verdict)
    complete(project, verdict, failures=failures, mirrored=mirrored)


def study_goes_on(project: Project, verdict: Verdict, tune: Tune, *, says: str = "", failures: int = 0) -> None:
    """The same tune reaches the study's end."""
    project.note_finished()
    ended(tune, 0, says=says)
    closed(project, verdict, failures=failures)


def kill(project: Project, tune: Tune) -> None:
    """Kill tune itself, and remember what was finished at that moment."""
    project.note_shared_memory()
    tune.signal(signal.SIGKILL)
    tune.process.wait()
    project.note_finished()


def _kill_one(project: Project, process: psutil.Process) -> None:
    project.note_shared_memory()
    try:
        process.kill()
    except psutil.Error as error:
        raise MissedError(str(error)) from None


def _descendant(tune: Tune, is_it: Callable[[psutil.Process], bool]) -> psutil.Process:
    """Return the one process below tune that is asked for."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            for process in psutil.Process(tune.process.pid).children(recursive=True):
                if is_it(process):
                    return process
        except psutil.Error:
            pass
        time.sleep(POLL)
    raise BrokenError("tune has no such child")
