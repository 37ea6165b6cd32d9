"""Files and names that come from others are data: nothing in them is run, followed, obeyed or sent on."""

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from ruamel.yaml import YAML
from study_data import budgets, config, failed, study, trial

from tuner import baseline, export, workload
from tuner import spec as specs
from tuner.assemble import show
from tuner.deployment import stopping
from tuner.errors import FailureKind, SpecError
from tuner.records import Records
from tuner.results import TrialResult
from tuner.serving import ServingConfig, Topology
from tuner.sinks import notes, pages, plots, verdict
from tuner.sinks.console import ConsoleSink
from tuner.sinks.pages import WorkloadFacts
from tuner.sinks.runfolder import RunFolder

CALL = '!!python/object/apply:os.system ["touch pwned"]'
LAUGHS = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9 if n else ['ha'] * 9)}]\n" for n in range(12))
BOMBS = {
    "a call": f"name: {CALL}\n",
    "a billion laughs": LAUGHS,
    "braces in braces": f"name: {'[' * 3000}\n",
    "digits": f"seed: {'9' * 10_000}\n",
    "length": "#" * 2_000_000,
}
TAME = "name: s\nmodel: m\nworkload: w\n"


@pytest.mark.parametrize("what", BOMBS)
def test_a_study_file_runs_nothing_and_fills_no_memory(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags that call, anchors that multiply, depth and length end in a line about the file."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "s.yaml"
    file.write_text((TAME if what != "a call" else "model: m\nworkload: w\n") + BOMBS[what])

    with pytest.raises(SpecError, match=r"s\.yaml"):
        specs.load(file)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("what", BOMBS)
def test_a_baseline_runs_nothing_and_fills_no_memory(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a study file."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "b.yaml"
    file.write_text(BOMBS[what])

    with pytest.raises(SpecError, match="--baseline"):
        baseline.read(str(file), ServingConfig("m"))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "odd",
    [
        '{"arrival_s": 0, "input_len": %s, "output_len": 1}' % ("9" * 5000),
        '{"arrival_s": 0, "input_len": 999999999999, "output_len": 1}',
        '{"arrival_s": NaN, "input_len": 1, "output_len": 1}',
        '{"arrival_s": 0, "input_len": 1, "output_len": 1, "prompt": %s}' % ("[" * 100_000),
        '{"arrival_s": 0, "input_len": 1, "output_len": 1, "session": {"a": 1}}',
    ],
    ids=lambda row: row[:60],
)
def test_a_row_that_is_not_traffic_is_refused_with_its_line(odd: str, tmp_path: Path) -> None:
    """Numbers without end, more tokens than any model takes, depth, and objects where a name belongs."""
    (tmp_path / "w.jsonl").write_text(odd + "\n")

    with pytest.raises(SpecError, match=r"w\.jsonl:1: "):
        workload.load(tmp_path / "w.jsonl")


def test_the_name_of_a_workload_folder_does_not_steer_a_terminal(tmp_path: Path) -> None:
    """Escape codes and line ends in it are spaces wherever the name is told."""
    folder = tmp_path / "a\x1b]0;pwned\x07\nb"
    folder.mkdir()
    (folder / "workload.jsonl").write_text('{"arrival_s": 0, "input_len": 1, "output_len": 1}\n')

    assert workload.load(folder).name == "a ]0;pwned  b"


def test_an_error_does_not_steer_a_terminal(tmp_path: Path) -> None:
    """It quotes names of files and what programs said."""
    with pytest.raises(SpecError) as caught:
        RunFolder.open(tmp_path / "a\x1b]0;pwned\x07")

    assert "]0;pwned" in caught.value.message
    assert caught.value.message.isprintable()


# --- Run folders ------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with one measured trial."""
    folder = RunFolder.create(tmp_path, study())
    folder.write(budgets()[0])
    return folder


def with_result(run: RunFolder, **changes: Any) -> None:
    """Change the trial's result.json as an editor would."""
    file = run.path / "trials" / "0000" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"config": None},
        {"config": {"args": 1}},
        {"metrics": {"ttft_p50_ms": float("nan")}},
        {"number": "../../x"},
        {"number": 7},
        {"failure": {"kind": "rm -rf"}},
        {"repeats": [1]},
    ],
    ids=str,
)
def test_a_result_that_is_none_is_refused_with_its_file(run: RunFolder, changes: dict[str, Any]) -> None:
    """Whatever stands in it."""
    with_result(run, **changes)

    with pytest.raises(SpecError, match=r"trials/0000/result\.json"):
        run.read_all()


