"""The study loop: what Optuna is told, what the budget pays for, what survives an interruption."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import optuna
import pytest

from tuner import spec as specs
from tuner.errors import FailureKind, HostError, Interrupted, InvalidReplay, SpecError, StartError
from tuner.results import Repeat, TrialResult
from tuner.seams import Evaluation, Progress
from tuner.serving import Json, ServingConfig
from tuner.sinks.runfolder import RunFolder
from tuner.slo import Slo
from tuner.study import storage, store
from tuner.study.loop import NOT_MEASURED, Study

HOST: dict[str, Json] = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "max_model_len": 4096,
                         "long_prefill_token_threshold": 0}  # fmt: skip
TEXT = """\
name: s
model: m
search_space:
  max_num_batched_tokens: {low: 128, high: 8192, log: true}
workload: w
slo: [ttft=800ms, itl=120ms]
budget: {trials: 8}
"""

Behaviour = Callable[[ServingConfig], None]


def latencies(config: ServingConfig) -> dict[str, float]:
    budget = config.args.get("max_num_batched_tokens", 2048)
    assert isinstance(budget, int)
    return {"ttft_p99": 0.4 + 40 / budget, "itl_p99": 0.04 + budget / 10_000}


class Model:
    """An evaluator whose answer depends on the configuration alone."""

    def __init__(self, behaviour: Behaviour = lambda _config: None) -> None:
        self.behaviour = behaviour
        self.evaluated: list[int] = []

    def evaluate(self, config: ServingConfig, slos: Sequence[Slo], directory: Path, progress: Progress) -> Evaluation:
        budget = config.args.get("max_num_batched_tokens", 2048)
        assert isinstance(budget, int)
        self.evaluated.append(budget)
        self.behaviour(config)
        return Evaluation((Repeat(latencies(config)),), {}, {"replay": 1.0})


def open_study(folder: Path, model: Model, text: str = TEXT, baseline: ServingConfig | None = None) -> Study:
    spec = specs.parse(text, "s.yaml")
    run = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    return Study(spec, optuna_study(run), run, model, (), HOST, baseline)


def optuna_study(run: RunFolder) -> optuna.Study:
    return store.open_study(storage.open_storage(run.storage), "s")


def by_label(results: Sequence[TrialResult], label: str) -> TrialResult:
    return next(r for r in results if r.label == label)


def test_trial_0_is_the_default_and_trial_1_the_baseline(tmp_path: Path) -> None:
    """The default is given no flag of the space; the baseline may lie outside it."""
    baseline = ServingConfig("m", {"max_num_batched_tokens": 16384})
    results = open_study(tmp_path / "r", Model(), baseline=baseline).run()

    assert (results[0].label, dict(results[0].config.args)) == ("default", {})
    assert (results[1].label, dict(results[1].config.args)) == ("baseline", {"max_num_batched_tokens": 16384})


def test_the_budget_pays_for_measurements_not_for_repeats(tmp_path: Path) -> None:
    """Equal points are measured once, told the same values and kept out of the budget."""
    model = Model()
    results = open_study(tmp_path / "r", model).run()

    measured = [r for r in results if r.same_as is None]
    assert len(measured) == 8
    assert len(model.evaluated) == len(set(model.evaluated)) == 8
    for same in (r for r in results if r.same_as is not None):
        assert same.metrics == results[same.same_as].metrics  # type: ignore[index]


def test_a_small_space_ends_as_exhausted(tmp_path: Path) -> None:
    """Three points and a budget of eight: three measurements and an end."""
    text = TEXT.replace("{low: 128, high: 8192, log: true}", "[512, 1024, 2048]")
    model = Model()

    open_study(tmp_path / "r", model, text).run()

    assert sorted(model.evaluated) == [512, 1024, 2048]


def test_a_small_space_of_topologies_ends_as_exhausted(tmp_path: Path) -> None:
    """Two budgets as replicas and two as a pair, equal points measured once: the default and three more."""
    text = TEXT.replace("{low: 128, high: 8192, log: true}", "[1024, 2048]") + "topologies: [2x, 1p1d]\n"

    results = open_study(tmp_path / "r", Model(), text).run()

    measured = [(str(r.config.topology), r.effective["max_num_batched_tokens"]) for r in results if r.same_as is None]
    assert measured[0] == ("2x", 2048)
    assert sorted(measured) == [("1p1d", 1024), ("1p1d", 2048), ("2x", 1024), ("2x", 2048)]


def test_slos_are_constraints_and_latencies_are_objectives(tmp_path: Path) -> None:
    """Optuna's own view of a trial: log latencies and the relative excess."""
    study = open_study(tmp_path / "r", Model())
    default = study.run()[0]
    told = study.optuna.trials[0]

    assert told.values == pytest.approx([math.log(default.metrics["ttft_p99"]), math.log(default.metrics["itl_p99"])])
    constraints = {k.removeprefix("constraints:"): v for k, v in told.system_attrs.items()}
    assert constraints["itl_p99"] == pytest.approx((0.2448 - 0.12) / 0.12)
    assert {t.number for t in study.optuna.best_trials} <= {r.number for r in study.results if r.slos_met}


