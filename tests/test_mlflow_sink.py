"""MLflow as a mirror: what arrives there, that it arrives once, and that its absence costs little."""

import base64
import dataclasses
import json
import shutil
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import DatasetInput, Run, ViewType
from study_data import GROUPS, START, X, Y, budgets, config, failed, groups, study, trial

from tuner.errors import FailureKind
from tuner.results import TrialResult
from tuner.serving import Role, ServingConfig, Topology
from tuner.sinks import card, pages, view
from tuner.sinks.mlflow import MlflowSink, embedded
from tuner.sinks.pages import WorkloadFacts
from tuner.spec import StudySpec
from tuner.workload import Request, Workload

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's use of SQLAlchemy
]

UID = "7f3a9c"
TRAFFIC = Workload("chat", (Request(0.0, 10, 5, prompt="a private matter"), Request(1.0, 30, 5)), "ab" * 32)
FACTS = WorkloadFacts("chat", "ab" * 32, {"requests": 73, "span_s": 30.0, "input_len_p50": 62.0})


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its schema, which takes seconds to make."""
    runs = tmp_path_factory.mktemp("empty")
    MlflowClient(tracking_uri=embedded(runs)[0]).search_experiments()
    return runs / "mlflow.db"


@pytest.fixture
def runs(tmp_path: Path, empty_store: Path) -> Path:
    """A folder of runs whose name needs quoting, with files of two trials."""
    return folder_of_runs(tmp_path, empty_store)


def folder_of_runs(where: Path, empty_store: Path) -> Path:
    folder = where / "my runs"
    trial_folder = folder / "quickstart" / "trials" / "0000"
    (trial_folder / "repeat-1").mkdir(parents=True)
    (trial_folder / "config.yaml").write_text("model: tune/tiny-qwen2\n")
    (trial_folder / "command.txt").write_text("vllm serve tune/tiny-qwen2\n")
    (trial_folder / "server-any-0.log").write_text("early\n" + "x" * 100_000 + "\nlate\n")
    (trial_folder / "repeat-1" / "metrics.json").write_text("{}")
    card.write(folder / "quickstart" / "workload", TRAFFIC, name=card.PAGE)
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> tuple[Path, MlflowSink]:
    """A study of nine trials, published as it went, and who published it: to be looked at, not changed."""
    folder = folder_of_runs(tmp_path_factory.mktemp("sent"), empty_store)
    return folder, publish(folder)


@pytest.fixture(scope="module")
def published(sent: tuple[Path, MlflowSink]) -> Path:
    """The folder of runs of that study."""
    return sent[0]


@pytest.fixture(scope="module")
def published_groups(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """The same of a study over topologies."""
    folder = folder_of_runs(tmp_path_factory.mktemp("groups"), empty_store)
    publish(folder, groups(), GROUPS)
    return folder


def sink(runs: Path, **changes: Any) -> MlflowSink:
    uri, artifacts = embedded(runs)
    given: dict[str, Any] = {
        "tracking_uri": uri,
        "artifact_root": artifacts,
        "study_uid": UID,
        "run_folder": runs / "quickstart",
        "workload": FACTS,
        "experiment": "tiny-qwen2 on chat",
        "vllm_version": "0.26.0",
        "warn": pytest.fail,
    }
    return MlflowSink(**(given | changes))


def publish(
    runs: Path, results: list[TrialResult] | None = None, spec: StudySpec | None = None, **changes: Any
) -> MlflowSink:
    """Live through a study as the loop does."""
    made = sink(runs, **changes)
    so_far: list[TrialResult] = []
    made.study_started(spec or study(), so_far)
    for result in budgets() if results is None else results:
        made.trial_started(result.number, result.config, result.label)
        so_far.append(result)
        made.trial_ended(result, so_far)
    made.study_ended(so_far)
    return made


def publish_at_once(
    runs: Path, results: list[TrialResult] | None = None, spec: StudySpec | None = None, **changes: Any
) -> MlflowSink:
    """Send a study that is over, in a tenth of the time."""
    made, results = sink(runs, **changes), budgets() if results is None else results
    made.study_started(spec or study(), results)
    made.study_ended(results)
    return made


def client(runs: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=embedded(runs)[0])


def runs_of(runs: Path, kind: str, view: int = ViewType.ACTIVE_ONLY) -> list[Run]:
    seen = client(runs)
    ids = [e.experiment_id for e in seen.search_experiments()]
    found = seen.search_runs(ids, f"tags.`tune.kind` = '{kind}'", view, 1000)
    return sorted(found, key=lambda run: int(run.data.tags.get("tune.trial", -1)))


def parent(runs: Path) -> Run:
    (only,) = runs_of(runs, "study")
    return only


def datasets(run: Run) -> list[DatasetInput]:
    return run.inputs.dataset_inputs if run.inputs is not None else []


def everything(runs: Path) -> list[Any]:
    """All that MLflow knows, with every point of every metric."""
    seen = client(runs)
    out: list[Any] = []
    for run in [*runs_of(runs, "study"), *runs_of(runs, "trial")]:
        points = {
            key: [(p.step, p.timestamp, p.value) for p in seen.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        inputs = [(i.dataset.name, i.dataset.digest) for i in datasets(run)]
        out.append((run.info.run_id, run.info.status, dict(run.data.params), dict(run.data.tags), points, inputs))
    return out


def artifacts(runs: Path, run_id: str, path: str | None = None) -> set[str]:
    found = client(runs).list_artifacts(run_id, path)
    inner = [artifacts(runs, run_id, item.path) for item in found if item.is_dir]
    return {item.path for item in found if not item.is_dir}.union(*inner)


def text_of(runs: Path, run_id: str, path: str) -> str:
    return Path(client(runs).download_artifacts(run_id, path)).read_text()


def test_a_study_is_a_parent_with_a_child_per_trial(sent: tuple[Path, MlflowSink]) -> None:
    """One parent, nine children below it with short names, all closed with the right status."""
    runs, made = sent
    top = parent(runs)
    children = runs_of(runs, "trial")

    assert made.synced
    assert top.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {top.info.run_id}
    assert [run.info.run_name for run in children] == [
        "t00 default", "t01 baseline", "t02 b1024", "t03 b512", "t04 b256",
        "t05 b65536", "t06 b128", "t07 b256", "t08 l256",
    ]  # fmt: skip
    assert [run.info.status for run in children] == ["FINISHED"] * 5 + ["FAILED"] + ["FINISHED"] * 3
    assert children[4].info.end_time == round((START + 80 * 4 + 72) * 1000)


def test_params_are_the_effective_arguments_under_vllms_names(published: Path) -> None:
    """Every param is on every child; the default's budget is the one the server resolved."""
    children = runs_of(published, "trial")

    assert len({frozenset(run.data.params) for run in children}) == 1
    assert children[0].data.params == {
        "topology": "1x",
        "pd_ratio": "none",
        "max_model_len": "4096",
        "max_num_batched_tokens": "2048",
        "long_prefill_token_threshold": "0",
        "enable_chunked_prefill": "true",
        "max_num_seqs": "32",
    }
    assert children[5].data.params["max_num_batched_tokens"] == "65536"
    assert children[5].data.params["max_num_seqs"] == "not given"


