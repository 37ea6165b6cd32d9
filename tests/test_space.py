"""The search space: proposals become configurations vLLM accepts, under one name each."""

import warnings

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import spec as specs
from tuner.serving import SINGLE, Json, Role, Topology, to_argv
from tuner.spec import StudySpec
from tuner.study import space, store

HOST: dict[str, Json] = {
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 128,
    "max_model_len": 4096,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
}


def study(**changes: object) -> StudySpec:
    text = """\
name: s
model: m
search_space:
  max_num_batched_tokens: {low: 32, high: 8192, log: true}
  long_prefill_token_threshold: {fraction_of: max_num_batched_tokens, low: 0.0625, high: 1.0}
  max_num_seqs: [16, 64, 256]
  enable_chunked_prefill: [true, false]
workload: w
"""
    return specs.parse(text, "s.yaml", changes)


def settled(values: dict[str, Json], spec: StudySpec | None = None) -> dict[str, Json]:
    return dict(space.resolve(SINGLE, values, spec or study(), HOST).args)


def test_chunking_off_raises_the_budget_to_the_model_length() -> None:
    """VLLM refuses chunking off with a budget below max_model_len."""
    assert settled({"enable_chunked_prefill": False, "max_num_batched_tokens": 512})["max_num_batched_tokens"] == 4096


def test_more_sequences_than_budget_are_lowered() -> None:
    """VLLM refuses a budget below max_num_seqs; a searched or default count gives way."""
    assert settled({"max_num_batched_tokens": 64})["max_num_seqs"] == 64
    assert settled({"max_num_batched_tokens": 64, "max_num_seqs": 256})["max_num_seqs"] == 64


def test_a_count_the_user_fixed_stays_and_the_budget_rises() -> None:
    """engine_args are a promise."""
    fixed = specs.parse("name: s\nmodel: m\nworkload: w\nengine_args: {max_num_seqs: 256}\n", "s.yaml")

    args = settled({"max_num_batched_tokens": 64}, fixed)

    assert (args["max_num_batched_tokens"], args["max_num_seqs"]) == (256, 256)


@pytest.mark.parametrize("threshold", [0, 512, 600])
def test_a_threshold_that_never_bites_is_off(threshold: int) -> None:
    """At or above the budget, or zero, it is the same as not given."""
    assert "long_prefill_token_threshold" not in settled(
        {"max_num_batched_tokens": 512, "long_prefill_token_threshold": threshold}
    )


def test_a_threshold_above_the_model_length_is_off() -> None:
    """0.32 refuses it, and no prompt is that long."""
    assert "long_prefill_token_threshold" not in settled(
        {"max_num_batched_tokens": 8192, "long_prefill_token_threshold": 4096}
    )


def test_a_default_value_is_the_same_as_no_argument() -> None:
    """Equal points are measured once."""
    same = space.resolve(SINGLE, {"max_num_batched_tokens": 2048, "max_num_seqs": 128}, study(), HOST)

    assert space.identity(same, HOST) == space.identity(space.default_config(study()), HOST)


def test_the_grid_has_two_points_an_octave_and_both_bounds() -> None:
    """512, 768, 1024, ...: the values people would try by hand."""
    assert space.grid_points(100, 1000, 2) == [100, 128, 192, 256, 384, 512, 768, 1000]


