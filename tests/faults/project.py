"""A tiny study in a folder of its own, tune at work in it, and what was seen of both."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
FAKE = REPO / "tests" / "fake_vllm.py"
SIGN = "TUNE_FAULT"  # in the environment of tune and all that it starts
NAME = "study"
TRIALS = 4
POLL = 0.005
# Of a fake study one trial takes a second; two cores may be shared with others.
PATIENCE = 240.0
# Long enough that a moment inside a phase can be hit.
CALM = {"start_delay": 0.3, "stop_delay": 0.2, "engine_child": True}
STUDY = """\
name: study
model: m
vllm: {command: [PROGRAM, serve], start_timeout: 8s, stop_timeout: 2s}
engine_args: {max_model_len: 4096, max_num_seqs: 32}
search_space:
  max_num_batched_tokens: [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 3072, 4096]
workload: {path: rows.jsonl, warm_up: 0.1s, drain_timeout: 3s}
slo: [itl_p99=10s, ttft=10s]
budget: {trials: TRIALS}
"""
ROWS = "".join(
    json.dumps({"arrival_s": i * 0.02, "input_len": 20 + 40 * (i % 3), "output_len": 8}) + "\n" for i in range(20)
)
# A program between tune and the server, for faults at its start; the hook is taken once.
PROGRAM = """\
#!/bin/sh
if [ "$1" = --version ]; then echo VERSION; exit; fi
if [ "$1" = serve ] && [ "$2" != --help=all ] && mv "HOOK" "HOOK.taken" 2>/dev/null; then . "HOOK.taken"; fi
exec SERVER "$@"
"""


class MissedError(Exception):
    """The moment was over before the fault could be injected: nothing was tested."""


class BrokenError(Exception):
    """A claim does not hold."""


class Tune:
    """A running tune; its words go to files, so that no pipe can stop it."""

    def __init__(self, project: "Project", words: Sequence[str], env: Mapping[str, str], number: int) -> None:
        self.words = words
        self._said = project.folder / f"tune-{number}.err"
        self._printed = project.folder / f"tune-{number}.out"
        with self._said.open("wb") as said, self._printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tuner", *words],
                cwd=project.folder, env=env, stdin=subprocess.DEVNULL, stdout=printed, stderr=said,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """What it wrote to stderr so far."""
        return self._said.read_text(errors="replace")

    @property
    def printed(self) -> str:
        """What it wrote to stdout so far."""
        return self._printed.read_text(errors="replace")

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_until(self, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
        """Wait for a moment in its life.

        Raises:
            MissedError: it ended before.
        """
        deadline = time.monotonic() + patience
        while not (value := condition()):
            if not self.is_running():
                raise MissedError(f"tune had ended (exit {self.process.returncode})")
            if time.monotonic() > deadline:
                raise MissedError(f"the moment did not come in {patience:g} s")
            time.sleep(POLL)
        return value

    def wait_until_said(self, pattern: str, count: int = 1) -> None:
        self.wait_until(lambda: len(re.findall(pattern, self.said)) >= count)

    def signal(self, number: signal.Signals) -> None:
        """Signal it.

        Raises:
            MissedError: it has ended.
        """
        if not self.is_running():
            raise MissedError(f"tune had ended (exit {self.process.returncode})")
        self.process.send_signal(number)

    def end(self, patience: float = PATIENCE) -> int:
        """Wait for its end and return the exit code.

        Raises:
            BrokenError: it hangs; it is killed.
        """
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise BrokenError(f"tune {' '.join(self.words)} did not end in {patience:g} s") from None


@dataclass
class Project:
    """One study that a fault is injected into.

    Attributes:
        folder: holds everything.
        rng: decides moments.
        mlflow: the tracking URI given to every call; None is the store in the runs folder.
        env: beside the inherited one, for every call.
        server: the command of a real vLLM; None is the fake.
        finished: the files of every result seen, by trial.
        tunes: every call made.
        shared_memory: that its processes were seen to use.
        trials: the budget.
        study: the study file.
        rows_text: the workload.
        longest_delay: after which a moment in a phase may come.
    """

    folder: Path
    rng: random.Random
    mlflow: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    server: str | None = None
    sign: str = field(default_factory=lambda: uuid.uuid4().hex)
    finished: dict[int, str] = field(default_factory=dict)
    tunes: list[Tune] = field(default_factory=list)
    shared_memory: set[str] = field(default_factory=set)
    trials: int = TRIALS
    study: str = STUDY
    rows_text: str = ROWS
    longest_delay: float = 0.25

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows.write_text(self.rows_text)
        self.write_program()
        text = self.study.replace("PROGRAM", json.dumps(str(self.program))).replace("TRIALS", str(self.trials))
        (self.folder / "s.yaml").write_text(text)

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def program(self) -> Path:
        return self.folder / "vllm-behind-sh"

    @property
    def hook(self) -> Path:
        return self.folder / "hook.sh"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def run_folder(self) -> Path:
        return self.runs / NAME

    @property
    def storage(self) -> Path:
        return self.run_folder / "optuna.db"

    @property
    def tracking_uri(self) -> str:
        return self.mlflow or f"sqlite:///{self.runs / 'mlflow.db'}"

    def write_program(self, version: str = "0.26.0") -> None:
        """Write what the study calls vLLM."""
        server = f'"{self.server or sys.executable}"' + ("" if self.server else f' "{FAKE}"')
        text = PROGRAM.replace("VERSION", version).replace("HOOK", str(self.hook)).replace("SERVER", server)
        self.program.write_text(text)
        self.program.chmod(0o755)

    def tune(self, *words: str, **env: str) -> Tune:
        """Start tune."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        ours = {"PYTHONPATH": str(REPO), SIGN: self.sign, "FAKE_VLLM": json.dumps(CALM)}
        started = Tune(self, words, inherited | ours | self.env | env, len(self.tunes))
        self.tunes.append(started)
        return started

    def run(self, *words: str, **env: str) -> Tune:
        """Begin the study."""
        return self.tune("run", "s.yaml", *self._where(), *words, **env)

    def resume(self, *words: str, **env: str) -> Tune:
        """Go on with the study."""
        return self.tune("run", "--resume", f"runs/{NAME}", *self._where(), *words, **env)

    def _where(self) -> list[str]:
        return ["--mlflow", self.mlflow] if self.mlflow else []

    def results(self) -> dict[int, str]:
        """Return the text of each complete result by trial."""
        found = {}
        for file in self.run_folder.glob("trials/*/result.json"):
            try:
                found[int(file.parent.name)] = file.read_text()
            except FileNotFoundError:  # replaced at this moment
                continue
        return found

    def note_finished(self) -> None:
        """Remember every finished trial: none may be lost or changed from now on."""
        for number, text in self.results().items():
            self.finished.setdefault(number, text)

    def journal(self) -> list[dict[str, Any]]:
        """Return what the run wrote down about its servers."""
        file = self.run_folder / "processes.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [entry for line in lines if (entry := _object(line))]

    def up(self) -> dict[str, Any] | None:
        """Return the server that is running now, by the journal."""
        entries = self.journal()
        return entries[-1] if entries and entries[-1]["event"] == "started" else None

    def server_process(self, tune: Tune) -> psutil.Process:
        """Return the API server that this project's tune has started."""
        while True:
            entry = tune.wait_until(self.up)
            try:
                process = psutil.Process(entry["pid"])
                if abs(process.create_time() - entry["create_time"]) < 1:
                    return process
            except psutil.Error:
                time.sleep(POLL)

    def processes(self) -> list[psutil.Process]:
        """Return every living process that comes from this project's tunes."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_signed = process.environ().get(SIGN) == self.sign
            return bool(is_signed and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    def note_shared_memory(self) -> None:
        """Remember the shared memory that our processes use now."""
        for process in self.processes():
            for path in _mapped(process):
                if path.startswith("/dev/shm/") and "faketime" not in path:  # noqa: S108 (looked at only)
                    self.shared_memory.add(path.removesuffix(" (deleted)"))

    def moment(self, tune: Tune, *phases: str) -> str:
        """Wait until a seeded moment of the study, and return it in words.

        One of `phases`, by default all of a trial's, of one of the first trials, or shortly after a result.
        """
        rng = self.rng
        phase = rng.choice(phases or ("starting", "warm-up", "replay", "stopping", "result"))
        k, delay = rng.randint(1, self.trials - 1), rng.uniform(0, self.longest_delay)
        if phase == "result":
            tune.wait_until(lambda: len(self.results()) >= k)
            words = f"{delay * 1000:.0f} ms after result {k}"
        else:
            tune.wait_until_said(rf"trial \d+: {phase}", k)
            words = f"{delay * 1000:.0f} ms into {phase} {k}"
        time.sleep(delay)
        if not tune.is_running():
            raise MissedError(f"{words}: tune had ended")
        return words

    def destroy(self) -> None:
        """End whatever is left of this project's processes."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _mapped(process: psutil.Process) -> Iterator[str]:
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in maps:
        words = line.split(maxsplit=5)
        if len(words) == 6:
            yield words[5]
