"""When a trial pauses, by what it has evaluated so far, and where its first rung is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from support.command_line import hpo_command, ok
from support.tiny import CPU, tiny_executor, write_study
from support.worker_process import result, study

from hpo.config.limits import ENERGY
from hpo.config.study_config import StudyConfig
from hpo.errors import Paused
from hpo.outcome import Outcome
from hpo.study.checkpoints import keep_best
from hpo.study.checkpoints.keep_best import without_checkpoints
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import best_trials
from hpo.study.running.stopping import Stop
from hpo.study.running.trial_runner import TrialRunner, shared_from_within
from hpo.study.running.worker import run_worker
from hpo.study.sampling.promotion import PAUSED_ATTR, RESUMED_ATTR
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.trial.telemetry import ScoredEvaluation, TrialResult
from hpo.trial.trial_parts import fit_pruner


def scored(index: int, budget_used: float, values: tuple[float | None, ...], broken: str = "") -> Any:
    facts = {"budget_used": budget_used, "seconds": 1.0, "epoch": 1.0, "metrics": {}, "rates": {}}
    evaluation: Any = SimpleNamespace(step=index, index=index, **facts)
    return ScoredEvaluation(evaluation, values, broken)  # type: ignore[arg-type]


def executor_of(config: StudyConfig, folder: Path, run: Callable[..., Any]) -> Any:
    return SimpleNamespace(
        study=config,
        device=SimpleNamespace(device_id="cpu"),
        trial_folder=lambda _token, number: folder / str(number),
        run=run,
    )


@pytest.mark.parametrize(
    ("values", "broken", "paused_at"),
    [
        ([0.5, 0.6, 0.7], "", 0.2),
        ([0.5, None, 0.7], "", 0.2),
        ([0.5, float("nan"), float("inf")], "", None),
        ([0.5, 0.6], "a limit", None),  # which ends it at the second
    ],
)
def test_a_trial_pauses_where_it_has_a_value_to_be_ranked_by(
    storage: Storage, tmp_path: Path, values: list[float | None], broken: str, paused_at: int | None
) -> None:
    config = study(3, pruner={"name": "promote", "starts": 0.2})

    def run(_params: Any, _folder: Path, _key: str, callbacks: Any, **_: Any) -> Any:
        for index, value in enumerate(values, 1):
            try:
                callbacks.on_evaluation(scored(index, index / 10, (value,), broken))
            except Paused:
                return result("paused", telemetry={"device": {}})
        return result("pruned" if broken else "complete", telemetry={"device": {}})

    executor = executor_of(config, tmp_path, run)
    create_or_resume_study(storage, config)
    stop = Stop()
    first: list[Any] = []

    def run_first(trial: Any, lease: Any) -> Any:
        first.append(TrialRunner(executor, storage, stop)(trial, lease))
        stop.set("enough")
        return first[-1]

    run_worker(config, storage, run_first, stop=stop)
    [trial] = storage.load_study(config.name).trials
    assert trial.user_attrs.get(PAUSED_ATTR) == paused_at
    assert storage.trial_counts(config.name).get("paused", 0) == (paused_at is not None)


def test_paused_trials_of_several_objectives_are_ranked_by_fronts_with_a_cap(
    storage: Storage, tmp_path: Path
) -> None:
    """A batch size is the memory it takes. Every score is 1 better at the rung than at the end.

    No whole front continues: at least two trials, `keep` for each objective, the ends of the front first.
    """
    scores = dict(enumerate((0.1, 0.3, 0.2, 0.5, 0.4, 0.45, 0.9, 0.6, 0.8), 1))
    config = study(
        9,
        objective=[{"metric": "score"}, {"metric": "peak_memory_bytes", "direction": "minimize"}],
        sampler={"name": "grid"},
        search_space={"batch_size": {"type": "categorical", "choices": list(scores)}},
        pruner={"name": "promote", "starts": 0.2, "keep": 1},
    )
    done: dict[str, int] = {}

    def run(params: dict[str, Any], _folder: Path, key: str, callbacks: Any, **_: Any) -> Any:
        size = params["batch_size"]
        for index in range(done.get(key, 0) + 1, 6):
            done[key] = index
            values = (scores[size] + (index < 5), float(size))
            try:
                callbacks.on_evaluation(scored(index, index / 5, values))
            except Paused:
                return result("paused", telemetry={"device": {}})
        return result("complete", values=values, telemetry={"device": {}})

    executor = executor_of(config, tmp_path, run)
    create_or_resume_study(storage, config)
    run_worker(config, storage, TrialRunner(executor, storage, Stop()))
    record, stored = read_study(storage, config.name), storage.load_study(config.name)
    complete = {trial.params["batch_size"] for trial in record.trials if trial.outcome == "complete"}
    assert {1, 7} <= complete, "the ends of the front 7, 4, 2, 1"
    assert 2 <= len(complete) <= 4, "and those that were the best third of a rung before all had begun"
    for trial in stored.trials:
        size = trial.params["batch_size"]
        is_complete = trial.state.name == "COMPLETE"
        assert (trial.state.name, trial.values) == (
            "COMPLETE" if is_complete else "PRUNED",
            [scores[size] + (not is_complete), size],
        )
        paused_at, resumed_at = trial.user_attrs[PAUSED_ATTR], trial.user_attrs.get(RESUMED_ATTR, 0.0)
        assert (paused_at == resumed_at) == is_complete, "it ended where it paused"
    by_score = sorted(complete, key=lambda size: scores[size], reverse=True)
    front = [size for place, size in enumerate(by_score) if size <= min(by_score[: place + 1])]
    assert [trial.params["batch_size"] for trial in best_trials(record)] == front
    assert {trial.params["batch_size"] for trial in stored.best_trials} == {*front}
    ended = [keep_best._ended(trial) for trial in stored.trials]
    kept = {trial.number for trial in record.trials} - without_checkpoints(ended, config.directions, 4)
    assert {stored.trials[number].params["batch_size"] for number in kept} == {*front}
    assert record.counts == {"open": 0, "running": 0, "done": 9}


# The first rung suits the data: training to there takes at least as long as the evaluation

EPOCHS = {"epochs": 2, "batch_size": 8, "max_length": 64, "dropout": 0.0}
STUDY: dict[str, Any] = {"n_trials": 4, "training": EPOCHS, "pruner": {"name": "promote", "keep": 1}}
"""Of 48 rows to train on and 24 to evaluate: an evaluation is 24 / (3 * 96) of a trial, 1/12."""


def test_trials_pause_where_the_evaluation_is_paid_for(tmp_path: Path) -> None:
    """The plan says so, a file that gives no first rung keeps the stored one, and another has its own."""
    database = f"sqlite:///{tmp_path}/hpo.db"
    write_study(tmp_path, **STUDY)
    planned = ok(hpo_command(tmp_path, "plan", "tiny.yaml", "--json")).json
    assert [stage["end"] for stage in planned["stages"]] == [0.09, 0.27, 1.0]
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database))
    for changes, rungs in (
        ({"n_trials": 5}, {0.09, 0.27}),
        ({"n_trials": 6, "pruner": {"name": "promote", "keep": 1, "starts": 0.3}}, {0.09, 0.27, 0.3}),
    ):
        write_study(tmp_path, **STUDY | changes)
        ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database))
        with open_storage(database) as storage:
            trials = read_study(storage, "tiny").trials
        assert {trial.attributes.get("paused_at") for trial in trials} - {None} == rungs


def test_a_study_of_before_keeps_its_rungs(tmp_path: Path) -> None:
    """Its paused trials are at rungs that another first one would not have."""
    database = f"sqlite:///{tmp_path}/hpo.db"
    write_study(tmp_path, **STUDY)
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database, "--timeout", "0.001"))
    with open_storage(database) as storage, storage.engine.begin() as connection:
        row = sa.text("SELECT definition FROM hpo_studies")
        definition = json.loads(connection.execute(row).scalar_one())
        definition["pruner"]["starts"] = None
        definition["given"].remove("pruner")
        change = sa.text("UPDATE hpo_studies SET definition = :definition")
        connection.execute(change, {"definition": json.dumps(definition)})
    ok(hpo_command(tmp_path, "run", "tiny.yaml", "--storage", database))
    with open_storage(database) as storage:
        trials = read_study(storage, "tiny").trials
    paused_at = {trial.attributes.get("paused_at") for trial in trials}
    assert paused_at - {None} == {0.12, 0.36}, "four trials of nine would go on from 0.04: none pauses there"


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"training": EPOCHS | {"epochs": 20}}, None),  # an evaluation is 1/120
        ({"training": EPOCHS | {"epochs": 0.1}}, 0.5),  # it takes longer than the training
        ({"training": {"max_steps": 4, "batch_size": 8}}, None),  # whose rows depend on the batch
        ({"training": {"batch_size": 8}}, 0.06),  # 3 epochs
    ],
)
def test_the_first_rung(tmp_path: Path, changes: dict[str, Any], starts: float | None) -> None:
    executor = tiny_executor(tmp_path, CPU, **STUDY | changes)
    fitted, _ = fit_pruner(executor.study, executor.dataset)
    assert fitted.pruner.starts == starts


@pytest.mark.parametrize(
    ("named", "outcome", "values"), [((), "complete", (0.5,)), ((ENERGY,), "failed", None)]
)
def test_energy_is_unknown_when_another_worker_joins_the_gpu(
    named: tuple[str, ...], outcome: str, values: tuple[float, ...] | None
) -> None:
    telemetry = {"device": {"shared": False}, "throughput": {ENERGY: 2.0, "step_seconds_p50": 1.0}}
    before = TrialResult(Outcome.COMPLETE, "", (0.5,), {ENERGY: 2.0, "worker": "a"}, telemetry)
    after = shared_from_within(before, named)
    assert (after.outcome, after.values, after.headline) == (outcome, values, {"worker": "a"})
    assert after.telemetry["device"]["shared"]
    assert after.telemetry["throughput"] == {ENERGY: None, "step_seconds_p50": 1.0}
    assert "another worker joined this GPU" in after.telemetry["energy_missing"]
    assert ("Run one worker on each GPU" in after.reason) == bool(named)
