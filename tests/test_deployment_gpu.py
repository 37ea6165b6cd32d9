"""GPUs are seen through nvidia-smi; here a script that answers from two files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from deployment_data import executable, launcher, little

from tuner.deployment import gpu
from tuner.errors import HostError

NVIDIA_SMI = """#!/bin/sh
here=$(dirname "$0")
case "$1" in
  --query-gpu=*) cat "$here/gpus" ;;
  --query-compute-apps=*) cat "$here/apps" ;;
esac
"""
TWO = "0, GPU-aa, NVIDIA GeForce RTX 4090, 24564, 24100\n1, GPU-bb, NVIDIA GeForce RTX 4090, 24564, 24100\n"
Host = Callable[..., None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a function that sets what nvidia-smi says."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def say(gpus: str = TWO, apps: str = "", script: str = NVIDIA_SMI) -> None:
        executable(tmp_path / "nvidia-smi", script)
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "apps").write_text(apps)

    return say


def test_gpus_are_listed_with_who_is_on_them(host: Host) -> None:
    """Memory in bytes, programs by process id."""
    host(apps="GPU-bb, 4242, 18000, python, odd\n".replace("18000, ", ""))
    first, second = gpu.list_gpus()

    assert (first.index, first.name, first.memory_free) == (0, "NVIDIA GeForce RTX 4090", 24100 * gpu.MIB)
    assert first.processes == {}
    assert second.processes == {4242: "python, odd"}


def test_without_nvidia_smi_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU host is not an error."""
    monkeypatch.setenv("PATH", str(tmp_path))

    assert gpu.list_gpus() == ()


def test_what_the_driver_does_not_tell_is_absent(host: Host) -> None:
    """Unified memory shows as [N/A]; that is no number."""
    host(gpus="0, GPU-aa, NVIDIA GB10, [N/A], [N/A]\n", apps="GPU-aa, [N/A], x\n")
    (only,) = gpu.list_gpus()

    assert (only.memory_total, only.memory_used, only.processes) == (None, None, {})


def test_a_driver_that_fails_is_the_hosts_error(host: Host) -> None:
    """Its own first line is shown."""
    host(script="#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    with pytest.raises(HostError, match="version mismatch"):
        gpu.list_gpus()


def test_a_busy_gpu_is_refused_by_name(host: Host) -> None:
    """It names the GPU, the process and the way out."""
    host(apps="GPU-aa, 4242, python\n")
    with pytest.raises(HostError, match=r"GPU 0 .* busy: pid 4242 \(python\)") as caught:
        gpu.require_free(gpu.list_gpus())

    assert "--gpus" in (caught.value.hint or "")


def test_memory_in_use_makes_a_gpu_busy_even_when_nobody_is_listed(host: Host) -> None:
    """Inside a container the driver may not list the neighbours."""
    host(gpus="0, GPU-aa, RTX, 24564, 4000\n")
    with pytest.raises(HostError, match="unlisted process"):
        gpu.require_free(gpu.list_gpus())


def test_free_gpus_are_chosen_first(host: Host) -> None:
    """A busy GPU comes last; a wish is followed; too few is an error."""
    host(apps="GPU-aa, 4242, python\n")
    listed = gpu.list_gpus()

    assert [g.index for g in gpu.choose(listed, 1)] == [1]
    assert [g.index for g in gpu.choose(listed, 1, wanted=[0])] == [0]
    with pytest.raises(HostError, match="3 GPUs needed, 2 GPUs there"):
        gpu.choose(listed, 3)
    with pytest.raises(HostError, match="no GPU 7"):
        gpu.choose(listed, 1, wanted=[7])


def test_visible_devices_limit_the_choice(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number or by the start of the UUID, as CUDA reads it."""
    host()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")

    assert [g.index for g in gpu.choose(gpu.list_gpus(), 1)] == [1]


def test_release_is_proven_by_process_and_memory(host: Host) -> None:
    """Ours must be gone and memory back; a listed neighbour's memory is not ours to judge."""
    host()
    before = gpu.list_gpus()[:1]
    host(apps="GPU-aa, 11, python\n")
    assert gpu.await_release(before, {11}, 0.0) == ("GPU 0 still has our pids [11]",)
    host(gpus=TWO.replace("24564, 24100", "24564, 14100"))
    assert gpu.await_release(before, {11}, 0.0) == ("GPU 0 did not get 9.8 GiB back",)
    host(gpus=TWO.replace("24564, 24100", "24564, 14100"), apps="GPU-aa, 4242, neighbour\n")
    assert gpu.await_release(before, {11}, 0.0) == ()


def test_a_launcher_refuses_a_busy_gpu_before_it_starts_anything(host: Host, tmp_path: Path) -> None:
    """No process, no log."""
    host(apps="GPU-bb, 4242, python\n")
    with pytest.raises(HostError, match="GPU 1"), launcher(gpus=(1,)).launch(little(), tmp_path / "trial"):
        pass

    assert list((tmp_path / "trial").iterdir()) == []


def test_a_launcher_shows_a_server_only_its_gpus(host: Host, tmp_path: Path) -> None:
    """The choice stands in the command that is written down."""
    host()
    with launcher(gpus=(1,)).launch(little(), tmp_path / "trial"):
        pass

    assert "CUDA_VISIBLE_DEVICES=1" in (tmp_path / "trial" / "command.txt").read_text()
