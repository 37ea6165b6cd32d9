"""Where workloads come from: traces of others, and what passes through a tap; each with its card."""

import shlex
from contextlib import suppress
from pathlib import Path

from tuner import intake
from tuner import workload as workloads
from tuner.deployment.program import as_typed
from tuner.errors import ExitCode, HostError
from tuner.proxy import recorder, recording
from tuner.replay.remote import base_of
from tuner.sinks import card
from tuner.sinks.console import rendered, say

MOST_ROWS_OF_A_CARD = 200_000  # of a kilobyte and more each while it is made


def is_workload(target: Path) -> bool:
    """Return whether a path is a workload's folder or file."""
    return (target / "workload.jsonl").is_file() or target.suffix == ".jsonl"


def card_of(target: Path) -> str:
    """Return a workload's card for the terminal."""
    return rendered(card.render(card.of(workloads.load(target), target if target.is_dir() else None)))


def import_trace(wanted: intake.Wanted) -> str:
    """Make a workload of a trace, with its card; return what became of its rows, in words."""
    found = intake.run(wanted)
    told = "".join(f"{line}\n" for line in intake.told(found))
    if found.files["workload"] > MOST_ROWS_OF_A_CARD:
        return f"{told}so many rows are no window of a study: there is no card (cut one: --window)\n"
    card.write(found.folder, workloads.load(found.folder))
    return told + card_of(found.folder)


def record(upstream: str, out: Path, *, host: str, port: int, keeps_prompts: bool, rotate: str) -> int:
    """Record what goes through to a server until a signal; say what was written; return the exit code."""
    base = base_of(upstream, "--upstream", keys="the keys of clients pass through")
    wanted = recorder.Wanted(base, host, port, out, keeps_prompts, recording.parse_size(rotate))
    done = recorder.run(wanted, say)
    _keep_recordings_card(out)
    print(_recorded(out, done.summary), end="", flush=True)
    return ExitCode.OK if done.is_whole else ExitCode.HOST


def finish_recording(folder: Path) -> int:
    """Make a workload of a recording that was cut off; return the exit code."""
    with recording.held(folder):
        summary = recording.finish(folder)
    _keep_recordings_card(folder)
    print(_recorded(folder, summary), end="", flush=True)
    return ExitCode.OK


def _keep_recordings_card(folder: Path) -> None:
    """Leave the card of what was recorded beside its rows; a recording is whole without it."""
    if is_workload(folder):
        with suppress(HostError):
            card.write(folder, workloads.load(folder))


def _recorded(folder: Path, summary: recording.Summary) -> str:
    """Return what a recording holds, and why it does not hold the rest."""
    lines = [f"requests: {summary.requests}, of which {summary.rows} are rows"]
    lines += [f"not written: {count} ({why})" for why, count in summary.not_written.items()]
    lines += [f"without block ids: {count} ({why})" for why, count in summary.without_block_ids.items()]
    if summary.was_cut:
        lines.append("the recorder was cut off: what had no row in its last seconds is not counted")
    if not summary.rows:
        return "\n".join([*lines, "nothing was recorded"]) + "\n"
    lines.append(f"{folder / 'workload.jsonl'}: block ids of {summary.hashed}, {summary.block_size} tokens each")
    return "\n".join([*lines, f"look at it: {as_typed('tune')} show {shlex.quote(str(folder))}"]) + "\n"