def test_a_fraction_of_an_argument_that_is_not_searched_takes_the_hosts_value() -> None:
    """The threshold is a share of whatever the budget is."""
    only = specs.parse(
        "name: s\nmodel: m\nworkload: w\nsearch_space:\n  long_prefill_token_threshold:"
        " {fraction_of: max_num_batched_tokens, low: 0.1, high: 0.5, off: false}\n",
        "s.yaml",
    )
    topology, values = space.suggest(optuna.trial.FixedTrial({"long_prefill_token_threshold.fraction": 0.125}), only)

    assert space.resolve(topology, values, only, HOST).args["long_prefill_token_threshold"] == 256


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_every_proposal_obeys_vllms_rules(seed: int) -> None:
    """No trial is lost to a rule that is known (the live tests ask vLLM itself)."""
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    topology, values = space.suggest(trial, study())
    args = HOST | dict(space.resolve(topology, values, study(), HOST).args)

    budget, threshold = args["max_num_batched_tokens"], args["long_prefill_token_threshold"]
    assert isinstance(budget, int)
    assert isinstance(threshold, int)
    assert budget >= args["max_num_seqs"]  # type: ignore[operator]
    assert args["enable_chunked_prefill"] or budget >= 4096
    assert threshold < min(budget, 4096)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_settling_is_idempotent(seed: int) -> None:
    """A canonical form settled again is itself."""
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    topology, values = space.suggest(trial, study())
    once = space.resolve(topology, values, study(), HOST)

    assert space.resolve(topology, dict(once.args), study(), HOST) == once


def test_the_default_inside_the_space_has_parameters() -> None:
    """The sampler learns from trial 0 when the space holds it."""
    inside = study(**{"search_space.max_num_seqs": [64, 128]})
    params = space.parameters_of(space.default_config(inside), inside, HOST)

    assert params == {
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold.is_on": False,
        "max_num_seqs": 128,
        "enable_chunked_prefill": True,
    }


def test_the_default_outside_the_space_has_none() -> None:
    """128 sequences are not among the choices."""
    assert space.parameters_of(space.default_config(study()), study(), HOST) is None


MIXED = """\
name: s
model: m
topologies: [4x, 1p3d, 2p2d, 3p1d]
engine_args: {max_model_len: 4096, decoder.enforce_eager: true}
search_space:
  max_num_batched_tokens: {low: 256, high: 8192, log: true}
  prefiller.max_num_batched_tokens: {low: 256, high: 8192, log: true}
  prefiller.long_prefill_token_threshold: {fraction_of: max_num_batched_tokens, low: 0.0625, high: 0.5}
  decoder.max_num_seqs: [64, 256]
kv_transfer_config: {kv_buffer_device: [cpu, cuda]}
front: {policy: cache_aware}
workload: w
"""
PAIR = Topology.parse("1p3d")


def mixed(**changes: object) -> StudySpec:
    return specs.parse(MIXED, "s.yaml", changes)


def drawn(seed: int, spec: StudySpec) -> dict[str, Json]:
    return space.draw(spec, np.random.default_rng(seed))


def test_topology_comes_first_then_the_ratio_then_what_applies() -> None:
    """One topology of several is one question; a role's dimensions are asked under PD only."""
    asked = [
        list(params)
        for params in (drawn(seed, mixed()) for seed in range(30))
        if "prefiller.long_prefill_token_threshold.fraction" not in params
    ]

    assert ["topology", "max_num_batched_tokens"] in asked
    assert [
        *("topology", "pd_ratio", "max_num_batched_tokens", "prefiller.max_num_batched_tokens", "decoder.max_num_seqs"),
        *("prefiller.long_prefill_token_threshold.is_on", "kv_buffer_device"),
    ] in asked


@pytest.mark.parametrize(
    ("topologies", "first"),
    [
        (["2x", "1p1d"], {"topology": ("2x", "1p1d")}),
        (["4x", "1p3d", "2p2d"], {"topology": ("4x", "pd")}),
        (["1p3d", "2p2d"], {"pd_ratio": ("1p3d", "2p2d")}),
        (["1p1d"], {}),
    ],
)
def test_only_what_has_several_answers_is_asked(topologies: list[str], first: dict[str, tuple[str, ...]]) -> None:
    """A single PD topology goes by its own name; a single topology is no question."""
    trial = optuna.create_study().ask()
    space.suggest(trial, mixed(topologies=topologies))
    choices = {
        name: distribution.choices
        for name, distribution in trial.distributions.items()
        if name in {"topology", "pd_ratio"} and isinstance(distribution, optuna.distributions.CategoricalDistribution)
    }

    assert dict(list(choices.items())[:1]) == first


