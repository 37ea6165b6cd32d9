"""Faults of studies on a real vLLM: the CPU build on the quick start's model, two trials each."""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil

from tests.faults import processes
from tests.faults.checks import Verdict, failed_kinds
from tests.faults.processes import study_goes_on
from tests.faults.project import POLL, BrokenError, MissedError, Project, Tune
from tests.faults.servers import port_taken as _port_taken

STUDY = """\
name: study
model: tune/tiny-qwen2
vllm: {command: [PROGRAM, serve], start_timeout: 90s, stop_timeout: 5s}
engine_args: {max_model_len: 4096, max_num_seqs: 32, enforce_eager: true}
env:
  OMP_NUM_THREADS: "1"
  OMP_WAIT_POLICY: PASSIVE
  VLLM_CPU_OMP_THREADS_BIND: nobind
  VLLM_CPU_KVCACHE_SPACE: "1"
  HF_HUB_OFFLINE: "1"
  TORCHDYNAMO_DISABLE: "1"
search_space:
  max_num_batched_tokens: [128, 256, 512, 1024, 4096]
workload: {path: rows.jsonl, warm_up: 1s, drain_timeout: 10s}
slo: [itl_p99=10s, ttft=10s]
budget: {trials: TRIALS}
"""
ROWS = "".join(f'{{"arrival_s": {i * 0.1}, "input_len": {60 + 80 * (i % 3)}, "output_len": 40}}\n' for i in range(30))


def vllm() -> str | None:
    """Return the `vllm` to run: TUNE_TEST_VLLM, beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / "vllm"
    return os.environ.get("TUNE_TEST_VLLM") or (str(beside) if beside.exists() else shutil.which("vllm"))


def missing() -> str:
    """Return what this machine lacks, if anything."""
    return "" if vllm() else "no vllm beside this Python, on PATH or in TUNE_TEST_VLLM"


def project(folder: Path, rng: random.Random) -> Project:
    """Return a study of two trials on the real vLLM."""
    return Project(folder, rng, server=vllm(), trials=2, study=STUDY, rows_text=ROWS, longest_delay=2.0)


kill_tune = processes.kill_tune
sigint_once = processes.sigint_once
sigint_twice = processes.sigint_twice
kill_server = processes.kill_server
kill_engine = processes.kill_engine
port_taken = _port_taken


def hangs_at_start(project: Project, verdict: Verdict) -> None:
    """A server that is stopped while it starts is ended at the time limit."""
    tune = project.run()
    verdict.moment = project.moment(tune, "starting")
    _stop(project, tune)
    study_goes_on(project, verdict, tune, says=r"failed \(timeout\): not ready after 90 s", failures=1)


def hangs_in_mid_stream(project: Project, verdict: Verdict) -> None:
    """A server that is stopped while it answers fails that trial alone."""
    tune = project.run()
    verdict.moment = project.moment(tune, "replay")
    _stop(project, tune)
    study_goes_on(project, verdict, tune, failures=1)


def hangs_at_stop(project: Project, verdict: Verdict) -> None:
    """A server that is stopped when it should end is killed; its measurement counts."""
    tune = project.run()
    tune.wait_until_said(r"trial \d+: replay", project.rng.randint(1, 2))
    server = project.server_process(tune)
    n = tune.said.count(": stopping")
    verdict.moment = f"when server {server.pid} was to stop"
    tune.wait_until_said(r"trial \d+: stopping", n + 1)
    _stop_all(server)
    study_goes_on(project, verdict, tune)


def out_of_memory_at_start(project: Project, verdict: Verdict) -> None:
    """A limit on its address space, below what vLLM needs: the trial fails, the study goes on."""
    gib = project.rng.choice([2, 3])  # with 4 gloo waits for ever for a thread that it could not start
    project.hook.write_text(f"ulimit -v {gib * 1024 * 1024}\n")
    verdict.moment = f"first server: {gib} GiB of address space"
    tune = project.run()
    study_goes_on(project, verdict, tune, says=r"trial \d+: failed \((oom|crash)\)", failures=1)


def out_of_memory_under_load(project: Project, verdict: Verdict) -> None:
    """No more address space from a moment of the replay on: the trial is measured or fails; the study goes on."""
    tune = project.run()
    verdict.moment = project.moment(tune, "warm-up", "replay")
    server = project.server_process(tune)
    for process in [server, *server.children(recursive=True)]:
        try:
            used = process.memory_info().vms
            process.rlimit(psutil.RLIMIT_AS, (used, used))
        except psutil.Error as error:
            raise MissedError(str(error)) from None
    study_goes_on(project, verdict, tune, failures=1)
    if not set(failed_kinds(project)) <= {"oom", "died", "crash", "nothing_completed"}:
        raise BrokenError(f"trials failed as {failed_kinds(project)}")


def _stop(project: Project, tune: Tune) -> None:
    _stop_all(project.server_process(tune))


def _stop_all(server: psutil.Process) -> None:
    """Stop a server and its children where they are."""
    try:
        for process in [server, *server.children(recursive=True)]:
            process.send_signal(signal.SIGSTOP)
    except psutil.Error as error:
        raise MissedError(str(error)) from None
    time.sleep(POLL)
