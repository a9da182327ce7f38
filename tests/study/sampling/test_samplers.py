from collections import Counter
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.pruners import MedianPruner, NopPruner, PatientPruner
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState
from support.scripted_study import ScriptedStudy, best_at_1e_4
from support.worker_process import SPACE, study

from hpo.config.search_space import suggest
from hpo.outcome import Outcome
from hpo.precision.table import choice_name
from hpo.study.sampling.device_sampler import WorkerDevice, WrapperSampler
from hpo.study.sampling.feasible_sampler import (
    MIN_INFEASIBLE_TRIALS,
    AvoidRepeats,
    Failures,
    InfeasibleFilterSampler,
)
from hpo.study.sampling.gp_sampler import PrunedAwareSampler
from hpo.study.sampling.samplers import HalfRandom, build_pruner, build_sampler

SAMPLERS = ("tpe", "gp", "nsga2", "random", "qmc")
LEARNING = ("tpe", "gp", "nsga2")
CONDITIONAL = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]},
    "batch_size": {"type": "categorical", "choices": [8, 16]},
    "pooling": {"type": "categorical", "choices": ["cls", "mean", "max"]},
    "init_scale": {"type": "categorical", "choices": [1024, 65536], "when": {"fp_precision": "fp16"}},
}
STEPS = {"dropout": {"type": "float", "low": 0.0, "high": 0.5, "step": 0.1}}
SMALL = {name: {"type": "categorical", "choices": [1, 2, 3, 4]} for name in ("batch_size", "epochs")}
SMALL |= {"max_length": {"type": "int", "low": 8, "high": 32, "step": 8}}
BATCHES = {"batch_size": {"type": "categorical", "choices": [4, 8, 16]}}
SIX = {"type": "categorical", "choices": ["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp8"]}
TWO_OBJECTIVES = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]


def config_of(name: str, space: dict[str, Any] | None = None, **options: Any) -> Any:
    return study(12, sampler={"name": name, "seed": 5, **options}, search_space=space or SPACE)


@pytest.mark.parametrize(
    ("name", "num_objectives", "explores", "states"),
    [
        ("gp", 1, False, ["COMPLETE"]),
        ("tpe", 1, True, ["PRUNED"]),
        ("tpe", 2, True, ["COMPLETE"]),
        ("tpe", 2, False, []),
    ],
)
def test_a_trial_at_a_rung_is_complete_to_gp_and_to_tpe_with_objectives(
    name: str, num_objectives: int, explores: bool, states: list[str]
) -> None:
    config = config_of(name)
    layers: list[Any] = [build_sampler(config.sampler, config.search_space, explores=explores)]
    while hasattr(layers[-1], "_sampler"):
        layers.append(layers[-1]._sampler)
    current = optuna.create_study(directions=["maximize"] * num_objectives)
    rungs = {"0.04": {"values": [0.5] * num_objectives}}
    current.add_trial(optuna.trial.create_trial(state=TrialState.PRUNED, user_attrs={"rungs": rungs}))
    views = [one.view(current) for one in layers if isinstance(one, PrunedAwareSampler)]
    assert [seen.trials[0].state.name for seen in views] == states
    assert any(isinstance(one, HalfRandom) for one in layers) == explores


def test_half_of_the_configurations_are_random() -> None:
    class Always(RandomSampler):
        def sample_independent(self, *_: Any) -> Any:
            return 8

    current = ScriptedStudy(config_of("tpe", {"batch_size": BATCHES["batch_size"]}), lambda _: 0.5)
    current.study.sampler = HalfRandom(WrapperSampler(Always()), seed=1)
    assert 0.5 < [params["batch_size"] for params in current.run(60)].count(8) / 60 < 0.8


def test_a_device_without_any_choice_of_a_setting_leaves_one_of_its_conditions() -> None:
    """The base is searched with both conditions, so half of the poolings need not be lost."""
    space = {"adapter": "none lora", "pooling": "cls mean", "base_precision": "int8 nf4"}
    choices = {name: {"type": "categorical", "choices": each.split()} for name, each in space.items()}
    choices["base_precision"]["when"] = {"adapter": "lora", "pooling": "mean"}
    skipped = {choice_name("base_precision", value) for value in ("int8", "nf4")}
    tried = ScriptedStudy(config_of("random", choices), lambda _: 0.5, skipped=skipped).run(12)
    assert {(params["adapter"], params["pooling"]) for params in tried} == {("none", "cls"), ("none", "mean")}


