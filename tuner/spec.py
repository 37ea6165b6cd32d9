"""The study file: YAML in, checked values out, every mistake at once with its line.

Nothing here starts or asks anything; a study file cannot execute anything.
"""

import difflib
import io
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML

from tuner import document, units
from tuner import slo as slos
from tuner import topologies as groups
from tuner.dimensions import DEFAULT_SPACE, Dimension, Fraction, IntRange, Part
from tuner.errors import SpecError
from tuner.metrics import DEFAULT_CLASSES
from tuner.outside import SECRET, WITH_PASSWORD
from tuner.serving import PARALLEL_SIZES, ROUTER, SECRET_ARGUMENTS, SINGLE, Front, Json, Role, ServingConfig, Topology
from tuner.slo import Slo
from tuner.topologies import Command, FrontSpec, Topologies

SESSIONS = FOLLOW, ABSOLUTE = "follow", "absolute"
RESERVED_NAMES = ("mlflow.db", "artifacts")
TINY_MODEL = "tune/tiny-qwen2"
OWN_ENV = ("TUNE_DEPLOYMENT", "VLLM_NIXL_SIDE_CHANNEL_PORT")
OWN_ARGS = ("host", "port", "config", "model", "model_tag", "uds")


def _seconds(value: object) -> object:
    if isinstance(value, str):
        return units.parse_duration(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"{value} of what? write {value}s or {value}min")  # noqa: TRY004 (becomes a line of the report)
    return value


Duration = Annotated[
    float,
    BeforeValidator(_seconds),
    PlainSerializer(lambda seconds: f"{seconds:.6f}".rstrip("0").rstrip(".") + "s", return_type=str),
]


class Vllm(Part):
    """The program that serves, and how long it may take to start and stop."""

    command: Command = ("vllm", "serve")
    stop_command: Command | None = None
    start_timeout: Duration = 600.0
    stop_timeout: Duration = 60.0
    port: int | None = Field(default=None, ge=1, le=65535)


class WorkloadSpec(Part):
    """Which recorded workload, and how it is replayed."""

    path: str
    rate_scale: float = Field(default=1.0, gt=0, le=100)
    warm_up: Duration = 5.0
    drain_timeout: Duration = 120.0
    sessions: Literal["follow", "absolute"] = "follow"
    classes: dict[str, tuple[int, int]] = Field(default_factory=lambda: dict(DEFAULT_CLASSES))


class Budget(Part):
    """When a study ends: measured trials, wall time, or whichever comes first."""

    trials: int | None = Field(default=None, ge=1)
    time: Duration | None = None

    @model_validator(mode="after")
    def _some_end(self) -> "Budget":
        if self.trials is None and self.time is None:
            raise ValueError("give trials, time or both")
        return self


class Objectives(Part):
    """The two metrics of the Pareto front, both minimised."""

    ttft: str
    itl: str