def test_an_argument_that_appears_late_is_added_to_earlier_trials(runs: Path) -> None:
    """Charts drop runs that lack a param."""
    publish(runs, [trial(0, label="default"), trial(1, args={"max_num_partial_prefills": 4})])

    assert [run.data.params["max_num_partial_prefills"] for run in runs_of(runs, "trial")] == ["not given", "4"]


def test_a_pd_group_logs_each_roles_arguments() -> None:
    """What both are given alike has vLLM's name, what one is given the role in front; the ratio is a param."""
    pd = ServingConfig(
        "m", {"max_num_seqs": 8}, {}, Topology.parse("2p1d"), {Role.PREFILLER: {"max_num_batched_tokens": 8192}}
    )

    assert pages.params(dataclasses.replace(trial(0), config=pd)) == {
        "topology": "2p1d",
        "pd_ratio": "2:1",
        "max_num_seqs": "8",
        "prefiller.max_num_batched_tokens": "8192",
    }


def test_a_pd_groups_servers_are_logged_with_what_they_resolved() -> None:
    """What vLLM resolved counts for both roles, unless a role was given its own; a prefixed name is taken as it is."""
    pd = dataclasses.replace(
        trial(0, topology="1p3d", args={"prefiller__max_num_batched_tokens": 8192}),
        effective={"max_num_batched_tokens": 2048, "decoder.max_num_seqs": 64},
    )

    assert {k: v for k, v in pages.params(pd).items() if "max_num" in k} == {
        "prefiller.max_num_batched_tokens": "8192",
        "decoder.max_num_batched_tokens": "2048",
        "decoder.max_num_seqs": "64",
    }