@pytest.mark.parametrize(
    ("config", "expected", "attributes"),
    [
        ({"name": "none"}, NopPruner, {}),
        ({"name": "promote", "keep": 2}, NopPruner, {}),
        ({"name": "median", "n_startup_trials": 7}, MedianPruner, {"_n_startup_trials": 7}),
        ({"name": "patient", "patience": 3}, PatientPruner, {"_wrapped_pruner": None, "_patience": 3}),
    ],
)
def test_a_pruner_is_optunas_with_its_options(config: Any, expected: type, attributes: Any) -> None:
    pruner = build_pruner(study(12, pruner=config).pruner)
    assert type(pruner) is expected
    assert vars(pruner).items() >= attributes.items()


@pytest.mark.parametrize("name", SAMPLERS)
def test_seed_and_worker_number_decide_the_configurations(name: str) -> None:
    config = config_of(name)
    tried = ScriptedStudy(config).run(12)
    assert all(set(params) == set(config.search_space) for params in tried)
    assert len({str(params) for params in tried}) == 12 or name in ("tpe", "nsga2")
    assert ScriptedStudy(config).run(3) == tried[:3]
    other = ScriptedStudy(config, worker_number=1).run(3)
    assert other != tried[:3]
    assert other == ScriptedStudy(config_of(name, seed=6)).run(3)


@pytest.mark.parametrize("name", LEARNING)
def test_a_wide_range_of_whole_numbers_is_not_listed(name: str) -> None:
    """A list of its values would need more memory than a machine has."""
    wide = {**BATCHES, "seed": {"type": "int", "low": 0, "high": 2**32 - 1}}
    assert len({params["seed"] for params in ScriptedStudy(config_of(name, wide), lambda _: 0.5).run(7)}) == 7


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (CONDITIONAL, 2 * 3 + 2 * 3 * 2),
        (STEPS, 6),  # TPE's 0 + 3 * 0.1 is not the 0.3 that the grid has
        (SMALL, 64),  # random changes alone would not find the last one
    ],
)
def test_no_configuration_is_tried_twice(space: dict[str, Any], size: int) -> None:
    """After the last configuration, the study continues."""
    current = ScriptedStudy(
        config_of("tpe", space),
        lambda params: float(sum(value for value in params.values() if not isinstance(value, str))),
    )
    tried = current.run(size)
    rounded = [{k: v if isinstance(v, str) else round(v, 6) for k, v in params.items()} for params in tried]
    assert len({str(sorted(params.items())) for params in rounded}) == size
    assert all(("init_scale" in params) == (params.get("fp_precision") == "fp16") for params in tried)
    current.run()
    assert current.params[:size] == tried


def test_gp_tries_zero_once_in_a_range_with_steps() -> None:
    """Its 7e-18 for 0 would pass for another configuration."""
    space = {"dropout": {"type": "float", "low": 0.0, "high": 0.3, "step": 0.1}, **BATCHES}
    current = ScriptedStudy(config_of("gp", space), lambda params: -params["dropout"])
    tried = {(round(params["dropout"], 6), params["batch_size"]) for params in current.run(12)}
    assert len(tried) == 12


def test_a_repeated_configuration_is_changed_in_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ScriptedStudy(config_of("tpe", SMALL), lambda _: 0.5)
    same = {"batch_size": 1, "epochs": 2, "max_length": 8}
    monkeypatch.setattr(RandomSampler, "sample_independent", lambda *drawn: same[drawn[3]])
    always = InfeasibleFilterSampler(RandomSampler(seed=0), seed=0)
    current.study.sampler = AvoidRepeats(always, current.space, seed=0)
    first, *others = current.run(6)
    assert first == same
    assert [len(params.items() - same.items()) for params in others] == [1] * 5


