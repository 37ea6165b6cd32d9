"""`llm-d.values.yaml`: a group as values of llm-d's Helm chart llm-d-modelservice."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from tuner.export.files import commented, text
from tuner.export.group import FRONT_PORT, SIDE_CHANNEL_PORT, image, model_folder
from tuner.export.kubernetes import environment, probe
from tuner.serving import Role, ServingConfig, to_argv

CHART = "v0.4.1"
BEHIND_PROXY = 8200  # where a decoder listens behind the chart's routing sidecar, which has the service's port
MODEL_NAME_LENGTH = 63  # of a label's value
# The chart gives these itself, from `parallelism`.
BY_CHART = {"tensor_parallel_size": "tensor", "data_parallel_size": "data"}


def llmd_values(config: ServingConfig, comments: Sequence[str], vllm_version: str | None) -> str:
    """Return the values; aggregated replicas are the chart's decoders, without a sidecar."""
    is_pd = config.topology.is_pd
    proxy: dict[str, Any] = {"enabled": is_pd}
    if is_pd:
        proxy |= {"targetPort": BEHIND_PROXY, "connector": "nixlv2"}
    prefill = _pods(config, Role.PREFILLER, FRONT_PORT, vllm_version) if is_pd else {"create": False}
    decode = _pods(config, *((Role.DECODER, BEHIND_PROXY) if is_pd else (Role.ANY, FRONT_PORT)), vllm_version)
    values = {
        "multinode": False,
        "modelArtifacts": _model(config),
        "accelerator": {"type": "nvidia"},
        "routing": {"servicePort": FRONT_PORT, "proxy": proxy},
        "decode": decode,
        "prefill": prefill,
    }
    return commented([*comments, *_about()], values)


def _about() -> list[str]:
    return [
        "",
        f"Values for the Helm chart llm-d-modelservice {CHART} (github.com/llm-d-incubation/llm-d-modelservice); which",
        "server gets a request is decided by llm-d's gateway and scheduler, installed beside it, not by vllm-router.",
        "A model that needs a token: modelArtifacts.authSecretName names a Secret with the key HF_TOKEN.",
        "A model that is a folder is looked for in a PersistentVolumeClaim named model, under the folder's own name.",
        "modelArtifacts.size limits the volume that the model is downloaded to and reserves nothing.",
    ]


def _model(config: ServingConfig) -> dict[str, Any]:
    served = config.args.get("served_model_name")
    name = str((served[0] if isinstance(served, list) and served else served) or config.model)
    folder = model_folder(config)
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", config.model)[-MODEL_NAME_LENGTH:].strip("-_.")
    return {
        "name": name,
        "uri": f"pvc://model/{PurePath(folder).name}" if folder else f"hf://{config.model}",
        "size": "500Gi",
        "labels": {"llm-d.ai/inferenceServing": text("true"), "llm-d.ai/model": text(label)},
    }


def _pods(config: ServingConfig, role: Role, port: int, vllm_version: str | None) -> dict[str, Any]:
    given = config.for_role(role)
    left_out = {name: None for name in (*BY_CHART, "served_model_name") if name in given}
    # `vllm serve MODEL` is the chart's own part.
    args = to_argv(replace(config, command=()), role, **left_out)[1:]
    gpus = {"nvidia.com/gpu": config.gpus_per_server(role)}
    ports = [{"name": "metrics", "containerPort": port}]
    if config.topology.is_pd:
        ports.append({"name": "side-channel", "containerPort": SIDE_CHANNEL_PORT})
    container = {
        "name": "vllm",
        "image": image(vllm_version),
        "modelCommand": "vllmServe",
        "args": [text(word) for word in args],
        "env": environment(config),
        "ports": ports,
        "resources": {"limits": gpus, "requests": dict(gpus)},
        "mountModelVolume": True,
        "extraConfig": {
            "startupProbe": probe(every=10, failures=120, port=port),
            "readinessProbe": probe(every=5, failures=3, port=port),
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 (where tensor-parallel workers meet)
    }
    sizes = {key: given.get(name, 1) for name, key in BY_CHART.items()}
    return {
        "create": True,
        "replicas": config.topology.count(role),
        "parallelism": {"tensor": sizes["tensor"], "data": sizes["data"], "dataLocal": sizes["data"], "workers": 1},
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
