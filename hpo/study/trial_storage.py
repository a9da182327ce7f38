"""The storage that Optuna's samplers and pruners work on: a worker's own trial is kept in memory.

Only its worker changes a running trial, so there is nothing to ask the database about it. What is suggested
and set is held back until `write`, which stores it in one statement a table. Of the other trials those are
read again that can have changed: unfinished ones, and what came after the last finished one.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage, _StudyInfo
from optuna.trial import FrozenTrial, TrialState

from hpo.study import trial_rows

ENQUEUED_SECONDS = 1.0
"""How often a worker looks for enqueued trials."""

AT_ONCE = "hpo:"
"""System attributes of such names are written at once: other workers decide by them."""


@dataclass
class _OwnTrial:
    """A running trial of this process, and what of it is not written yet."""

    trial: FrozenTrial
    params: dict[str, tuple[float, BaseDistribution]] = field(default_factory=dict)
    user_attrs: dict[str, Any] = field(default_factory=dict)
    system_attrs: dict[str, Any] = field(default_factory=dict)


class TrialStorage(_CachedStorage):
    """Optuna's cached storage, with the trials that this process runs in memory."""

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._own: dict[int, _OwnTrial] = {}
        # study -> when none was enqueued: the id of its last trial, and the time
        self._none_enqueued: dict[int, tuple[int, float]] = {}
        # No transaction: each query sees what is committed by then, and a trial's details come after its row.
        self._reader = backend.engine.execution_options(isolation_level="AUTOCOMMIT")

    # A trial of this process

    def own(self, study_id: int, trial: FrozenTrial) -> None:
        """Keep a running trial in memory from here on; until `disown` nobody else changes it."""
        with self._lock:
            self._own.setdefault(trial._trial_id, _OwnTrial(trial))
            self._known(study_id).unfinished_trial_ids.add(trial._trial_id)
            self._add_trials_to_cache(study_id, [trial])

    def disown(self, trial_id: int) -> None:
        """Forget a trial, and what of it was not written."""
        self._own.pop(trial_id, None)

    def write(self, connection: sa.Connection, trial_id: int) -> None:
        """Store what was suggested and set of an own trial. May be run twice, as after a lost connection."""
        own = self._own.get(trial_id)
        if own is None:
            return
        rows = ((name, *param) for name, param in own.params.items())
        trial_rows.write_params(connection, trial_id, rows)
        trial_rows.write_attributes(connection, trial_rows.user_attributes, trial_id, own.user_attrs)
        trial_rows.write_attributes(connection, trial_rows.system_attributes, trial_id, own.system_attrs)

    def written(self, trial_id: int) -> None:
        """Note that what `write` stored is committed."""
        self._own[trial_id] = _OwnTrial(self._own[trial_id].trial)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        own = self._own.get(trial_id)
        return own.trial if own else super().get_trial(trial_id)

    def set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> None:
        own = self._own.get(trial_id)
        if own is None:
            super().set_trial_param(trial_id, param_name, param_value_internal, distribution)
            return
        study_id, _ = self._trial_id_to_study_id_and_number[trial_id]
        known = self._studies[study_id].param_distribution.setdefault(param_name, distribution)
        check_distribution_compatibility(known, distribution)
        own.params[param_name] = (param_value_internal, distribution)
        own.trial.distributions = {**own.trial.distributions, param_name: distribution}
        own.trial.params = {
            **own.trial.params,
            param_name: distribution.to_external_repr(param_value_internal),
        }

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        if own := self._own.get(trial_id):
            own.user_attrs[key] = own.trial.user_attrs[key] = value
        else:
            super().set_trial_user_attr(trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        own = self._own.get(trial_id)
        if own:
            own.trial.system_attrs[key] = value
        if own and not key.startswith(AT_ONCE):
            own.system_attrs[key] = value
        else:
            super().set_trial_system_attr(trial_id, key, value)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)
        if own := self._own.get(trial_id):
            own.trial.intermediate_values[step] = intermediate_value

    # All trials of a study

    def enqueued_trials(self, study_id: int) -> list[FrozenTrial]:
        """The trials of `study.enqueue_trial` that wait, without a look at the others."""
        table, (known, looked) = trial_rows.trials, self._none_enqueued.get(study_id, (-1, -math.inf))
        if time.monotonic() - looked < ENQUEUED_SECONDS:
            return []
        new, waits = sa.and_(table.c.study_id == study_id, table.c.trial_id > known), TrialState.WAITING
        look = sa.select(
            sa.func.max(table.c.trial_id), sa.func.max(table.c.trial_id).filter(table.c.state == waits)
        )
        with self._reader.connect() as connection:
            last, enqueued = connection.execute(look.where(new)).one()
            if enqueued is not None:
                return trial_rows.read_trials(connection, sa.and_(new, table.c.state == waits))
        self._none_enqueued[study_id] = known if last is None else last, time.monotonic()
        return []

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        self._read_trials_from_remote_storage(study_id)
        shown = self._trials(study_id)
        if states is not None:
            shown = [trial for trial in shown if trial.state in states]
        return copy.deepcopy(shown) if deepcopy else shown

    def _trials(self, study_id: int) -> list[FrozenTrial]:
        with self._lock:
            known = self._studies[study_id].trials
            # An own trial may be known before others with smaller numbers.
            return [known[number] for number in sorted(known)]

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        with self._lock:
            known = self._known(study_id)
            last, unfinished = known.last_finished_trial_id, known.unfinished_trial_ids
            table = trial_rows.trials
            changed = table.c.trial_id > last
            if old := [trial_id for trial_id in unfinished if trial_id <= last]:
                changed = sa.or_(changed, table.c.trial_id.in_(old))
            with self._reader.connect() as connection:
                found = trial_rows.read_trials(connection, sa.and_(table.c.study_id == study_id, changed))
            own = {trial_id: kept.trial for trial_id, kept in self._own.items()}
            self._add_trials_to_cache(study_id, [own.get(trial._trial_id, trial) for trial in found])
            for trial in found:
                if not trial.state.is_finished():
                    unfinished.add(trial._trial_id)
                    continue
                unfinished.discard(trial._trial_id)
                known.last_finished_trial_id = max(known.last_finished_trial_id, trial._trial_id)

    def _known(self, study_id: int) -> _StudyInfo:
        return self._studies.setdefault(study_id, _StudyInfo())
