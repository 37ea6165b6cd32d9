"""Export of a group: every file says what the configuration says, by the rules of those who read it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from compose_spec import PyCompose
from ruamel.yaml import YAML

from tuner import export
from tuner import spec as specs
from tuner.results import Repeat, TrialResult
from tuner.serving import Role, ServingConfig, Topology, argument, to_argv, to_config

SPEC = specs.parse("name: Chat.7B\nmodel: m\nworkload: w\nslo: [ttft=500ms, itl=50ms]\n", "s.yaml")
ENV = {"OMP_NUM_THREADS": "1", "ODD": "a $b $(c)", "SWITCH": "on", "HF_TOKEN": "hunter2", "CUDA_VISIBLE_DEVICES": "7"}
SHARED = {name: value for name, value in ENV.items() if name not in {"HF_TOKEN", "CUDA_VISIBLE_DEVICES"}}
KV = {role: {"kv_connector": "NixlConnector", "kv_role": role.kv_role} for role in (Role.PREFILLER, Role.DECODER)}
BY_ROLE = {
    Role.PREFILLER: {"kv_transfer_config": KV[Role.PREFILLER], "max_num_batched_tokens": 8192},
    Role.DECODER: {"kv_transfer_config": KV[Role.DECODER], "tensor_parallel_size": 2, "data_parallel_size": 2},
}
GROUPS = ["2x", "1p1d", "2p2d"]
COMMON = {"start.sh", "compose.yaml", "kubernetes.yaml", "llm-d.values.yaml"}


def configured(topology: str, **more: Any) -> ServingConfig:
    shape = Topology.parse(topology)
    args = {"enable_chunked_prefill": False, "max_num_seqs": 64, "served_model_name": "chat"}
    given = {"model": "Qwen/Qwen2.5-7B", "args": args, "env": ENV, "role_args": BY_ROLE if shape.is_pd else {}} | more
    return ServingConfig(topology=shape, **given)


def exported(out: Path, config: ServingConfig, **more: Any) -> export.Exported:
    metrics = {"ttft_p99": 0.4, "itl_p99": 0.04}
    result = TrialResult(7, config, repeats=(Repeat(metrics),), metrics=metrics, ended=1.0, vllm_version="0.26.0+cpu")
    return export.write(result, SPEC, [], out, {"Workload": "w, sha256 abc"}, **more)


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def interpolated(text: str) -> str:
    """Return what Docker Compose reads once it has put the defaults of variables in."""
    return re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


def flags(words: list[str]) -> dict[str, str | list[str]]:
    """Return the values of a command's flags by name; a list where a flag is repeated or takes several."""
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            found.setdefault(argument(word), [])
            last = word
        elif found:
            found[argument(last)].append(word)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


@pytest.mark.parametrize("topology", GROUPS)
def test_a_group_is_a_pair_of_files_for_each_role_and_ways_to_start_it(tmp_path: Path, topology: str) -> None:
    """All files are listed, the start line is one script, and every file says where it comes from."""
    names = {"serve"} if topology == "2x" else {"prefiller", "decoder"}
    found = exported(tmp_path / "be st", configured(topology))

    assert {f.name for f in found.files} == COMMON | {f"{n}.{kind}" for n in names for kind in ("yaml", "env")}
    assert {f.name for f in (tmp_path / "be st").iterdir()} == {f.name for f in found.files}
    assert found.start_line == f"sh '{tmp_path / 'be st' / 'start.sh'}'"
    for file in found.files:
        if file.suffix != ".env":
            assert "trial 7 of study Chat.7B" in file.read_text()


@pytest.mark.parametrize("topology", GROUPS)
def test_each_role_has_its_arguments_and_all_share_the_environment(tmp_path: Path, topology: str) -> None:
    """The YAML is what the configuration gives that role; no secret, port or GPU number is in any environment."""
    config = configured(topology)
    exported(tmp_path, config)

    for role in config.topology.roles:
        name = "serve" if role is Role.ANY else str(role)
        assert read(tmp_path / f"{name}.yaml") == to_config(config, role)
        script = f'. "{tmp_path / name}.env"; printf "%s|%s|%s" "$OMP_NUM_THREADS" "$ODD" "$SWITCH"'
        said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=10, env={})
        assert said.stdout == "1|a $b $(c)|on"
        assert "CUDA" not in (tmp_path / f"{name}.env").read_text()


@pytest.mark.parametrize("topology", GROUPS)
def test_no_secret_is_written(tmp_path: Path, topology: str) -> None:
    """A token that found its way into the environment of a configuration stays out of every file."""
    for file in exported(tmp_path, configured(topology), gpus=True).files:
        assert "hunter2" not in file.read_text()


def launches(script: str) -> list[list[str]]:
    return [line.split() for line in script.replace("$((", "").replace("))", "").splitlines() if "launch " in line[:7]]


