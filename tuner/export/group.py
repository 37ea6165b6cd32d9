"""The servers of a group: what they are called, and which ports and GPUs each takes when they share a host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tuner.export.files import stem
from tuner.serving import SECRET_ARGUMENTS, Role, ServingConfig, front_argv

FRONT_PORT, SERVER_PORT = 8000, 8100
SIDE_CHANNEL_PORT, PROMETHEUS_PORT = 5600, 29000  # the defaults of vLLM and of vllm-router

# The wheel that a study measures with. The image vllm/vllm-router (built by the release pipeline of
# github.com/vllm-project/router) is made around the Rust binary, with a command line of its own that was not tried.
ROUTER_IMAGE, ROUTER_PACKAGE = "python:3.12-slim", "vllm-router==0.1.17"
ROUTER_NOTE = (
    f"The front is {ROUTER_PACKAGE} from PyPI, the version that tune is tested with; the image vllm/vllm-router",
    "has a command line of its own, which was not tried.",
)
FRONT_KEY = "OPENAI_API_KEY"  # what vllm-router sends to prefillers and decoders, in place of the client's key
SECRET_VARIABLES = tuple(sorted(SECRET_ARGUMENTS.values()))
CACHE, CONFIG_FOLDER = "/root/.cache/huggingface", "/etc/vllm"


@dataclass(frozen=True, slots=True)
class Server:
    """One server of a group on a shared host.

    Attributes:
        role: what it does.
        index: its number among those of its role.
        number: its number in the group; its port is that far from the first.
        side_channel: how far its side channel's port is from the first.
        gpus: places in the list of GPUs.
    """

    role: Role
    index: int
    number: int
    side_channel: int
    gpus: tuple[int, ...]

    @property
    def name(self) -> str:
        """As "prefiller-0"."""
        return f"{stem(self.role)}-{self.index}"

    @property
    def yaml(self) -> str:
        """The file that `vllm serve --config` takes."""
        return f"{stem(self.role)}.yaml"


def servers(config: ServingConfig) -> tuple[Server, ...]:
    """Return the servers of a group, prefillers first.

    Each rank of a data-parallel server listens at a side channel of its own, counted from the server's first.
    """
    found: list[Server] = []
    step = max(config.gpus_per_server(role) for role in config.topology.roles)
    first_gpu = 0
    for number, (role, index) in enumerate(config.topology.members):
        n_gpus = config.gpus_per_server(role)
        found.append(Server(role, index, number, number * step, tuple(range(first_gpu, first_gpu + n_gpus))))
        first_gpu += n_gpus
    return tuple(found)


def router_argv(config: ServingConfig, urls: Mapping[Role, Sequence[str]], host: str = "0.0.0.0") -> list[str]:  # noqa: S104
    """Return the front's command in a container of its own, where all interfaces are the container's."""
    argv = front_argv(config, host, FRONT_PORT, urls, prometheus_port=PROMETHEUS_PORT)
    return ["vllm-router", *argv[len(config.front.command) :], "--prometheus-host", host]


def urls_by_role(config: ServingConfig, urls: Mapping[Server, str]) -> dict[Role, list[str]]:
    """Return the urls of the servers as `front_argv` takes them."""
    return {role: [url for server, url in urls.items() if server.role is role] for role in config.topology.roles}


def image(vllm_version: str | None) -> str:
    """Return vLLM's image of the version that was measured."""
    return f"vllm/vllm-openai:v{vllm_version.split('+')[0]}" if vllm_version else "vllm/vllm-openai:latest"


def model_folder(config: ServingConfig) -> str | None:
    """Return the folder that holds the model, which a container must be given; None for a name on the hub."""
    return config.model if PurePath(config.model).is_absolute() else None


def describe(config: ServingConfig) -> str:
    """Return the group in words, as "2 prefillers, 1 decoder"."""
    words = {Role.ANY: "replica", Role.PREFILLER: "prefiller", Role.DECODER: "decoder"}
    counts = [(config.topology.count(role), words[role]) for role in config.topology.roles]
    return ", ".join(f"{n} {word}{'s' if n > 1 else ''}" for n, word in counts)
