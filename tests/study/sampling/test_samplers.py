from __future__ import annotations

from collections import Counter
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from support.scripted_study import Params, ScriptedStudy, best_at_1e_4
from support.worker_process import SPACE, study

from hpo.config.sampler_config import PrunerConfig
from hpo.config.search_space import suggest
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.sampling.feasible_sampler import InfeasibleFilterSampler
from hpo.study.sampling.infeasible import MIN_INFEASIBLE_TRIALS
from hpo.study.sampling.samplers import build_pruner

SAMPLERS = ("tpe", "gp", "nsga2", "random", "qmc")
LEARNING = ("tpe", "gp", "nsga2")


def config_of(name: str, space: dict[str, Any] | None = None, **options: Any) -> Any:
    return study(12, sampler={"name": name, "seed": 5, **options}, search_space=space or SPACE)


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_suggests_all_settings_as_its_seed_and_worker_number_decide(name: str) -> None:
    config = config_of(name)
    tried = ScriptedStudy(config).run(12)
    assert all(set(params) == set(config.search_space) for params in tried)
    assert len({str(params) for params in tried}) == 12 or name in ("tpe", "nsga2")
    assert ScriptedStudy(config).run(3) == tried[:3]
    assert ScriptedStudy(config, worker_number=1).run(3) != tried[:3]


def test_workers_share_one_sequence() -> None:
    """Alone or in turns, the same points are tried after the first, which is random."""
    storage = optuna.storages.InMemoryStorage()
    workers = [ScriptedStudy(config_of("qmc"), storage=storage, worker_number=i) for i in range(3)]
    for index in range(12):
        workers[index % 3].run()
    assert workers[0].params[1:] == ScriptedStudy(config_of("qmc")).run(12)[1:]


def test_the_settings_that_an_enqueued_point_of_a_grid_leaves_open_are_drawn() -> None:
    space = {name: SPACE[name] for name in ("fp_precision", "batch_size")}
    current = ScriptedStudy(config_of("grid", space), lambda _: 0.5, skipped={"bf16"})
    drawn = current.run(8, batch_size=16)
    assert {params["batch_size"] for params in drawn} == {16}
    assert {params["fp_precision"] for params in drawn} == {"fp32", "fp16"}


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_half_of_what_a_study_with_rungs_tries_does_not_depend_on_what_was_best(name: str) -> None:
    space = {"learning_rate": SPACE["learning_rate"], "dropout": {"type": "float", "low": 0.0, "high": 0.5}}
    config, num_equal = config_of(name, space), {}
    for explores in (True, False):
        tried = [
            ScriptedStudy(config, lambda params: sign * best_at_1e_4(params), explores=explores).run(40)[12:]  # noqa: B023
            for sign in (1, -1)
        ]
        num_equal[explores] = sum(params == other for params, other in zip(*tried, strict=True))
    assert 8 <= num_equal[True] <= 20
    assert num_equal[False] <= 2


# Repeated configurations

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


@pytest.mark.parametrize(
    ("space", "size", "name", "options"),
    [
        (CONDITIONAL, 2 * 3 + 2 * 3 * 2, "tpe", {}),
        (CONDITIONAL, 2 * 3 + 2 * 3 * 2, "gp", {}),
        (STEPS, 6, "tpe", {}),  # TPE's 0 + 3 * 0.1 is not the 0.3 that the grid has
        (SMALL, 64, "tpe", {}),  # random changes alone would not find the last one
    ],
)
def test_no_configuration_is_tried_twice(
    space: dict[str, Any], size: int, name: str, options: dict[str, Any]
) -> None:
    """Also where a setting depends on another; when all were tried, it goes on."""
    current = ScriptedStudy(
        config_of(name, space, **options),
        lambda params: float(sum(value for value in params.values() if not isinstance(value, str))),
    )
    tried = current.run(size)
    rounded = [{k: v if isinstance(v, str) else round(v, 6) for k, v in params.items()} for params in tried]
    assert len({str(sorted(params.items())) for params in rounded}) == size
    assert all(("init_scale" in params) == (params.get("fp_precision") == "fp16") for params in tried)
    current.run()
    assert current.params[:size] == tried