def test_ports_side_channels_and_gpus_are_each_servers_own(tmp_path: Path) -> None:
    """Side channels are spaced by the largest server's ranks, GPUs follow each other."""
    exported(tmp_path, configured("2p2d"), gpus=True)
    script = (tmp_path / "start.sh").read_text()

    rows = launches(script)
    assert [row[1] for row in rows] == ["prefiller-0", "prefiller-1", "decoder-0", "decoder-1"]
    assert [row[4] for row in rows] == ["0", "1", "2", "3"]
    assert [row[5] for row in rows] == ["prefiller", "prefiller", "decoder", "decoder"]
    assert [row[8] for row in rows] == ["0", "4", "8", "12"]
    assert [row[9] for row in rows] == ["1", "2", "3,4,5,6", "7,8,9,10"]
    assert "GPUS=${GPUS-0,1,2,3,4,5,6,7,8,9}" in script


def test_a_host_without_gpus_shares_none_out(tmp_path: Path) -> None:
    """No list of GPUs, and no variable of CUDA's."""
    exported(tmp_path, configured("1p1d"))

    assert not re.search("GPU|CUDA", (tmp_path / "start.sh").read_text())


@pytest.mark.parametrize("topology", GROUPS)
@pytest.mark.parametrize("gpus", [True, False])
def test_the_script_is_posix_shell(tmp_path: Path, topology: str, gpus: bool) -> None:  # noqa: FBT001
    """`sh -n` takes it, and shellcheck finds nothing where it is installed."""
    plugin = tmp_path / "from"
    plugin.mkdir()
    exported(tmp_path, configured(topology), gpus=gpus, plugin=plugin)
    script = str(tmp_path / "start.sh")

    subprocess.run(["sh", "-n", script], check=True, timeout=10)
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    if Path(shellcheck).exists():
        subprocess.run([shellcheck, "-s", "sh", script], check=True, timeout=60)


def test_a_plugin_is_copied_along(tmp_path: Path) -> None:
    """Its folder is in front of the servers' path, without byte code."""
    (tmp_path / "from" / "__pycache__").mkdir(parents=True)
    (tmp_path / "from" / "nixl_on_cpu.py").write_text("")
    exported(tmp_path / "out", configured("1p1d"), plugin=tmp_path / "from")

    assert [f.name for f in (tmp_path / "out" / "plugin").iterdir()] == ["nixl_on_cpu.py"]
    assert 'PYTHONPATH="$here/plugin${PYTHONPATH:+:$PYTHONPATH}"' in (tmp_path / "out" / "start.sh").read_text()


def test_another_topology_leaves_no_stale_file(tmp_path: Path) -> None:
    """What an earlier export wrote goes; a file of the user's own stays."""
    exported(tmp_path, configured("1p1d"))
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    files = exported(tmp_path, configured("1x")).files

    assert {f.name for f in files} == {"serve.yaml", "serve.env"}
    assert {f.name for f in tmp_path.iterdir()} == {"serve.yaml", "serve.env", "compose.yaml"}