def test_topologies_are_told_apart_by_params_that_every_run_has(published_groups: Path) -> None:
    """Parallel coordinates drop a run that lacks a param, so replicas say "none" and PD "not given"."""
    children = runs_of(published_groups, "trial")
    names = ("topology", "topology.kind", "pd_ratio", "n_gpus", "max_num_batched_tokens",
             "prefiller.max_num_batched_tokens", "decoder.max_num_seqs")  # fmt: skip

    assert len({frozenset(run.data.params) for run in children}) == 1
    assert [tuple(run.data.params[name] for name in names) for run in children[:4]] == [
        ("4x", "aggregated", "none", "4", "not given", "not given", "not given"),
        ("4x", "aggregated", "none", "4", "512", "not given", "not given"),
        ("1p3d", "pd", "1:3", "4", "not given", "16384", "64"),
        ("2p2d", "pd", "2:2", "4", "not given", "8192", "not given"),
    ]
    assert [run.info.run_name for run in children] == [
        "t00 default", "t01 4x b512", "t02 1p3d p.b16384 d.s64", "t03 2p2d p.b8192", "t04 3p1d b65536",
        "t05 1p3d p.b4096 d.s32",
    ]  # fmt: skip
    assert children[2].data.metrics["kv_transfer_time_mean_ms"] == pytest.approx(12.0)
    assert children[2].data.metrics["kv_transfer_share"] == 1.0


def test_a_group_counts_the_gpus_that_it_takes() -> None:
    """Four servers take four, on a CPU none, and where they share devices those of the largest."""
    pd = trial(0, topology="1p3d", args={"prefiller__tensor_parallel_size": 2})
    on_cpu = dataclasses.replace(pd, vllm_version="0.26.0+cpu")

    assert pages.params_of_all([pd])[0]["n_gpus"] == "5"
    assert pages.params_of_all([pd], share_devices=True)[0]["n_gpus"] == "2"
    assert pages.params_of_all([on_cpu])[0]["n_gpus"] == "0"


def test_a_threshold_that_is_off_is_off_for_the_roles_a_trial_has() -> None:
    """Zero for servers that would read it, "not given" for those that are not there."""
    threshold = "long_prefill_token_threshold"
    given = [
        trial(0, topology="4x"),
        trial(1, topology="1p3d"),
        trial(2, topology="4x", args={threshold: 64}),
        trial(3, topology="1p3d", args={f"prefiller__{threshold}": 128}),
    ]
    seen = pages.params_of_all(given)

    assert [seen[n][threshold] for n in range(4)] == ["0", "not given", "64", "not given"]
    assert [seen[n][f"prefiller.{threshold}"] for n in range(4)] == ["not given", "0", "not given", "128"]


def test_the_note_tells_whether_pd_pays(published_groups: Path) -> None:
    """The sentence and a table in Markdown follow the answer; a study of one topology has neither."""
    note = parent(published_groups).data.tags["mlflow.note.content"].splitlines()
    first = note.index("Best of each topology at 4 GPUs:")

    assert sum(line.startswith("- PD pays here at 4 GPUs, 1p3d") for line in note) == 1
    assert note[first + 2].startswith("| topology | trials | best | TTFT p50 long | ITL p99 | SLO | KV transfer |")
    assert note[first + 3] == "|---|---|---|---|---|---|---|---|"
    assert note[first + 4].startswith("| 4x | 2 | trial 1 | 470 ms | 74.0 ms |")
    assert note[first + 8] == ""


def test_metrics_are_milliseconds_with_one_point_each(published: Path) -> None:
    """Medians at step 0, repeats under `repeat/` by number, excesses; nothing for failures and repeats."""
    children = runs_of(published, "trial")
    history = client(published).get_metric_history(children[4].info.run_id, "repeat/itl_p99_ms")

    assert children[4].data.metrics["itl_p99_ms"] == pytest.approx(101.0)
    assert children[4].data.metrics["ttft_p50_ms.long"] == pytest.approx(589.0)
    assert children[4].data.metrics["slo_excess/ttft_p50.long"] == pytest.approx(589 / 600 - 1)
    assert [p.step for p in history] == [1, 2]
    assert [p.value for p in history] == pytest.approx([98.98, 101.0])
    assert children[5].data.metrics == {}
    assert children[7].data.metrics == {}


