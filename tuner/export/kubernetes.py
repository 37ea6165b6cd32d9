"""`kubernetes.yaml`: a group as Deployments that the router finds by their pods' labels."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml.scalarstring import LiteralScalarString

from tuner.export.files import commented, shared_env, stem, text
from tuner.export.group import (
    CACHE,
    CONFIG_FOLDER,
    FRONT_KEY,
    FRONT_PORT,
    PROMETHEUS_PORT,
    ROUTER_IMAGE,
    ROUTER_NOTE,
    ROUTER_PACKAGE,
    SECRET_VARIABLES,
    SIDE_CHANNEL_PORT,
    image,
    model_folder,
    router_argv,
)
from tuner.serving import Role, ServingConfig

LABEL = "app.kubernetes.io"
NAMESPACE = "default"


def kubernetes_yaml(
    config: ServingConfig, name: str, yamls: Mapping[Role, str], comments: Sequence[str], vllm_version: str | None
) -> str:
    """Return the manifests: values, a Deployment and a headless Service for each role, the front and what it may see.

    Args:
        config: of the group.
        name: of the study; what is made is named after it.
        yamls: what `vllm serve --config` takes, by role.
        comments: lines of provenance.
        vllm_version: the one that was measured.
    """
    base = slug(name)
    data = {f"{stem(role)}.yaml": LiteralScalarString(content) for role, content in yamls.items()}
    manifests = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(base, "config"), "data": data}]
    for role in config.topology.roles:
        manifests += [_deployment(config, base, role, vllm_version), _headless(config, base, role)]
    manifests += [*_permission(base), _front(config, base), _front_service(base)]
    return commented([*comments, *_about(base)], *manifests)


def _about(base: str) -> list[str]:
    return [
        "",
        f"kubectl apply -f kubernetes.yaml: requests go to the Service {base}-front, port {FRONT_PORT}.",
        f"In a namespace other than {NAMESPACE}, change the subject of the RoleBinding as well. Secrets, where",
        f'they are needed: kubectl create secret generic {base}-secrets --from-literal=HF_TOKEN="$HF_TOKEN"',
        *ROUTER_NOTE,
    ]


def slug(name: str) -> str:
    """Return a name that Kubernetes takes for a Service, with room for what is hung on it."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return words if words[:1].isalpha() else f"vllm-{words}".strip("-")


def _labels(base: str, component: str) -> dict[str, str]:
    return {f"{LABEL}/instance": text(base), f"{LABEL}/component": text(component)}


def _metadata(base: str, component: str) -> dict[str, Any]:
    return {"name": f"{base}-{component}", "labels": _labels(base, component)}


def _deployment(config: ServingConfig, base: str, role: Role, vllm_version: str | None) -> dict[str, Any]:
    component = stem(role)
    pod = {
        "enableServiceLinks": False,  # a Service named vllm would set VLLM_PORT, which vLLM takes for its own
        "terminationGracePeriodSeconds": 60,
        "containers": [_container(config, base, role, vllm_version)],
        "volumes": _volumes(config, base),
    }
    return _deployed(base, component, config.topology.count(role), pod)


def _deployed(base: str, component: str, replicas: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(base, component),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": _labels(base, component)},
            # No GPU is spare for a pod beside the present ones.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {"metadata": {"labels": _labels(base, component)}, "spec": pod},
        },
    }


def _container(config: ServingConfig, base: str, role: Role, vllm_version: str | None) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": FRONT_PORT}]
    if config.topology.is_pd:
        ports.append({"name": "side-channel", "containerPort": SIDE_CHANNEL_PORT})
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "cache", "mountPath": CACHE},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 (where tensor-parallel workers meet)
    ]
    if (folder := model_folder(config)) is not None:
        mounts.append({"name": "model", "mountPath": folder, "readOnly": True})
    return {
        "name": "vllm",
        "image": image(vllm_version),
        "command": ["vllm", "serve"],
        "args": ["--config", f"{CONFIG_FOLDER}/{stem(role)}.yaml", "--host", "0.0.0.0", "--port", text(FRONT_PORT)],  # noqa: S104
        "env": environment(config) + [_secret(base, variable) for variable in SECRET_VARIABLES],
        "ports": ports,
        "resources": {"limits": {"nvidia.com/gpu": config.gpus_per_server(role)}},
        "startupProbe": probe(every=10, failures=120),  # a download of the model is in it
        "readinessProbe": probe(every=5, failures=3),
        "livenessProbe": probe(every=30, failures=3),
        "volumeMounts": mounts,
    }