@pytest.mark.parametrize("topology", GROUPS)
def test_compose_is_valid_and_names_each_server(tmp_path: Path, topology: str) -> None:
    """A parser of the Compose specification takes it; servers, GPUs, side channels and the front agree."""
    config = configured(topology)
    exported(tmp_path, config)
    text = interpolated((tmp_path / "compose.yaml").read_text())
    services = YAML(typ="safe").load(text)["services"]
    servers = {name: service for name, service in services.items() if name != "front"}

    assert set(PyCompose.from_yaml(text).service_names()) == set(services)
    assert len(servers) == config.topology.n_servers
    gpus = [d for s in servers.values() for d in s["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]]
    assert gpus == [str(gpu) for gpu in range(config.n_gpus)]
    for name, service in servers.items():
        own = {name for name in service["environment"] if name.startswith("VLLM_NIXL")}
        assert service["image"] == "vllm/vllm-openai:v0.26.0"
        assert f"./{name.rsplit('-', 1)[0]}.yaml:{service['command'][1]}:ro" in service["volumes"]
        assert service["environment"].items() >= SHARED.items()
        assert (service["environment"]["HF_TOKEN"], service["environment"]["VLLM_API_KEY"]) == (None, None)
        assert own == (
            {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"} if config.topology.is_pd else set()
        )
        assert service["environment"].get("VLLM_NIXL_SIDE_CHANNEL_HOST", name) == name == service["hostname"]
    front = flags(services["front"]["command"])
    urls = [front.get(name, []) for name in ("worker_urls", "prefill", "decode")]
    told = [url for found in urls for url in (found if isinstance(found, list) else [found])]
    assert told == [f"http://{name}:8000" for name in servers]
    assert services["front"]["depends_on"] == {name: {"condition": "service_healthy"} for name in servers}


@pytest.mark.parametrize("topology", GROUPS)
def test_kubernetes_takes_the_manifests(tmp_path: Path, topology: str) -> None:
    """Each validates against Kubernetes' own schema, unknown fields refused; what one names, another is."""
    config = configured(topology)
    exported(tmp_path, config)
    manifests = list(YAML(typ="safe").load_all(tmp_path / "kubernetes.yaml"))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    by_name = {(m["kind"], m["metadata"]["name"]): m for m in manifests}
    assert len(by_name) == len(manifests)
    front = by_name["Deployment", "chat-7b-front"]["spec"]["template"]["spec"]
    argv = flags(front["containers"][0]["args"])
    for role in config.topology.roles:
        name = "serve" if role is Role.ANY else str(role)
        values = YAML(typ="safe").load(by_name["ConfigMap", "chat-7b-config"]["data"][f"{name}.yaml"])
        deployment = by_name["Deployment", f"chat-7b-{name}"]["spec"]
        (container,) = deployment["template"]["spec"]["containers"]
        labels = deployment["template"]["metadata"]["labels"]
        service = by_name["Service", f"chat-7b-{name}"]["spec"]
        selector = {"any": "selector", "prefiller": "prefill_selector", "decoder": "decode_selector"}[role]
        env = {row["name"]: row for row in container["env"]}

        assert values == to_config(config, role)
        assert deployment["replicas"] == config.topology.count(role)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == config.gpus_per_server(role)
        assert container["args"][:2] == ["--config", f"/etc/vllm/{name}.yaml"]
        assert (service["clusterIP"], service["selector"]) == ("None", labels)
        assert argv[selector] == [f"{key}={value}" for key, value in labels.items()]
        assert {name: env[name]["value"].replace("$$(", "$(") for name in SHARED} == SHARED
        assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"]
        if config.topology.is_pd:
            address = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
            assert address == "status.podIP"
    account = by_name["RoleBinding", "chat-7b-front"]["subjects"][0]["name"]
    assert front["serviceAccountName"] == account == by_name["ServiceAccount", account]["metadata"]["name"]
    assert by_name["Role", by_name["RoleBinding", account]["roleRef"]["name"]]["rules"][0]["resources"] == ["pods"]


@pytest.mark.parametrize("topology", GROUPS)
def test_llm_ds_chart_is_given_what_it_reads(tmp_path: Path, topology: str) -> None:
    """Keys of llm-d-modelservice v0.4.1; the arguments that the chart adds itself are not given twice."""
    config = configured(topology)
    exported(tmp_path, config)
    values = read(tmp_path / "llm-d.values.yaml")

    assert set(values) == {"multinode", "modelArtifacts", "accelerator", "routing", "decode", "prefill"}
    assert set(values["modelArtifacts"]) == {"name", "uri", "size", "labels"}
    assert set(values["modelArtifacts"]["labels"]) == {"llm-d.ai/inferenceServing", "llm-d.ai/model"}
    assert (values["modelArtifacts"]["name"], values["modelArtifacts"]["uri"]) == ("chat", "hf://Qwen/Qwen2.5-7B")
    assert values["prefill"]["create"] is config.topology.is_pd is values["routing"]["proxy"]["enabled"]
    roles = {"prefill": Role.PREFILLER, "decode": Role.DECODER} if config.topology.is_pd else {"decode": Role.ANY}
    for name, role in roles.items():
        pods = values[name]
        (container,) = pods["containers"]
        port = 8200 if role is Role.DECODER else 8000
        whole = flags(to_argv(config, role)[3:])
        sizes = {"tensor": whole.pop("tensor_parallel_size", "1"), "data": whole.pop("data_parallel_size", "1")}
        assert whole.pop("served_model_name") == "chat"

        assert set(pods) == {"create", "replicas", "parallelism", "containers", "volumes"}
        assert set(container) == {"name", "image", "modelCommand", "args", "env", "ports", "resources",
                                  "mountModelVolume", "extraConfig", "volumeMounts"}  # fmt: skip
        assert (container["modelCommand"], pods["replicas"]) == ("vllmServe", config.topology.count(role))
        assert flags(container["args"]) == whole
        assert {key: str(pods["parallelism"][key]) for key in sizes} == sizes
        assert container["resources"]["limits"] == {"nvidia.com/gpu": config.gpus_per_server(role)}
        assert (
            container["extraConfig"]["readinessProbe"]["httpGet"]["port"]
            == container["ports"][0]["containerPort"]
            == port
        )


def test_a_model_in_a_folder_is_given_to_containers(tmp_path: Path) -> None:
    """At the path that the YAML names, read-only."""
    exported(tmp_path, configured("2x", model="/models/tiny"))
    services = read(tmp_path / "compose.yaml")["services"]
    manifests = list(YAML(typ="safe").load_all(tmp_path / "kubernetes.yaml"))

    assert "/models/tiny:/models/tiny:ro" in services["serve-1"]["volumes"]
    (pod,) = [m["spec"]["template"]["spec"] for m in manifests
              if m["kind"] == "Deployment" and m["metadata"]["name"] == "chat-7b-serve"]  # fmt: skip
    assert pod["volumes"][-1]["hostPath"]["path"] == "/models/tiny"
    assert read(tmp_path / "llm-d.values.yaml")["modelArtifacts"]["uri"] == "pvc://model/tiny"