def test_a_role_goes_before_the_shared_argument() -> None:
    """The prefillers have a budget of their own, the decoders take the shared one."""
    values: dict[str, Json] = {"max_num_batched_tokens": 1024, "prefiller.max_num_batched_tokens": 8192}
    config = space.resolve(PAIR, values, mixed(), HOST)

    assert config.for_role(Role.PREFILLER)["max_num_batched_tokens"] == 8192
    assert config.for_role(Role.DECODER)["max_num_batched_tokens"] == 1024
    assert dict(config.args) == {"max_model_len": 4096}
    assert config.front.policy == "cache_aware"


def test_a_shared_dimension_that_no_server_would_take_is_not_asked() -> None:
    """Both roles have their own: the shared one applies to replicas only."""
    spec = mixed(**{"engine_args.decoder.max_num_batched_tokens": 2048})

    assert "max_num_batched_tokens" not in space.applying(spec, PAIR)
    assert "max_num_batched_tokens" in space.applying(spec, Topology.parse("4x"))


def test_kv_moves_from_producers_to_consumers() -> None:
    """Each PD server says what it is; replicas transfer nothing."""
    config = space.resolve(PAIR, {"kv_buffer_device": "cuda"}, mixed(), HOST)
    shared = {"kv_connector": "NixlConnector", "kv_buffer_device": "cuda"}

    assert config.for_role(Role.PREFILLER)["kv_transfer_config"] == shared | {"kv_role": "kv_producer"}
    assert config.for_role(Role.DECODER)["kv_transfer_config"] == shared | {"kv_role": "kv_consumer"}
    assert "kv_transfer_config" not in space.resolve(Topology.parse("4x"), {}, mixed(), HOST).for_role(Role.ANY)


def test_rules_are_settled_with_each_roles_own_values() -> None:
    """The decoders' count falls to their budget; the prefillers' threshold is a share of theirs."""
    share: Json = {"fraction": 0.25, "of": "max_num_batched_tokens"}
    values: dict[str, Json] = {"max_num_batched_tokens": 128, "prefiller.max_num_batched_tokens": 4096}
    values |= {"decoder.max_num_seqs": 256, "prefiller.long_prefill_token_threshold": share}
    config = space.resolve(PAIR, values, mixed(), HOST)

    assert config.for_role(Role.DECODER)["max_num_seqs"] == 128
    assert config.for_role(Role.PREFILLER)["long_prefill_token_threshold"] == 1024
    assert "max_num_seqs" not in config.for_role(Role.PREFILLER)


def test_a_shared_fraction_is_taken_of_each_roles_value() -> None:
    """A quarter of 4096 for prefillers, a quarter of 1024 for decoders."""
    share: Json = {"fraction": 0.25, "of": "max_num_batched_tokens"}
    values: dict[str, Json] = {"max_num_batched_tokens": 1024, "prefiller.max_num_batched_tokens": 4096}
    config = space.resolve(PAIR, values | {"long_prefill_token_threshold": share}, mixed(), HOST)

    found = [config.for_role(role)["long_prefill_token_threshold"] for role in (Role.PREFILLER, Role.DECODER)]
    assert found == [1024, 256]


def test_what_a_role_lacks_it_does_not_inherit() -> None:
    """A threshold that never bites on the decoders is not given to them, though the prefillers have it."""
    values: dict[str, Json] = {"max_num_batched_tokens": 512, "prefiller.max_num_batched_tokens": 4096}
    config = space.resolve(PAIR, values | {"long_prefill_token_threshold": 1024}, mixed(), HOST)

    assert config.for_role(Role.PREFILLER)["long_prefill_token_threshold"] == 1024
    assert "long_prefill_token_threshold" not in config.for_role(Role.DECODER)