def probe(*, every: int, failures: int, port: int = FRONT_PORT) -> dict[str, Any]:
    """Return a look at a server's health."""
    look = {"path": "/health", "port": port}
    return {"httpGet": look, "periodSeconds": every, "timeoutSeconds": 5, "failureThreshold": failures}


def environment(config: ServingConfig) -> list[dict[str, Any]]:
    """Return what a server's pod is given; its side channel is reached at the pod's own address."""
    env: list[dict[str, Any]] = [
        {"name": name, "value": text(value.replace("$(", "$$("))} for name, value in shared_env(config).items()
    ]
    if config.topology.is_pd:
        env.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": _field("status.podIP")})
        env.append({"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": text(SIDE_CHANNEL_PORT)})
    return env


def _field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


def _secret(base: str, variable: str, key: str | None = None) -> dict[str, Any]:
    reference = {"name": f"{base}-secrets", "key": key or variable, "optional": True}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _volumes(config: ServingConfig, base: str) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{base}-config"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if (folder := model_folder(config)) is not None:
        volumes.append({"name": "model", "hostPath": {"path": folder, "type": "Directory"}})
    return volumes


def _headless(config: ServingConfig, base: str, role: Role) -> dict[str, Any]:
    """Return a Service without an address of its own, whose name stands for the addresses of the pods."""
    ports = [{"name": "http", "port": FRONT_PORT}]
    if config.topology.is_pd:
        ports.append({"name": "side-channel", "port": SIDE_CHANNEL_PORT})
    spec = {"clusterIP": "None", "selector": _labels(base, stem(role)), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(base, stem(role)), "spec": spec}


def _permission(base: str) -> list[dict[str, Any]]:
    """Return what lets the front watch the pods of its namespace."""
    rbac = "rbac.authorization.k8s.io"
    metadata = _metadata(base, "front")
    account = {"kind": "ServiceAccount", "name": metadata["name"], "namespace": NAMESPACE}
    rule = {"apiGroups": [text("")], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(base, "front")},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": _metadata(base, "front"), "rules": [rule]},
        {
            "apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": metadata["name"]}, "subjects": [account],
        },
    ]  # fmt: skip


def _front(config: ServingConfig, base: str) -> dict[str, Any]:
    argv = [word for word in router_argv(config, dict.fromkeys(config.topology.roles, ())) if word != "--worker-urls"]
    argv += ["--service-discovery", "--service-discovery-port", str(FRONT_PORT)]
    argv += ["--service-discovery-namespace", "$(NAMESPACE)"]
    flags = {Role.ANY: "--selector", Role.PREFILLER: "--prefill-selector", Role.DECODER: "--decode-selector"}
    for role in config.topology.roles:
        argv += [flags[role], *(f"{label}={value}" for label, value in _labels(base, stem(role)).items())]
    install = f'pip install --quiet --no-cache-dir {ROUTER_PACKAGE} && exec "$0" "$@"'
    container = {
        "name": "router",
        "image": ROUTER_IMAGE,
        "command": ["sh", "-c", text(install)],
        "args": [text(word) for word in argv],
        "env": [
            {"name": "NAMESPACE", "valueFrom": _field("metadata.namespace")},
            *([_secret(base, FRONT_KEY, "VLLM_API_KEY")] if config.topology.is_pd else []),
        ],
        "ports": [
            {"name": "http", "containerPort": FRONT_PORT},
            {"name": "metrics", "containerPort": PROMETHEUS_PORT},
        ],
        "startupProbe": probe(every=5, failures=60),
        "readinessProbe": probe(every=5, failures=3),
    }
    pod = {"enableServiceLinks": False, "serviceAccountName": f"{base}-front", "containers": [container]}
    return _deployed(base, "front", 1, pod)


def _front_service(base: str) -> dict[str, Any]:
    ports = [{"name": "http", "port": FRONT_PORT}, {"name": "metrics", "port": PROMETHEUS_PORT}]
    spec = {"selector": _labels(base, "front"), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(base, "front"), "spec": spec}
