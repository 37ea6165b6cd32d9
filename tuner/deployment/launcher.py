"""Start a configuration on this host, one server or a group behind a front, so that nothing is left afterwards.

launcher = LocalLauncher()
with launcher.launch(config, directory) as deployment:
    ...  # requests to deployment.url

A group is several servers, aggregated replicas or prefillers and decoders, with vllm-router before them. They
start side by side where memory allows, on GPUs and ports of their own, the front when all are ready. A group
that comes up partly is ended whole.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.deployment import gpu, host, ports, process, program
from tuner.deployment.group import Group, Start
from tuner.deployment.guardian import Guardian
from tuner.deployment.ports import Reservation
from tuner.deployment.process import ALONE, FRONT, Server
from tuner.errors import FailureKind, HostError, SpecError, StartError
from tuner.seams import Member
from tuner.serving import SECRET_ARGUMENTS, Json, Role, ServingConfig, front_argv, to_argv

PORT_TRIES = 3
GIB = 2**30
# What a server takes of the host's memory beside weights and KV cache: 1.5 GiB were seen, on 0.26 and 0.32.
SERVER_MEMORY = 2 * GIB


@dataclass(frozen=True, slots=True)
class Deployment:
    """Servers that are up, and the front of a group; leaving the launcher's context ends them."""

    servers: tuple[Server, ...]
    front: Server | None = None

    @property
    def url(self) -> str:
        """Where requests go."""
        return (self.front or self.servers[0]).url

    @property
    def port(self) -> int:
        """The port of `url`."""
        return (self.front or self.servers[0]).port

    @property
    def members(self) -> tuple[Member, ...]:
        """The servers, prefillers before decoders; not the front."""
        return tuple(Member(server.role or Role.ANY, server.url, server.ranks) for server in self.servers)

    def check_alive(self) -> None:
        """Raise ServerDied when a server or the front has ended."""
        for server in self.servers:
            server.check_alive()
        if self.front is not None:
            self.front.check_alive()


