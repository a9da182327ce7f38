from __future__ import annotations

import math
from collections import Counter
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from worker_process import SPACE, study

from hpo.config.search_space import suggest
from hpo.study.device_sampler import ANY_DEVICE, WorkerDevice
from hpo.study.feasible_sampler import MIN_INFEASIBLE_TRIALS, InfeasibleFilterSampler, is_infeasible
from hpo.study.gp_sampler import PrunedAwareSampler
from hpo.study.samplers import build_pruner, build_sampler

SAMPLERS = ("tpe", "gp", "cmaes", "nsga2", "random", "grid", "qmc")
LEARNING = ("tpe", "gp", "nsga2")
GRID = {
    "fp_precision": SPACE["fp_precision"],
    "learning_rate": {"type": "float", "low": 0.1, "high": 0.4, "step": 0.1},
}
NUMBERS = {**SPACE, "weight_decay": {"type": "float", "low": 0.0, "high": 0.1}}


def config_of(name: str, **options: Any) -> Any:
    space = {"grid": GRID, "cmaes": NUMBERS}.get(name, SPACE)
    return study(12, sampler={"name": name, "seed": 5, **options}, search_space=space)


def opened(
    config: Any,
    worker_number: int = 0,
    storage: Any = None,
    device: WorkerDevice = ANY_DEVICE,
    **options: Any,
) -> optuna.Study:
    """The study as one worker opens it."""
    sampler = build_sampler(
        config.sampler, config.search_space, worker_number=worker_number, device=device, **options
    )
    return optuna.create_study(
        study_name="s",
        storage=storage,
        directions=[objective.direction for objective in config.objective],
        sampler=sampler,
        load_if_exists=True,
    )


def end(current: optuna.Study, trial: optuna.Trial, outcome: str, **attributes: Any) -> None:
    """Tell the study of a trial that could not work, as a worker does."""
    for key, value in {"outcome": outcome, **attributes}.items():
        trial.set_user_attr(key, value)
    trial.set_constraint("feasible", 1.0)
    current.tell(trial, state=TrialState.PRUNED)


def run(config: Any, n_trials: int, broken: Any = lambda _: False, worker_number: int = 0) -> optuna.Study:
    """Ask and tell, as a worker does."""
    current = opened(config, worker_number)
    for _ in range(n_trials):
        trial = current.ask()
        params = suggest(config.search_space, trial)
        if broken(params):
            end(current, trial, "nonfinite")
        else:
            current.tell(trial, 1.0 - abs(math.log10(params["learning_rate"]) + 4.0))
    return current


def params_of(current: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in current.trials]


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_suggests_all_settings(name: str) -> None:
    config = config_of(name)
    tried = params_of(run(config, 12))
    assert all(set(params) == set(config.search_space) for params in tried)
    assert len({str(params) for params in tried}) == 12 or name in ("tpe", "nsga2")


@pytest.mark.parametrize("name", SAMPLERS)
def test_seed_and_worker_number_decide(name: str) -> None:
    config = config_of(name)
    first = params_of(run(config, 3))
    assert params_of(run(config, 3)) == first
    assert (params_of(run(config, 3, worker_number=1)) == first) == (name == "grid")


def test_qmc_workers_share_one_sequence() -> None:
    """Alone or in turns, the same points are tried after the first, which is random."""
    config = config_of("qmc")
    alone = params_of(run(config, 7))[1:]
    storage = optuna.storages.InMemoryStorage()
    workers = [opened(config, number, storage) for number in range(2)]
    for number in range(7):
        trial = workers[number % 2].ask()
        suggest(config.search_space, trial)
        workers[number % 2].tell(trial, 0.5)
    assert params_of(workers[0])[1:] == alone


def test_grid_workers_share_one_grid() -> None:
    config = config_of("grid")
    storage = optuna.storages.InMemoryStorage()
    workers = [opened(config, number, storage) for number in range(3)]
    for number in range(12):
        trial = workers[number % 3].ask()
        suggest(config.search_space, trial)
        workers[number % 3].tell(trial, 0.5)
    assert len({str(params) for params in params_of(workers[0])}) == 12


# Repeated configurations

