"""A configuration as a command line and as a config file."""

import pytest

from tuner.serving import Json, Role, ServingConfig, Topology, to_argv, to_config


def test_arguments_become_flags_with_vllms_spelling() -> None:
    """Only here does `_` turn into `-`; booleans become --NAME or --no-NAME, JSON stays JSON."""
    config = ServingConfig(
        "m",
        {"max_num_seqs": 8, "enforce_eager": True, "enable_chunked_prefill": False, "kv_transfer_config": {"a": 1}},
    )

    assert to_argv(config, port=80) == [
        *("vllm", "serve", "m", "--no-enable-chunked-prefill", "--enforce-eager"),
        *("--kv-transfer-config", '{"a": 1}', "--max-num-seqs", "8", "--port", "80"),
    ]


def test_a_boolean_that_is_off_is_written_as_no_name() -> None:
    """VLLM 0.26 drops `NAME: false` from a config file in silence."""
    config = ServingConfig("m", {"enable_chunked_prefill": False, "enforce_eager": True, "max_num_seqs": 8})

    assert to_config(config) == {
        "model": "m",
        "no-enable-chunked-prefill": True,
        "enforce-eager": True,
        "max-num-seqs": 8,
    }


def test_an_argument_of_none_is_not_given() -> None:
    """None means: as vLLM has it."""
    assert to_argv(ServingConfig("m", {"max_num_seqs": None})) == ["vllm", "serve", "m"]


def test_equal_configurations_have_equal_keys() -> None:
    """The order of arguments is no difference; a value is."""
    one, other = ServingConfig("m", {"a": 1, "b": 2}), ServingConfig("m", {"b": 2, "a": 1})

    assert one.key == other.key
    assert one.key != ServingConfig("m", {"a": 1, "b": 3}).key


def test_a_role_adds_its_own_arguments() -> None:
    """Prefillers and decoders differ in a few arguments."""
    config = ServingConfig(
        "m", {"a": 1}, topology=Topology(prefillers=1, decoders=1), role_args={Role.DECODER: {"b": 2}}
    )

    assert config.for_role(Role.PREFILLER) == {"a": 1}
    assert config.for_role(Role.DECODER) == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["1x", "4x", "1p1d", "2p3d"])
def test_topologies_read_as_they_are_written(text: str) -> None:
    """Parse and str are inverse."""
    assert str(Topology.parse(text)) == text


@pytest.mark.parametrize("text", ["0x", "x", "1p", "0p1d", "2", "1p0d"])
def test_a_topology_of_nothing_is_refused(text: str) -> None:
    """A count of zero or a missing one is no topology."""
    with pytest.raises(ValueError, match="not a topology"):
        Topology.parse(text)


@pytest.mark.parametrize("values", [{"a": [1, "b"]}, {"a": 1.5}, {"a": "x y"}])
def test_lists_and_text_keep_their_words(values: dict[str, Json]) -> None:
    """A list is several words after one flag, text is one word."""
    argv = to_argv(ServingConfig("m", values))
    value = values["a"]

    assert argv[argv.index("--a") + 1 :] == [str(v) for v in (value if isinstance(value, list) else [value])]