def test_numbers_that_are_none_stay_away() -> None:
    """Infinity would become 1.8e308 and ruin every chart."""
    found = pages.metrics(trial(0, float("inf"), 0.1, repeats=()))

    assert dict((k, v) for k, v, _ in found) == {"itl_p99_ms": 100.0}  # noqa: C402


def test_tags_let_a_team_filter(published: Path) -> None:
    """SLO, front, recommendation, role, outcome and failure are tags; those of the front are up to date."""
    tags = [run.data.tags for run in runs_of(published, "trial")]

    assert [t["tune.slo"] for t in tags] == ["missed"] * 4 + ["met", "none", "missed", "met", "missed"]
    assert [t["tune.pareto"] for t in tags] == ["yes", "no", "yes", "yes", "yes", "no", "yes", "no", "no"]
    assert [t["tune.recommended"] for t in tags] == ["no"] * 4 + ["yes"] + ["no"] * 4
    assert [t["tune.role"] for t in tags] == ["default", "baseline", *["candidate"] * 7]
    assert [t["tune.outcome"] for t in tags] == ["ok"] * 5 + ["failed", "ok", "same_as", "ok"]
    assert (tags[5]["tune.failure"], tags[7]["tune.same_as"]) == ("oom", "4")


def test_a_later_trial_takes_a_point_off_the_front(runs: Path) -> None:
    """The tags of trial 0 change when trial 1 beats it."""
    made = sink(runs)
    made.study_started(study(), [])
    made.trial_ended(trial(0, 2, 2), [trial(0, 2, 2)])
    before = runs_of(runs, "trial")[0].data.tags["tune.pareto"]
    made.trial_ended(trial(1, 1, 1), [trial(0, 2, 2), trial(1, 1, 1)])

    assert (before, runs_of(runs, "trial")[0].data.tags["tune.pareto"]) == ("yes", "no")


def test_the_workload_is_a_dataset(published: Path) -> None:
    """Runs can be found by the traffic that was replayed."""
    (data,) = datasets(parent(published))

    assert (data.dataset.name, data.dataset.digest) == ("chat", ("ab" * 32)[:36])
    assert json.loads(str(data.dataset.profile))["requests"] == 73
    assert len(client(published).search_runs(["1"], "dataset.name = 'chat'")) == 10


def test_the_card_of_the_workload_lies_on_the_parent_as_in_the_run_folder(runs: Path, tmp_path: Path) -> None:
    """Sent again from the same folder, with a trial more, it is the same; prompts are in none of it."""
    for known in (1, 2):
        publish_at_once(runs, budgets()[:known])
    top = parent(runs).info.run_id
    sent = Path(client(runs).download_artifacts(top, "workload", str(tmp_path)))

    for name in ("card.md", "card.png"):
        content = (sent / name).read_bytes()
        assert content == (runs / "quickstart" / "workload" / name).read_bytes()
        assert b"a private matter" not in content
    assert "private" not in text_of(runs, top, "workload_summary.json")


def test_a_run_from_before_there_were_cards_is_published_without(runs: Path) -> None:
    """As is one whose card was replaced by a link."""
    folder = runs / "quickstart" / "workload"
    (folder / "card.md").unlink()
    (folder / "card.png").unlink()
    (folder / "card.png").symlink_to(runs / "mlflow.db")

    assert publish_at_once(runs).synced
    assert not [name for name in artifacts(runs, parent(runs).info.run_id) if name.startswith("workload/")]


def test_files_of_a_trial_lie_on_its_run(published: Path) -> None:
    """Configuration, command line, measurements, and the end of the server's log."""
    child = runs_of(published, "trial")[0].info.run_id

    assert artifacts(published, child) == {
        "config.yaml", "command.txt", "server-any-0.tail.log", "repeat-1/metrics.json",
    }  # fmt: skip
    tail = text_of(published, child, "server-any-0.tail.log")
    assert tail.endswith("late\n")
    assert "early" not in tail


