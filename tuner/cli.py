"""The verbs: read flags, call one function, turn a TunerError into a line, a hint and an exit code.

Results go to stdout, progress and errors to stderr.
"""

import errno
import functools
import io
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from tuner import __version__
from tuner.errors import ExitCode, SpecError, TunerError
from tuner.flags import Gpus, Runs, Sessions, Sets, Slos, overrides, refuse_with_resume

LOOPBACK = "127.0.0.1"

P = ParamSpec("P")

app = typer.Typer(
    name="tune",
    help="Find the vLLM configuration that keeps your latency promise, by measuring it on your traffic.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line."""
    app()


def _guarded(verb: Callable[P, int]) -> Callable[P, None]:
    """Turn what a verb returns or raises into an exit code, and a TunerError into words."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        signal.signal(signal.SIGTERM, _as_interrupt)  # what docker and systemd send: stop as Ctrl-C does
        if sys.stdout is None:
            sys.stdout = io.StringIO()
        logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
        try:
            code = verb(*args, **kwargs)
        except TunerError as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            print(f"tune: {error.message}", file=sys.stderr)
            if error.hint:
                print(f"      {error.hint}", file=sys.stderr)
            code = error.exit_code
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("tune: interrupted", file=sys.stderr)
            code = ExitCode.INTERRUPTED
        except OSError as error:
            if error.errno not in {errno.EPIPE, errno.ENOSPC, errno.EBADF} or error.filename is not None:
                raise
            sys.stdout = io.StringIO()  # nothing more can be said there
            code = ExitCode.OK if error.errno == errno.EPIPE else ExitCode.HOST
            if code != ExitCode.OK:
                with suppress(OSError):
                    print(f"tune: {error.strerror}", file=sys.stderr)
        raise typer.Exit(code)

    return run


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _show_version(value: bool) -> None:  # noqa: FBT001 (typer's callback)
    if value:
        print(f"tune {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the vLLM configuration that keeps your latency promise, by measuring it on your traffic."""


@app.command()
@_guarded
def run(  # noqa: PLR0917 (one parameter a flag)
    study: Annotated[
        str | None, typer.Argument(help="A study's YAML or its name under studies/. Without: a default for this host.")
    ] = None,
    slo: Slos = None,
    set_: Sets = None,
    trials: Annotated[int | None, typer.Option("--trials", help="Trials to measure.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="Wall time to spend, such as 45min.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Replays of each trial.")] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", help="What you run today: a YAML of vllm serve --config, or a command line in quotes."
        ),
    ] = None,
    workload: Annotated[str | None, typer.Option("--workload", help="A workload's folder or name.")] = None,
    rate_scale: Annotated[
        float | None, typer.Option("--rate-scale", help="Replay at this multiple of the recorded request rate.")
    ] = None,
    sessions: Sessions = None,
    gpus: Gpus = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of sampler and prompts.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the study and its run folder.")] = None,
    runs: Runs = Path("runs"),
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue a run folder.", metavar="RUN")] = None,
    dry_run: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--dry-run", help="Show study, space, baseline command and time; start nothing.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            "--mlflow",
            metavar="URI",
            help='MLflow tracking URI, or "off". Default: TUNE_MLFLOW, else a store in the runs folder.',
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="Optuna storage: a URL, or a journal file. Default: TUNE_STORAGE, else SQLite in the run folder.",
        ),
    ] = None,
) -> int:
    """Tune: replay a workload against vLLM configurations and find the one that keeps the SLO."""
    from tuner import assemble, plan  # noqa: PLC0415 (optuna and numpy are not needed for --help)

    given = overrides(slo, set_, gpus)
    for path, value in (
        ("budget.trials", trials), ("budget.time", time), ("repeats", repeats), ("seed", seed), ("name", name),
        ("workload.path", workload), ("workload.rate_scale", rate_scale), ("workload.sessions", sessions),
    ):  # fmt: skip
        if value is not None:
            given[path] = value
    where = assemble.Where(runs=runs, mlflow=mlflow, storage=storage)
    if resume is not None:
        refuse_with_resume(study, given, baseline, dry_run=dry_run)
        return assemble.resume(resume, where, given)
    found = plan.make(study, given, baseline, may_lack_vllm=dry_run)
    if dry_run:
        print(plan.describe(found))
        return ExitCode.OK
    return assemble.run(found, where)