def test_a_role_given_what_all_have_is_the_same_point() -> None:
    """Equal servers under two spellings are measured once; a role that differs is another point."""
    spec = mixed()
    shared = space.resolve(PAIR, {"max_num_batched_tokens": 1024}, spec, HOST)
    spelled = space.resolve(
        PAIR, {"max_num_batched_tokens": 1024, "prefiller.max_num_batched_tokens": 1024}, spec, HOST
    )
    default = space.resolve(PAIR, {"prefiller.max_num_batched_tokens": 2048}, spec, HOST)
    other = space.resolve(PAIR, {"max_num_batched_tokens": 1024, "prefiller.max_num_batched_tokens": 2048}, spec, HOST)

    assert space.identity(shared, HOST) == space.identity(spelled, HOST)
    assert space.identity(default, HOST) == space.identity(space.resolve(PAIR, {}, spec, HOST), HOST)
    assert space.identity(other, HOST) != space.identity(shared, HOST)


def test_the_default_is_the_first_aggregated_topology_else_the_first() -> None:
    """Replicas are what an operator has before PD; without any, the default transfers KV all the same."""
    alone = space.default_config(mixed(topologies=["2p2d", "1p3d"]))

    assert str(space.default_config(mixed(topologies=["2p2d", "4x"])).topology) == "4x"
    assert str(alone.topology) == "2p2d"
    assert "kv_transfer_config" in alone.for_role(Role.DECODER)


def test_what_servers_run_with_is_told_by_role_where_roles_differ() -> None:
    """One name where they agree, the role in front where they do not."""
    config = space.resolve(PAIR, {"prefiller.max_num_batched_tokens": 8192}, mixed(), HOST)
    found = space.effective(config, HOST)

    assert (found["prefiller.max_num_batched_tokens"], found["decoder.max_num_batched_tokens"]) == (8192, 2048)
    assert "max_num_batched_tokens" not in found
    assert found["max_num_seqs"] == 128


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_a_drawn_point_is_found_again_and_roles_keep_to_themselves(seed: int) -> None:
    """A configuration names the parameters it came from; no server is given the other role's arguments."""
    spec, params = mixed(), drawn(seed, mixed())
    topology, values = space.suggest(optuna.trial.FixedTrial(dict(params)), spec)
    config = space.resolve(topology, values, spec, HOST)
    again = space.parameters_of(config, spec, HOST)

    assert again is not None
    found = space.resolve(*space.suggest(optuna.trial.FixedTrial(dict(again)), spec), spec, HOST)
    assert space.identity(found, HOST) == space.identity(config, HOST)
    assert {n: v for n, v in params.items() if isinstance(v, str)} == {
        n: v for n, v in again.items() if isinstance(v, str)
    }
    own = {Role.PREFILLER: {"long_prefill_token_threshold"}, Role.DECODER: {"max_num_seqs", "enforce_eager"}}
    for role in topology.roles:
        others = {name for other, names in own.items() if other is not role for name in names}
        assert not others & set(config.for_role(role))
        assert not any("." in word.split("=")[0] for word in to_argv(config, role) if word.startswith("--"))


def test_tpe_accepts_the_conditional_space() -> None:
    """Thirty trials asked and told, multivariate and in groups: every branch is asked, and Optuna warns of nothing."""
    spec = mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(directions=["minimize", "minimize"])
        topologies = set()
        for number in range(30):
            study.sampler = store.sampler(spec, number)
            trial = study.ask()
            topology, values = space.suggest(trial, spec)
            topologies.add(str(topology))
            config = space.resolve(topology, values, spec, HOST)
            budget = config.for_role(topology.roles[0]).get("max_num_batched_tokens", 2048)
            assert isinstance(budget, int)
            trial.set_constraint("ttft", 1000 / budget - 1)
            study.tell(trial, [1 / budget, budget])

    assert topologies == {"4x", "1p3d", "2p2d", "3p1d"}


def test_the_space_is_told_in_words() -> None:
    """Topologies first, then a line a dimension."""
    assert space.describe(mixed())[:4] == [
        "topology: one of 4x, pd",
        "pd_ratio: one of 1p3d, 2p2d, 3p1d, where topology is pd",
        "kv_buffer_device: one of cpu, cuda, where prefill and decode are apart",
        "max_num_batched_tokens: 256 to 8192, log scale, 2 points per octave",
    ]
