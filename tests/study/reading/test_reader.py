"""A study as it looks from outside, while its trials begin and end."""

import io
import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import optuna
import pytest
import sqlalchemy as sa
from support.detailed_documents import document, error, task_document
from support.labelled_rows import rows_of
from support.worker_process import begin, change_worker, evaluate, result, run_trials, study, worker_on

from hpo.errors import RunError, StorageError
from hpo.study.reading.detailed_evaluations import (
    _of_task,
    _packed,
    _warn_once,
    read_row_statistics,
    store_detailed_evaluation,
)
from hpo.study.reading.overview import StudyOverview, list_studies
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import with_evaluation
from hpo.study.reading.watch import StudyProgress, StudyWatch, outcome_of, watching
from hpo.study.sampling.promotion import promotion_of
from hpo.study.store.lifecycle import set_state
from hpo.study.store.optuna_internals import params, user_attributes
from hpo.study.store.schema import detailed_evaluations, evaluations, row_statistics, studies
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import read_stored
from hpo.tasks.kind import Task
from hpo.training.metrics import row_statistics as row_statistics_of


@pytest.mark.parametrize("table", ["trial_values", "hpo_workers"])
def test_a_meanwhile_ended_trial_is_read_before_or_after(storage: Storage, table: str) -> None:
    with worker_on(storage, study(2)) as worker, open_storage(storage.url) as reader:
        lease, _ = begin(worker)
        ended = []

        def end_trial(*args: Any) -> None:
            if f"FROM {table}" in args[2].replace("\n", " ") and not ended:
                ended.append(True)
                worker.record_outcome(lease, result("complete"))

        for when in ("before_cursor_execute", "after_cursor_execute"):
            sa.event.listen(reader.engine, when, end_trial)
        record = read_study(reader, "tiny")
        assert ended
        seen = record.trials[0]
        assert (seen.state, seen.outcome, seen.values, record.counts["done"]) in [
            ("RUNNING", "running", None, 0),
            ("COMPLETE", "complete", (0.5,), 1),
        ]
        assert read_study(reader, "tiny").trials[0].values == (0.5,)


def listed(storage: Storage) -> dict[str, StudyOverview]:
    return {overview.name: overview for overview in list_studies(storage)}


def test_both_views_count_trials_and_live_workers(storage: Storage) -> None:
    run_trials(storage, study(2, name="up"))
    run_trials(storage, study(2, name="down"))
    config = study(6, name="begun", pruner={"name": "promote"})
    with ExitStack() as stack:
        alive, idle, dead, paused = (stack.enter_context(worker_on(storage, config)) for _ in range(4))
        leases = [begin(worker)[0] for worker in (alive, idle, dead, paused)]
        idle.release(leases[1])
        leases[3].pause(0.1, [0.5])  # its worker dies before it gives up the trial
        for worker in (dead, paused):
            change_worker(storage, worker, process_start="1")
        overviews, record = listed(storage), read_study(storage, "begun")
    assert list(overviews) == ["up", "down", "begun"]
    assert (overviews["up"].state, overviews["up"].workers) == ("done", 0)
    begun = overviews["begun"]
    assert record.counts == {"open": 4, "running": 1, "done": 0, "paused": 1}
    assert begun.trials == {**record.counts, "total": 6}
    assert [trial.outcome for trial in record.trials] == ["running", "preempted", "preempted", "paused"]
    assert (begun.state, begun.workers) == ("open", 2)
    assert begun.created <= begun.now
    set_state(storage, "begun", "paused")
    optuna.delete_study(study_name="up", storage=storage.optuna)
    assert {name: one.state for name, one in listed(storage).items()} == {"down": "done", "begun": "paused"}


