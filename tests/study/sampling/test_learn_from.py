from __future__ import annotations

import logging
import math
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from scripted_study import Params, ScriptedStudy, best_at_1e_4
from worker_process import SPACE, result, run_trials, study

from hpo.device import DeviceInfo
from hpo.errors import StudyFileError
from hpo.study.reading.reader import read_study
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.sampling.learn_from import (
    MAX_SHOWN,
    MIN_COMPARED,
    OTHER_DATA,
    OTHER_DEVICE,
    OTHER_ENCODER,
    OTHER_METRIC,
    PriorSampler,
    earlier_trials,
    likeness,
    ranked,
)
from hpo.study.store.lifecycle import delete_study
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

SAMPLER = {"name": "tpe", "seed": 7}
PRIOR = "learnt from earlier"


def best_at_1e_5(params: Params) -> float:
    return -abs(math.log10(params["learning_rate"]) + 5.0)


def searched(script: Any = best_at_1e_4, n_trials: int = 30, **changes: Any) -> ScriptedStudy:
    current = ScriptedStudy(study(1, sampler={"name": "random"}, **changes), script)
    current.run(n_trials)
    return current


def knowing(
    earlier: ScriptedStudy, script: Any = best_at_1e_4, weight: float = 1.0, **sampler: Any
) -> ScriptedStudy:
    config = study(1, sampler=SAMPLER | sampler)
    current = ScriptedStudy(config, script)
    trials = earlier_trials(earlier.study, config.search_space, seed=0)
    current.study.sampler.wrap_innermost(lambda inner: PriorSampler(inner, trials, PRIOR, weight))  # type: ignore[attr-defined]
    return current


def with_prior(current: ScriptedStudy) -> list[FrozenTrial]:
    return [trial for trial in current.trials if trial.user_attrs.get("source") == PRIOR]


def distance(trials: list[FrozenTrial]) -> float:
    """Mean distance of the learning rates from 1e-4, in decades."""
    return sum(abs(math.log10(trial.params["learning_rate"]) + 4) for trial in trials) / len(trials)


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_every_second_trial_begins_where_the_earlier_study_was_good(name: str) -> None:
    earlier, drawn, others = searched(), [], []
    for seed in range(6):
        current = knowing(earlier, name=name, seed=seed)
        current.run(5)
        drawn += with_prior(current)
        others += [trial for trial in current.trials if not trial.user_attrs]
    assert (len(drawn), len(others)) == (3 * 6, 2 * 6)
    assert distance(drawn) < 0.6 * distance(others)


@pytest.mark.parametrize(("weight", "numbers"), [(1.0, [0, 2, 4, 6]), (0.5, [0, 4]), (0.2, [0])])
def test_a_study_that_is_less_alike_is_asked_less(weight: float, numbers: list[int]) -> None:
    current = knowing(searched(), weight=weight)
    for outcome in ("failed", *[0.5] * 7):
        current.end(current.ask()[0], outcome)
    # Trial 0 does not count: it FAILed.
    after_failed = [number + 1 for number in numbers if number + 1 < 8]
    assert [trial.number for trial in with_prior(current)] == [0, *after_failed], (
        "a FAILed one does not count"
    )


def test_a_prior_that_misleads_is_left_when_it_is_known() -> None:
    """The study is the earlier one turned upside down: what it thinks best is worst."""
    for seed in range(5):
        current = knowing(searched(best_at_1e_5), lambda params: -best_at_1e_5(params), seed=seed)
        current.run(30)
        drawn = [trial.number for trial in with_prior(current)]
        assert len(drawn) <= 2 * MIN_COMPARED
        assert max(drawn) < 15


def test_only_the_ranks_of_the_earlier_study_count() -> None:
    scripts = {
        "values": (best_at_1e_4, "maximize"),
        "other values": (lambda params: math.exp(9 * best_at_1e_4(params)) - 1e6, "maximize"),
        "losses": (lambda params: -best_at_1e_4(params), "minimize"),
    }
    drawn = {}
    for name, (script, direction) in scripts.items():
        current = knowing(searched(script, objective={"metric": "a/accuracy", "direction": direction}))
        drawn[name] = current.run(8)
    assert drawn["values"] == drawn["other values"] == drawn["losses"]
    assert drawn["values"] != knowing(searched(best_at_1e_5)).run(8)


