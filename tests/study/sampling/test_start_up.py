"""The first trials of a study try each value of the settings that change the cost of a trial."""

from collections import Counter
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from support.worker_process import SPACE, begin, run_trials, study, worker_on

from hpo.config.limits import FEASIBLE
from hpo.outcome import Outcome
from hpo.study.reading.reader import read_study
from hpo.study.sampling.device_sampler import ANY_DEVICE, WorkerDevice
from hpo.study.sampling.start_up import StartUp, start_up
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

CHOICES: dict[str, list[Any]] = {
    "fp_precision": ["fp32", "bf16", "fp16"],
    "attention": ["sdpa", "eager", "flash"],
    "optimizer_state": ["fp32", "bf16"],
    "adapter": ["none", "lora"],
    "base_precision": ["fp32", "int8"],
}
SAMPLERS = ("tpe", "gp", "nsga2", "random", "qmc")


def start_of(*names: str, sampler: str = "tpe", device: WorkerDevice = ANY_DEVICE, **when: Any) -> StartUp:
    space: dict[str, Any] = {name: {"type": "categorical", "choices": CHOICES[name]} for name in names}
    for name, condition in when.items():
        space[name]["when"] = condition
    return start_up(study(sampler={"name": sampler}, search_space=space | {"pooling": POOLING}), device)


POOLING = {"type": "categorical", "choices": ["cls", "mean"]}


def ended(outcome: str = "complete", telemetry: Any = None, **params: Any) -> FrozenTrial:
    state = TrialState[Outcome(outcome).optuna_state]
    trial = create_trial(
        state=state,
        value=0.5 if state == TrialState.COMPLETE else None,
        params=params,
        distributions={name: CategoricalDistribution(CHOICES[name]) for name in params},
        user_attrs={"outcome": outcome, "telemetry": telemetry or {}},
    )
    if Outcome(outcome).infeasible:
        trial.set_constraint(FEASIBLE, 1.0)
    return trial


def drawn(start: StartUp, number: int, trials: list[FrozenTrial] | None = None) -> list[dict[str, Any]]:
    """The values of the next complete trials."""
    trials, values = trials or [], list[dict[str, Any]]()
    for _ in range(number):
        values.append(start.values(trials, {}))
        trials.append(ended(**values[-1]))
    return values


def test_small_studies_try_each_precision_with_each_sampler(storage: Storage) -> None:
    for sampler in SAMPLERS:
        for n_trials, most in ((2, 2), (3, 1), (8, 3)):
            space = {
                **SPACE,
                "fp_precision": {"type": "categorical", "choices": CHOICES["fp_precision"][:n_trials]},
            }
            config = study(
                n_trials, name=f"{sampler}-{n_trials}", sampler={"name": sampler}, search_space=space
            )
            run_trials(storage, config)
            record = read_study(storage, config.name)
            tried = Counter(trial.params["fp_precision"] for trial in record.trials)
            assert len(tried) == min(n_trials, 3), (sampler, n_trials)
            assert sampler == "tpe" or max(tried.values()) <= most


def test_two_settings_do_not_always_change_together() -> None:
    values = drawn(start_of("fp_precision", "attention", device=WorkerDevice("cpu")), 4)
    assert {(one["fp_precision"], one["attention"]) for one in values[:2]} == {
        ("fp32", "sdpa"),
        ("bf16", "eager"),
    }
    assert len({tuple(one.values()) for one in values}) == 4
    assert {one["attention"] for one in values} == {"sdpa", "eager"}, "a CPU has no flash attention"


def test_settings_follow_their_conditions() -> None:
    start = start_of("adapter", "base_precision", base_precision={"adapter": "lora"})
    values = drawn(start, 3)
    assert [one.get("base_precision") for one in values if one["adapter"] == "lora"][:2] == ["fp32", "int8"]
    assert all("base_precision" not in one for one in values if one["adapter"] == "none")
    assert start.values([], {"adapter": "none"}) == {}


def test_a_device_tries_only_what_it_runs() -> None:
    start = start_of("fp_precision", device=WorkerDevice(left_out={"fp16": "no support"}))
    assert {one["fp_precision"] for one in drawn(start, 5)} == {"fp32", "bf16"}


COMPLETE = [ended(fp_precision="fp32"), ended(fp_precision="fp16")]
CHECKED = {"compatibility": {"verdict": "incompatible"}, "precision": {"effective": "bf16"}}


@pytest.mark.parametrize(
    ("trials", "is_tried"),
    [
        ([("failed", {})], False),
        ([("oom", {})], False),
        ([("invalid", {})], False),
        ([("crashed", {})] * 3, True),
        ([("pruned", {})], False),
        ([("nonfinite", {"finite_in_fp32": False})], False),
        ([("nonfinite", {"finite_in_fp32": True})], True),
        ([("incompatible", CHECKED)], True),
        ([("incompatible", {"precision": {"effective": "bf16"}})], False),
    ],
)
def test_a_trial_that_ended_early_by_another_cause_tries_nothing(trials: Any, is_tried: bool) -> None:
    earlier = [*COMPLETE * 5, *(ended(*one, fp_precision="bf16") for one in trials)]
    values = start_of("fp_precision", sampler="random").values(earlier, {})
    assert values == ({} if is_tried else {"fp_precision": "bf16"})
    at_start = start_of("fp_precision").values([*COMPLETE, *earlier[10:]], {})
    assert (at_start.get("fp_precision") != "bf16") == is_tried, "what cannot work is not tried again"


def test_parallel_workers_and_enqueued_trials_share_the_start(storage: Storage) -> None:
    config = study(6, sampler={"name": "tpe"}, first=[{"learning_rate": 1e-4}])
    start = lambda: start_up(config, ANY_DEVICE)  # noqa: E731
    with open_storage(storage.url) as other:
        first, second = (worker_on(one, config, start_values=start().values) for one in (storage, other))
        with first, second:
            seen = second._watch.read(second.id, second.runnable, None)
            begin(first)
            assert second._claim(lambda it: second._begin(it, seen, None)) is None, "it has seen too little"
            begin(second)
        fixed = [trial.system_attrs["fixed_params"] for trial in storage.load_study("tiny").trials]
    assert [one["fp_precision"] for one in fixed] == ["fp32", "bf16"]
    assert fixed[0]["learning_rate"] == 1e-4


def test_a_resumed_study_tries_a_missing_precision_first(storage: Storage) -> None:
    first = [{"fp_precision": "fp32"}] * 12
    for n_trials in (12, 14):
        create_or_resume_study(storage, study(n_trials, first=first))
        run_trials(storage, study(n_trials, first=first))
    assert {trial.params["fp_precision"] for trial in read_study(storage, "tiny").trials[12:]} == {
        "bf16",
        "fp16",
    }