@app.command()
@_guarded
def replay(  # noqa: PLR0917 (one parameter a flag)
    workload: Annotated[str, typer.Argument(help="A workload's folder, name or .jsonl file.")],
    url: Annotated[str, typer.Option("--url", help="The server, with or without /v1.")],
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo",
            help="A promise, repeatable: ttft=500ms, itl_p95=50ms, ttft_p90.long=2s, attainment=0.99.",
            metavar="METRIC=LIMIT",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The served model's name. Default: the only one there is.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="completions (token ids, the default) or chat (text).")
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option("--rate-scale", help="Replay at this multiple of the recorded request rate.")
    ] = None,
    sessions: Sessions = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Replays; the median is shown.")] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of the prompts. Default: another each time, so that none is cached."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", help="Prompts are token ids below it. Default: the model's, else 32000."),
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(
            "--extra-body",
            help='Merged into each request; null removes a key that a server refuses: {"ignore_eos": null}.',
            metavar="JSON",
        ),
    ] = None,
    warm_up: Annotated[
        str | None, typer.Option("--warm-up", help="How long made-up requests go first. Default: 5s; 0s for none.")
    ] = None,
    request_timeout: Annotated[
        str | None, typer.Option("--request-timeout", help="How long one request may take. Default: no limit.")
    ] = None,
    drain_timeout: Annotated[
        str | None,
        typer.Option("--drain-timeout", help="How long requests may run after the last one went out. Default: 2min."),
    ] = None,
    processes: Annotated[int | None, typer.Option("--processes", help="Client processes.")] = None,
    as_json: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--json", help="Print the whole result as one JSON object.")
    ] = False,
    bench_json: Annotated[
        Path | None,
        typer.Option("--bench-json", help="Write it as `vllm bench serve` does, a line a repeat.", metavar="FILE"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for records, metrics and a picture.", metavar="DIR")
    ] = None,
) -> int:
    """Replay a workload against a server that is running, and report what it was like."""
    from tuner import assemble, measure  # noqa: PLC0415

    asked = measure.wanted(
        workload, url, slo or (), rate_scale, seed, model=model, endpoint=endpoint, repeats=repeats,
        sessions=sessions, vocab_size=vocab_size, extra_body=extra_body, warm_up=warm_up,
        request_timeout=request_timeout, drain_timeout=drain_timeout, processes=processes,
    )  # fmt: skip
    return assemble.replay(asked, out, bench_json, as_json=as_json)


@app.command(name="import")
@_guarded
def import_(  # noqa: PLR0917 (one parameter a flag)
    source: Annotated[
        Path, typer.Argument(help="A trace that somebody recorded: JSONL, CSV or JSON, plain or gzip.", metavar="TRACE")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The workload's folder. Default: workloads/ and the file's name.", metavar="DIR"
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Which trace format, where the file does not tell; any other word lists them.",
            metavar="NAME",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            help="Cut a window like the whole trace, such as 10min, one more to confirm, and the history before them.",
            metavar="DURATION",
        ),
    ] = None,
    max_len: Annotated[
        int | None, typer.Option("--max-len", help="Drop rows of more tokens, prompt and output together.")
    ] = None,
    rate_scale: Annotated[
        float | None,
        typer.Option("--rate-scale", help="Below 1 keep whole prefix groups, above 1 lay relabelled copies over them."),
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option("--time-scale", help="Multiply recorded times: 2 is half as fast.")
    ] = None,
    spread_steps: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--spread-steps", help="Draw arrivals inside the steps of the recording's clock.")
    ] = False,
    shrink: Annotated[
        int | None, typer.Option("--shrink", help="For small models: divide prompts, their blocks, and outputs by it.")
    ] = None,
    shrink_output: Annotated[
        int | None, typer.Option("--shrink-output", help="Divide outputs by this instead.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of what is drawn.")] = 0,
    time_unit: Annotated[
        str | None, typer.Option("--time-unit", help="For formats that leave it open.", metavar="s|ms|us")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Arrivals are drawn at this rate, for traces without.", metavar="N/s")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Tokens of a block id, where not the format's own.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Counts text without lengths: a model's folder or name.", metavar="MODEL"),
    ] = None,
    template_tokens: Annotated[
        int | None, typer.Option("--template-tokens", help="With --tokenizer: what the chat template adds to a prompt.")
    ] = None,
    keep_prompts: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--keep-prompts", help="Keep prompts, as token ids; else they become block ids.")
    ] = False,
    skip_damaged: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--skip-damaged", help="Drop and count rows that cannot be read.")
    ] = False,
) -> int:
    """Make a workload of a trace somebody else recorded; every row is kept, or counted by the reason why not."""
    from tuner import gather, intake  # noqa: PLC0415

    wanted = intake.wanted(
        source, out, format=format_, window=window, max_len=max_len, rate_scale=rate_scale, time_scale=time_scale,
        spread_steps=spread_steps, shrink=shrink, shrink_output=shrink_output, seed=seed, time_unit=time_unit,
        rate=rate, block_size=block_size, tokenizer=tokenizer, template_tokens=template_tokens,
        keep_prompts=keep_prompts, skip_damaged=skip_damaged,
    )  # fmt: skip
    print(gather.import_trace(wanted), end="")
    return ExitCode.OK


