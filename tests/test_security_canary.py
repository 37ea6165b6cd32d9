"""Secrets and prompts stay where they were put: canaries wherever a user can give them, and a look at every byte.

A study on a server that prints all it knows, with an embedded MLflow; then a group of them behind vllm-router.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from deployment_data import wait_until
from front_data import ROUTER, needs_router
from replay_data import free_port, wait_for

from tuner import baseline, measure
from tuner import spec as specs
from tuner.deployment import process
from tuner.errors import TunerError
from tuner.outside import without_secret
from tuner.serving import ServingConfig
from tuner.sinks import view
from tuner.study import storage as storages

pytestmark = pytest.mark.once
TALKATIVE = Path(__file__).parent / "data" / "talkative_vllm.py"
NAMES = (
    "VLLM_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_CONNECTION_STRING", "MY_SERVICE_SECRET",
)  # fmt: skip
CANARIES = {name: f'canary/of"{name.lower()}@+1' for name in NAMES}
ENVIRONMENT = CANARIES | {"BROKER": "amqp://me:canary-of-broker@10.0.0.1/x"}
SECRETS = (*CANARIES.values(), "canary-of-broker", "canary/of")  # the last finds a half of one
QUIET = ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "CI", "PYTEST_CURRENT_TEST")
PROMPT = "canary of a prompt, told in confidence"

STUDY = """\
name: talk
model: m
vllm: {{command: [{python}, {server}, serve], start_timeout: 20s, stop_timeout: 5s}}
engine_args: {{max_model_len: 4096, max_num_seqs: 32}}
search_space:
  max_num_batched_tokens: {budgets}
workload: {{path: rows.jsonl, warm_up: 0.1s}}
slo: [itl_p50=10s, ttft_p50=10s]
budget: {{trials: {trials}}}
{more}
"""
FAULTS = {"crash_if": {"max_num_batched_tokens": 16384}, "http_status": {"only": [9], "status": 500}}


@dataclass
class Family:
    """What was seen of a process and all it started while it ran."""

    words: set[str] = field(default_factory=set)
    listening: set[tuple[str, str]] = field(default_factory=set)

    def look(self, root: psutil.Process) -> None:
        for member in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                self._look_at(member)

    def _look_at(self, member: psutil.Process) -> None:
        words = member.cmdline()
        self.words.add(" ".join(words))
        program = next((Path(word).name for word in words if "vllm" in word), words[0] if words else "")
        for connection in member.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                self.listening.add((program, connection.laddr.ip))


@dataclass
class Talk:
    """A study that has ended: where, what was said, and what was seen of its processes."""

    folder: Path
    said: str
    family: Family

    def files(self, *tops: str) -> Iterator[tuple[str, bytes]]:
        for top in tops:
            for path in (self.folder / top).rglob("*"):
                if path.is_file():
                    yield str(path.relative_to(self.folder)), path.read_bytes()


def tune(folder: Path, *words: str, family: Family | None = None, **env: str) -> tuple[int, str]:
    """Run tune with all canaries in its environment; return exit code and all that it said."""
    running = subprocess.Popen(
        [sys.executable, "-m", "tuner", *words],
        cwd=folder, env=os.environ | ENVIRONMENT | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with watched(running.pid, family):
        said, _ = running.communicate(timeout=100)
    return running.returncode, said


@contextmanager
def watched(pid: int, family: Family | None) -> Iterator[None]:
    """Look at a process and its children again and again while the block runs."""
    over, root = threading.Event(), psutil.Process(pid)

    def look() -> None:
        while family is not None and not over.wait(0.1):
            with suppress(psutil.Error):
                family.look(root)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def write(folder: Path, text: str) -> None:
    rows = [{"arrival_s": i * 0.05, "input_len": len(PROMPT), "output_len": 6, "prompt": PROMPT} for i in range(15)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "s.yaml").write_text(text)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    """A study with a crash and with failing requests, exported twice; and one whose tracking server is away."""
    folder, family = tmp_path_factory.mktemp("talk"), Family()
    write(folder, STUDY.format(python=sys.executable, server=TALKATIVE, budgets=[256, 16384], trials=4, more=""))
    code, said = tune(
        folder, "run", "s.yaml", "--baseline", "vllm serve m --max-num-seqs 16",
        family=family, FAKE_VLLM=json.dumps(FAULTS),
    )  # fmt: skip
    assert code == 0, said
    for words in (("export", "runs/talk", "-o", "best"), ("show", "runs/talk")):
        code, more = tune(folder, *words)
        assert code == 0, more
        said += more
    return Talk(folder, said, family)


def forms(secrets: Sequence[str]) -> Mapping[str, set[bytes]]:
    """Return what to look for: each secret as it is and as JSON writes it."""
    return {secret: {secret.encode(), json.dumps(secret)[1:-1].encode()} for secret in secrets}


def leaks(talk: Talk, secrets: Sequence[str], *tops: str) -> list[tuple[str, str]]:
    """Return which secret stands where, in files, in what was said and in the process list."""
    places = [*talk.files(*tops), ("said", talk.said.encode())]
    places += [("process list", words.encode()) for words in talk.family.words]
    return [(secret, place) for secret, any_of in forms(secrets).items()
            for place, data in places if any(form in data for form in any_of)]  # fmt: skip


def test_no_secret_of_the_environment_is_in_any_output(talk: Talk) -> None:
    """Run folder with the servers' logs, MLflow's store and artifacts, terminal, exports, process lists."""
    assert "failed (crash): RuntimeError: cannot reach the hub with " in talk.said
    assert "1 of 15 requests failed: http_500" in talk.said
    assert list(talk.folder.glob("runs/artifacts/**/server-any-0.tail.log"))
    assert leaks(talk, SECRETS, "runs", "best") == []


def test_a_log_is_readable_where_its_secrets_were(talk: Talk) -> None:
    """Only the values are gone."""
    log = (talk.folder / "runs/talk/trials/0000/server-any-0.log").read_text()

    assert "environment: " in log
    assert "HF_TOKEN=***" in log
    assert "Application startup complete" in log


def test_a_prompt_stays_in_the_workload(talk: Talk) -> None:
    """The run folder's own copy of the workload has it, and nothing else has."""
    places = {place for _, place in leaks(talk, [PROMPT], "runs", "best")}

    assert places == {"runs/talk/workload/workload.jsonl"}