def test_parameters_from_another_worker_are_kept() -> None:
    current = ScriptedStudy(config_of("tpe", CONDITIONAL))
    begun = {"fp_precision": "fp16", "batch_size": 16}
    for _ in range(3):
        trial = current.study.ask()
        for name, value in begun.items():
            choices = current.space[name].choices
            distribution = CategoricalDistribution(choices)
            trial.storage.set_trial_param(trial._trial_id, name, choices.index(value), distribution)
        resumed = optuna.trial.Trial(current.study, trial._trial_id)
        params = suggest(current.space, resumed)
        assert params | begun == params
        current.end(resumed, 0.5)
    assert len({str(sorted(params.items())) for params in current.params}) == 3


@pytest.mark.parametrize("outcome", ["pruned", "invalid"])
def test_failed_trials_do_not_count_as_tried(outcome: str) -> None:
    current = ScriptedStudy(config_of("tpe", BATCHES))
    _, first = current.ask()
    ended, second = current.ask()
    current.end(ended, outcome)
    failed, third = current.ask()
    current.end(failed, "failed")
    assert {params["batch_size"] for params in (first, second, third)} == {4, 8, 16}
    assert current.ask()[1] == third


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize(
    ("changes", "works", "outcome", "n_trials", "most"),
    [
        ({}, {"fp32", "bf16"}, "nonfinite", 30, MIN_INFEASIBLE_TRIALS),
        ({"objective": TWO_OBJECTIVES}, {"fp32", "bf16"}, "nonfinite", 16, MIN_INFEASIBLE_TRIALS),
        ({"search_space": SPACE | {"fp_precision": SIX}}, {"fp32"}, "unsupported", 12, 1),
        ({"search_space": CONDITIONAL}, {"fp32"}, "unsupported", 9, 1),
    ],
    ids=["nonfinite", "two objectives", "one unsupported trial is enough", "changed proposals"],
)
def test_an_infeasible_precision_is_drawn_at_most(
    name: str, changes: dict[str, Any], works: set[str], outcome: str, n_trials: int, most: int
) -> None:
    config = study(n_trials, sampler={"name": name, "seed": 2}, **changes)
    values = (0.5,) * len(config.objective)
    current = ScriptedStudy(config, lambda params: values if params["fp_precision"] in works else outcome)
    tried = Counter(params["fp_precision"] for params in current.run(n_trials))
    assert 0 < max(tried[broken] for broken in tried.keys() - works) <= most


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
def test_a_choice_with_three_failures_by_bad_luck_comes_back(name: str) -> None:
    num_seen = 0

    def script(params: dict[str, Any]) -> Any:
        nonlocal num_seen
        num_seen += params["fp_precision"] == "fp16"
        unlucky = params["fp_precision"] == "fp16" and num_seen <= MIN_INFEASIBLE_TRIALS
        return "nonfinite" if unlucky else best_at_1e_4(params)

    ScriptedStudy(config_of(name), script).run(90)
    assert num_seen > MIN_INFEASIBLE_TRIALS


FP16 = ("fp_precision", "fp16")
CHOICES = {
    "fp_precision": CategoricalDistribution(("fp32", "bf16", "fp16")),
    "batch_size": CategoricalDistribution((8, 16, 32)),
    "encoder": CategoricalDistribution(("a", "b")),
}
CHECKED = {"compatibility": {"checked_on": "CPU, torch 2"}}
HEALS = {"finite_in_fp32": True, "precision": {"effective": "fp16"}}


def trial(outcome: str, *rungs: float, telemetry: dict[str, Any] | None = None, **params: Any) -> FrozenTrial:
    """A trial that has reached these rungs; a `paused` one has not ended."""
    params = {"batch_size": 8, "fp_precision": "fp16", **params}
    is_paused = outcome == "paused"
    state = TrialState.RUNNING if is_paused else TrialState[Outcome(outcome).optuna_state]
    return optuna.trial.create_trial(
        state=state,
        value=0.5 if state == TrialState.COMPLETE else None,
        params=params,
        distributions={name: CHOICES[name] for name in params},
        user_attrs={
            "outcome": outcome,
            "telemetry": telemetry or {},
            "rungs": {str(rung): {"values": [0.5], "constraints": {}} for rung in rungs},
            "paused_at": max(rungs, default=0.0),
        },
        system_attrs={} if is_paused or not Outcome(outcome).infeasible else {"constraints:feasible": 1.0},
    )


