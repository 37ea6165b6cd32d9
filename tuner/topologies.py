"""What a study says of its servers: the topologies it compares, what differs by role, how KV moves, what is in front.

A study compares topologies at equal GPUs only, and a role's own arguments are written with the role in front:
`prefiller.max_num_batched_tokens`.
"""

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from tuner.dimensions import Part
from tuner.serving import PARALLEL_SIZES, SINGLE, Front, Json, Role, Topology

AUTO = "auto"
ROLES: tuple[Role, ...] = (Role.PREFILLER, Role.DECODER)
CONNECTOR: dict[str, Json] = {"kv_connector": "NixlConnector"}
BY_TEXT = ("consistent_hash", "sticky_least_loaded")
KV, DEVICE = "kv_transfer_config", "kv_buffer_device"

Command = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda v: tuple(shlex.split(v)) if isinstance(v, str) else v),
    Field(min_length=1),
]


def _policy(value: object) -> object:
    if value == "kv_aware":
        raise ValueError("kv_aware needs the servers' KV events as a source, which tune does not set up")
    return value


Policy = Annotated[
    Literal["random", "round_robin", "cache_aware", "power_of_two", "consistent_hash", "sticky_least_loaded"],
    BeforeValidator(_policy),
]


class FrontSpec(Part):
    """The program before the servers of a group, and how it spreads requests."""

    command: Command = ("vllm-router",)
    policy: Policy = "round_robin"
    prefill_policy: Policy | None = None
    decode_policy: Policy | None = None

    @property
    def value(self) -> Front:
        """What a configuration carries."""
        return Front(self.command, self.policy, self.prefill_policy, self.decode_policy)


def _read(value: object) -> object:
    if value == AUTO:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f'{value!r}: write a list, such as [4x, 1p3d, 2p2d], or "auto"')
    return tuple(Topology.parse(v) if isinstance(v, str) else v for v in value)


def _distinct(topologies: tuple[Topology, ...]) -> tuple[Topology, ...]:
    if twice := next((t for t in topologies if topologies.count(t) > 1), None):
        raise ValueError(f"{twice} stands here twice")
    return topologies


Topologies = Annotated[
    tuple[Topology, ...],
    BeforeValidator(_read),
    AfterValidator(_distinct),
    PlainSerializer(lambda ts: [str(t) for t in ts] or AUTO),
]


def of_slots(slots: int) -> tuple[Topology, ...]:
    """Return what "auto" means where `slots` servers fit: replicas, and every split into prefillers and decoders."""
    if slots < 2:
        return (SINGLE,)
    return (Topology(replicas=slots), *(Topology(prefillers=n, decoders=slots - n) for n in range(1, slots)))


def split(name: str) -> tuple[Role, str]:
    """Return role and argument of a key: "decoder.max_num_seqs" is the decoders', "max_num_seqs" anybody's."""
    head, _, rest = name.partition(".")
    return (Role(head), rest) if head in ROLES and rest else (Role.ANY, name)


def by_role(args: Mapping[str, Json]) -> dict[Role, dict[str, Json]]:
    """Return arguments sorted by role, the shared ones under `any`."""
    out: dict[Role, dict[str, Json]] = {role: {} for role in (Role.ANY, *ROLES)}
    for name, value in args.items():
        role, bare = split(name)
        out[role][bare] = value
    return out


def check_prefix(name: str) -> None:
    """Refuse a key whose prefix was meant as a role; another prefix may be vLLM's own (`compilation_config.mode`).

    Raises:
        ValueError: with what was meant.
    """
    head, _, rest = name.partition(".")
    if head in ROLES and not rest:
        raise ValueError(f"{head}: write a role's argument as {head}.NAME: value")
    if rest and head not in ROLES and (close := difflib.get_close_matches(head, ROLES, n=1, cutoff=0.7)):
        raise ValueError(f'{name}: no role "{head}", did you mean "{close[0]}.{rest}"?')
    if split(name)[1].partition(".")[0] == KV:
        raise ValueError(f"{name}: tune sets it for each role; what you want in it goes under the study's key {KV}")


def kv_transfer(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return `kv_transfer_config` as a study gives it, checked.

    Raises:
        ValueError: it names what tune sets, or lists what cannot be a choice.
    """
    for name in ("kv_role", "engine_id"):
        if name in config:
            raise ValueError(f"{name} is set by tune itself, for each server its own")
    if (connector := config.get("kv_connector", CONNECTOR["kv_connector"])) != CONNECTOR["kv_connector"]:
        raise ValueError(
            f"kv_connector: {connector}: only {CONNECTOR['kv_connector']} is taken, whose transfers can be proven"
        )
    devices = config.get(DEVICE, "cpu")
    choices = devices if isinstance(devices, list) else [devices]
    if not choices or not all(isinstance(d, str) for d in choices) or len(set(map(str, choices))) != len(choices):
        raise ValueError(f"{DEVICE}: {devices!r} is neither a device nor a list of distinct ones, such as [cpu, cuda]")
    return dict(config)


def kv_transfer_of(role: Role, given: Mapping[str, Json], device: Json = None) -> dict[str, Json]:
    """Return a server's `kv_transfer_config`; `device` is one of a list that the study gives, the first if None."""
    chosen = CONNECTOR | dict(given)
    if isinstance(listed := chosen.get(DEVICE), list):
        chosen[DEVICE] = listed[0] if device is None else device
    return chosen | {"kv_role": role.kv_role}


def check_equal(counts: Mapping[Topology, int]) -> None:
    """Refuse topologies that take different numbers of GPUs.

    Raises:
        ValueError: with each topology's count.
    """
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{topology} takes {n}" for topology, n in counts.items())
        raise ValueError(f"topologies: comparisons at unequal GPUs are not fair: {told}")


def check_sizes_are_fixed(search_space: Iterable[str]) -> None:
    """Refuse a search over how many GPUs a server takes.

    Raises:
        ValueError: for the first such dimension.
    """
    for name in search_space:
        if split(name)[1] in PARALLEL_SIZES:
            raise ValueError(
                f"search_space.{name}: it changes how many GPUs a server takes, and comparisons at unequal GPUs "
                "are not fair: fix it under engine_args"
            )


def check_policy(topologies: Sequence[Topology], front: Front) -> None:
    """Refuse policies under which all prompts of a replay meet one replica.

    They look for a session or a text to go by, and a replay's prompts are token ids (tests/test_front_router.py,
    "Balance").

    Raises:
        ValueError: the policy is one of these, and there are replicas.
    """
    if front.policy in BY_TEXT and any(t.is_group and not t.is_pd for t in topologies):
        raise ValueError(
            f"front.policy: {front.policy} sends every prompt of token ids to the same replica: take round_robin or "
            "power_of_two"
        )


def check_used(topologies: Sequence[Topology], keys: Mapping[str, Iterable[str]], kv: Mapping[str, Any] | None) -> None:
    """Refuse what says something of prefillers and decoders in a study without any.

    Raises:
        ValueError: for the first such key.
    """
    if not topologies or any(t.is_pd for t in topologies):
        return
    told = ", ".join(map(str, topologies))
    for part, names in keys.items():
        for name in names:
            if split(name)[0] is not Role.ANY:
                raise ValueError(
                    f"{part}.{name}: no topology of this study has a {split(name)[0]} (topologies: {told})"
                )
    if kv:
        raise ValueError(f"{KV}: no topology of this study transfers KV (topologies: {told})")