def test_the_parent_has_the_front_the_table_and_the_best_configuration(published: Path) -> None:
    """A reviewer needs nothing but the parent."""
    seen = parent(published)
    top = seen.info.run_id

    assert artifacts(published, top) == {
        "pareto/pareto.html", "pareto/pareto.png", "trials.json", "study.yaml", "workload_summary.json",
        "best/config.yaml", "workload/card.md", "workload/card.png",
    }  # fmt: skip
    table = json.loads(text_of(published, top, "trials.json"))
    assert table["columns"][:4] == ["trial", "marks", "TTFT p50 long (ms)", "ITL p99 (ms)"]
    assert table["data"][4][:4] == [4, "front, recommended", 589.0, 101.0]
    assert not any("." in column for column in table["columns"]), "the UI shows nothing under such a name"
    assert "max-num-batched-tokens: 256" in text_of(published, top, "best/config.yaml")
    assert json.loads(seen.data.tags["mlflow.loggedArtifacts"]) == [{"path": "trials.json", "type": "table"}]


def test_the_note_starts_with_the_answer(published: Path) -> None:
    """The UI folds the description after a few lines."""
    note = parent(published).data.tags["mlflow.note.content"].splitlines()
    best = runs_of(published, "trial")[4].info.run_id

    answer = r"**SLO met by 1 of 8 trials. Best: trial 4 \(max\_num\_batched\_tokens 256\): ITL p99 -75 %"
    assert note[0].startswith(answer)
    assert note[4].startswith(f"| [recommended, trial 4](#/experiments/1/runs/{best}) | 589 ms | 101 ms |")


def test_the_studys_progress_is_a_line_by_trial(published: Path) -> None:
    """Best values and the number of feasible trials by trial number, the failed one included."""
    seen, top = client(published), parent(published).info.run_id

    def line(key: str) -> list[tuple[int, float]]:
        return sorted((p.step, p.value) for p in seen.get_metric_history(top, key))

    assert line("feasible_trials") == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (8, 1)]
    assert [step for step, _ in line("best_itl_p99_ms")] == [4, 5, 6, 8]
    assert [value for _, value in line("best_itl_p99_ms")] == pytest.approx([101.0] * 4)
    volumes = [value for _, value in line("hypervolume")]
    assert volumes == sorted(volumes)
    assert volumes[-1] > 0


def test_publishing_twice_changes_nothing(runs: Path) -> None:
    """Sent in one go, then lived through by a new process: every run, point and tag stays as it was."""
    publish_at_once(runs)
    before = everything(runs)
    assert publish(runs).synced

    assert everything(runs) == before