def test_an_oom_is_a_complete_trial_that_violates_everything(tmp_path: Path) -> None:
    """Samplers ignore FAIL and go back to the crash; a penalty without constraints attracts them."""

    def oom(config: ServingConfig) -> None:
        if config.args.get("max_num_batched_tokens", 0) > 4096:  # type: ignore[operator]
            raise StartError(FailureKind.OOM, "out of memory", log=("torch.OutOfMemoryError",))

    study = open_study(tmp_path / "r", Model(oom), TEXT.replace("trials: 8", "trials: 12"))
    results = study.run()
    failed = [r for r in results if r.failure]

    assert failed
    assert sum(r.same_as is None for r in results) == 12
    for result in failed:
        frozen = study.optuna.trials[result.number]
        assert frozen.state == optuna.trial.TrialState.COMPLETE
        assert frozen.system_attrs["constraints:itl_p99"] == NOT_MEASURED
        assert result.metrics == {}


def test_a_lagging_client_is_no_fault_of_the_configuration(tmp_path: Path) -> None:
    """FAIL, queued again, outside the budget."""
    seen: dict[int, int] = {}

    def lag_once(config: ServingConfig) -> None:
        budget = config.args.get("max_num_batched_tokens", 2048)
        assert isinstance(budget, int)
        seen[budget] = seen.get(budget, 0) + 1
        if seen[budget] == 1:
            raise InvalidReplay(FailureKind.CLIENT_LAG, "the client was late")

    study = open_study(tmp_path / "r", Model(lag_once))
    results = study.run()

    assert sum(r.is_measured and r.same_as is None for r in results) == 8
    assert study.optuna.trials[0].state == optuna.trial.TrialState.FAIL
    assert by_label([r for r in results if r.is_measured], "default").number > 0


def test_a_machine_too_noisy_for_the_default_ends_the_study(tmp_path: Path) -> None:
    """Three replays of the default that the client could not drive: no reference, no study."""

    def always(_config: ServingConfig) -> None:
        raise InvalidReplay(FailureKind.CLIENT_LAG, "the client was late")

    model = Model(always)
    with pytest.raises(HostError, match="default could not be measured"):
        open_study(tmp_path / "r", model).run()
    assert model.evaluated == [2048] * 3


def test_a_bad_argument_in_trial_0_ends_the_study(tmp_path: Path) -> None:
    """What the default refuses, every trial would refuse."""

    def refuse(_config: ServingConfig) -> None:
        raise StartError(FailureKind.BAD_ARGUMENT, "unrecognized arguments: --nope")

    with pytest.raises(SpecError, match="--nope"):
        open_study(tmp_path / "r", Model(refuse)).run()