def test_what_a_server_prints_does_not_steer_the_terminal(talk: Talk) -> None:
    """Its escape codes end at its log."""
    assert "cannot reach the hub" in talk.said
    assert not [c for c in talk.said if not (c.isprintable() or c == "\n")]


def test_everything_that_a_study_starts_listens_on_the_loopback_interface(talk: Talk) -> None:
    """No address of this host is open to others while a study runs."""
    assert {program for program, _ in talk.family.listening} == {"talkative_vllm.py"}
    assert [where for where in talk.family.listening if not ip_address(where[1]).is_loopback] == []


@needs_router
@pytest.mark.once
def test_a_group_keeps_secrets_and_listens_on_the_loopback_interface(tmp_path: Path) -> None:
    """Servers, side channels, the front and its metrics; YAML, environment, script and manifests of the export."""
    family = Family()
    more = f"topologies: [1p1d]\nfront: {{command: '{ROUTER}'}}"
    write(tmp_path, STUDY.format(python=sys.executable, server=TALKATIVE, budgets=[1024], trials=1, more=more))
    code, said = tune(tmp_path, "run", "s.yaml", "--mlflow", "off", family=family)
    group = Talk(tmp_path, said, family)

    assert code == 0, said
    assert leaks(group, SECRETS, "runs") == []
    assert {place for _, place in leaks(group, [PROMPT], "runs")} == {"runs/talk/workload/workload.jsonl"}
    assert {name.replace("::", "-") for name, _ in family.listening} == {"talkative_vllm.py", "vllm-router"}
    assert [where for where in family.listening if not ip_address(where[1]).is_loopback] == []
    assert (tmp_path / "runs/talk/best/start.sh").is_file()