@pytest.mark.parametrize("read", [list_studies, lambda storage: read_study(storage, "s0")])
def test_the_number_of_queries_is_constant(storage: Storage, read: Callable[[Storage], object]) -> None:
    statements: list[str] = []
    sa.event.listen(storage.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    counts = []
    for number in range(3):
        run_trials(storage, study(2 * number + 1, name="s0"))
        run_trials(storage, study(2, name=f"s{number}"))
        statements.clear()
        read(storage)
        counts.append(len(statements))
    assert counts == [counts[0]] * 3


DOCUMENT = document({"a b": task_document("regression", {}, worst=[error("1", "\0 ☃", 1.0, 2.0)])})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({**DOCUMENT, "version": 99}), "must have the version 2, but "),
        (json.dumps({**DOCUMENT, "tasks": None}), "this is no whole detailed evaluation: tasks: "),
        (json.dumps(DOCUMENT)[:-9], "this is no JSON: "),
    ],
    ids=["another version", "damaged", "cut"],
)
def test_an_unreadable_document_is_left_out_with_a_warning(
    storage: Storage, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    _warn_once.cache_clear()
    run_trials(storage, study(2))
    token = storage.study_token("tiny")
    for split in ("test", "validation"):
        store_detailed_evaluation(storage, "tiny", token, 1, document({}, split=split))
    damage = sa.update(detailed_evaluations).where(detailed_evaluations.c.split == "test")
    storage.write(lambda it: it.execute(damage.values(document=text)))
    record = read_study(storage, "tiny")
    assert [list(trial.detailed) for trial in record.trials] == [[], ["validation"]]
    assert read_study(storage, "tiny").trials == record.trials
    (warning,) = [each.message for each in caplog.records]
    assert warning.startswith("The detailed evaluation of trial 1 on test of tiny is left out: ")
    assert why in warning
    store_detailed_evaluation(storage, "tiny", token, 1, DOCUMENT)
    assert read_study(storage, "tiny").trials == with_evaluation(record, 1, DOCUMENT).trials


def numbers(progress: StudyProgress) -> tuple[list[tuple[int, list[float]]], list[int]]:
    """The running trials by number with their last value, and the numbers of the ended ones."""
    running = [(trial.number, list(trial.intermediate_values.values())[-1:]) for trial, _ in progress.running]
    return running, [trial.number for trial in progress.ended]


def test_a_trial_is_reported_at_each_pause_and_at_its_end(storage: Storage) -> None:
    config = study(1, pruner={"name": "promote", "starts": 0.1, "keep": 1, "reduction_factor": 2})
    promotion = promotion_of(config.pruner, config.directions, 1)
    with worker_on(storage, config, promotion=promotion) as worker:
        watch = StudyWatch(storage, config)
        for rung in (0.1, 0.2):
            lease, _ = begin(worker)
            assert numbers(watch.read()) == ([(0, [])], [])
            lease.pause(rung, [0.5])
            assert numbers(watch.read()) == ([(0, [])], []), "its worker writes the checkpoint"
            worker.record_outcome(lease, result("paused"))
            paused = watch.read()
            assert (numbers(paused), paused.num_done) == (([], [0]), 0)
            assert outcome_of(paused.ended[0]) == "paused"
            assert numbers(watch.read()) == ([], [])
        worker.record_outcome(begin(worker)[0], result("complete"))
    last = watch.read()
    assert (numbers(last), last.num_done) == (([], [0]), 1)
    assert outcome_of(last.ended[0]) == "complete"


@pytest.mark.parametrize("content", [b"no archive", b"PK\x03\x04 cut"])
def test_damaged_row_statistics_are_one_clear_error(storage: Storage, content: bytes) -> None:
    run_trials(storage, study(2))
    row = sa.insert(row_statistics).values(study="tiny", trial_number=1, content=content)
    storage.write(lambda it: it.execute(row))
    with pytest.raises(RunError, match=r"trial 1 of `tiny` cannot be read \(.*Compare anew: hpo delete tiny"):
        read_row_statistics(storage, "tiny", [])


@pytest.mark.parametrize("groups", [None, [0, 0, 1]])
def test_row_statistics_keep_the_groups_of_rows(storage: Storage, groups: Any) -> None:
    run_trials(storage, study(2))
    task = Task("t", "single_label", ("a", "b"), primary="accuracy")
    rows = rows_of(task, ["a", "b", None])
    content = _packed({"t": row_statistics_of(task, ["a", "a", "a"], rows, groups)})
    row = sa.insert(row_statistics).values(study="tiny", trial_number=1, content=content)
    storage.write(lambda it: it.execute(row))
    found = read_row_statistics(storage, "tiny", [task])[1]["t"]
    assert (found.num_examples, found.groups(found.index_N).tolist()) == (3, [0, 0] if groups else [0, 1])


@pytest.mark.parametrize("metrics", [["score"], ["t/log_loss"]])
def test_stored_probabilities_are_those_that_a_metric_needs(metrics: list[str]) -> None:
    task, p_NC = Task("t", "single_label", ("a", "b")), np.array([[0.7, 0.3], [0.2, 0.8]])
    given = row_statistics_of(task, ["a", "b"], rows_of(task, ["a", "b"]), None, p_NC)
    with np.load(io.BytesIO(_packed({"t": given}, metrics)), allow_pickle=False) as archive:
        found = _of_task(archive, task)
    assert found.scores()["log_loss"] == given.scores()["log_loss"]
    assert ("roc_auc_macro" in found.scores()) == (metrics == ["t/log_loss"])


NO_CHOICE = '{"name": "CategoricalDistribution", "attributes": {"choices": []}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("outcome", "{cut"),
        *(("telemetry", text) for text in ("{cut", "[1]")),
        *(("learning_rate", text) for text in ("{cut", '{"name": "Unknown"}', NO_CHOICE)),
        *(("metrics", text) for text in ("{cut", "[1]")),
    ],
)
def test_a_damaged_value_is_one_error_with_its_trial(storage: Storage, name: str, text: str) -> None:
    run_trials(storage, study(2), lambda trial: evaluate(storage, trial) or None)
    damage = {
        "metrics": sa.update(evaluations).values(metrics=text),
        "learning_rate": sa.update(params).where(params.c.param_name == name).values(distribution_json=text),
    }
    attribute = sa.update(user_attributes).where(user_attributes.c.key == name).values(value_json=text)
    storage.write(lambda it: it.execute(damage.get(name, attribute)))
    with pytest.raises(StorageError, match=f"`{name}` of trial 0 is damaged: "):
        read_study(storage, "tiny")


@pytest.mark.parametrize("text", ["{cut", "[1]"])
@pytest.mark.parametrize(
    "read",
    [Storage.read_definition, read_study, read_stored, lambda storage, _: run_trials(storage, study(2))],
)
def test_a_damaged_definition_is_one_error(
    storage: Storage, read: Callable[[Storage, str], object], text: str
) -> None:
    run_trials(storage, study(2))
    with storage.engine.begin() as connection:
        connection.execute(sa.update(studies).values(definition=text))
    with pytest.raises(StorageError, match="The definition of the study `tiny` is damaged: "):
        read(storage, "tiny")


@pytest.mark.parametrize("fails", [True, False])
def test_error_of_the_display_never_replaces_the_result(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def show(_: StudyProgress) -> None:
        raise OSError("no terminal")

    block = pytest.raises(KeyError, match="of the block") if fails else nullcontext()
    with block, watching(StudyProgress, show, 1e-3):
        if fails:
            raise KeyError("of the block")
    assert caplog.messages == ["The display of the trials failed: OSError: no terminal"]
