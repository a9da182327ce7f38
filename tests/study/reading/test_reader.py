from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from support.worker_process import begin, result, study, worker_on

from hpo.study.reading.reader import read_study
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
