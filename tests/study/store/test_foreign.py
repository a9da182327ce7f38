"""Another program adds trials to a study of hpo. The trials of hpo ignore them."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial
from support.worker_process import begin, result, run_trials, study, worker_on

from hpo.config.search_space import suggest
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import best_trials
from hpo.study.store.lifecycle import has_complete
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

NAME = "learning_rate"
OUR_ATTRIBUTES = {
    "outcome": "complete",
    "outcome_reason": 3,
    "telemetry": "no document",
    "worker": None,
    "paused_at": "x",
    "resumed_at": [],
    "rungs": 7,
    "whole": "yes",
    "retry_of": 99,
    "active_seconds": "long",
}


def suggested(distribution: Any, value: Any, name: str = NAME) -> dict[str, Any]:
    return {"params": {name: value}, "distributions": {name: distribution}}


def add(**given: Any) -> Callable[[optuna.Study], None]:
    """Add a trial with the value 99, better than any trial of hpo."""
    return lambda opened: opened.add_trial(create_trial(**{"value": 99.0, **given}))


def optimize(opened: optuna.Study) -> None:
    def objective(trial: optuna.Trial) -> float:
        return 90.0 + trial.suggest_float(NAME, 0.0, 1.0) + trial.suggest_int("batch_size", 1, 4)

    opened.optimize(objective, n_trials=2)


FOREIGN = {
    "no logarithm": add(**suggested(FloatDistribution(1e-3, 1.0), 0.5)),
    "other choices": add(**suggested(CategoricalDistribution(["fp64"]), "fp64", "fp_precision")),
    "several values": lambda opened: opened._storage.create_new_trial(
        opened._study_id, create_trial(state=TrialState.COMPLETE, values=[99.0, 99.0])
    ),
    "our attributes": add(user_attrs=OUR_ATTRIBUTES),
    "strange constraints": add(system_attrs={"constraints": 3, "fixed_params": [], "constraints:x": "y"}),
    "values that are no numbers": add(intermediate_values={1: math.nan, 2: math.inf}),
    "running": add(state=TrialState.RUNNING, value=None, user_attrs=OUR_ATTRIBUTES),
    "optimized": optimize,
}


@pytest.fixture
def load(storage: Storage) -> Iterator[Callable[[], optuna.Study]]:
    """Load the study like a plain Optuna script."""
    opened: list[RDBStorage] = []

    def load_study() -> optuna.Study:
        opened.append(RDBStorage(storage.url))
        return optuna.load_study(study_name="tiny", storage=opened[-1])

    yield load_study
    for one in opened:
        one.remove_session()
        one.engine.dispose()


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [*(("gp", kind) for kind in FOREIGN), *((name, "optimized") for name in ("tpe", "nsga2", "grid"))],
)
def test_trials_ignore_foreign_trials(
    storage: Storage, load: Callable[[], optuna.Study], sampler: str, kind: str
) -> None:
    space = {"fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]}}
    if sampler != "grid":
        space[NAME] = {"type": "float", "low": 1e-5, "high": 1e-3, "log": True}
    config = study(3, search_space=space, sampler={"name": sampler})
    create_or_resume_study(storage, config)
    outside = load()
    foreign = FOREIGN[kind]
    foreign(outside)
    assert not storage.read(lambda connection: has_complete(connection, "tiny"))
    assert best_trials(read_study(storage, "tiny")) == []

    def run(trial: optuna.trial.Trial) -> Any:
        if trial.number == num_foreign:
            foreign(outside)  # also while the study runs
        return result("complete", values=(0.1,))

    num_foreign = len(outside.trials)
    assert run_trials(storage, config, run).outcomes == {"complete": 3}
    record = read_study(storage, "tiny")
    assert [trial.values for trial in record.trials] == [(0.1,)] * 3
    assert record.num_foreign == 2 * num_foreign
    assert record.counts == {"open": 0, "running": 0, "done": 3}
    assert best_trials(record)[0].values == (0.1,)
    assert storage.load_study("tiny").best_value == 0.1


@pytest.mark.parametrize(
    ("n_trials", "paused", "state"), [(1, False, TrialState.COMPLETE), (2, True, TrialState.FAIL)]
)
def test_trial_ended_by_another_program_counts_as_failed(
    storage: Storage, load: Callable[[], optuna.Study], n_trials: int, paused: bool, state: TrialState
) -> None:
    config = study(n_trials, pruner={"name": "promote"})
    with worker_on(storage, config) as worker:
        lease, trial = begin(worker)
        suggest(config.search_space, trial)
        if paused:
            lease.pause(0.1, [0.5])
            worker.record_outcome(lease, result("paused"))
        load().tell(trial.number, 99.0 if state == TrialState.COMPLETE else None, state)
        if n_trials == 1:
            assert (worker.claim(), worker.left) == (None, [])
        shown = worker._study.trials[0]
        assert (shown.state, shown.values) == (TrialState.FAIL, None), "samplers learn nothing from it"
    run_trials(storage, config)
    record = read_study(storage, "tiny")
    assert [trial.outcome for trial in record.trials] == ["failed", *["complete"] * (n_trials - 1)]
    assert record.trials[0].reason == "somebody ended it outside of hpo."
    assert [trial.number for trial in best_trials(record)] == [1] * (n_trials - 1)
    assert record.num_foreign == 0


def fixed(params: Any) -> dict[str, Any]:
    return {"system_attrs": {"fixed_params": params}}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (fixed([[NAME, 1e-4]]), "`fixed_params` must be a mapping"),
        *((fixed({NAME: value}), f"{NAME}=") for value in ([1], True, math.nan, 10**400)),
        (fixed({"fp_precision": ["fp32"]}), "fp_precision="),
        (suggested(FloatDistribution(0.0, 9.0), 5.0), f"{NAME}=5 is outside"),
        (suggested(CategoricalDistribution(["fp64"]), "fp64", "fp_precision"), "fp_precision=fp64 is none"),
        (suggested(FloatDistribution(0.0, 9.0), 5.0, "x"), "does not search `x`"),
    ],
)
def test_waiting_trial_with_wrong_values_is_refused(
    storage: Storage, given: dict[str, Any], why: str
) -> None:
    config = study(1, sampler={"name": "gp"}, pruner={"name": "promote"})
    waiting = create_trial(state=TrialState.WAITING, user_attrs=OUR_ATTRIBUTES, **given)
    create_or_resume_study(storage, config).add_trial(waiting)
    assert run_trials(storage, config).outcomes == {"complete": 1}
    refused, other = read_study(storage, "tiny").trials
    assert (refused.outcome, other.outcome) == ("failed", "complete")
    assert why in refused.reason