@app.command()
@_guarded
def record(  # noqa: PLR0917 (one parameter a flag)
    upstream: Annotated[
        str | None, typer.Option("--upstream", help="The server that requests go on to.", metavar="URL")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The workload's folder, empty or not there yet.", metavar="DIR")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Where clients come to.", min=0, max=65535)] = 9000,
    host: Annotated[str, typer.Option("--host", help="Where to listen; other than this, anybody may come.")] = LOOPBACK,
    keep_prompts: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--keep-prompts", help="Write prompts too. Without, no text of anybody's reaches the disk.")
    ] = False,
    rotate: Annotated[str, typer.Option("--rotate", help="Size of a part while recording.", metavar="SIZE")] = "64MB",
    finish: Annotated[
        Path | None, typer.Option("--finish", help="Make a workload of a recording that was cut off.", metavar="DIR")
    ] = None,
) -> int:
    """Pass requests on to a server that is running, and write them as a workload."""
    from tuner import gather  # noqa: PLC0415

    if finish is not None:
        if upstream is not None or out is not None or keep_prompts:
            raise SpecError("--finish goes alone: it makes a workload of what is in its folder")
        return gather.finish_recording(finish)
    if upstream is None or out is None:
        raise SpecError("--upstream and -o are needed",
                        hint="for example --upstream http://127.0.0.1:8000 -o workloads/mine")  # fmt: skip
    return gather.record(upstream, out, host=host, port=port, keeps_prompts=keep_prompts, rotate=rotate)


@app.command()
@_guarded
def show(
    target: Annotated[Path, typer.Argument(help="A run folder, or a workload's.", metavar="RUN|WORKLOAD")],
    sync: Annotated[  # noqa: FBT002 (a flag)
        bool, typer.Option("--sync", help="Send to MLflow what it lacks of a run.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option("--mlflow", help="With --sync: where to, if not as begun.", metavar="URI"),
    ] = None,
) -> int:
    """Show a run's trials, front and verdict, or a workload's card."""
    from tuner import assemble  # noqa: PLC0415

    if sync:
        print(assemble.sync(target, assemble.Where(mlflow=mlflow)), end="")
        return ExitCode.OK
    print(assemble.show(target), end="")
    return ExitCode.OK


@app.command()
@_guarded
def export(
    target: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write into. Default: RUN/best.")] = None,
    pick: Annotated[str, typer.Option("--pick", help="best, knee, ttft, itl or a trial's number.")] = "best",
) -> int:
    """Write a trial's configuration as YAML for vllm serve --config, its environment and the start line."""
    from tuner import assemble  # noqa: PLC0415

    print(assemble.export_run(target, out, pick), end="")
    return ExitCode.OK


@app.command()
@_guarded
def doctor(
    study: Annotated[str | None, typer.Argument(help="A study's YAML or name: checked against this host.")] = None,
    slo: Slos = None,
    set_: Sets = None,
    gpus: Gpus = None,
) -> int:
    """Check whether this host can run a study; each line is ok or says what to do."""
    from tuner import doctor as checks  # noqa: PLC0415

    return checks.run(study, overrides(slo, set_, gpus))
