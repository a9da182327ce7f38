"""A worker refuses rows that hpo did not write, with one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from worker_process import begin, result, study, worker_on

from hpo.errors import StorageError
from hpo.study.sampling.promotion import PAUSED_ATTR, RESUMED_ATTR, RUNGS_ATTR
from hpo.study.store import optuna_internals
from hpo.study.store.storage import Storage

GOOD = {"values": [0.5], "constraints": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (PAUSED_ATTR, "soon"),
        (RESUMED_ATTR, None),
        (RUNGS_ATTR, [0.5]),
        (RUNGS_ATTR, {"now": GOOD}),
        (RUNGS_ATTR, {"0.1": {"values": ["good"], "constraints": {}}}),
        (RUNGS_ATTR, {"0.1": {"values": [0.5, 0.5], "constraints": {}}}),
        (RUNGS_ATTR, {"0.1": {"values": [0.5], "constraints": {"score": "low"}}}),
        (RUNGS_ATTR, {"0.1": {"values": [0.5]}}),
    ],
)
def test_a_changed_attribute_is_one_clear_error(storage: Storage, name: str, value: Any) -> None:
    with worker_on(storage, study(2)) as worker:
        lease, trial = begin(worker)
        worker.record_outcome(lease, result("preempted"))
        trial.set_user_attr(name, value)
        with pytest.raises(StorageError, match=f"`{name}` of trial 0 must be"):
            worker.claim()


def test_a_changed_trial_number_is_one_clear_error(storage: Storage) -> None:
    with worker_on(storage, study(3)) as worker:
        begin(worker)
        with storage.engine.begin() as connection:
            connection.execute(sa.update(optuna_internals.trials).values(number=2**40))
        with pytest.raises(StorageError, match="numbers from 0 to 1, but the last one has"):
            worker.claim()
