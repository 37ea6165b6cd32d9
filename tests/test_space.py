"""The search space: proposals become configurations vLLM accepts, under one name each."""

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import spec as specs
from tuner.serving import SINGLE, Json
from tuner.spec import StudySpec
from tuner.study import space

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