def test_what_another_worker_began_is_kept() -> None:
    current = ScriptedStudy(config_of("tpe", CONDITIONAL))
    begun = {"fp_precision": "fp16", "batch_size": 16}
    for _ in range(3):
        trial = current.study.ask()
        for name, value in begun.items():
            choices = current.space[name].choices
            trial.storage.set_trial_param(
                trial._trial_id, name, choices.index(value), CategoricalDistribution(choices)
            )
        taken_over = optuna.trial.Trial(current.study, trial._trial_id)
        params = suggest(current.space, taken_over)
        assert params | begun == params
        current.end(taken_over, 0.5)
    assert len({str(sorted(params.items())) for params in current.params}) == 3


def test_running_and_pruned_trials_count_as_tried_but_failed_ones_do_not() -> None:
    current = ScriptedStudy(config_of("tpe", BATCHES))
    _, first = current.ask()
    pruned, second = current.ask()
    current.end(pruned, "pruned")
    failed, third = current.ask()
    current.end(failed, "failed")
    assert {params["batch_size"] for params in (first, second, third)} == {4, 8, 16}
    assert current.ask()[1] == third


# Infeasible choices

SIX = {"type": "categorical", "choices": ["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp8"]}
TWO_OBJECTIVES = [{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}]


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
def test_a_precision_that_never_works_is_drawn_at_most(
    name: str, changes: dict[str, Any], works: set[str], outcome: str, n_trials: int, most: int
) -> None:
    config = study(n_trials, sampler={"name": name, "seed": 2}, **changes)
    values = (0.5,) * len(config.objective)
    current = ScriptedStudy(config, lambda params: values if params["fp_precision"] in works else outcome)
    tried = Counter(params["fp_precision"] for params in current.run(n_trials))
    assert 0 < max(tried[broken] for broken in tried.keys() - works) <= most


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_samplers_see_all_brackets_of_hyperband(name: str) -> None:
    """Optuna shows a sampler the trials of one bracket alone: a broken precision would be tried in each."""
    current = ScriptedStudy(
        config_of(name, n_startup_trials=2),
        lambda params: "unsupported" if params["fp_precision"] == "fp16" else params["learning_rate"],
        pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3),
    )
    assert Counter(params["fp_precision"] for params in current.run(24))["fp16"] <= 4


def avoided(current: ScriptedStudy) -> set[tuple[str, Any]]:
    """The choices that a trial of the study would not have now."""
    sampler = InfeasibleFilterSampler(optuna.samplers.RandomSampler(seed=0), 0)
    sampler.before_trial(current.study, current.trials[0])
    choices = {item for params in current.params for item in params.items()}
    return {choice for choice in choices if sampler.avoids(*choice)}


def test_only_the_cause_is_avoided() -> None:
    """Every trial with `mlp` was infeasible so far, but only because they all had fp16."""
    space = {**SPACE, "head_type": {"type": "categorical", "choices": ["linear", "mlp"]}}
    current = ScriptedStudy(
        config_of("tpe", space), lambda params: "nonfinite" if params["fp_precision"] == "fp16" else 0.5
    )
    for precision, head in [("fp16", "mlp")] * 3 + [("fp16", "linear"), ("fp32", "linear")]:
        current.run(fp_precision=precision, head_type=head, batch_size=8)
    assert avoided(current) == {("fp_precision", "fp16")}


def test_failed_trials_count_for_nothing() -> None:
    current = ScriptedStudy(
        config_of("tpe"), lambda params: "failed" if params["fp_precision"] == "fp16" else 0.5
    )
    current.run(20)
    assert not avoided(current)