def memory(limit: int | None) -> dict[str, Any]:
    return {"device": {"memory_limit_bytes": limit}}


@pytest.mark.parametrize(
    ("outcome", "telemetry", "device", "expected"),
    [
        ("invalid", {}, {}, True),
        ("oom", memory(100), {"memory_bytes": 105}, True),
        ("oom", memory(100), {"memory_bytes": 104}, False),
        ("oom", memory(100), {}, False),
        ("oom", memory(None), {"memory_bytes": 105}, False),
        ("complete", memory(100), {"memory_bytes": 105}, False),
        ("unsupported", {}, {"left_out": {"bf16": ""}}, True),
        ("unsupported", {}, {"left_out": {"fp16": ""}}, False),
        ("unsupported", {}, {}, False),
        ("nonfinite", CHECKED, {"left_out": {"bf16": ""}, "checked_on": "GPU, torch 2"}, False),
        ("incompatible", CHECKED, {"checked_on": "GPU, torch 2"}, True),
        ("incompatible", CHECKED, {"checked_on": "CPU, torch 2"}, False),
        ("incompatible", CHECKED, {}, False),
        ("incompatible", {}, {"checked_on": "GPU, torch 2"}, False),
    ],
)
def test_failures_of_other_devices_say_nothing_here(
    outcome: str, telemetry: dict[str, Any], device: dict[str, Any], expected: bool
) -> None:
    assert WorkerDevice(**device).says_nothing(trial(outcome, telemetry=telemetry)) is expected


@pytest.mark.parametrize("name", LEARNING)
def test_samplers_see_the_last_rung_of_a_running_trial_and_no_invalid_trial(name: str) -> None:
    current = ScriptedStudy(config_of(name), lambda _: "invalid")
    current.run(2)
    running, _ = current.ask()
    for step, value in enumerate((0.2, 0.5, 0.5, 0.9), start=1):
        running.report(value, step)
    limits = {"peak_memory_bytes": 1.0}
    sampler: Any = current.study.sampler
    for value, reports in ((0.5, {1: 0.2, 2: 0.5, 3: 0.5}), (0.7, {})):
        rungs = {"0.04": {"values": [0.2]}, "0.12": {"values": [value], "constraints": limits}}
        running.set_user_attr("rungs", rungs)
        (seen,) = sampler.view(current.study).trials
        assert (seen.state, seen.values, seen.constraints) == (TrialState.PRUNED, [value], limits)
        assert seen.intermediate_values == reports


def test_a_narrowed_sampler_hides_the_proposals_of_running_trials() -> None:
    current = ScriptedStudy(config_of("tpe"), skipped={"fp16"})
    for state, value in ((TrialState.RUNNING, None), (TrialState.COMPLETE, 0.5)):
        kept = {"system_attrs": {"proposal": 1}}
        current.study.add_trial(optuna.trial.create_trial(state=state, value=value, **kept))
    sampler: Any = current.study.sampler
    assert [seen.system_attrs for seen in sampler.view(current.study).trials] == [{}, {"proposal": 1}]


def blamed(*trials: FrozenTrial) -> set[tuple[str, Any]]:
    failures = Failures()
    for one in trials:
        if one.state.is_finished():
            failures.add_ended(one)
    return failures.blamed([one for one in trials if not one.state.is_finished()])


@pytest.mark.parametrize("rungs", [(), (0.04,), (0.04, 0.12, 0.36)])
def test_one_failure_suffices_if_the_step_is_finite_in_fp32(rungs: tuple[float, ...]) -> None:
    paused = [trial("paused", *rungs) for _ in range(5) if rungs]
    failed = trial("nonfinite", *rungs, telemetry=HEALS)
    assert blamed(*paused) == set()
    assert blamed(*paused, failed) == {FP16}