def test_a_result_as_deep_as_the_stack_is_refused(run: RunFolder) -> None:
    """No traceback."""
    (run.path / "trials" / "0000" / "result.json").write_text("[" * 200_000)

    with pytest.raises(SpecError, match="damaged"):
        run.read_all()


def test_a_variable_whose_name_is_code_is_not_exported(run: RunFolder) -> None:
    """A shell sources what is exported."""
    data = json.loads((run.path / "trials" / "0000" / "result.json").read_text())["config"]
    with_result(run, config=data | {"env": {"X=1; touch pwned; Y": "1"}})

    with pytest.raises(SpecError, match="no name for an environment variable"):
        run.read_all()


@pytest.mark.parametrize("place", ["trials/0000/private.txt", "trials/0001", "best", "workload"])
def test_a_link_in_a_run_folder_is_not_followed(run: RunFolder, tmp_path: Path, place: str) -> None:
    """It would be published to MLflow, or written through."""
    (tmp_path / "private").mkdir()
    (run.path / place).symlink_to(tmp_path / "private")

    with pytest.raises(SpecError, match="a link inside a run folder"):
        RunFolder.open(run.path)


def test_an_export_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Not even one that leads nowhere yet."""
    out, target = tmp_path / "best", tmp_path / "elsewhere"
    out.mkdir()
    (out / "serve.yaml").symlink_to(target)

    with pytest.raises(SpecError, match="no export of tune"):
        export.write(budgets()[0], study(), [], out, {})
    assert not target.exists()


class Bomb:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


def test_records_of_others_are_not_unpickled(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as a pickle nor as an archive of them; tune show does not look at records at all."""
    monkeypatch.chdir(tmp_path)
    plain, archive = BytesIO(pickle.dumps(Bomb())), BytesIO()
    np.savez(archive, due=np.array([Bomb()], dtype=object))
    for text in (plain, archive):
        file = run.path / "trials" / "0000" / "repeat-1" / "records.npz"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.getvalue())
        with pytest.raises(ValueError, match="allow_pickle"):
            Records.load(file)

    assert "trial" in show(run.path)
    assert not (tmp_path / "pwned").exists()


