from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from support.worker_process import begin, result, run_trials, study, worker_on

from hpo.report.status import study_status
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import NOT_READ, best_trials
from hpo.study.store.storage import Storage, open_storage


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


def telemetry(number: int) -> dict[str, Any]:
    precision = {"observed": {"tf32": False}, "agrees": None if number == 1 else True, "reason": "unseen."}
    return {"precision": precision, "weights_lost": number == 2}


def test_a_brief_record_has_the_best_trials_and_warnings(storage: Storage) -> None:
    run_trials(storage, study(4), lambda trial: result("complete", telemetry=telemetry(trial.number)))
    whole, brief = read_study(storage, "tiny"), read_study(storage, "tiny", brief=True)
    assert study_status(brief) == study_status(whole)
    assert len(study_status(brief)["warnings"]) == 2
    assert best_trials(brief)[0].params == best_trials(whole)[0].params != {}
    assert brief.trials[3].telemetry is NOT_READ
    with pytest.raises(RuntimeError, match="was not read"):
        brief.trials[3].params.get("learning_rate")