FINITE = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]},
    "batch_size": {"type": "categorical", "choices": [8, 16]},
    "pooling": {"type": "categorical", "choices": ["cls", "mean", "max"]},
    "init_scale": {"type": "categorical", "choices": [1024, 65536], "when": {"fp_precision": "fp16"}},
}
NUM_FINITE = 2 * 3 + 2 * 3 * 2


def finite(name: str = "tpe", **options: Any) -> Any:
    return study(NUM_FINITE, sampler={"name": name, "seed": 5, **options}, search_space=FINITE)


def tell_next(current: optuna.Study, space: Any, state: TrialState = TrialState.COMPLETE) -> dict[str, Any]:
    trial = current.ask()
    params = suggest(space, trial)
    value = 1.0 if params["fp_precision"] == "fp32" and params["pooling"] == "cls" else 0.0
    current.tell(trial, value if state == TrialState.COMPLETE else None, state=state)
    return params


@pytest.mark.parametrize(
    ("name", "options"), [("tpe", {"multivariate": True}), ("tpe", {"multivariate": False}), ("gp", {})]
)
def test_no_configuration_is_had_twice(name: str, options: dict[str, Any]) -> None:
    """Also where a setting depends on another; when all were had, it goes on."""
    config = finite(name, **options)
    current = opened(config)
    tried = [tell_next(current, config.search_space) for _ in range(NUM_FINITE)]
    assert len({str(sorted(params.items())) for params in tried}) == NUM_FINITE
    assert all(("init_scale" in params) == (params["fp_precision"] == "fp16") for params in tried)
    tell_next(current, config.search_space)
    assert params_of(current)[:NUM_FINITE] == tried


def test_a_step_of_a_range_is_one_value_however_it_was_computed() -> None:
    """TPE's 0 + 3 * 0.1 is not the 0.3 that the grid has."""
    space = {"dropout": {"type": "float", "low": 0.0, "high": 0.5, "step": 0.1}}
    config = study(6, sampler={"name": "tpe", "seed": 5}, search_space=space)
    current = opened(config)
    for _ in range(6):
        trial = current.ask()
        current.tell(trial, suggest(config.search_space, trial)["dropout"])
    assert len({round(params["dropout"], 6) for params in params_of(current)}) == 6


def test_the_last_configuration_of_a_small_space_is_found() -> None:
    space = {name: {"type": "categorical", "choices": [1, 2, 3, 4]} for name in ("batch_size", "epochs")}
    space["max_length"] = {"type": "int", "low": 8, "high": 32, "step": 8}
    config = study(64, sampler={"name": "tpe", "seed": 5}, search_space=space)
    current = opened(config)
    for _ in range(64):
        trial = current.ask()
        params = suggest(config.search_space, trial)
        current.tell(trial, float(params["batch_size"]))
    assert len({str(sorted(params.items())) for params in params_of(current)}) == 64