@pytest.mark.parametrize("name", LEARNING)
def test_samplers_do_not_see_invalid_trials(name: str) -> None:
    """They learn nothing from a fault of the model, the data or a metric."""
    current = ScriptedStudy(
        config_of(name, n_startup_trials=2) if name != "nsga2" else config_of(name),
        lambda params: "invalid" if params["fp_precision"] == "fp16" else best_at_1e_4(params),
    )
    tried = Counter(params["fp_precision"] for params in current.run(20))
    assert tried["fp16"] > MIN_INFEASIBLE_TRIALS
    sampler: Any = current.study.sampler
    seen = sampler.view(current.study).trials
    assert [trial.params["fp_precision"] for trial in seen].count("fp16") == 0
    assert len(seen) == 20 - tried["fp16"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_an_invalid_configuration_is_not_repeated_while_others_are_left(name: str, seed: int) -> None:
    config = config_of(name, BATCHES, seed=seed)
    current = ScriptedStudy(config, lambda params: "invalid" if params["batch_size"] == 8 else 0.5)
    current.run(batch_size=8)
    assert {params["batch_size"] for params in current.run(2)} == {4, 16}


@pytest.mark.parametrize(
    ("precision", "outcome", "telemetry", "is_blamed"),
    [
        ("fp16", "nonfinite", {"precision": {"effective": "fp16"}}, True),
        ("fp32", "nonfinite", {"precision": {"effective": "fp32"}}, False),
        ("fp16", "incompatible", {"compatibility": {"verdict": "incompatible"}}, True),
        ("fp16", "incompatible", {"precision": {"effective": "fp16"}}, False),
    ],
    ids=["nonfinite in fp16", "nonfinite in fp32", "found by the check", "a model that cannot be built"],
)
def test_a_precision_is_avoided_only_if_it_may_be_the_cause(
    precision: str, outcome: str, telemetry: dict[str, Any], is_blamed: bool
) -> None:
    current = ScriptedStudy(config_of("tpe"))
    for batch_size in (8, 16, 32, 8):
        current.study.enqueue_trial({"fp_precision": precision, "batch_size": batch_size})
        current.end(current.ask()[0], outcome, telemetry=telemetry)
    assert (("fp_precision", precision) in avoided(current)) == is_blamed


@pytest.mark.parametrize("name", LEARNING)
def test_choice_that_works_once_comes_back(name: str) -> None:
    """After three trials that were out of memory by bad luck, a category must not be lost for good."""
    seen: list[Params] = []

    def script(params: Params) -> Any:
        seen.extend([params] if params["fp_precision"] == "fp16" else [])
        unlucky = params["fp_precision"] == "fp16" and len(seen) <= MIN_INFEASIBLE_TRIALS
        return "nonfinite" if unlucky else best_at_1e_4(params)

    ScriptedStudy(config_of(name), script).run(90 if name != "gp" else 70)
    assert len(seen) > MIN_INFEASIBLE_TRIALS


@pytest.mark.parametrize("name", LEARNING)
def test_study_in_which_nothing_works_goes_on(name: str) -> None:
    tried = ScriptedStudy(config_of(name), lambda _: "nonfinite").run(15)
    assert len({params["fp_precision"] for params in tried}) == 3


# Out of memory

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "memory", "expected"),
    [(20, 80, True), (20, 20, False), (20, 10, False), (20, None, False), (None, 80, False)],
)
@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_what_did_not_fit_into_less_memory_may_be_tried_where_there_is_more(
    name: str, limit: int | None, memory: int | None, expected: bool
) -> None:
    storage, config = optuna.storages.InMemoryStorage(), config_of(name, BATCHES)
    small = ScriptedStudy(config, lambda params: float(params["batch_size"]), storage=storage)
    for _ in range(3):
        small.study.enqueue_trial({"batch_size": 16})
        limit_bytes = None if limit is None else limit * GIB
        small.end(small.ask()[0], "oom", telemetry={"device": {"memory_limit_bytes": limit_bytes}})
    for batch_size in (4, 8):
        small.run(batch_size=batch_size)
    device = WorkerDevice(memory_bytes=None if memory is None else memory * GIB)
    _, next_one = ScriptedStudy(config, storage=storage, device=device).ask()
    assert (next_one["batch_size"] == 16) == expected  # 4 and 8 were tried


# Pruners


@pytest.mark.parametrize(("name", "kind"), PrunerConfig.CLASSES.items())
def test_every_pruner_can_be_built_without_options(name: str, kind: str) -> None:
    assert type(build_pruner(study(1, pruner={"name": name}).pruner)).__name__ == kind