def _slo(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return slos.parse(value, classes=_any_class(value))
    except SpecError as error:
        raise ValueError(f"{error.message.removeprefix('--slo ')}; {error.hint}") from error


def _any_class(text: str) -> list[str]:
    """Classes are checked against the workload's own once the whole file is read."""
    match = re.search(r"^[a-z0-9_]+\.([\w-]+)", text.strip())
    return [match[1]] if match else []


def _no_secret(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if name in OWN_ENV:
            raise ValueError(f"{name} is set by tune itself")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(f"{name!r} is no name for an environment variable")
        if SECRET.search(name) or WITH_PASSWORD.search(value):
            raise ValueError(
                f"{name} looks like a secret: export it in the shell, it is passed on and never written down"
            )
    return env


def _distinct_gpus(gpus: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if twice := [gpu for gpu in gpus or () if gpus and gpus.count(gpu) > 1]:
        raise ValueError(f"GPU {twice[0]} stands here twice; share_devices: true puts servers on the same one")
    return gpus


def _argument_names(args: dict[str, Any]) -> dict[str, Any]:
    for name in args:
        if "-" in name:
            raise ValueError(f'{name}: write it with underscores, "{name.replace("-", "_")}"')
        groups.check_prefix(name)
        bare = groups.split(name)[1]
        if (variable := SECRET_ARGUMENTS.get(bare)) is not None:
            raise ValueError(
                f"{name} is a secret: export {variable} in the shell, it is passed on and never written down"
            )
        if bare in OWN_ARGS:
            raise ValueError(f"{name} is set by tune itself")
    return args


def _engine_args(args: dict[str, Any]) -> dict[str, Json]:
    for name, value in args.items():
        if groups.split(name)[1] in PARALLEL_SIZES and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: {value!r} is no number of GPUs: write a whole number from 1 on, without quotes")
    return {name: _json(value) for name, value in _argument_names(args).items()}


def _kv_transfer(config: dict[str, Any] | None) -> dict[str, Json] | None:
    return None if config is None else groups.kv_transfer({name: _json(value) for name, value in config.items()})


def _json(value: Any) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no value for an argument")
    if value is not None and not isinstance(value, bool | int | float | str | dict | list | tuple):
        raise ValueError(f"{value!r}: put it in quotes if it is text")
    if isinstance(value, str) and WITH_PASSWORD.search(value):
        raise ValueError("an address with a password in it, which would be written down and shown")
    if isinstance(value, dict):
        return {str(k): _json(v) for k, v in value.items()}
    return [_json(v) for v in value] if isinstance(value, tuple | list) else value


def _check_objectives(objectives: Objectives, classes: Iterable[str]) -> None:
    for family, metric in (("ttft", objectives.ttft), ("itl", objectives.itl)):
        try:
            known = slos.parse(f"{metric}=1s", classes=classes).metric
        except SpecError as error:
            raise ValueError(f"objectives.{family}: {metric}: {error.hint}") from error
        if known != metric or units.family(metric) != family:
            raise ValueError(f"objectives.{family}: {metric} is no statistic of {family}, such as {family}_p95")


class StudySpec(Part):
    """A study: what is served, what is varied, on which traffic, with which promise and budget."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: str = Field(pattern=r"^[^-\s][^\n\r]*$")
    vllm: Vllm = Vllm()
    engine_args: Annotated[dict[str, Any], AfterValidator(_engine_args)] = Field(default_factory=dict)
    env: Annotated[dict[str, str], AfterValidator(_no_secret)] = Field(default_factory=dict)
    search_space: Annotated[dict[str, Dimension], AfterValidator(_argument_names)] = Field(default_factory=dict)
    topologies: Topologies = (SINGLE,)  # none: "auto", which the plan resolves
    kv_transfer_config: Annotated[dict[str, Any] | None, AfterValidator(_kv_transfer)] = None
    front: FrontSpec | None = None
    share_devices: bool = False
    workload: Annotated[WorkloadSpec, BeforeValidator(lambda v: {"path": v} if isinstance(v, str) else v)]
    slo: tuple[Annotated[Slo, BeforeValidator(_slo), PlainSerializer(lambda s: s.text, return_type=str)], ...] = ()
    objectives: Objectives | None = None
    budget: Budget = Budget(trials=20)
    repeats: int = Field(default=1, ge=1, le=20)
    gpus: Annotated[tuple[int, ...] | None, AfterValidator(_distinct_gpus)] = None
    seed: int = Field(default=0, ge=0)
    sampler: Literal["tpe", "random"] = "tpe"

    @model_validator(mode="before")
    @classmethod
    def _default_space(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("search_space") is None:
            return data | {"search_space": DEFAULT_SPACE}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "StudySpec":
        if self.name in RESERVED_NAMES:
            raise ValueError(f"name: {self.name} is taken by the MLflow store beside the run folders")
        for low, high in self.workload.classes.values():
            if not 0 <= low < high:
                raise ValueError(f"workload.classes: [{low}, {high}] is no range of prompt lengths")
        if self.objectives is not None:
            _check_objectives(self.objectives, self.workload.classes)
        self._check_space()
        self._check_topologies()
        self._check_slos()
        return self

    def _check_space(self) -> None:
        if both := sorted(set(self.engine_args) & set(self.search_space)):
            raise ValueError(f"{both[0]} is under engine_args and under search_space: keep one")
        known = {groups.split(name)[1] for name in (*self.search_space, *self.engine_args)}
        for name, dimension in self.search_space.items():
            if not isinstance(dimension, Fraction):
                continue
            if dimension.fraction_of == groups.split(name)[1]:
                raise ValueError(f"search_space.{name}: a fraction of itself")
            if dimension.fraction_of not in {*known, "max_num_batched_tokens"}:
                raise ValueError(
                    f"search_space.{name}: fraction_of {dimension.fraction_of}: neither searched nor under engine_args"
                )

    def _check_topologies(self) -> None:
        groups.check_sizes_are_fixed(self.search_space)
        keys = {"engine_args": self.engine_args, "search_space": self.search_space}
        groups.check_used(self.topologies, keys, self.kv_transfer_config)
        groups.check_policy(self.topologies, self.router)
        groups.check_equal({topology: self.n_gpus(topology) for topology in self.topologies})
        if self.share_devices and not self.topologies:
            raise ValueError("share_devices: name the topologies; auto gives every server devices of its own")
        for name in () if self.topologies else self.engine_args:
            role, bare = groups.split(name)
            if role is not Role.ANY and bare in PARALLEL_SIZES:
                raise ValueError(f"engine_args.{name}: with topologies: auto all servers are of one size")

    def fixed(self, topology: Topology) -> ServingConfig:
        """Return what the study fixes of a topology, nothing settled: enough to count GPUs."""
        by_role = groups.by_role(self.engine_args)
        own = {role: by_role[role] for role in groups.ROLES if topology.is_pd}
        return ServingConfig(self.model, by_role[Role.ANY], topology=topology, role_args=own)

    def n_gpus(self, topology: Topology) -> int:
        """Return how many GPUs a topology takes: those of all servers, or of the largest where they share."""
        fixed = self.fixed(topology)
        return max(map(fixed.gpus_per_server, topology.roles)) if self.share_devices else fixed.n_gpus

    @property
    def router(self) -> Front:
        """What stands before the servers of a group."""
        return self.front.value if self.front is not None else ROUTER

    def with_topologies(self, topologies: tuple[Topology, ...]) -> "StudySpec":
        """Return the study with "auto" replaced by what it means here.

        Raises:
            SpecError: the study says something of roles that do not exist here.
        """
        found = self.model_copy(update={"topologies": topologies})
        try:
            found._check_topologies()  # noqa: SLF001 (a copy is not validated)
        except ValueError as error:
            raise SpecError(f"topologies: auto, here {', '.join(map(str, topologies))}: {error}",
                            hint="name the topologies in the study") from error  # fmt: skip
        return found

    def _check_slos(self) -> None:
        metrics = [slo.metric for slo in self.slo]
        if twice := next((m for m in metrics if metrics.count(m) > 1), None):
            raise ValueError(f"slo: {twice} is limited twice")
        for slo in self.slo:
            slos.parse(slo.text, classes=self.workload.classes)
            if slo.limit is None and slo.metric == "slo_attainment":
                raise ValueError("slo: attainment cannot be relative to the default")

    @property
    def objective_metrics(self) -> tuple[str, str]:
        """The metrics of the front: as given, else the statistic of the first TTFT and ITL SLO."""
        if self.objectives is not None:
            return self.objectives.ttft, self.objectives.itl
        return self._slo_metric("ttft", "ttft_p95"), self._slo_metric("itl", "itl_p99")

    def _slo_metric(self, family: str, default: str) -> str:
        return next((s.metric for s in self.slo if units.family(s.metric) == family), default)


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> StudySpec:
    """Read a study file; `overrides` are values by dotted path, as given by flags.

    Raises:
        SpecError: all mistakes of the file, one a line, each with file and line.
    """
    try:
        text = document.text_of(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {error}", hint="tune run STUDY takes a YAML file") from error
    return parse(text, str(path), overrides)


def parse(text: str, source: str, overrides: Mapping[str, Any] | None = None) -> StudySpec:
    """Read the text of a study file; `source` names it in errors."""
    data = document.read(text, source)
    plain = document.plain(data)
    given = dict(overrides or {})
    for dotted, value in given.items():
        document.put(plain, dotted, document.plain(value))
    try:
        return StudySpec.model_validate(plain)
    except ValidationError as error:
        lines = [_explain(item, data, source, given) for item in error.errors()]
        raise SpecError("\n".join(lines), hint='README, "The study file", lists every key') from error
    except SpecError as error:
        raise SpecError(f"{source}: slo: {error.message.removeprefix('--slo ')}", hint=error.hint) from error


def _explain(item: Any, data: Any, source: str, overrides: Mapping[str, Any]) -> str:
    loc = [part for part in item["loc"] if part not in {"ints", "floats", "choice", "fraction"}]
    dotted = ".".join(str(part) for part in loc)
    message = item["msg"].removeprefix("Value error, ")
    if not loc and (named := re.match(r"([a-z_]+)(?:\.([\w.]+))?: ", message)) and named[1] in StudySpec.model_fields:
        loc, message = [part for part in named.groups() if part], message[named.end() :]
        dotted = ".".join(loc)
    if item["type"] == "extra_forbidden":
        message = "unknown key" + _did_you_mean(loc)
    elif item["type"] == "missing":
        message = "missing"
    elif item["type"] != "value_error" and loc[:1] != ["env"] and not isinstance(item.get("input", {}), dict):
        message = f"{message[0].lower()}{message[1:]}, not {item['input']!r}"
    flag = next((name for name in overrides if _concerns(name, dotted, message)), None)
    where = FLAGS.get(flag, f"--set {flag}") if flag else f"{source}:{document.line_of(data, loc)}"
    return f"{where}: {dotted}: {message}" if dotted else f"{where}: {message}"


FLAGS = {
    "slo": "--slo", "budget.trials": "--trials", "budget.time": "--time", "workload.path": "--workload",
    "workload.rate_scale": "--rate-scale", "workload.sessions": "--sessions", "gpus": "--gpus", "repeats": "--repeats",
    "seed": "--seed", "name": "--name",
}  # fmt: skip


def _concerns(override: str, dotted: str, message: str) -> bool:
    """Whether an error is about a value that a flag gave."""
    parent, _, last = override.rpartition(".")
    return dotted == override or dotted.startswith(override + ".") or (dotted == parent and message.startswith(last))


def _did_you_mean(loc: Sequence[Any]) -> str:
    known: Iterable[str] = StudySpec.model_fields
    nested: dict[str, Iterable[str]] = {
        "vllm": Vllm.model_fields,
        "workload": WorkloadSpec.model_fields,
        "budget": Budget.model_fields,
        "objectives": Objectives.model_fields,
        "front": FrontSpec.model_fields,
        "search_space": {*IntRange.model_fields, *Fraction.model_fields, "values"},
    }
    if len(loc) > 1:
        known = nested.get(str(loc[0]), ())
    close = difflib.get_close_matches(str(loc[-1]), list(known), n=1)
    return f', did you mean "{close[0]}"?' if close else f"; known here: {', '.join(sorted(known))}"


def dump(spec: StudySpec) -> str:
    """Return the study as YAML that `parse` reads back to an equal value."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    out = io.StringIO()
    yaml.dump(_lists(spec.model_dump(mode="python", exclude_none=True)), out)
    return out.getvalue()


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"values"}:
            return _lists(value["values"])
        return {k: _lists(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_lists(v) for v in value]
    return value


def places(study: Path | None) -> list[Path]:
    """Return the folders in which `studies/` and `workloads/` are looked for, nearest first."""
    found = [Path.cwd()]
    if study is not None:
        found += [study.resolve().parent, study.resolve().parent.parent]
    return [*found, Path(__file__).resolve().parent.parent, Path(sys.prefix) / "share" / "tune"]


def find_workload(path: str, study: Path | None) -> Path:
    """Return where a study's workload lies: a path, or a name under some `workloads/`.

    Raises:
        SpecError: it is nowhere; the message lists the names there are.
    """
    tried = [base / tail for base in places(study) for tail in (path, Path("workloads") / path)]
    for candidate in tried:
        if candidate.is_file() or (candidate / "workload.jsonl").is_file():
            return candidate.resolve()
        if candidate.is_dir() and any(candidate.glob("recording-*.jsonl")):
            raise SpecError(f"workload: {path}: a recording that was cut off, or still goes on",
                            hint=f"make a workload of it: tune record --finish {candidate}")  # fmt: skip
    names = sorted({p.parent.name for base in places(study) for p in base.glob("workloads/*/workload.jsonl")})
    close = difflib.get_close_matches(path, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names) or 'none'}"
    raise SpecError(f"workload: {path}: not found", hint=hint)