def test_relative_limits_refer_to_the_default(tmp_path: Path) -> None:
    """itl=0.5x is half of what the default measured in this study."""
    results = open_study(tmp_path / "r", Model(), TEXT.replace("itl=120ms", "itl=0.5x")).run()
    limit = 0.5 * results[0].metrics["itl_p99"]

    assert results[0].excess["itl_p99"] == pytest.approx(1.0)
    for result in (r for r in results if r.is_measured):
        assert result.slos_met == (result.metrics["ttft_p99"] <= 0.8 and result.metrics["itl_p99"] <= limit)


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path) -> None:
    """Ctrl-C in trial 4: nothing measured is lost or measured again, and the point is queued again."""

    class Stop(Model):
        def evaluate(self, *args: object) -> Evaluation:  # type: ignore[override]
            if len(self.evaluated) == 4:
                raise KeyboardInterrupt
            return super().evaluate(*args)  # type: ignore[arg-type]

    first, second = Stop(), Model()
    with pytest.raises(Interrupted):
        open_study(tmp_path / "r", first).run()
    results = open_study(tmp_path / "r", second).run()

    assert len(first.evaluated) == 4
    assert len(set(first.evaluated) & set(second.evaluated)) == 0
    assert sum(r.is_measured and r.same_as is None for r in results) == 8


def test_a_resumed_study_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """With a deterministic evaluator the same points are measured, in the same order."""

    class Stop(Model):
        def evaluate(self, *args: object) -> Evaluation:  # type: ignore[override]
            if len(self.evaluated) == 5:
                raise KeyboardInterrupt
            return super().evaluate(*args)  # type: ignore[arg-type]

    whole = [r.config for r in open_study(tmp_path / "whole", Model()).run() if r.is_measured and r.same_as is None]
    with pytest.raises(Interrupted):
        open_study(tmp_path / "cut", Stop()).run()
    cut = [r.config for r in open_study(tmp_path / "cut", Model()).run() if r.is_measured and r.same_as is None]

    assert cut[:6] == whole[:6]
    assert len(cut) == len(whole)


def test_a_result_on_disk_is_told_not_measured_again(tmp_path: Path) -> None:
    """Killed between the last write and tell: the measurement is kept."""
    study = open_study(tmp_path / "r", Model())
    study.run()
    trial = study.optuna.ask()
    trial.suggest_int("max_num_batched_tokens", 128, 8192, log=True)
    run = RunFolder(tmp_path / "r")
    config = ServingConfig("m", {"max_num_batched_tokens": 333})
    run.write(TrialResult(trial.number, config, repeats=(Repeat(latencies(config)),), metrics=latencies(config)))

    open_study(tmp_path / "r", Model()).run()

    assert optuna_study(run).trials[trial.number].state == optuna.trial.TrialState.COMPLETE


def test_each_topology_gets_a_first_trial(tmp_path: Path) -> None:
    """After the default each other topology is measured as it is, so that none is judged by unlucky arguments."""
    text = TEXT + "topologies: [4x, 1p3d, 2p2d]\n"
    study = open_study(tmp_path / "r", Model(), text)
    results = study.run()

    assert [str(r.config.topology) for r in results[:3]] == ["4x", "1p3d", "2p2d"]
    assert [r.config.args.get("max_num_batched_tokens", 2048) for r in results[:3]] == [2048] * 3
    assert sum("first_of" in t.user_attrs for t in study.optuna.trials) == 2
    open_study(tmp_path / "r", Model(), text).run()
    assert sum("first_of" in t.user_attrs for t in study.optuna.trials) == 2, "asked for once, also when resumed"


def test_a_budget_too_small_for_all_topologies_is_left_to_the_sampler(tmp_path: Path) -> None:
    """Three trials for three topologies: nothing would be searched."""
    text = TEXT.replace("trials: 8", "trials: 3") + "topologies: [4x, 1p3d, 2p2d]\n"
    study = open_study(tmp_path / "r", Model(), text)
    study.run()

    assert not any("first_of" in t.user_attrs for t in study.optuna.trials)