@dataclass(frozen=True, slots=True)
class _Seat:
    """A server to be started and what is its own: ports and GPUs."""

    role: Role
    index: int
    port: Reservation
    side_channel: Sequence[Reservation]
    gpus: Sequence[gpu.Gpu]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLauncher:
    """Starts servers as processes of this host.

    Attributes:
        host: the address servers listen on; an argument `host` goes before it.
        port: of the one server, or of the front, fixed by the user; None lets the system pick. An argument
            `port` goes before it.
        gpus: indices by nvidia-smi; they must be free, and each server gets its own. None: not looked at.
        share_devices: all servers get the same GPUs, and start one after the other.
        start_timeout: seconds until the servers must be ready.
        stop_patience: seconds between asking a server to end and killing it.
        cache_directory: where vLLM keeps compiled code between trials, unless the environment says.
        stop_command: what ends a container that the configuration's command starts.
        journal: the run's `processes.jsonl`.
        measuring: arguments that make the server say more of what it does; a configuration's own go before them.
        plugin: a folder that prefillers and decoders find on their PYTHONPATH.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    gpus: tuple[int, ...] = ()
    share_devices: bool = False
    start_timeout: float = 600.0
    stop_patience: float = 30.0
    cache_directory: Path | None = None
    stop_command: tuple[str, ...] = ()
    journal: Path | None = None
    measuring: Mapping[str, Json] = field(default_factory=dict)
    plugin: Path | None = None

    @contextmanager
    def launch(self, config: ServingConfig, directory: Path) -> Iterator[Deployment]:
        """Start a configuration, its logs and command lines in `directory`; ready when entered.

        Raises:
            StartError: it did not come up; everything started is gone again.
            SpecError: the configuration cannot be started here as it is written.
            HostError: no such program, a busy GPU or port; on leaving, something was left over.
        """
        self._check(config)
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            guardian = stack.enter_context(Guardian())
            yield self._on_some_ports(stack, config, directory, guardian)

    def _check(self, config: ServingConfig) -> None:
        for name, variable in SECRET_ARGUMENTS.items():
            if any(name in config.for_role(role) for role in config.topology.roles):
                raise SpecError(
                    f"{name}: a secret does not belong on a command line, which ends up in logs and results",
                    hint=f"leave it out and export {variable} instead",
                )
        if not program.starts_container(config.command):
            return
        words = f"command: {shlex.join(config.command)} starts a container"
        if config.topology.is_group:
            raise SpecError(
                f"{words}, and topology {config.topology} is a group, each of whose servers would need its own",
                hint="install vLLM beside tune to measure groups; tune export writes a compose file for them",
            )
        if not self.stop_command:
            raise SpecError(
                f"{words}, which tune could not end",
                hint="give the container a --name and write stop_command: [docker, stop, NAME]",
            )

    def _on_some_ports(
        self, stack: ExitStack, config: ServingConfig, directory: Path, guardian: Guardian
    ) -> Deployment:
        """Start the servers, again on other ports when somebody was faster."""
        fixed = config.args.get("port", self.port)
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                return stack.enter_context(self._started(config, directory, guardian, fixed))
            except StartError as error:
                if error.kind != FailureKind.PORT or fixed is not None or not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def _started(
        self, config: ServingConfig, directory: Path, guardian: Guardian, fixed_port: Any
    ) -> Iterator[Deployment]:
        with ExitStack() as stack:
            seats = self._seats(stack, config, fixed_port)
            front_ports = self._front_ports(stack, config, fixed_port)
            (directory / "command.txt").unlink(missing_ok=True)
            group = Group(guardian, directory, self.stop_patience, self.journal)
            stack.callback(group.end)
            side_by_side = not self.share_devices and _memory_allows(config)
            servers = []
            for seat in seats:
                servers.append(group.start(self._server(config, seat, directory)))
                if not side_by_side:
                    group.await_ready(self.start_timeout)
            group.await_ready(self.start_timeout)
            front = None
            if front_ports:
                front = group.start(self._front(config, servers, front_ports, directory))
                group.await_ready(self.start_timeout)
            yield Deployment(tuple(servers), front)

    def _address(self, config: ServingConfig) -> str:
        return str(config.args.get("host", self.host))

    def _seats(self, stack: ExitStack, config: ServingConfig, fixed_port: Any) -> list[_Seat]:
        gpus = list(gpu.choose(gpu.list_gpus(), len(self.gpus), self.gpus)) if self.gpus else []
        gpu.require_free(gpus)
        if gpus and not self.share_devices and config.n_gpus > len(gpus):
            raise HostError(f"topology {config.topology} needs {config.n_gpus} GPUs, {len(gpus)} are given")
        seats = []
        for role, index in config.topology.members:
            n = config.gpus_per_server(role)
            own, gpus = gpus[:n], gpus if self.share_devices else gpus[n:]
            # Requests go to the front of a group, so a port that the user fixed is the front's.
            port = ports.reserved(self._address(config), None if config.topology.is_group else fixed_port)
            seats.append(_Seat(role, index, stack.enter_context(port), self._side_channel(stack, config, role), own))
        return seats

    def _side_channel(self, stack: ExitStack, config: ServingConfig, role: Role) -> list[Reservation]:
        """Reserve the ports on which a server tells others how its KV cache is read: one a data-parallel rank."""
        if role.kv_role is None:
            return []
        ranks = config.for_role(role).get("data_parallel_size", 1)
        return ports.reserve_in_a_row(stack, self.host, ranks if isinstance(ranks, int) else 1)

    def _front_ports(self, stack: ExitStack, config: ServingConfig, fixed_port: Any) -> list[Reservation]:
        """Reserve the front's own port and the one on which vllm-router shows its metrics; a lone server has none."""
        if not config.topology.is_group:
            return []
        both = (ports.reserved(self._address(config), fixed_port), ports.reserved("127.0.0.1"))
        return [stack.enter_context(one) for one in both]

    def _server(self, config: ServingConfig, seat: _Seat, directory: Path) -> Start:
        address = self._address(config)
        argv = to_argv(config, seat.role, **self._measuring(config, seat.role), host=address, port=seat.port.port)
        settings = process.settings(config.env, cache=self.cache_directory, gpus=[one.index for one in seat.gpus])
        if seat.side_channel:
            settings["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(seat.side_channel[0].port)
            if "VLLM_NIXL_SIDE_CHANNEL_HOST" not in os.environ:
                settings.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", self.host)
            if self.plugin is not None:
                inherited = settings.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
                settings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.plugin), inherited]))
        name = ALONE
        if config.topology.is_group:
            name = f"{'replica' if seat.role is Role.ANY else seat.role} {seat.index}"
        log = directory / f"server-{seat.role}-{seat.index}.log"
        ranks = config.for_role(seat.role).get("tensor_parallel_size", 1)
        return Start(
            name, seat.role, argv, settings, address, (seat.port, *seat.side_channel), log, seat.gpus,
            self.stop_command, ranks if isinstance(ranks, int) else 1,
        )  # fmt: skip

    def _front(
        self, config: ServingConfig, servers: Sequence[Server], own: Sequence[Reservation], directory: Path
    ) -> Start:
        urls = {role: [server.url for server in servers if server.role is role] for role in config.topology.roles}
        address = self._address(config)
        argv = front_argv(
            config, address, own[0].port, urls, prometheus_port=own[1].port, hides_failures=False
        )  # fmt: skip
        # Before prefillers and decoders it puts this key in place of the client's (tests/test_front_router.py).
        key = os.environ.get("VLLM_API_KEY")
        settings = {"OPENAI_API_KEY": key} if key else {}  # another key of that name is for somebody else
        return Start(FRONT, None, argv, settings, address, own, directory / "front.log")

    def _measuring(self, config: ServingConfig, role: Role) -> dict[str, Json]:
        given = config.for_role(role)
        # vLLM keeps no times of requests without its statistics, and refuses the two together.
        if given.get("disable_log_stats"):
            return {}
        return {name: value for name, value in self.measuring.items() if name not in given}


def _memory_allows(config: ServingConfig) -> bool:
    """Whether this host's memory holds all servers at once, as far as that is known beforehand."""
    if not config.topology.is_group:
        return True
    each = SERVER_MEMORY
    space = config.env.get("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", ""))
    if space.isdecimal():  # else vLLM takes its own default, or refuses it
        # A server on a CPU keeps KV cache and weights where the others keep theirs.
        each += int(space) * GIB + host.size_of_weights(config.model)
    return each * config.topology.n_servers < host.memory()[0]
