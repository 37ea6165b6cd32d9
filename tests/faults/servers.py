"""Faults of one server of a study: it hangs, runs out of memory, or finds its port taken."""

import json
import socket
import threading
import time
from typing import Any

from tests.faults.checks import BrokenError, Verdict, failed_kinds
from tests.faults.processes import study_goes_on
from tests.faults.project import CALM, MissedError, Project, Tune


def hangs_at_start(project: Project, verdict: Verdict) -> None:
    """A server that is never ready is ended at the time limit; the trial says so."""
    tune = _next_server(project, verdict, hang_at_start=True)
    study_goes_on(project, verdict, tune, says=r"failed \(timeout\): not ready after \d+ s", failures=1)
    _expect(project, verdict, "timeout")


def hangs_at_stop(project: Project, verdict: Verdict) -> None:
    """A server that does not listen to SIGTERM is killed; its measurement counts."""
    tune = _next_server(project, verdict, ignore_term=True)
    study_goes_on(project, verdict, tune)
    _expect(project, verdict)


def hangs_in_mid_stream(project: Project, verdict: Verdict) -> None:
    """A server that falls silent inside its answers costs what drain_timeout says, and only itself."""
    how: dict[str, Any] = project.rng.choice(
        [{"freeze_at": 0.2, "freeze_for": 600.0}, {"silence": {"every": 1, "after": 2}}, {"silence": {"every": 1}}]
    )
    tune = _next_server(project, verdict, **how)
    study_goes_on(project, verdict, tune, failures=1)
    _expect(project, verdict, "nothing_completed", "died", "timeout")


def out_of_memory_at_start(project: Project, verdict: Verdict) -> None:
    """Too little memory at the start is that trial's failure, told as such."""
    tune = _next_server(project, verdict, fail_at_start="oom")
    study_goes_on(project, verdict, tune, says=r"failed \(oom\)", failures=1)
    _expect(project, verdict, "oom")


def out_of_memory_under_load(project: Project, verdict: Verdict) -> None:
    """Memory that runs out while requests run is that trial's failure, told as such."""
    tune = _next_server(project, verdict, oom_after=project.rng.randint(2, 20))
    study_goes_on(project, verdict, tune, says=r"failed \(oom\)", failures=1)
    _expect(project, verdict, "oom")


def port_taken(project: Project, verdict: Verdict) -> None:
    """A stranger is faster at the reserved port: the server is started on another one."""
    tune = project.run()
    moment = project.moment(tune, "result", "starting")
    earlier = len(_starts(project))
    project.hook.write_text("sleep 0.5\n")
    tune.wait_until(lambda: project.hook.with_name("hook.sh.taken").exists())
    tune.wait_until(lambda: len(_starts(project)) > earlier)
    with _stranger(_starts(project)[-1]["port"], answers=project.rng.random() < 0.5) as answers:
        verdict.moment = f"{moment}; the stranger {'answers' if answers else 'is silent'}"
        tune.wait_until(lambda: len(_starts(project)) > earlier + 1)
    study_goes_on(project, verdict, tune)
    _expect(project, verdict)


class _stranger:  # noqa: N801 (reads as a context)
    """Somebody else's server on a port."""

    def __init__(self, port: int, *, answers: bool) -> None:
        self.answers = answers
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind(("127.0.0.1", port))
        except OSError as error:
            self.socket.close()
            raise MissedError(f"port {port}: {error}") from None
        self.socket.listen()

    def __enter__(self) -> bool:
        threading.Thread(target=self._serve, daemon=True).start()
        return self.answers

    def _serve(self) -> None:
        kept = []
        while True:
            try:
                there, _ = self.socket.accept()
                if self.answers:
                    there.recv(4096)
                    there.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    there.close()
                else:
                    kept.append(there)
            except OSError:
                return

    def __exit__(self, *_: object) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _starts(project: Project) -> list[dict[str, Any]]:
    return [entry for entry in project.journal() if entry["event"] == "started"]


def _next_server(project: Project, verdict: Verdict, **behaviour: Any) -> Tune:
    """Run the study; one server, the first or one after a seeded moment, behaves so. Wait until it is there."""
    words = json.dumps(behaviour)
    hook = f"export FAKE_VLLM='{json.dumps(CALM | behaviour)}'\n"
    if is_first := project.rng.random() < 0.3:
        project.hook.write_text(hook)
    tune = project.run()
    if is_first:
        verdict.moment = f"first server: {words}"
    else:
        verdict.moment = f"server after {project.moment(tune)}: {words}"
        project.hook.write_text(hook)
    tune.wait_until(lambda: project.hook.with_name("hook.sh.taken").exists())
    time.sleep(0.1)
    return tune


def _expect(project: Project, verdict: Verdict, *kinds: str) -> None:
    """One trial failed in one of these ways, or none where no way is named.

    A client that was late is the machine's own doing, and its trial is measured again outside the budget.
    """
    found = [kind for kind in failed_kinds(project) if kind != "client_lag"]
    if not (len(found) == 1 and found[0] in kinds if kinds else not found):
        raise BrokenError(f"trials failed as {found}, the fault explains one of {kinds or 'none'}")