def test_passwords_of_servers_that_are_away_are_nowhere(tmp_path: Path) -> None:
    """Given by TUNE_MLFLOW and TUNE_STORAGE: not in the run folder, in what is said, nor in a process list."""
    family = Family()
    write(tmp_path, STUDY.format(python=sys.executable, server=TALKATIVE, budgets=[1024], trials=1, more=""))
    there = f"127.0.0.1:{free_port()}"
    tracking, storage = f"http://me:canary-of-mlflow@{there}", f"nonsense://me:canary-of-storage@{there}/x"
    code, said = tune(tmp_path, "run", "s.yaml", family=family, TUNE_MLFLOW=tracking)
    code_of_storage, more = tune(tmp_path, "run", "s.yaml", family=family, TUNE_STORAGE=storage, TUNE_MLFLOW="off")
    found = Talk(tmp_path, said + more, family)

    assert (code, code_of_storage) == (0, 4), said + more
    assert f"MLflow at http://{there}" in said.replace("***@", "")
    assert f"nonsense://***@{there}" in more
    assert leaks(found, [*SECRETS, "canary-of-mlflow", "canary-of-storage"], "runs") == []


def test_a_killed_tune_leaves_no_secret_in_a_log(tmp_path: Path) -> None:
    """The guardian, which ends its servers, goes over their logs too."""
    write(tmp_path, STUDY.format(python=sys.executable, server=TALKATIVE, budgets=[1024], trials=1, more=""))
    env = os.environ | ENVIRONMENT | {"FAKE_VLLM": json.dumps({"freeze_at": 0.1, "freeze_for": 60})}
    argv = [sys.executable, "-m", "tuner", "run", "s.yaml", "--mlflow", "off"]
    log, journal = tmp_path / "runs/talk/trials/0000/server-any-0.log", tmp_path / "runs/talk/processes.jsonl"
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as running:
        try:
            wait_until(lambda: log.is_file() and "startup complete" in log.read_text(), timeout=30)
        finally:
            running.kill()
    wait_until(lambda: '"ended"' in journal.read_text(), timeout=15)

    assert "environment: " in log.read_text()
    assert leaks(Talk(tmp_path, "", Family()), SECRETS, "runs") == []


# --- What is refused, and what is said then ---------------------------------------------------------------

BROKEN_YAML = "max-num-seqs: 8\napi-key: canary-of-yaml\n  hf-token: [canary-of-yaml\n"
ROW = '{"arrival_s": 0, "input_len": 1, "output_len": 1}\n'


def refused(ask: Callable[[], object]) -> str:
    """Return what the user is told."""
    with pytest.raises(TunerError) as caught:
        ask()
    return f"{caught.value.message}\n{caught.value.hint}"