def test_what_another_worker_began_is_kept() -> None:
    config = finite()
    current = opened(config)
    begun = {"fp_precision": "fp16", "batch_size": 16}
    for _ in range(3):
        trial = current.ask()
        for name, value in begun.items():
            trial.storage.set_trial_param(
                trial._trial_id,
                name,
                config.search_space[name].choices.index(value),
                optuna.distributions.CategoricalDistribution(config.search_space[name].choices),
            )
        taken_over = optuna.trial.Trial(current, trial._trial_id)
        params = suggest(config.search_space, taken_over)
        assert params | begun == params
        current.tell(taken_over, 0.5)
    assert len({str(sorted(params.items())) for params in params_of(current)}) == 3


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_samplers_see_all_brackets_of_hyperband(name: str) -> None:
    """Optuna shows a sampler the trials of one bracket alone: a broken precision would be tried in each."""
    config = config_of(name, n_startup_trials=2)
    current = opened(config)
    current.pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3)
    broken = 0
    for _ in range(24):
        trial = current.ask()
        params = suggest(config.search_space, trial)
        if params["fp_precision"] == "fp16":
            broken += 1
            end(current, trial, "unsupported")
            continue
        for step in range(1, 10):
            trial.report(params["learning_rate"] * step, step)
            trial.should_prune()  # the first call makes the brackets
        current.tell(trial, params["learning_rate"])
    assert {trial.state for trial in current.trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert broken <= 4


def test_running_and_pruned_trials_count_as_had_but_failed_ones_do_not() -> None:
    space = {"batch_size": {"type": "categorical", "choices": [4, 8, 16]}}
    config = study(3, sampler={"name": "tpe", "seed": 5}, search_space=space)
    current = opened(config)
    first = current.ask()
    had = {suggest(config.search_space, first)["batch_size"]}
    second = current.ask()
    had.add(suggest(config.search_space, second)["batch_size"])
    current.tell(second, state=TrialState.PRUNED)
    assert len(had) == 2
    third = current.ask()
    last = suggest(config.search_space, third)["batch_size"]
    current.tell(third, state=TrialState.FAIL)
    assert {last} == {4, 8, 16} - had
    assert suggest(config.search_space, current.ask())["batch_size"] == last


def test_a_changed_proposal_has_no_avoided_choice() -> None:
    config = finite()
    current = opened(config)
    for _ in range(9):
        trial = current.ask()
        params = suggest(config.search_space, trial)
        if params["fp_precision"] == "fp16":
            end(current, trial, "unsupported")
        else:
            current.tell(trial, 1.0)
    assert sum(map(is_infeasible, current.trials)) <= MIN_INFEASIBLE_TRIALS


# Infeasible choices


@pytest.mark.parametrize("name", LEARNING)
def test_choice_that_never_works_is_avoided(name: str) -> None:
    n_trials = 30
    current = run(config_of(name), n_trials, lambda params: params["fp_precision"] == "fp16")
    assert sum(map(is_infeasible, current.trials)) <= MIN_INFEASIBLE_TRIALS


def test_only_the_cause_is_avoided() -> None:
    """Every trial with `mlp` was infeasible so far, but only because they all had fp16."""
    config = study(
        12, search_space={**SPACE, "head_type": {"type": "categorical", "choices": ["linear", "mlp"]}}
    )
    current = opened(config)
    rows = [("fp16", "mlp")] * 3 + [("fp16", "linear"), ("fp32", "linear")]
    for precision, head in rows:
        current.enqueue_trial({"fp_precision": precision, "head_type": head, "batch_size": 8})
        trial = current.ask()
        suggest(config.search_space, trial)
        if precision == "fp16":
            end(current, trial, "nonfinite")
        else:
            current.tell(trial, 0.5)
    sampler = InfeasibleFilterSampler(optuna.samplers.RandomSampler(seed=0), 0)
    sampler.before_trial(current, current.trials[0])
    choices = [("fp_precision", "fp16"), ("head_type", "mlp"), ("head_type", "linear"), ("batch_size", 8)]
    assert [choice for choice in choices if sampler.avoids(*choice)] == [("fp_precision", "fp16")]


@pytest.mark.parametrize("name", LEARNING)
def test_one_unsupported_trial_is_enough(name: str) -> None:
    """Five of six precisions do not work on this device: a study of twelve trials must not end with them."""
    precisions = ["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp8"]
    space = {**SPACE, "fp_precision": {"type": "categorical", "choices": precisions}}
    config = study(12, search_space=space)
    current = opened(study(12, sampler={"name": name, "seed": 2}, search_space=space))
    for _ in range(12):
        trial = current.ask()
        if suggest(config.search_space, trial)["fp_precision"] == "fp32":
            current.tell(trial, 0.5)
        else:
            end(current, trial, "unsupported")
    tried = Counter(trial.params["fp_precision"] for trial in current.trials)
    assert tried.pop("fp32") >= 7
    assert set(tried.values()) == {1}


@pytest.mark.parametrize("name", LEARNING)
def test_choice_that_works_once_comes_back(name: str) -> None:
    """After three trials that were out of memory by bad luck, a category must not be lost for good."""
    seen = 0

    def broken(params: dict[str, Any]) -> bool:
        nonlocal seen
        seen += params["fp_precision"] == "fp16"
        return params["fp_precision"] == "fp16" and seen <= MIN_INFEASIBLE_TRIALS

    config = config_of(name)
    current = run(config, 90 if name != "gp" else 70, broken)
    assert seen > MIN_INFEASIBLE_TRIALS
    assert any(
        trial.params["fp_precision"] == "fp16"
        for trial in current.trials
        if trial.state == TrialState.COMPLETE
    )


@pytest.mark.parametrize("name", LEARNING)
def test_study_in_which_nothing_works_goes_on(name: str) -> None:
    current = run(config_of(name), 15, lambda _: True)
    assert len(current.trials) == 15
    assert len({trial.params["fp_precision"] for trial in current.trials}) == 3


def test_failed_trials_count_for_nothing() -> None:
    config = config_of("tpe")
    current = opened(config)
    for _ in range(20):
        trial = current.ask()
        params = suggest(config.search_space, trial)
        failed = params["fp_precision"] == "fp16"
        current.tell(trial, None if failed else 0.5, state=TrialState.FAIL if failed else TrialState.COMPLETE)
    sampler = InfeasibleFilterSampler(optuna.samplers.RandomSampler(seed=0), 0)
    sampler.before_trial(current, current.trials[0])
    assert not any(sampler.avoids("fp_precision", choice) for choice in ("fp32", "bf16", "fp16"))


def test_gp_sees_infeasible_trials_as_worst() -> None:
    """Infeasible by a combination: no category is to blame, so only what GP learns can help."""
    config = config_of("gp")

    def broken(params: dict[str, Any]) -> bool:
        return params["fp_precision"] != "fp32" and params["learning_rate"] > 5e-5

    gp = optuna.samplers.GPSampler(seed=1, warn_independent_sampling=False)
    shares = []
    for sampler in (PrunedAwareSampler(gp), gp):
        current = opened(config)
        current.sampler = sampler
        for _ in range(40):
            trial = current.ask()
            params = suggest(config.search_space, trial)
            if broken(params):
                end(current, trial, "nonfinite")
            else:
                current.tell(trial, 1.0 - abs(math.log10(params["learning_rate"]) + 4.0))
        shares.append(sum(map(is_infeasible, current.trials[10:])) / 30)
    seeing, blind = shares
    assert seeing < 0.3
    assert seeing < blind / 2


class _Shown(optuna.samplers.RandomSampler):
    """Keeps the study that it is asked for."""

    def infer_relative_search_space(self, study: optuna.Study, trial: Any) -> dict[str, Any]:  # noqa: ARG002
        self.study = study
        return dict(study.trials[0].distributions)

    def sample_relative(
        self,
        study: optuna.Study,  # noqa: ARG002
        trial: Any,  # noqa: ARG002
        search_space: dict[str, Any],
    ) -> dict[str, Any]:
        return {name: getattr(one, "high", None) for name, one in search_space.items() if name != "pooling"}


NUMBERS_AND_NAMES = {
    "batch_size": {"type": "categorical", "choices": [16, 8, 32]},
    "pooling": {"type": "categorical", "choices": ["cls", "mean", "max"]},
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gp_sees_what_to_expect_of_pruned_trials(sign: float) -> None:
    """Their best evaluation and the median gain of those that went on; maximised or minimised alike."""
    config = study(12, search_space=NUMBERS_AND_NAMES)
    current = optuna.create_study(direction="maximize" if sign > 0 else "minimize")
    courses = [[0.1, 0.2, 0.5], [0.4, 0.3, 0.5], [0.0, 0.1, 0.9], [0.3, 0.2], []]
    for course in courses:
        trial = current.ask()
        suggest(config.search_space, trial)
        for step, score in enumerate(course, start=1):
            trial.report(sign * score, step)
        if len(course) == 3:
            current.tell(trial, sign * max(course))
        else:
            current.tell(trial, state=TrialState.PRUNED)
    sampler = PrunedAwareSampler(shown := _Shown(seed=0))
    current.sampler = sampler
    suggest(config.search_space, current.ask())
    states = [trial.state for trial in shown.study.trials[:5]]
    assert states == [TrialState.COMPLETE] * 4 + [TrialState.PRUNED]  # nothing is known of the last one
    # The complete trials gained 0.3, 0.1 and 0.8 after their second evaluation.
    assert [trial.value for trial in shown.study.trials[:4]] == pytest.approx(
        [sign * value for value in (0.5, 0.5, 0.9, 0.3 + 0.3)]
    )
    assert current.trials[3].state == TrialState.PRUNED


def test_gp_sees_numbers_in_their_order() -> None:
    """Choices that are numbers are ranks for the sampler and stay choices in the study."""
    config = study(12, search_space=NUMBERS_AND_NAMES)
    current = optuna.create_study(direction="maximize")
    for batch_size in (16, 8, 32):
        current.enqueue_trial({"batch_size": batch_size, "pooling": "mean"})
        trial = current.ask()
        suggest(config.search_space, trial)
        current.tell(trial, 0.5)
    current.sampler = PrunedAwareSampler(shown := _Shown(seed=0))
    trial = current.ask()
    assert suggest(config.search_space, trial)["batch_size"] == 32
    assert [one.params["batch_size"] for one in shown.study.trials[:3]] == [1, 0, 2]
    assert {one.params["pooling"] for one in shown.study.trials[:3]} == {"mean"}
    assert trial.distributions["batch_size"] == optuna.distributions.CategoricalDistribution((16, 8, 32))


def test_several_objectives_with_infeasible_trials() -> None:
    for name in LEARNING:
        config = config_of(name)
        current = optuna.create_study(directions=["maximize", "minimize"])
        current.sampler = build_sampler(config.sampler, config.search_space)
        for _ in range(16):
            trial = current.ask()
            params = suggest(config.search_space, trial)
            if params["fp_precision"] == "fp16":
                end(current, trial, "nonfinite")
            else:
                current.tell(trial, (0.5, params["batch_size"]))
        assert sum(map(is_infeasible, current.trials)) <= MIN_INFEASIBLE_TRIALS


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
    space = {"batch_size": {"type": "categorical", "choices": [4, 8, 16]}}
    config = study(9, sampler={"name": name, "seed": 5}, search_space=space)
    current = opened(config)
    for batch_size in (16, 16, 16, 4, 8):
        current.enqueue_trial({"batch_size": batch_size})
        trial = current.ask()
        if suggest(config.search_space, trial)["batch_size"] == 16:
            limit_bytes = None if limit is None else limit * GIB
            end(current, trial, "oom", telemetry={"device": {"memory_limit_bytes": limit_bytes}})
        else:
            current.tell(trial, float(batch_size))
    device = WorkerDevice(memory_bytes=None if memory is None else memory * GIB)
    current.sampler = build_sampler(config.sampler, config.search_space, device=device)
    next_one = suggest(config.search_space, current.ask())["batch_size"]
    assert (next_one == 16) == expected  # 4 and 8 were had


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("num_complete", [0, 2])
def test_gp_is_shown_nothing_worse_than_what_cannot_work(direction: str, num_complete: int) -> None:
    sign = 1.0 if direction == "maximize" else -1.0
    current = optuna.create_study(direction=direction)
    for number in range(6):
        trial = current.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
        trial.report(sign * (5.0 - number), step=1)
        if number < num_complete:
            current.tell(trial, sign * 6.0)
        elif number < 5:
            current.tell(trial, state=TrialState.PRUNED)
        else:
            end(current, trial, "nonfinite")
    current.sampler = PrunedAwareSampler(shown := _Shown(seed=0))
    current.ask().suggest_float("x", 0, 1)
    *others, infeasible = [trial.values[0] for trial in shown.study.trials[:6]]
    assert infeasible == (min if direction == "maximize" else max)(others)


# Pruners


@pytest.mark.parametrize(
    ("pruner", "kind"),
    [
        ({"name": "hyperband", "max_resource": 9}, optuna.pruners.HyperbandPruner),
        ({"name": "asha", "reduction_factor": 2}, optuna.pruners.SuccessiveHalvingPruner),
        ({"name": "median", "n_startup_trials": 2}, optuna.pruners.MedianPruner),
        ({"name": "percentile"}, optuna.pruners.PercentilePruner),
        ({"name": "patient"}, optuna.pruners.PatientPruner),
        ({"name": "none"}, optuna.pruners.NopPruner),
    ],
)
def test_pruner(pruner: dict[str, Any], kind: type) -> None:
    assert type(build_pruner(study(1, pruner=pruner).pruner)) is kind
