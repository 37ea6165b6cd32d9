"""Any storage that Optuna knows, and one writer at a time in it."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import storage_data
from optuna.storages import BaseStorage
from storage_data import KINDS, storage_url
from test_study_loop import HOST, TEXT, Model

from tuner import spec as specs
from tuner.errors import HostError, Interrupted
from tuner.seams import Evaluation
from tuner.sinks.runfolder import RunFolder
from tuner.study import storage, store, writer
from tuner.study.loop import Study
from tuner.study.writer import HOLDING, PREFIX, REVOKED, Writer

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A storage of each kind, shared by the tests of this file; each takes a study of its own in it."""
    with storage_url(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def shared(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shared.db'}"


def in_storage(url: str, name: str) -> optuna.Study:
    found = storage.open_storage(url)
    opened.append(found)
    return store.open_study(found, name)


opened: list[BaseStorage] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while opened:
        storage.close(opened.pop())


class Stop(Model):
    """Ctrl-C in the fourth trial."""

    def evaluate(self, *args: Any) -> Evaluation:
        if len(self.evaluated) == 3:
            raise KeyboardInterrupt
        return super().evaluate(*args)


def run(url: str, folder: Path, model: Model, name: str = "s", uid: str = "uid") -> Study:
    folder.mkdir(exist_ok=True)
    with store.opened(name, uid, url, shared=True) as (study, check):
        made = Study(specs.parse(TEXT, "s.yaml"), study, RunFolder(folder), model, (), HOST, check_writer=check)
        made.run()
    return made


def test_a_study_is_interrupted_and_resumed_in_any_storage(url: str, tmp_path: Path) -> None:
    """A file, a journal, a gRPC proxy, Redis, PostgreSQL: the trials are those of a study that was left alone."""
    alone = [r.config for r in run(f"sqlite:///{tmp_path / 'alone.db'}", tmp_path / "alone", Model()).results]
    with pytest.raises(Interrupted):
        run(url, tmp_path / "cut", Stop())
    found = run(url, tmp_path / "cut", Model())

    assert [r.config for r in found.results if r.is_measured] == alone
    assert [t.state.name for t in in_storage(url, "s").trials].count("COMPLETE") == len(alone)


def test_two_writers_are_refused_in_any_storage(url: str) -> None:
    """The second is told which process on which host is at work, and may go on when that one has left."""
    study = in_storage(url, "writers")
    with Writer(study, url), pytest.raises(HostError, match=rf"another tune is at work .* process {os.getpid()} on "):
        Writer(in_storage(url, "writers"), url).__enter__()
    with Writer(in_storage(url, "writers"), url) as second:
        second.check()


def hold(url: str, held: Any) -> None:
    with Writer(in_storage(url, "s"), url):
        held.set()
        time.sleep(60)


def test_the_claim_of_a_killed_process_holds_nobody_up(shared: str) -> None:
    """After kill -9 the next one starts at once, without waiting for silence."""
    in_storage(shared, "s")
    held = SPAWN.Event()
    process = SPAWN.Process(target=hold, args=(shared, held))
    process.start()
    assert held.wait(60)
    with pytest.raises(HostError, match="another tune is at work"):
        Writer(in_storage(shared, "s"), shared).__enter__()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    said: list[str] = []

    with Writer(in_storage(shared, "s"), shared, said.append):
        assert said == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SILENCE", 2.0)
    monkeypatch.setattr(writer, "BEAT", 0.3)


@pytest.mark.usefixtures("quick")
def test_another_hosts_claim_is_dead_when_it_is_silent(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot be seen from here is believed dead after a silence, and alive while it renews its claim."""
    first = Writer(in_storage(shared, "s"), shared)
    first.__enter__()
    monkeypatch.setattr(writer, "_where", lambda: "another host")
    said: list[str] = []
    with pytest.raises(HostError, match="another tune is at work"):
        Writer(in_storage(shared, "s"), shared, said.append).__enter__()
    assert "waiting up to 2 s" in said[0]
    first._ended.set()  # it is cut off from the storage
    first._thread.join(10)

    with Writer(in_storage(shared, "s"), shared) as second:
        second.check()
        with pytest.raises(HostError, match="has taken this study over"):
            first.check()


@pytest.mark.usefixtures("quick")
def test_one_that_was_taken_over_stops_before_it_writes(shared: str, tmp_path: Path) -> None:
    """A study whose claim is gone ends with an error; what it measured is in its run folder and not told twice."""

    class TakenOver(Model):
        def evaluate(self, *args: Any) -> Evaluation:
            if len(self.evaluated) == 2:
                study = in_storage(shared, "s")
                for key in [key for key in study.user_attrs if key.startswith(PREFIX)]:
                    study.set_user_attr(key + REVOKED, True)
            return super().evaluate(*args)

    with pytest.raises(HostError, match="has taken this study over"):
        run(shared, tmp_path / "r", TakenOver())

    told = [t.state.name for t in in_storage(shared, "s").trials]
    assert len(RunFolder(tmp_path / "r").read_all()) == len(told)
    assert told == ["COMPLETE"] * (len(told) - 1) + ["RUNNING"]


@pytest.mark.usefixtures("quick")
def test_two_hosts_that_ask_at_once_do_not_take_the_study_from_each_other(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sees the other's process: one gets it and keeps it, whatever they wait for."""
    in_storage(shared, "s")
    hosts = iter(("one", "two"))
    monkeypatch.setattr(writer, "_where", lambda: next(hosts))
    two = [Writer(in_storage(shared, "s"), shared) for _ in range(2)]

    def ask(one: Writer) -> bool:
        try:
            with one:
                time.sleep(5)
                one.check()
        except HostError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(ask, two)) == 1


@pytest.mark.parametrize("damage", ['{"op_code": 1, "half', ""])
def test_a_journal_that_was_cut_off_in_a_line_goes_on(tmp_path: Path, damage: str) -> None:
    """A full disk or a loss of power leaves half a line: what is written later does not join it."""
    journal = tmp_path / "o.journal"
    with pytest.raises(Interrupted):
        run(str(journal), tmp_path / "r", Stop())
    with journal.open("a") as file:
        file.write(damage)
    found = run(str(journal), tmp_path / "r", Model())

    assert len({r.number for r in found.results}) == len(in_storage(str(journal), "s").trials)


def test_a_study_of_somebody_elses_kind_is_refused(shared: str) -> None:
    """One objective where tune has two: Optuna would take no value of ours."""
    optuna.create_study(study_name="s", storage=shared)

    with pytest.raises(HostError, match="not one of tune's"), store.opened("s", "uid", shared):
        pass


def test_a_study_that_is_deleted_while_it_runs_ends_with_words(shared: str, tmp_path: Path) -> None:
    """Somebody deletes it in a dashboard: an error that says so, and the results are in the run folder."""

    class Deleted(Model):
        def evaluate(self, *args: Any) -> Evaluation:
            if len(self.evaluated) == 2:
                optuna.delete_study(study_name="s", storage=shared)
            return super().evaluate(*args)

    with pytest.raises(HostError, match=r"was deleted while it ran|Optuna storage"):
        run(shared, tmp_path / "r", Deleted())
    assert len(RunFolder(tmp_path / "r").read_all()) >= 2


def test_of_many_that_ask_at_once_one_gets_it(shared: str) -> None:
    """Six writers at the same moment: never two together, and one in the end."""
    in_storage(shared, "s")
    together: list[int] = []

    def ask(_: int) -> bool:
        study = in_storage(shared, "s")
        try:
            with Writer(study, shared):
                claims = [c for k, c in study.user_attrs.items() if k.startswith(PREFIX) and c]
                together.append(sum(claim["state"] == HOLDING for claim in claims))
                time.sleep(8)
        except HostError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(ask, range(6)))

    assert sum(got) == 1
    assert together == [1]


def test_another_runs_study_is_not_touched(shared: str, tmp_path: Path) -> None:
    """Two runs that name their study alike in one storage: the second is refused and the first unchanged."""
    run(shared, tmp_path / "first", Model(), uid="first")
    before = in_storage(shared, "s").trials

    with pytest.raises(HostError, match=r"study 's' with [0-9]+ trials that is not this run's") as caught:
        run(shared, tmp_path / "second", Model(), uid="second")
    assert "--name" in str(caught.value.hint)
    assert in_storage(shared, "s").trials == before


def test_a_storage_that_goes_away_is_an_error_with_advice(tmp_path: Path) -> None:
    """The storage is lost in mid-study: the trial's result is on disk, the error says where the storage was."""
    with storage_url("postgresql", tmp_path) as found:
        database = storage_data.running[-1]

        class Gone(Model):
            def evaluate(self, *args: Any) -> Evaluation:
                if len(self.evaluated) == 2:
                    storage_data.end(database)
                return super().evaluate(*args)

        with pytest.raises(HostError, match=r"Optuna storage postgresql://\*\*\*@127.0.0.1") as caught:
            run(found, tmp_path / "r", Gone())

    assert "canary" not in caught.value.message
    assert "--resume" in str(caught.value.hint)
    assert sum(r.same_as is None for r in RunFolder(tmp_path / "r").read_all()) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("nonsense://x", "Optuna storage nonsense://x"),
        ("grpc://127.0.0.1:1", "Optuna storage grpc://127.0.0.1:1"),
        ("redis://:canary@127.0.0.1:1", r"Optuna storage redis://\*\*\*@127.0.0.1:1"),
        ("sqlite:////nowhere/x.db", "unable to open database file"),
        ("oracle://u:canary@h/x", r"Optuna storage oracle://\*\*\*@h/x: No module named"),
    ],
)
def test_a_storage_that_cannot_be_used_is_named(wrong: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error with the address, its password left out."""
    monkeypatch.setattr(storage, "GRPC_PATIENCE", 1.0)
    with pytest.raises(HostError, match=message) as caught, store.opened("s", "uid", wrong):
        pass
    assert "canary" not in caught.value.message


@pytest.mark.parametrize(("address", "driver"), [("redis://127.0.0.1:1", "redis"), ("grpc://127.0.0.1:1", "grpc")])
def test_a_driver_that_is_missing_is_named(address: str, driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said, in place of a traceback."""
    monkeypatch.setitem(sys.modules, driver, None)
    for name in ("JournalRedisBackend", "GrpcStorageProxy"):
        monkeypatch.setattr(storage, name, _lacking)

    with pytest.raises(HostError, match="no driver here") as caught:
        storage.open_storage(address)
    assert "install the driver" in str(caught.value.hint)


def _lacking(*_: object, **__: object) -> None:
    raise ImportError("no driver here")


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    """A workload given by mistake is not written into."""
    rows = tmp_path / "rows.jsonl"
    text = '{"arrival_s": 0.0, "input_len": 3, "output_len": 4}\n{"arrival_s": 1.0, "input_len": 3, "output_len": 4}'
    rows.write_text(text)

    with pytest.raises(HostError, match="not a journal of Optuna's"):
        storage.open_storage(str(rows))
    assert rows.read_text() == text


def test_a_database_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    """A path without a scheme is a journal file; one that holds a database is refused with the right URL."""
    in_storage(f"sqlite:///{tmp_path / 'x.db'}", "s")

    with pytest.raises(HostError, match="write sqlite:///"):
        storage.open_storage(str(tmp_path / "x.db"))