def test_earlier_trials_are_ranked_by_how_far_they_came() -> None:
    earlier = optuna.create_study(direction="maximize")
    for number, (state, reports) in enumerate(
        [
            ("PRUNED", {1: 0.9}),
            ("COMPLETE", {}),
            ("PRUNED", {1: 0.1, 2: 0.2}),
            ("FAIL", {1: 1.0}),
            ("PRUNED", {}),
        ]
    ):
        trial = earlier.ask()
        trial.suggest_float("learning_rate", 1e-5, 1e-3)
        for step, value in reports.items():
            trial.report(value, step)
        if number == 4:
            trial.set_constraint("feasible", 1.0)
        earlier.tell(trial, 0.0 if state == "COMPLETE" else None, TrialState[state])
    origin = earlier.ask()
    origin.set_user_attr("origin", 0)
    origin.suggest_float("learning_rate", 1e-5, 1e-3)
    earlier.tell(origin, 0.5)
    assert [trial.number for trial in ranked(earlier.trials, earlier.direction)] == [5, 1, 2, 0]
    space = study(1).search_space
    shown = earlier_trials(earlier, space, seed=0)
    rates = [trial.params["learning_rate"] for trial in shown]
    assert rates == [earlier.trials[number].params["learning_rate"] for number in (5, 1, 2)], "0 went on as 5"
    assert all(trial.params.keys() == space.keys() for trial in shown), "what was not searched is drawn"


def test_what_does_not_fit_is_left_out_and_many_are_thinned() -> None:
    current = searched(n_trials=3 * MAX_SHOWN)
    narrow = SPACE | {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}}
    shown = earlier_trials(current.study, study(1, search_space=narrow).search_space, seed=0)
    assert len(shown) <= MAX_SHOWN
    assert min(trial.params["learning_rate"] for trial in shown) >= 1e-4
    best = ranked(current.trials, current.study.direction)
    fits = next(trial for trial in best if trial.params["learning_rate"] >= 1e-4)
    assert shown[0].params == fits.params
    assert earlier_trials(searched(n_trials=0).study, study(1).search_space, seed=0) == []


@pytest.mark.parametrize(
    ("changes", "same", "weight"),
    [
        ({}, {}, 1.0),
        ({"model": {"encoder": "org/other"}}, {}, OTHER_ENCODER),
        ({"training": {"encoder": "org/other"}}, {"same_data": False}, OTHER_ENCODER * OTHER_DATA),
        ({"objective": {"metric": "a/f1_macro"}}, {"same_device": False}, OTHER_METRIC * OTHER_DEVICE),
        ({"objective": {"metric": "train_tokens_per_second"}}, {}, 0.0),
    ],
)
def test_how_alike_two_studies_are(changes: dict[str, Any], same: dict[str, bool], weight: float) -> None:
    same = {"same_data": True, "same_device": True} | same
    assert likeness(study(**changes).definition(), study().definition(), **same) == pytest.approx(weight)


def test_speed_on_another_device_says_nothing() -> None:
    speed = study(objective={"metric": "train_tokens_per_second"}).definition()
    assert likeness(speed, speed, same_data=True, same_device=False) == 0.0


def earlier_in(storage: Storage) -> None:
    facts = {"device": {"type": "cpu", "name": "test CPU", "torch_version": "2"}}
    run_trials(
        storage,
        study(20, name="earlier"),
        lambda trial: result("complete", values=(best_at_1e_4(trial.params),), telemetry=facts),
    )


def test_a_study_learns_from_another_and_stores_none_of_its_trials(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    earlier_in(storage)
    caplog.set_level(logging.INFO, "hpo")
    config = study(10, sampler=SAMPLER, portfolio=False, learn_from="earlier")
    create_or_resume_study(storage, config)
    kind = DeviceInfo(type="cpu", name="test CPU", torch_version="2").kind
    device = WorkerDevice(kind=kind, left_out={"bf16": "it cannot"})

    def end(trial: optuna.Trial) -> Any:
        return result("complete", values=(best_at_1e_4(trial.params),))

    run_trials(storage, config, end, device=device)
    assert "trials of `earlier`, weight 1.00" in caplog.text
    record = read_study(storage, "tiny")
    assert record.slots["done"] == len(record.trials) == 10
    assert "bf16" not in {trial.params["fp_precision"] for trial in record.trials}
    assert 1 <= sum(trial.attributes.get("source") == PRIOR for trial in record.trials) <= 5


def test_an_earlier_study_that_is_not_there(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    config = study(2, sampler=SAMPLER, learn_from="earlier")
    with pytest.raises(StudyFileError, match=r"study.yaml: learn_from: There is no study `earlier`"):
        create_or_resume_study(storage, config)
    earlier_in(storage)
    create_or_resume_study(storage, config)
    delete_study(storage, "earlier")
    run_trials(storage, config)  # a worker has not made the study
    assert "learn_from: the study `earlier` is gone" in caplog.text
    assert storage.slot_counts("tiny")["done"] == 2
    with pytest.raises(StudyFileError, match="learn_from: There is no study `earlier`"):
        create_or_resume_study(storage, config)
    create_or_resume_study(storage, study(2, sampler=SAMPLER))


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": {"name": "random"}},
        {"sampler": {"name": "nsga2"}},
        {"learn_from": "tiny"},
        {"objective": [{"metric": "score"}, {"metric": "train_tokens_per_second"}]},
    ],
    ids=str,
)
def test_it_is_refused_where_nothing_learns(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="learn_from\n  must be"):
        study(2, **{"sampler": SAMPLER, "learn_from": "earlier", **changes})
