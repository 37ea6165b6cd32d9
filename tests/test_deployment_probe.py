"""The installed vLLM is asked what it is; here stand-ins answer, tests/live/ asks the real one."""

import sys
from pathlib import Path

import pytest
from deployment_data import executable

from tuner.deployment import probe, program
from tuner.errors import HostError

HELP = (Path(__file__).parent / "data" / "help-0.26.txt").read_text()


def stand_in(path: Path, version: str = "0.26.0+cpu", *, body: str = "") -> tuple[str, ...]:
    """Return the command of a program that answers as vLLM does on --version and --help=all."""
    (path.parent / "help").write_text(HELP)
    text = f"""#!/bin/sh
{body}
case "$*" in
  --version) echo "INFO 11-29 20:41:34 [importing.py:53] noise"; echo "{version}" ;;
  "serve --help=all") cat "$(dirname "$0")/help" ;;
esac
"""
    return (str(executable(path, text)), "serve")


def test_a_wrapper_is_asked_by_version_and_help(tmp_path: Path) -> None:
    """Version and flags come from the text; command lines are not judged."""
    found = probe.probe(stand_in(tmp_path / "wrapper"), [["m"]])

    assert (found.version, found.platform, found.verdicts) == ("0.26.0+cpu", None, ())
    assert "max_num_batched_tokens" in found.flags


def test_the_help_text_tells_kind_choices_and_default() -> None:
    """Read from the real --help=all of 0.26.0."""
    flags = {flag.name: flag for flag in probe.read_help(HELP)}

    assert flags["scheduling_policy"] == probe.Flag("scheduling_policy", None, ("fcfs", "priority"), "fcfs")
    assert flags["long_prefill_token_threshold"].default == 0
    assert flags["enable_chunked_prefill"] == probe.Flag("enable_chunked_prefill", "bool", (), None)
    assert flags["headless"] == probe.Flag("headless", "bool", (), default=False)
    assert "help" not in flags
    assert "no_enable_chunked_prefill" not in flags


def test_unknown_arguments_come_with_what_may_have_been_meant(tmp_path: Path) -> None:
    """A slip is pointed out; the negative of a switch and a part of a JSON argument are known."""
    found = probe.probe(stand_in(tmp_path / "wrapper"))
    unknown = probe.unknown_arguments(found, ["max_num_seqs", "max_num_seq", "no_async_scheduling", "zzz"])

    assert list(unknown) == ["max_num_seq", "zzz"]
    assert unknown["max_num_seq"][0] == "max_num_seqs"
    assert unknown["zzz"] == ()


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.26.0", None),
        ("0.26.1+cpu", None),
        ("0.29.0", None),
        ("0.32.0", None),
        ("0.33.0rc1", "newer"),
        ("1.0.0", "newer"),
        ("0.9.2", "older"),
        ("dev", "not a release"),
    ],
)
def test_untested_versions_are_warned_of(version: str, says: str | None) -> None:
    """Between the tested versions nothing is said."""
    warning = probe.version_warning(version)

    assert (says is None) == (warning is None)
    assert says is None or says in (warning or "")


def test_no_vllm_is_the_hosts_error_with_a_way_out() -> None:
    """The command is named."""
    with pytest.raises(HostError, match="no-such-vllm"):
        probe.probe(("no-such-vllm", "serve"))


def test_what_is_no_vllm_is_said_to_be_none(tmp_path: Path) -> None:
    """A program without version and flags is refused."""
    other = executable(tmp_path / "other", "#!/bin/sh\necho hello\n")
    with pytest.raises(HostError, match="does not answer --version"):
        probe.probe((str(other), "serve"))


def test_a_program_that_does_not_answer_ends_at_the_deadline(tmp_path: Path) -> None:
    """A hanging import cannot hang the study."""
    with pytest.raises(HostError, match=r"no answer within 0\.3 s"):
        probe.probe(stand_in(tmp_path / "slow", body="sleep 600"), timeout=0.3)


def test_a_vllm_that_does_not_load_says_why(tmp_path: Path) -> None:
    """The import error of the vLLM's own Python is the message."""
    broken = tmp_path / "lib" / "vllm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise ImportError("libcudart.so.13: cannot open shared object file")')
    vllm = executable(tmp_path / "bin" / "vllm", f"#!{sys.executable}\n")
    with pytest.raises(HostError, match=r"does not load: ImportError: libcudart"):
        probe.probe((str(vllm), "serve"), env={"PYTHONPATH": str(tmp_path / "lib")})


@pytest.mark.parametrize(
    ("head", "python"),
    [
        ("#!/opt/env/bin/python3.12\n", "/opt/env/bin/python3.12"),
        ("#!/bin/sh\n'''exec' '/a b/bin/python' \"$0\" \"$@\"\n' '''\n", "/a b/bin/python"),
        ("#!/bin/sh\n'''exec' /long/bin/python3 \"$0\" \"$@\"\n", "/long/bin/python3"),
        ("#!/bin/sh\nexec docker run vllm\n", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_the_python_of_a_script_is_read_from_its_head(tmp_path: Path, head: str, python: str | None) -> None:
    """As pip and uv write it; a shell script or a binary has none."""
    assert program.interpreter(str(executable(tmp_path / "script", head))) == python


def test_containers_are_recognised() -> None:
    """By the engine and its run; a path that contains the word is no container."""
    assert program.starts_container(("sudo", "/usr/bin/docker", "run", "--gpus", "all", "vllm/vllm-openai"))
    assert program.starts_container(("podman", "run", "x"))
    assert not program.starts_container(("/home/docker/bin/vllm", "serve"))
    assert not program.starts_container(("docker", "exec", "it", "vllm", "serve"))
