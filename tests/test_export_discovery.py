"""The front of the Kubernetes manifests, run: it finds the pods that the manifests label, and no others."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deployment_data import wait_until
from ruamel.yaml import YAML
from test_export_start import FAKE, ROUTER, SPEC, completion, free_ports, is_healthy, needs_router, served

from tuner import export
from tuner.results import TrialResult
from tuner.serving import ServingConfig, Topology

KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: 'http://127.0.0.1:%d'}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


def pod(name: str, address: str, labels: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1", "labels": labels}
    status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": metadata, "spec": {"containers": []}, "status": status}


@contextmanager
def kubernetes(pods: list[dict[str, Any]]) -> Iterator[tuple[int, list[str]]]:
    """Serve as much of Kubernetes' interface as lists pods and never reports a change; yield port and paths asked."""
    over, asked = threading.Event(), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if "watch=" in self.path:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                over.wait(60)
                return
            listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": pods}
            body = json.dumps(listed).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], asked
        over.set()
        server.shutdown()


def manifests(out: Path, topology: str) -> dict[str, Any]:
    """Export a group and return its Deployments by component."""
    config = ServingConfig("m", topology=Topology.parse(topology))
    export.write(TrialResult(1, config, ended=1.0, slos_met=False), SPEC, [], out, {})
    found = YAML(typ="safe").load_all(out / "kubernetes.yaml")
    return {m["metadata"]["name"].removeprefix("s-"): m["spec"] for m in found if m["kind"] == "Deployment"}


@needs_router
@pytest.mark.parametrize("topology", ["2x", "1p1d"])
def test_the_front_finds_the_pods_of_each_role(tmp_path: Path, topology: str) -> None:
    """Two fake servers stand for the pods, at two loopback addresses; both serve what goes through the front."""
    deployments = manifests(tmp_path, topology)
    labels = {name: spec["template"]["metadata"]["labels"] for name, spec in deployments.items()}
    names = ["prefiller", "decoder"] if topology == "1p1d" else ["serve", "serve"]
    pods = [pod(f"{name}-{i}", f"127.0.0.{i + 1}", labels[name]) for i, name in enumerate(names)]
    pods.append(pod("other", "127.0.0.9", {"app": "other"}))
    port = free_ports(4)
    argv = deployments["front"]["template"]["spec"]["containers"][0]["args"]
    ports = {"--port": port, "--prometheus-port": port + 1, "--service-discovery-port": port + 2}
    own = [
        str(ports.get(before, "ns" if word == "$(NAMESPACE)" else word))
        for before, word in zip(["", *argv], argv, strict=False)
    ]
    with kubernetes(pods) as (api, asked), ExitStack() as stack:
        (tmp_path / "kubeconfig").write_text(KUBECONFIG % api)
        commands = [[sys.executable, str(FAKE), "serve", "m", "--host", f"127.0.0.{i}", "--port", str(port + 2)]
                    for i in (1, 2)]  # fmt: skip
        for command in [*commands, [str(ROUTER), *own[1:]]]:
            env = os.environ | {"KUBECONFIG": str(tmp_path / "kubeconfig")}
            process = stack.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
            stack.callback(process.kill)
        assert wait_until(lambda: is_healthy(port), timeout=30)
        every = ("127.0.0.1", "127.0.0.2")
        assert wait_until(lambda: is_served(port) and all(served(port + 2, host) for host in every), timeout=30)
        assert asked[0].startswith("/api/v1/namespaces/ns/pods")


def is_served(port: int) -> bool:
    """Whether the front has found the servers that a request needs."""
    try:
        return bool(completion(port)["choices"])
    except OSError:
        return False