def test_a_journal_ends_only_what_carries_its_marker(tmp_path: Path) -> None:
    """Not a process that it merely names, start time and all; not everything, with a marker of null."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    born = psutil.Process(stranger.pid).create_time()
    entry = {"event": "started", "pid": stranger.pid, "create_time": born}
    lines = [json.dumps(entry | {"marker": marker}) for marker in ("made-up", None, ["x"])]
    (tmp_path / "processes.jsonl").write_text("\n".join([*lines, json.dumps(entry), "[]", "1", "[" * 100_000, "{"]))
    try:
        assert stopping.end_leftovers(tmp_path / "processes.jsonl") == ()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# --- Names in what is exported and shown ------------------------------------------------------------------

HOSTILE = "$(touch pwned) `touch pwned`; touch pwned\n- x: {a: b} # \"'\\ ${HOME} %s 🙂"
HTML = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
LINKS = "[x](javascript:alert(1)) ![x](http://x/y.png) | **b** `c`"
ESCAPES = "\x1b]0;pwned\x07\x1b[2J[red]x[/red][link=http://x]y[/link]\r\n\u202e"


def hostile(topology: str) -> TrialResult:
    """A trial whose model, values and labels try to be something else."""
    made = ServingConfig("m; touch pwned #", {"served_model_name": HOSTILE, "chat_template": HOSTILE},
                         {"ODD": HOSTILE}, Topology.parse(topology))  # fmt: skip
    return TrialResult(1, made, label=HOSTILE, ended=1.0, vllm_version="0.26.0")


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash") if shutil.which(shell)])
@pytest.mark.parametrize("topology", ["1x", "2x", "1p1d"])
def test_an_export_holds_words_and_no_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str, shell: str
) -> None:
    """Values arrive as they were; a name in a comment stays in its line."""
    monkeypatch.chdir(tmp_path)
    out, facts = tmp_path / HOSTILE.partition("\n")[0].replace("/", ""), {"Workload": HOSTILE, "Run folder": ESCAPES}
    exported = export.write(hostile(topology), study(), [], out, facts)
    tame = export.write(hostile(topology), study(), [], tmp_path / "tame", {})
    env = next(file for file in exported.files if file.suffix == ".env")
    sourced = subprocess.run(
        [shell, "-c", '. "$0"; printf %s "$ODD"', str(env)], capture_output=True, text=True, check=True
    )

    assert sourced.stdout == HOSTILE
    assert str(out) in exported.start_line
    assert len(shlex.split(exported.start_line)) == len(shlex.split(tame.start_line))
    for file, other in zip(exported.files, tame.files, strict=True):
        text = file.read_text(encoding="utf-8")
        assert all(c.isprintable() or c == "\n" for c in text), file.name
        assert uncommented(text) == uncommented(other.read_text(encoding="utf-8"))
        if file.suffix == ".yaml":
            assert list(YAML(typ="safe").load_all(text)), file.name
    served = next(file for file in exported.files if file.suffix == ".yaml")
    assert YAML(typ="safe").load(served.read_text())["chat-template"] == HOSTILE
    if topology != "1x":
        subprocess.run([shell, "-n", str(out / "start.sh")], check=True)
    assert not (tmp_path / "pwned").exists()


def uncommented(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def test_notes_in_mlflow_show_names_and_obey_none() -> None:
    """Rendered as the UI renders Markdown: no image, no script, no link but ours, no more columns."""
    odd = HTML + LINKS
    named = study(name="s", model=f"a/{odd}")
    args = {"chat_template": odd}
    results = [trial(0, label="default", args=args), trial(1, 0.5, 0.5, label=odd, args=args)]
    results.append(failed(2, FailureKind.CRASH, odd + ESCAPES))
    links = notes.Links("#/ours", {0: "#/ours/0", 1: "#/ours/1"})
    texts = [notes.note(named, results, links), notes.experiment_note(named, WorkloadFacts(odd, "ab"), "#/ours")]
    texts += [notes.trial_note(named, result, results[0]) for result in results]
    pages_ = [MarkdownIt("commonmark", {"html": True}).enable("table").render(text) for text in texts]

    for page in pages_:
        assert "<img" not in page
        assert "<script" not in page
        assert "javascript:" not in "".join(part.partition('"')[0] for part in page.split('href="')[1:])
    rows = [page.count("<td") / max(page.count("<tr") - page.count("<thead"), 1) for page in pages_ if "<table" in page]
    assert rows
    assert all(row == 4 for row in rows)


def test_the_interactive_front_has_no_script_but_its_own() -> None:
    """Names in titles, labels and hover texts end no script."""

    def page(name: str) -> str:
        results = [trial(0, label="default"), trial(1, 0.5, 0.5, label=name, args={"chat_template": name})]
        return plots.figure_html(results, "ttft_p50.long", "itl_p99", (), title=name, subtitle=name)

    assert page(HTML).lower().count("<script") == page("tame").lower().count("<script")
    assert "<img" not in page(HTML)
    assert "\\u003cimg" not in page(HTML)  # as JSON writes it: Plotly would read tags out of it


def test_names_and_failures_are_shown_to_a_terminal_as_they_are() -> None:
    """No escape code and no line end gets through, and brackets are no markup."""
    odd = failed(3, FailureKind.CRASH, ESCAPES)
    results = [trial(0, label="default"), trial(1, 0.5, 0.5, label=ESCAPES, args={"chat_template": ESCAPES}), odd]
    out, table = StringIO(), StringIO()
    sink = ConsoleSink(out)
    sink.study_started(study(), [])
    sink.trial_started(1, config(chat_template=ESCAPES), ESCAPES)
    sink.trial_ended(odd, results)
    sink.study_ended(results)
    Console(file=table, width=200).print(verdict.render_trials(study(), results))
    said = out.getvalue() + table.getvalue() + verdict.verdict(study(), results)

    assert not [c for c in said if not (c.isprintable() or c == "\n")]
    assert "[red]" in out.getvalue()
    assert "[red]" in table.getvalue()


def test_what_is_sent_to_mlflow_has_no_control_characters() -> None:
    """Names of runs, tags and params."""
    odd = trial(1, label=ESCAPES, args={"chat_template": ESCAPES})
    sent = [pages.run_name(odd, None), *pages.tags(odd, None).values(), *pages.params(odd).values()]
    sent += pages.tags(failed(2, FailureKind.CRASH, ESCAPES), None).values()

    assert not [c for text in sent for c in text if not c.isprintable()]
