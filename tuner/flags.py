"""Flags that several verbs take, and what they override of a study."""

from pathlib import Path
from typing import Annotated, Any

import typer
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tuner.errors import SpecError

Slos = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        help="A promise, repeatable: ttft=500ms, itl_p95=50ms, ttft_p90.long=2s, attainment=0.99, or "
        "itl=0.33x (of the default). Replaces those of the study.",
        metavar="METRIC=LIMIT",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a value of the study by its path, repeatable: engine_args.max_model_len=8192.",
        metavar="KEY=VALUE",
    ),
]
Sessions = Annotated[
    str | None,
    typer.Option(
        "--sessions",
        help="follow: a turn waits for the answer before it and the time to think, where the workload knows them (the "
        "default); absolute: all rows go at recorded times.",
        metavar="follow|absolute",
    ),
]
Gpus = Annotated[str | None, typer.Option("--gpus", help="GPUs to use by nvidia-smi's index: 0,1.", metavar="LIST")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run folders and the MLflow store lie.", metavar="DIR")]


def overrides(slo: list[str] | None, set_: list[str] | None, gpus: str | None) -> dict[str, Any]:
    """Return what flags override of a study, by dotted path.

    Raises:
        SpecError: names the flag that cannot be read.
    """
    found: dict[str, Any] = {}
    for text in set_ or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SpecError(f"--set {text}: write KEY=VALUE", hint="for example --set engine_args.max_model_len=8192")
        found[key] = _yaml_value(text, value)
    if slo:
        found["slo"] = [part.strip() for text in slo for part in text.split(",")]
    if gpus is not None:
        try:
            found["gpus"] = [int(index) for index in gpus.split(",")]
        except ValueError:
            raise SpecError(f"--gpus {gpus}: write indices, such as 0,1") from None
    return found


def _yaml_value(text: str, value: str) -> Any:
    try:
        return YAML(typ="safe").load(value)
    except (YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"--set {text.partition('=')[0]}: not a YAML value") from error


def refuse_with_resume(study: str | None, given: dict[str, Any], baseline: str | None, *, dry_run: bool) -> None:
    """Refuse what a run that is continued cannot take.

    Raises:
        SpecError: says what.
    """
    if dry_run:
        raise SpecError("--dry-run goes with a new run", hint="tune show RUN tells what a run has measured")
    if study or baseline or set(given) - {"budget.trials", "budget.time"}:
        raise SpecError("--resume continues a run as it was begun; it takes no other study, flags or baseline",
                        hint="start a new run for a changed study")  # fmt: skip
