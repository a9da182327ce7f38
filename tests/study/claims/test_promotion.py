"""Trials that pause after a short start: the best continue, although workers die."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from support.worker_process import (
    KILL_POINTS,
    die_at,
    evaluate,
    finish,
    make_and_run,
    note,
    notes,
    result,
    run_until_killed,
    start_process,
    study,
    worker_on,
)

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.report.status import study_status
from hpo.study.claims.leases import Lease, WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import RunSummary
from hpo.study.running.worker import WorkerOptions
from hpo.study.sampling.points import grid_points
from hpo.study.sampling.promotion import RESUMED_ATTR, promotion_of
from hpo.study.store.storage import Storage, open_storage

SPACE = {"batch_size": {"type": "categorical", "choices": list(range(1, 9))}}
PRUNER = {"name": "promote", "starts": 0.05, "keep": 2, "reduction_factor": 9}
"""Its rungs are at 0.05 and 0.45. All eight trials continue from the first, after all have begun."""
CONFIG = study(8, sampler={"name": "grid"}, search_space=SPACE, pruner=PRUNER)


PROMOTION = promotion_of(CONFIG.pruner, CONFIG.directions, 1000)
assert PROMOTION is not None
AT_ONCE = study(8, sampler={"name": "grid"}, search_space=SPACE, pruner={**PRUNER, "reduction_factor": 2})
"""Half of the first rung continue at once, and all of the second: 0.45 is no rung of it."""


NUM_EVALUATIONS = 4  # a trial pauses after the first and the second


def value(params: dict[str, Any], index: int) -> float:
    """Return the score of an evaluation; it grows with the batch size."""
    return params["batch_size"] / 100 + index / 1000


def train(storage: Storage, log: Path, trial: optuna.trial.Trial, lease: Lease) -> Any:
    """Run a trial with pauses at its rungs."""
    params = suggest(CONFIG.search_space, trial)
    lease.store_params()
    resumed_at = trial.user_attrs.get(RESUMED_ATTR, 0.0)
    for index in range(math.ceil(NUM_EVALUATIONS * resumed_at) + 1, NUM_EVALUATIONS + 1):
        evaluate(storage, trial, index, value(params, index), step=10 * index)
        note(log, number=trial.number, index=index, **params)
        if rung := PROMOTION.pauses_at(index / NUM_EVALUATIONS, resumed_at):
            lease.pause(rung, [value(params, index)])
            return result("paused")
    return result("complete", values=(value(params, NUM_EVALUATIONS),))


def work(url: str, log: Path, kill: str = "", kill_at: int = 1) -> RunSummary:
    """Be a worker of `CONFIG`, and die at the `kill_at`-th `kill`."""
    die_at(kill, kill_at)
    with open_storage(url) as storage:

        def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
            return train(storage, log, trial, lease)

        return make_and_run(CONFIG, storage, execute, WorkerOptions(poll_seconds=0.02))


def check(storage: Storage, *, side_by_side: bool = False) -> None:
    """Check that each configuration is one trial, and batch sizes 7 and 8 are complete.

    With `side_by_side`, others may have paused before these, and are complete too.
    """
    record = read_study(storage, CONFIG.name)
    assert record.counts == {"open": 0, "running": 0, "done": 8}
    assert sorted(trial.params["batch_size"] for trial in record.trials) == list(range(1, 9))
    for trial in record.trials:
        assert trial.state == ("COMPLETE" if trial.outcome == "complete" else "PRUNED")
        assert [*trial.attributes["rungs"]] == ["0.05", "0.45"][: len(trial.attributes["rungs"])]
        num_evaluations = {0.0: 1, 0.05: 2, 0.45: NUM_EVALUATIONS}[trial.attributes.get(RESUMED_ATTR, 0.0)]
        steps = [10 * index for index in range(1, num_evaluations + 1)]
        assert [row.step for row in trial.evaluations] == steps
        reports = storage.load_study(CONFIG.name).trials[trial.number].intermediate_values
        assert reports == {step // 10: value(trial.params, step // 10) for step in steps}
    complete = {trial.params["batch_size"] for trial in record.trials if trial.outcome == "complete"}
    assert complete >= {7, 8} if side_by_side else complete == {7, 8}


def test_concurrent_workers_promote_the_same_trials(storage_url: str, tmp_path: Path) -> None:
    finish(*(start_process(work, storage_url, tmp_path / "log") for _ in range(8)))
    with open_storage(storage_url) as storage:
        check(storage, side_by_side=True)


RARE = {"trial made": (2, 7), "half of the outcome": (1, 2), "trial ended": (1, 2)}
"""Rare points. Each start and each promotion passes the others."""


def kills() -> Iterator[Any]:
    """Yield the kills: all with SQLite, and the most dangerous ones with PostgreSQL."""
    for point in ("pause noted", *KILL_POINTS):
        for kill_at in RARE.get(point, (2, 9)):
            if point not in ("training", "half suggested"):
                yield pytest.param("sqlite", point, kill_at)
            if kill_at != 2 and point in ("trial made", "half of the outcome", "pause noted"):
                yield pytest.param("postgres", point, kill_at, marks=pytest.mark.postgres)


@pytest.mark.parametrize(("kind", "point", "kill_at"), list(kills()))
def test_kill_at_any_point_loses_no_trial(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, point: str, kill_at: int
) -> None:
    """The 2nd time is in a start, the 9th in a continued trial or its claim."""
    storage_url, log = request.getfixturevalue(f"{kind}_url"), tmp_path / "log"
    run_until_killed(work, storage_url, log, point, kill_at)
    work(storage_url, log)
    with open_storage(storage_url) as storage:
        check(storage)
    done = Counter((line["batch_size"], line["index"]) for line in notes(log))
    again = sum(count - 1 for count in done.values())
    assert again <= 2, "only the killed trial, without a checkpoint here"


def promoting(storage: Storage, config: StudyConfig = CONFIG, **options: Any) -> WorkerLease:
    promotion = promotion_of(config.pruner, config.directions, config.num_trials)
    points = grid_points(config.search_space, config.sampler.seed)
    return worker_on(storage, config, promotion=promotion, read_points=lambda: points, **options)


def test_trial_continues_on_the_machine_with_its_checkpoint(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """Each machine has its own folder of checkpoints. The second one leaves early."""
    steps = []  # of the checkpoints of continued trials
    first, second = (promoting(storage, AT_ONCE, shares_checkpoints=False) for _ in range(2))
    first.host, second.host = "first", "second"
    with first:
        with second:
            for worker in (first, second) * 5:
                if (lease := worker.claim()) is None:
                    continue
                if RESUMED_ATTR in lease.trial.user_attrs:
                    steps.append(lease.saved_step)
                run = train(storage, Path(os.devnull), lease.trial, lease)
                lease.saved_step = 10
                worker.record_outcome(lease, run)
        assert steps == [10] * 4
        assert len([said for said in caplog.messages if "`checkpoint.location`" in said]) == 2, "once each"
        while lease := first.claim():
            steps.append(lease.saved_step)
            run = train(storage, Path(os.devnull), lease.trial, lease)
            first.record_outcome(lease, run)
    assert storage.is_finished(CONFIG.name)
    assert set(steps[3:]) == {0, 10}, "the other machine is gone"


@pytest.mark.parametrize(
    ("baseline", "rungs"), [({"score": 0.5}, (0.45,)), ({"score": 0.4}, (0.05, 0.45)), ({}, (0.05, 0.45))]
)
def test_trials_of_a_rung_without_a_ranking_continue(
    storage: Storage, baseline: dict[str, float], rungs: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="hpo"), promoting(storage) as worker:
        for _ in range(5):
            lease = worker.claim()
            assert lease is not None
            lease.pause(0.05, [0.5])
            worker.record_outcome(lease, result("paused", telemetry={"baseline": baseline}))
        lease = worker.claim()
        assert lease is not None
        assert lease.promotion is not None
        assert (lease.promotion.rungs, lease.number) == (rungs, 0 if len(rungs) == 1 else 5)
    text = "At 5% of their training, 5 of 5 trials are no better than the best constant prediction"
    assert (text in caplog.text) == (len(rungs) == 1)
    numbers = study_status(read_study(storage, CONFIG.name))
    assert numbers["left_out_rungs"].startswith(text) == (len(rungs) == 1)