@pytest.mark.parametrize("lost", range(1, 60, 4))
def test_a_publisher_that_dies_anywhere_is_completed_by_the_next(
    runs: Path, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call to MLflow is the last that arrives, the next publisher makes the same end state."""
    results = budgets()[:6]
    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > lost:
                raise ConnectionError("gone")
            return real(*args, **kwargs)

        return call

    writes = ("create_run", "log_batch", "log_inputs", "log_artifact", "log_text", "log_dict", "set_terminated")
    with monkeypatch.context() as broken:
        for name in writes:
            broken.setattr(MlflowClient, name, dying(getattr(MlflowClient, name)))
        first = sink(runs, warn=lambda _: None)
        first.study_started(study(), [])
        first.study_ended(results)
        assert first.synced == (calls <= lost)
    second = sink(runs)
    second.study_started(study(), results)
    second.study_ended(results)

    assert len(runs_of(runs, "trial", ViewType.ALL)) == 6
    after = everything(runs)
    assert [status for _, status, *_ in after] == ["FINISHED"] * 6 + ["FAILED"]
    assert all(
        len({step for step, *_ in points}) == len(points)
        for *_, all_points, _ in after
        for points in all_points.values()
    )
    assert all("tune.synced" in tags for _, _, _, tags, *_ in after)


def test_a_dead_server_costs_a_warning_and_no_time(tmp_path: Path) -> None:
    """A closed port: one warning, never an exception, seconds in all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    warnings: list[str] = []
    start = time.perf_counter()
    made = publish(
        tmp_path, tracking_uri=f"http://me:secret@127.0.0.1:{port}", artifact_root=None, warn=warnings.append
    )  # fmt: skip

    assert time.perf_counter() - start < 10
    assert not made.synced
    assert made.url() is None
    assert len(warnings) == 1
    assert warnings[0].startswith(f"MLflow at http://127.0.0.1:{port} cannot be used (")
    assert warnings[0].endswith("the study goes on, and MLflow is tried again after each trial")
    assert "secret" not in made.hint()


def test_a_server_that_comes_back_gets_everything(runs: Path) -> None:
    """Trials measured while MLflow was away are published once it answers."""
    shutil.move(runs / "mlflow.db", runs / "elsewhere")
    (runs / "mlflow.db").mkdir()  # a store that cannot be opened
    start = time.perf_counter()
    warnings: list[str] = []
    made = sink(runs, warn=warnings.append)
    made.study_started(study(), [])
    made.trial_ended(budgets()[0], budgets()[:1])
    assert not made.synced
    (runs / "mlflow.db").rmdir()
    shutil.move(runs / "elsewhere", runs / "mlflow.db")

    assert time.perf_counter() - start < 20
    assert made.reconcile(budgets())
    assert len(runs_of(runs, "trial")) == 9
    assert len(warnings) == 1


def test_of_two_parents_the_one_with_the_trials_stays(runs: Path) -> None:
    """A proxy that asked twice made a second one, older by its start: it goes, and no trial changes its place."""
    publish_at_once(runs)
    top = parent(runs)
    tags = {"tune.study_uid": UID, "tune.kind": "study"}
    client(runs).create_run(top.info.experiment_id, start_time=1, tags=tags)
    assert publish_at_once(runs).synced

    assert parent(runs).info.run_id == top.info.run_id
    assert {run.data.tags["mlflow.parentRunId"] for run in runs_of(runs, "trial")} == {top.info.run_id}


def test_runs_that_a_user_deleted_are_made_again(runs: Path) -> None:
    """A parent and a trial deleted in mid-study: at its end there are one parent and all trials below it."""
    made = sink(runs)
    made.study_started(study(), budgets()[:4])
    client(runs).delete_run(parent(runs).info.run_id)
    client(runs).delete_run(runs_of(runs, "trial")[2].info.run_id)
    made.study_ended(budgets())

    children = runs_of(runs, "trial")
    assert made.synced
    assert len(children) == 9
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent(runs).info.run_id}


def test_a_trial_without_a_result_is_closed_by_the_next_session(runs: Path) -> None:
    """The process that ran it was killed."""
    first = sink(runs)
    first.study_started(study(), [])
    first.trial_started(0, config(), "default")
    second = sink(runs)
    second.study_started(study(), [])
    (orphan,) = runs_of(runs, "trial")

    assert (orphan.info.status, orphan.data.tags["tune.outcome"]) == ("KILLED", "interrupted")
    second.trial_ended(budgets()[0], budgets()[:1])
    (found,) = runs_of(runs, "trial")
    assert (found.info.status, found.data.tags["tune.outcome"]) == ("FINISHED", "ok")


def test_an_interrupted_trial_is_killed_not_failed(runs: Path) -> None:
    """The red icon is for configurations that fail."""
    publish(runs, [failed(0, FailureKind.INTERRUPTED, "ctrl-c")])

    assert [run.info.status for run in runs_of(runs, "trial")] == ["KILLED"]


def test_a_second_study_shares_the_experiment(runs: Path) -> None:
    """Studies of one model on one workload lie side by side, with their own views."""
    first, second = publish_at_once(runs), publish_at_once(runs, study_uid="other")
    experiment = client(runs).get_experiment("1")

    assert len(runs_of(runs, "study")) == 2
    assert first.url() != second.url()
    assert {"mlflow.sharedViewState.7f3a9c", "mlflow.sharedViewState.other"} <= set(experiment.tags)


def test_a_deleted_experiment_stays_deleted(runs: Path) -> None:
    """Its name is taken for ever; the study goes to the next one."""
    publish_at_once(runs)
    client(runs).delete_experiment("1")

    assert publish_at_once(runs).synced
    assert client(runs).get_experiment("2").name == "tiny-qwen2 on chat (2)"


def test_a_store_copied_from_elsewhere_gets_its_own_experiment(runs: Path, tmp_path: Path) -> None:
    """The old experiment's artifacts lie at a path of another machine."""
    publish_at_once(runs)
    moved = tmp_path / "moved"
    shutil.move(runs, moved)

    assert publish_at_once(moved).synced
    assert not runs.exists(), "nothing is written to the old place"


