"""Studies that end early when a better result has become improbable."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState, create_trial
from worker_process import die_at, evaluate, finish, note, notes, result, run_trials, start_process, study

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.report.spending import spending_told
from hpo.report.status import study_status
from hpo.study.claims.chance import chance_of_better
from hpo.study.claims.leases import Lease
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import best_trials
from hpo.study.running.worker import RunSummary, WorkerOptions, run_worker
from hpo.study.sampling.promotion import PAUSED_ATTR, RESUMED_ATTR, promotion_of
from hpo.study.store.schema import spent
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

NUM_TRIALS = 60


def plateau(params: dict[str, Any]) -> float:
    """All that the best third of the configurations gains over each other is nothing that matters."""
    return 0.9 + 1e-3 * params["learning_rate"] if params["batch_size"] == 32 else params["learning_rate"]


def spread(params: dict[str, Any]) -> float:
    return math.log(params["learning_rate"])


def work(url: str, config: StudyConfig, log: Path, kill_at: int = 0) -> RunSummary:
    """Be a worker; it dies when the outcome of its `kill_at`-th trial is stored."""
    promotion = promotion_of(config.pruner, config.directions, config.num_slots)
    die_at("outcome stored" if kill_at else "", kill_at)
    with open_storage(url) as storage:

        def train(trial: optuna.trial.Trial, lease: Lease) -> Any:
            params = suggest(config.search_space, trial)
            lease.store_params()
            resumed_at = trial.user_attrs.get(RESUMED_ATTR, 0.0)
            note(log, resumed_at=resumed_at, **params)
            evaluate(storage, trial, round(10 * resumed_at) + 1, plateau(params))
            if promotion and (rung := promotion.pauses_at(resumed_at + 0.2, resumed_at)):
                storage.persist(lambda: trial.set_user_attr(PAUSED_ATTR, rung))
                return result("pruned")
            return result("complete", values=(plateau(params),))

        return run_worker(config, storage, train, WorkerOptions(poll_seconds=0.02))


NONE = {"name": "none"}
ONE_RUNG = {"name": "promote", "starts": 0.2, "keep": 1, "reduction_factor": 3}


@pytest.mark.parametrize(
    ("kind", "stop", "pruner"),
    [
        pytest.param("postgres", 0.05, NONE, marks=pytest.mark.postgres),
        ("sqlite", None, NONE),
        ("sqlite", 0.4, ONE_RUNG),
    ],
)
def test_four_workers_of_which_one_is_killed(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, stop: float | None, pruner: dict[str, Any]
) -> None:
    """Those that have begun end, the best of them with a value, and each trains once."""
    storage_url = request.getfixturevalue(f"{kind}_url")
    log, config = tmp_path / "log", study(NUM_TRIALS, pruner=pruner, stop_when_unlikely=stop)
    with open_storage(storage_url) as storage:
        create_or_resume_study(storage, config)
    killed = start_process(work, storage_url, config, log, 3)
    finish(*(start_process(work, storage_url, config, log) for _ in range(3)))
    killed.join(60)
    assert killed.exitcode in (-signal.SIGKILL, 0)
    with open_storage(storage_url) as storage:
        record = read_study(storage, "tiny")
        told, status = spending_told(record), study_status(record)
    num_begun = sum(RESUMED_ATTR not in trial.attributes for trial in record.trials)
    assert len(notes(log)) == len(record.trials)
    assert num_begun == record.slots["done"] == sum(record.slots.values())
    (best,) = best_trials(record)
    assert plateau(best.params) == max(plateau(trial.params) for trial in record.trials)
    if stop is None:
        assert num_begun == NUM_TRIALS
        assert (told, status["ended_early"]) == ([], None)
    else:
        assert 9 <= num_begun < NUM_TRIALS
        chance = status["ended_early"]
        assert 0 <= chance <= stop
        assert told == [f"Ended early: a better result had become improbable (p = {chance:.2g})."]


def test_a_study_that_ended_early_goes_on_with_more_trials_alone(storage: Storage) -> None:
    def run(n_trials: int) -> int:
        config = study(n_trials, pruner=NONE, stop_when_unlikely=0.2)
        create_or_resume_study(storage, config)
        ended = run_trials(storage, config, lambda trial: result("complete", values=(spread(trial.params),)))
        assert ended.ended == "finished"
        record = read_study(storage, "tiny")
        assert record.ended_early is not None
        assert len(record.trials) == sum(record.slots.values())
        return len(record.trials)

    first = run(30)
    assert 20 <= first < 30
    assert run(30) == first, "it is as improbable as before"
    more = run(50)
    assert first < more < 50
    config = study(55, pruner=NONE)
    create_or_resume_study(storage, config)
    assert read_study(storage, "tiny").ended_early is None, "there are trials to come"
    run_trials(storage, config)
    record = read_study(storage, "tiny")
    assert (len(record.trials), record.ended_early) == (55, None)


def test_those_to_come_are_as_many_as_the_budget_is_enough_for(storage: Storage) -> None:
    """Nine tenths are spent, by a trial that is gone, so for one that has begun a ninth of one is to come."""
    config = study(1000, pruner=NONE, stop_when_unlikely=0.2, budget={"hours": 1000.0})
    create_or_resume_study(storage, config)
    with storage.engine.begin() as connection:
        gone = {"id": "1", "study": "tiny", "trial_number": 2000, "seconds": 900.0 * 3600}
        connection.execute(sa.insert(spent).values(gone))
    assert run_trials(storage, config).ended == "finished"
    record = read_study(storage, "tiny")
    assert len(record.trials) == 1
    assert record.ended_early == pytest.approx(0.1, abs=1e-4)


def ended(
    value: float | None, rung: float | None = None, resumed_at: float | None = None, limit: float = 0.0
) -> FrozenTrial:
    attrs = {"outcome": "complete", PAUSED_ATTR: rung, RESUMED_ATTR: resumed_at}
    if rung is not None or value is None:
        attrs["outcome"] = "pruned" if rung else "nonfinite"
    state = TrialState.PRUNED if rung or value is None else TrialState.COMPLETE
    return create_trial(
        state=state,
        value=value,
        user_attrs={key: value for key, value in attrs.items() if value is not None},
        system_attrs={"constraints": [limit]},
    )


CROWD = [*(1.0 + index / 10 for index in range(9)), *(5.0 + index for index in range(11))]
"""Of the losses 9 are near each other: 8 of them are 0.45 better than the ninth, and the best is 4.5 better
than the median, of which 5 % are half of that."""
CROWDED = math.exp(-0.5)


@pytest.mark.parametrize(
    ("trials", "chance"),
    [
        ([], 1.0),
        ([ended(loss) for loss in CROWD[:8]], 5 / 13),
        ([ended(None) for _ in CROWD], 5 / 25),
        ([ended(1.0) for _ in CROWD], 5 / 25),
        ([ended(loss) for loss in [1.0] * 9 + CROWD[9:]], 0.0),
        ([ended(loss) for loss in CROWD], 5 / 25 * CROWDED),
        ([ended(loss, rung=0.12) for loss in CROWD], 5 / 25),
        ([ended(loss, limit=1.0) for loss in CROWD], 5 / 25),
        (
            [ended(loss, rung=0.04) for loss in range(20)]
            + [ended(loss, rung=0.12, resumed_at=0.04) for loss in range(20)]
            + [ended(loss, rung=0.36, resumed_at=0.12) for loss in CROWD],
            5 / 25 * CROWDED,
        ),
        ([*(ended(loss) for loss in CROWD), create_trial(state=TrialState.FAIL)], 5 / 25 * CROWDED),
        ([*(ended(loss) for loss in CROWD), create_trial(state=TrialState.WAITING)], 1.0),
    ],
)
def test_the_chance(trials: list[FrozenTrial], chance: float) -> None:
    assert chance_of_better(trials, 1.0, 5) == pytest.approx(chance)
    mirrored = [
        create_trial(
            state=trial.state,
            value=None if trial.value is None else -trial.value,
            user_attrs=trial.user_attrs,
            system_attrs=trial.system_attrs,
        )
        for trial in trials
    ]
    assert chance_of_better(mirrored, -1.0, 5) == pytest.approx(chance)
