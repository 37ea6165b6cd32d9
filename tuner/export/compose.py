"""`compose.yaml`: a group on one host with Docker, a container each."""

from collections.abc import Sequence
from typing import Any

from tuner.export.files import commented, shared_env, text
from tuner.export.group import (
    CACHE,
    CONFIG_FOLDER,
    FRONT_KEY,
    FRONT_PORT,
    ROUTER_IMAGE,
    ROUTER_NOTE,
    ROUTER_PACKAGE,
    SECRET_VARIABLES,
    SIDE_CHANNEL_PORT,
    Server,
    image,
    model_folder,
    router_argv,
    servers,
    urls_by_role,
)
from tuner.serving import ServingConfig

ABOUT = (
    "",
    "docker compose up --wait: needs Docker Compose 2.17 or newer and the NVIDIA container toolkit. The front listens",
    "at port 8000 of the loopback interface; HOST and PORT change that. Secrets (HF_TOKEN, VLLM_API_KEY) come from",
    "your shell.",
    *ROUTER_NOTE,
    f"Before prefillers and decoders it sends them {FRONT_KEY}: with VLLM_API_KEY export it too, with the same key. It",
    "asks nobody for a key itself: keep it on the loopback interface, or behind something that does.",
)
HEALTH = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{FRONT_PORT}/health', timeout=5)"


def compose_yaml(config: ServingConfig, comments: Sequence[str], vllm_version: str | None) -> str:
    """Return the file; a server is reached by its service's name, at the same port in each container."""
    members = servers(config)
    services = {server.name: _server(config, server, vllm_version) for server in members}
    urls = {server: f"http://{server.name}:{FRONT_PORT}" for server in members}
    argv = router_argv(config, urls_by_role(config, urls))
    services["front"] = {
        "build": {"dockerfile_inline": f"FROM {ROUTER_IMAGE}\nRUN pip install --no-cache-dir {ROUTER_PACKAGE}\n"},
        "entrypoint": [argv[0]],
        "command": [text(_plain(word)) for word in argv[1:]],
        "ports": [text(f"${{HOST:-127.0.0.1}}:${{PORT:-{FRONT_PORT}}}:{FRONT_PORT}")],
        "depends_on": {server.name: {"condition": "service_healthy"} for server in members},
        "healthcheck": _healthcheck(start_period="60s"),
        "restart": "unless-stopped",
    }
    if config.topology.is_pd:
        services["front"]["environment"] = {FRONT_KEY: None}
    return commented([*comments, *ABOUT], {"services": services, "volumes": {"huggingface": {}}})


def _server(config: ServingConfig, server: Server, vllm_version: str | None) -> dict[str, Any]:
    env: dict[str, str | None] = {name: text(_plain(value)) for name, value in shared_env(config).items()}
    if config.topology.is_pd:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = text(server.name)  # the containers' name server knows it
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = text(SIDE_CHANNEL_PORT)
    volumes = [f"./{server.yaml}:{CONFIG_FOLDER}/{server.yaml}:ro", f"huggingface:{CACHE}"]
    if (folder := model_folder(config)) is not None:
        volumes.append(f"{folder}:{folder}:ro")
    devices = {"driver": "nvidia", "device_ids": [text(gpu) for gpu in server.gpus], "capabilities": ["gpu"]}
    return {
        "image": image(vllm_version),
        "hostname": server.name,
        "entrypoint": ["vllm", "serve"],
        "command": ["--config", f"{CONFIG_FOLDER}/{server.yaml}", "--host", "0.0.0.0", "--port", text(FRONT_PORT)],  # noqa: S104
        "environment": env | dict.fromkeys(SECRET_VARIABLES),  # no value: passed on from the shell
        "volumes": [text(_plain(volume)) for volume in volumes],
        "ipc": "host",
        "healthcheck": _healthcheck(start_period="600s"),
        "deploy": {"resources": {"reservations": {"devices": [devices]}}},
        "stop_grace_period": "60s",
        "restart": "unless-stopped",
    }


def _healthcheck(*, start_period: str) -> dict[str, Any]:
    return {
        "test": ["CMD", "python3", "-c", text(HEALTH)],
        "interval": "5s", "timeout": "10s", "retries": 3, "start_period": start_period,
    }  # fmt: skip


def _plain(value: str) -> str:
    """Return a text in which Docker Compose finds no variable."""
    return value.replace("$", "$$")