@pytest.mark.parametrize("outcome", ["paused", "pruned"])
def test_only_a_complete_trial_clears_a_precision(outcome: str) -> None:
    """Without a repeat in fp32, three failures are needed."""
    failed = [trial("nonfinite", 0.04) for _ in range(MIN_INFEASIBLE_TRIALS)]
    others = [trial(outcome, 0.04) for _ in range(5)]
    assert blamed(*failed, *others) == {FP16}
    assert blamed(*failed[1:], *others) == set()
    for telemetry in (HEALS, {}):
        again = trial("nonfinite", 0.04, telemetry=telemetry)
        assert blamed(*failed, again, trial("complete")) == set()


@pytest.mark.parametrize(
    ("outcome", "telemetry", "is_blamed"),
    [
        ("nonfinite", {"precision": {"effective": "fp16"}}, True),
        ("nonfinite", {"precision": {"effective": "fp32"}}, False),
        ("nonfinite", {"precision": {"effective": "fp16"}, "finite_in_fp32": False}, False),
        ("incompatible", {"compatibility": {"verdict": "incompatible"}}, True),
        ("incompatible", {"precision": {"effective": "fp16"}}, False),  # a model that cannot be built
        ("failed", {}, False),
    ],
)
def test_a_precision_is_blamed_only_if_it_may_be_the_cause(
    outcome: str, telemetry: dict[str, Any], is_blamed: bool
) -> None:
    """Otherwise the batch size of all these trials is."""
    failed = [trial(outcome, telemetry=telemetry, batch_size=32) for _ in range(5)]
    other = [("batch_size", 32)] if outcome != "failed" else []
    assert blamed(*failed) == ({FP16} if is_blamed else {*other})


def test_one_failure_before_the_progress_of_other_trials_does_not_suffice() -> None:
    """A high learning rate breaks fp16 early in one trial, while others train on."""
    early, late = (trial("nonfinite", *rungs, telemetry=HEALS) for rungs in [(), (0.04, 0.12)])
    others = [trial("paused", 0.04), trial("paused", 0.04, 0.12)]
    assert blamed(early, *others) == set()
    assert blamed(early, late, *others) == {FP16}


@pytest.mark.parametrize("outcome", ["incompatible", "oom", "unsupported", "crashed"])
def test_a_paused_trial_clears_its_choices_of_early_failures(outcome: str) -> None:
    failed = [trial(outcome) for _ in range(5)]
    assert blamed(*failed) >= {FP16}
    assert blamed(*failed, trial("paused", 0.04)) == set()


@pytest.mark.parametrize("name", ["tpe", "nsga2"])
@pytest.mark.parametrize("outcome", ["complete", "paused"])
def test_a_precision_without_a_complete_trial_gets_a_tenth_of_the_starts(name: str, outcome: str) -> None:
    """It may still break. Before any trial is complete, nothing is known."""
    space = {name: SPACE[name] for name in ("fp_precision", "learning_rate")}
    current = ScriptedStudy(study(100, sampler={"name": name, "seed": 1}, search_space=space))

    def start(**given: Any) -> str:
        if given:
            current.study.enqueue_trial(given)
        started, params = current.ask()
        started.set_user_attr("rungs", {"0.04": {"values": [0.5], "constraints": {}}})
        if params["fp_precision"] == "fp32" and outcome == "complete":
            current.end(started, 0.5)
        return str(params["fp_precision"])

    for precision in ("fp32", "bf16", "fp16"):
        start(fp_precision=precision)
    drawn = [start() for _ in range(47)]
    for precision in ("bf16", "fp16"):
        assert (drawn.count(precision) <= 4) == (outcome == "complete")


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_wider_range_is_drawn_from_at_once(name: str) -> None:
    """Plain Optuna's QMC never leaves the first range, and the others no longer draw the setting jointly."""
    narrow: dict[str, Any] = {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-4, "log": True}}
    narrow |= {"dropout": {"type": "float", "low": 0.0, "high": 0.5}}
    wide = {**narrow, "learning_rate": {**narrow["learning_rate"], "high": 1e-1}}
    storage = optuna.storages.InMemoryStorage()
    for space in (narrow, wide):
        current = ScriptedStudy(config_of(name, space), storage=storage)
        drawn = current.run(12)
    assert max(params["learning_rate"] for params in drawn) > 1e-4
    view = current.study.sampler.view(current.study)  # type: ignore[attr-defined]
    assert optuna.search_space.intersection_search_space(view.trials).keys() == wide.keys()