def test_a_deleted_run_folder_is_no_news(runs: Path) -> None:
    """Without its files a trial still has its numbers."""
    shutil.rmtree(runs / "quickstart")

    assert publish_at_once(runs).synced


def test_outside_names_are_text(runs: Path) -> None:
    """Markdown and HTML in names and arguments are shown, not obeyed."""
    evil = "<img src=x onerror=alert(1)> [click](http://evil) `x` | **b**\n# h"
    facts = dataclasses.replace(FACTS, name=evil)
    publish(runs, [trial(0, label="default"), trial(1, 0.1, 0.1, args={"x": evil})], workload=facts, experiment=evil)
    note = parent(runs).data.tags["mlflow.note.content"]
    described = client(runs).get_experiment("1").tags["mlflow.note.content"]

    for text in (note, described):
        assert "<img" not in text
        assert r"\[click\]\(http://evil\)" in text
        assert "\n# h" not in text


def test_the_saved_view_reads_back(sent: tuple[Path, MlflowSink]) -> None:
    """The tag is what MLflow's UI reads: an envelope around a packed state that filters, sorts and draws."""
    runs, made = sent
    value = json.loads(client(runs).get_experiment("1").tags["mlflow.sharedViewState.7f3a9c"])
    scheme, _, packed = value["state"].partition(";")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))

    assert (value["name"], value["createdAt"], scheme) == ("Pareto review: quickstart", round(START * 1000), "deflate")
    assert "params.`max_num_batched_tokens`" in state["selectedColumns"]
    assert "metrics.`ttft_p50_ms.long`" in state["selectedColumns"]
    scatter = state["compareRunCharts"][0]
    assert (scatter["xaxis"]["key"], scatter["yaxis"]["key"]) == ("ttft_p50_ms.long", "itl_p99_ms")
    found = client(runs).search_runs(["1"], state["searchFilter"], order_by=[f"{state['orderByKey']} ASC"])
    assert [run.data.tags["tune.trial"] for run in found][:2] == ["6", "4"]
    assert len(found) == 8, "the trial that repeats another is not listed"
    assert str(made.url()).endswith(f"viewStateShareKey={UID}")


def test_the_saved_view_shows_the_topology_once() -> None:
    """Kind and ratio say nothing that the topology does not."""
    value = json.loads(view.saved_view(GROUPS, groups(), UID))
    state = json.loads(zlib.decompress(base64.b64decode(value["state"].partition(";")[2])))

    assert state["compareRunCharts"][1]["selectedParams"] == [
        "topology", "max_num_batched_tokens", "decoder.max_num_seqs", "prefiller.max_num_batched_tokens",
    ]  # fmt: skip


def test_the_hint_can_be_pasted(sent: tuple[Path, MlflowSink]) -> None:
    """A path with a space is quoted; the address leads to the view."""
    runs, made = sent
    command, address = made.hint().splitlines()[-2:]

    assert command.endswith(f"mlflow ui --backend-store-uri 'sqlite:///{runs}/mlflow.db'")
    assert address == (
        f"http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey={UID}"
    )


def test_users_settings_of_mlflow_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our time limits are defaults."""
    import importlib
    import os

    import tuner.sinks.tracking as module

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    importlib.reload(module)

    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_facts_of_a_workload() -> None:
    """Name, fingerprint and shape come from the rows."""
    rows = (Request(0.0, 10, 5), Request(1.0, 30, 5))
    facts = WorkloadFacts.of(Workload("chat", rows, "ff" * 32))

    assert (facts.name, facts.sha256, facts.shape["requests"]) == ("chat", "ff" * 32, 2)
    ids = Request(0.0, 64, 5, (1, 2), 32)
    warm = WorkloadFacts.of(Workload("chat", (ids,), "ff" * 32, history=(ids,)))
    assert warm.shape["ideal_prefix_hit_after_history"] == 0.75


def test_names_that_mlflow_refuses_are_respelled() -> None:
    """Letters outside MLflow's set become underscores."""
    assert pages.key("ttft_p50_ms.größe(1)") == "ttft_p50_ms.gr__e_1_"
    assert pages.metric_key(X) == "ttft_p50_ms.long"
    assert pages.metric_key(Y) == "itl_p99_ms"