@pytest.mark.parametrize(
    "line",
    [
        "env: {HF_TOKEN: canary-of-study}",
        "env: {PGPASSWORD: canary-of-study}",
        "env: {MY_KEY: 77700077700077}",
        "env: {BROKER: 'amqp://me:canary-of-study@host/x'}",
        "env: {BROKER: 'https://canary-of-study@host/x'}",
        "engine_args: {api_key: canary-of-study}",
        "engine_args: {decoder.hf_token: canary-of-study}",
        "engine_args: {hf_overrides: {url: 'https://me:canary-of-study@host/x'}}",
        "search_space: {api_key: [canary-of-study, b]}",
        "mlflow: http://me:canary-of-study@host",
    ],
)
def test_a_secret_in_a_study_is_refused_and_not_repeated(line: str) -> None:
    """Whichever way it is wrong."""
    said = refused(lambda: specs.parse(f"name: s\nmodel: m\nworkload: w\n{line}\n", "s.yaml"))

    assert "s.yaml:4" in said
    assert "canary" not in said
    assert "77700077700077" not in said


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --api-key canary-of-baseline",
        "vllm serve m --hf-token=canary-of-baseline --max-num-seqs 8",
        "env VLLM_API_KEY=canary-of-baseline vllm m --max-num-seqs 8",
        "vllm serve m --otlp-traces-endpoint http://me:canary-of-baseline@host/x",
        "b.yaml",
    ],
)
def test_a_secret_in_a_baseline_is_refused_and_not_repeated(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a flag, before the program, in an address, in a file that is no YAML."""
    monkeypatch.chdir(tmp_path)
    Path("b.yaml").write_text(BROKEN_YAML)
    said = refused(lambda: baseline.read(text, ServingConfig("m")))

    assert said.startswith("--baseline")
    assert "canary" not in said


@pytest.mark.parametrize("password", ["canary", "can@canary", "a/canary@b", "canary%40x"])
def test_a_password_in_an_address_is_not_repeated(password: str, tmp_path: Path) -> None:
    """Of Optuna's storage, of a server, of MLflow; whatever characters it has."""
    (tmp_path / "w.jsonl").write_text(ROW)
    there = f"me:{password}@127.0.0.1:1"
    storage = refused(lambda: storages.open_storage(f"nonsense://{there}/x"))
    said = [
        storage,
        refused(lambda: measure.wanted(str(tmp_path / "w.jsonl"), f"http://{there}")),
        refused(lambda: measure.wanted(str(tmp_path / "w.jsonl"), f"ftp://{there}")),
        view.open_ui_hint(f"postgresql://{there}/mlflow", None),
        view.open_ui_hint(f"http://{there}", None),
        view.review_url(without_secret(f"https://{there}"), "1", "k"),
    ]

    assert "127.0.0.1:1/x" in storage
    assert [text for text in said if "canary" in text or "can@" in text] == []


@pytest.mark.parametrize("body", ['{"key": "canary"', '["canary"]', '{"model": "canary"}'])
def test_a_body_that_cannot_be_sent_is_not_repeated(body: str, tmp_path: Path) -> None:
    """It may hold a key of the server's."""
    (tmp_path / "w.jsonl").write_text(ROW)
    said = refused(lambda: measure.wanted(str(tmp_path / "w.jsonl"), "http://h", extra_body=body))

    assert said.startswith("--extra-body")
    assert "canary" not in said


@contextmanager
def talking(folder: Path) -> Iterator[str]:
    """Run the talkative server by itself; yield its URL."""
    folder.mkdir()
    url = f"http://127.0.0.1:{free_port()}"
    argv = [sys.executable, str(TALKATIVE), "serve", "m", "--port", url.rpartition(":")[2], "--max-model-len", "4096"]
    env = os.environ | ENVIRONMENT | {"FAKE_VLLM": json.dumps(FAULTS)}
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, env=env, stdout=log, stderr=log) as server:
        try:
            wait_for(f"{url}/health", server)
            yield url
        finally:
            server.terminate()


def test_replay_shows_and_keeps_no_secret(tmp_path: Path) -> None:
    """Of a server that is there already: neither what it was asked with nor what its errors quote."""
    rows = [{"arrival_s": i * 0.02, "input_len": 20, "output_len": 4} for i in range(20)]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = json.dumps({"user": "canary-of-body"})
    files = ("-o", "out/r", "--bench-json", "out/b.json")
    with talking(tmp_path / "server") as url:
        code, said = tune(
            tmp_path, "replay", "w.jsonl", "--url", url, "--warm-up", "0s", "--extra-body", body, "--json", *files
        )
    found = Talk(tmp_path, said, Family())

    assert code == 0, said
    assert "1 of 20 requests failed: http_500: input:" in said
    assert leaks(found, [*SECRETS, "canary-of-body"], "out") == []


# --- Telemetry --------------------------------------------------------------------------------------------

ASK_MLFLOW = """
import builtins, os
seen, real = [], builtins.__import__
def watch(name, *more, **also):
    if name.split('.')[0] == 'mlflow':
        seen.append(os.environ.get('MLFLOW_DISABLE_TELEMETRY'))
    return real(name, *more, **also)
builtins.__import__ = watch
import tuner.sinks.mlflow
from mlflow.telemetry.utils import is_telemetry_disabled
print(seen[0], is_telemetry_disabled())
"""


def test_nobody_is_told_of_a_study() -> None:
    """MLflow's telemetry is off before MLflow is imported, and vLLM's statistics in each server's environment."""
    env = {name: value for name, value in os.environ.items() if name not in QUIET}
    done = subprocess.run([sys.executable, "-c", ASK_MLFLOW], env=env, capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["true", "True"]
    assert process.environment(process.settings({}), "m")["VLLM_NO_USAGE_STATS"] == "1"
