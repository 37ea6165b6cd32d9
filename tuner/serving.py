"""What a configuration of vLLM is, and how it becomes command lines or config files: one server, or a group.

Arguments keep vLLM's own names with underscores (`max_num_batched_tokens`) everywhere inside; only
this module turns `_` into `-`.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType

# Arguments whose values never belong on a command line or in a file, and the variable to export instead.
SECRET_ARGUMENTS = {"api_key": "VLLM_API_KEY", "hf_token": "HF_TOKEN"}

# Each multiplies the GPUs that one server takes.
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Role(StrEnum):
    """What a server of a group does."""

    ANY = "any"
    PREFILLER = "prefiller"
    DECODER = "decoder"

    @property
    def kv_role(self) -> str | None:
        """The role's name in vLLM's `kv_transfer_config`; None for a server that transfers nothing."""
        return {Role.PREFILLER: "kv_producer", Role.DECODER: "kv_consumer"}.get(self)


@dataclass(frozen=True, slots=True)
class Topology:
    """How many servers of which role: aggregated replicas ("1x", "4x") or a PD group ("2p1d")."""

    replicas: int = 0
    prefillers: int = 0
    decoders: int = 0

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Return the topology written as "4x" or "1p3d".

        Raises:
            ValueError: neither form, or a count of zero.
        """
        if match := re.fullmatch(r"([1-9]\d*)x", text):
            return cls(replicas=int(match[1]))
        if match := re.fullmatch(r"([1-9]\d*)p([1-9]\d*)d", text):
            return cls(prefillers=int(match[1]), decoders=int(match[2]))
        raise ValueError(f'{text!r} is not a topology: write "1x", "4x" (replicas) or "2p1d" (prefillers, decoders)')

    def __str__(self) -> str:
        return f"{self.replicas}x" if self.replicas else f"{self.prefillers}p{self.decoders}d"

    @property
    def n_servers(self) -> int:
        """Servers the topology starts."""
        return self.replicas + self.prefillers + self.decoders

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that have arguments of their own."""
        return (Role.ANY,) if self.replicas else (Role.PREFILLER, Role.DECODER)

    @property
    def is_pd(self) -> bool:
        """Whether prefill and decode run on servers of their own."""
        return not self.replicas

    @property
    def is_group(self) -> bool:
        """Whether there is more than one server, with a front before them."""
        return self.n_servers > 1

    def count(self, role: Role) -> int:
        """Return how many servers of a role there are."""
        return {Role.ANY: self.replicas, Role.PREFILLER: self.prefillers, Role.DECODER: self.decoders}[role]

    @property
    def members(self) -> tuple[tuple[Role, int], ...]:
        """Role and number of each server, prefillers first: ((prefiller, 0), (decoder, 0), (decoder, 1))."""
        return tuple((role, index) for role in self.roles for index in range(self.count(role)))


SINGLE = Topology(replicas=1)


@dataclass(frozen=True, slots=True)
class Front:
    """What stands before the servers of a group and spreads requests over them: vllm-router.

    Attributes:
        command: the program and its leading words.
        policy: how it chooses a server; one of vllm-router's `--policy`.
        prefill_policy, decode_policy: for one role of a PD group; None: `policy`.
    """

    command: tuple[str, ...] = ("vllm-router",)
    policy: str = "round_robin"
    prefill_policy: str | None = None
    decode_policy: str | None = None


ROUTER = Front()


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """One configuration of vLLM, ready to be started, logged or exported.

    Attributes:
        model: what `vllm serve` is given: a name on the hub or a folder.
        args: engine arguments by vLLM's names; a value of None means the argument is not given.
        env: environment variables set for the server beside the inherited ones.
        topology: how many servers of which role.
        role_args: arguments of one role only, on top of `args`.
        command: the program and its leading words; the model and flags follow.
        front: stands before the servers of a group; a single server has none.
    """

    model: str
    args: Mapping[str, Json] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    topology: Topology = SINGLE
    role_args: Mapping[Role, Mapping[str, Json]] = field(default_factory=dict)
    command: tuple[str, ...] = ("vllm", "serve")
    front: Front = ROUTER

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", MappingProxyType(_given(self.args)))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))
        by_role = {role: MappingProxyType(_given(args)) for role, args in self.role_args.items()}
        object.__setattr__(self, "role_args", MappingProxyType(by_role))

    @property
    def key(self) -> str:
        """Return a short text equal for configurations that start the same servers."""
        parts: list[object] = [self.model, dict(self.args), dict(self.env), str(self.topology), list(self.command)]
        parts.append({str(role): dict(args) for role, args in self.role_args.items()})
        parts.append(asdict(self.front) if self.topology.is_group else None)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def for_role(self, role: Role) -> dict[str, Json]:
        """Return the arguments a server of this role is given."""
        return dict(self.args) | dict(self.role_args.get(role, {}))

    def gpus_per_server(self, role: Role) -> int:
        """Return how many GPUs one server of a role takes: the product of its parallel sizes."""
        given = self.for_role(role)
        return math.prod(size for name in PARALLEL_SIZES if isinstance(size := given.get(name), int))

    @property
    def n_gpus(self) -> int:
        """GPUs that all servers take together."""
        return sum(self.topology.count(role) * self.gpus_per_server(role) for role in self.topology.roles)


def _given(args: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in sorted(args.items()) if value is not None}


def flag(name: str) -> str:
    """Return the flag of an argument: "max_num_seqs" becomes "--max-num-seqs"."""
    return "--" + name.replace("_", "-")


def argument(flag_text: str) -> str:
    """Return the argument of a flag: "--max-num-seqs" becomes "max_num_seqs"."""
    return flag_text.removeprefix("--").replace("-", "_")


def to_argv(config: ServingConfig, role: Role = Role.ANY, **extra: Json) -> list[str]:
    """Return the command that starts a server of this role; `extra` adds arguments such as host and port."""
    argv = [*config.command, config.model]
    for name, value in (config.for_role(role) | extra).items():
        argv += _words(name, value)
    return argv


def _words(name: str, value: Json) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [flag(name), *(str(item) for item in value)]
    return [flag(name), _scalar(value)]


def _scalar(value: Json) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def to_config(config: ServingConfig, role: Role = Role.ANY) -> dict[str, Json]:
    """Return the mapping that, written as YAML, `vllm serve --config` reads as these arguments.

    A boolean that is off is written `no-NAME: true`: vLLM 0.26 drops `NAME: false` from a config file
    without a word (vllm/utils/argparse_utils.py, `load_config_file`). JSON values become text.
    """
    out: dict[str, Json] = {"model": config.model}
    for name, value in config.for_role(role).items():
        key = flag(name).removeprefix("--")
        if value is False:
            out[f"no-{key}"] = True
        elif isinstance(value, dict):
            out[key] = _scalar(value)
        else:
            out[key] = value
    return out


def front_argv(
    config: ServingConfig,
    host: str,
    port: int,
    urls: Mapping[Role, Sequence[str]],
    *,
    prometheus_port: int,
    hides_failures: bool = True,
) -> list[str]:
    """Return the command that starts the front of a group.

    Args:
        config: of the group.
        host: where the front listens.
        port: likewise.
        urls: of the servers, by role.
        prometheus_port: vllm-router serves its own metrics there.
        hides_failures: whether it may ask another server when one failed. As shipped, it sends what failed (500,
            503, 429, no connection) to another replica, and takes a server out after ten failures: good to serve
            with, and a failed request would be measured as a slow one (tests/test_front_router.py, "Failures").
    """
    front = config.front
    argv = list(front.command)
    if config.topology.is_pd:
        argv += ["--vllm-pd-disaggregation"]
        argv += [word for url in urls[Role.PREFILLER] for word in ("--prefill", url)]
        argv += [word for url in urls[Role.DECODER] for word in ("--decode", url)]
    else:
        argv += ["--worker-urls", *urls[Role.ANY]]
    argv += ["--policy", front.policy]
    if config.topology.is_pd:
        for flag_name, policy in (("--prefill-policy", front.prefill_policy), ("--decode-policy", front.decode_policy)):
            argv += [flag_name, policy] if policy else []
    argv += [] if hides_failures else ["--disable-retries", "--disable-circuit-breaker"]
    # The servers are ready when the front starts; by default it would look again only after 30 s.
    argv += ["--host", host, "--port", str(port), "--worker-startup-check-interval", "1"]
    return [*argv, "--prometheus-port", str(prometheus_port), "--log-level", "warning"]
