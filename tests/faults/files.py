"""Faults of files and of who uses them: cut short, changed under the study, another vLLM, two resumes at once."""

import json
from pathlib import Path

from tests.faults.checks import BrokenError, Verdict, ended, nothing_left, nothing_lost
from tests.faults.processes import closed, goes_on, kill, study_goes_on
from tests.faults.project import MissedError, Project
from tuner.sinks.runfolder import RunFolder


def truncated_result(project: Project, verdict: Verdict) -> None:
    """A result that was cut short is named and kept apart, and its trial is measured again."""
    _killed(project, verdict, results=2)
    number = project.rng.choice(sorted(project.finished))
    file = project.run_folder / "trials" / f"{number:04d}" / "result.json"
    verdict.moment += f", result {number}"
    _cut(project, file)
    del project.finished[number]
    ended(project.resume(), 0, says=rf"{number:04d}/result\.json: damaged; kept as result\.json\.damaged")
    nothing_lost(project, verdict)
    goes_on(project, verdict)


def truncated_journal(project: Project, verdict: Verdict) -> None:
    """The list of processes may end in mid-line: what can be read is enough."""
    _killed(project, verdict)
    _cut(project, project.run_folder / "processes.jsonl")
    goes_on(project, verdict)


def truncated_plan(project: Project, verdict: Verdict) -> None:
    """Without what the run began with it cannot go on: refused by name; results can be read, a new run is whole."""
    _killed(project, verdict)
    name = project.rng.choice(["plan.json", "study.yaml", "workload/workload.jsonl"])
    verdict.moment += f", {name}"
    file = project.run_folder / name
    whole = file.read_bytes()
    _cut(project, file)
    ended(project.resume(), 2, says=rf"tune: .*{name.partition('/')[0]}")
    nothing_lost(project, verdict)
    file.write_bytes(whole)
    goes_on(project, verdict)


def truncated_measurements(project: Project, verdict: Verdict) -> None:
    """What lies beside a result may be cut short: the result is what counts."""
    _killed(project, verdict)
    files = sorted(project.run_folder.glob("trials/*/repeat-1/*")) + sorted(project.run_folder.glob("trials/*/*.log"))
    if not files:
        raise MissedError("nothing was measured")
    for file in project.rng.sample(files, 2):
        verdict.moment += f", {file.relative_to(project.run_folder / 'trials')}"
        _cut(project, file)
    goes_on(project, verdict)


def two_resumes(project: Project, verdict: Verdict) -> None:
    """Of two resumes at once one goes on and the other is refused."""
    _killed(project, verdict)
    both = [project.resume(), project.resume()]
    codes = sorted(tune.end() for tune in both)
    if codes != [0, 4]:
        raise BrokenError(f"exit codes {codes}, not 0 and 4")
    for tune in both:
        ended(tune, 0, 4)
    refused = next(tune for tune in both if tune.end() == 4)
    ended(refused, 4, says=r"another tune is at work here[\s\S]*wait for it or stop it")
    closed(project, verdict)


def workload_changed(project: Project, verdict: Verdict) -> None:
    """The user's workload changes under a study: the run has a copy of its own and goes on with it."""
    tune = project.run()
    verdict.moment = project.moment(tune)
    _change(project, project.rows)
    if project.rng.random() < 0.5:
        study_goes_on(project, verdict, tune)
    else:
        verdict.moment += ", then killed"
        kill(project, tune)
        nothing_left(project, verdict)
        goes_on(project, verdict)
    offered = {int(r.metrics["n_offered"]) for r in RunFolder(project.run_folder).read_all() if r.is_measured}
    if offered != {20}:
        raise BrokenError(f"trials were offered {offered} requests, not all the 20 that the run began with")


def copy_changed(project: Project, verdict: Verdict) -> None:
    """The run's own copy of the workload changes: two workloads would be mixed, so resuming refuses."""
    _killed(project, verdict)
    copy = project.run_folder / "workload" / "workload.jsonl"
    whole = copy.read_bytes()
    _change(project, copy)
    ended(project.resume(), 2, says=r"tune: .*workload.*changed")
    nothing_lost(project, verdict)
    copy.write_bytes(whole)
    goes_on(project, verdict)


def another_vllm(project: Project, verdict: Verdict) -> None:
    """Another version of vLLM at a resume is refused with both named; with the first one back it goes on."""
    _killed(project, verdict)
    project.write_program("0.32.0")
    ended(project.resume(), 4, says=r"begun with vLLM 0\.26\.0, here is 0\.32\.0")
    nothing_left(project, verdict)
    nothing_lost(project, verdict)
    project.write_program("0.26.0")
    goes_on(project, verdict)


def _killed(project: Project, verdict: Verdict, results: int = 1) -> None:
    """Run the study and kill it at a seeded moment after some results."""
    tune = project.run()
    tune.wait_until(lambda: len(project.results()) >= results)
    verdict.moment = f"killed {project.moment(tune)}"
    kill(project, tune)
    nothing_left(project, verdict)


def _cut(project: Project, file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: project.rng.randint(0, max(len(whole) - 2, 0))])


def _change(project: Project, file: Path) -> None:
    """Leave out a row and make another longer."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows.pop(project.rng.randrange(1, len(rows)))
    rows[0]["input_len"] += 100
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
