"""The end of trials that no worker has: paused trials that do not continue, and trials that are given up."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.outcome import Outcome
from hpo.study.sampling.promotion import PAUSED_ATTR, is_paused, rungs_of
from hpo.study.store.optuna_internals import end_trial, is_unfinished, trial_id_of
from hpo.study.store.schema import claims

NOT_PROMOTED = "it was not promoted: other trials were better at this rung, or the study ended."


def is_as_seen(study: str, trial: FrozenTrial, owner: str | None) -> sa.ColumnElement[bool]:
    """Return the condition that an unfinished trial still has this owner and still waits at the same rung."""
    paused_at = trial.user_attrs[PAUSED_ATTR] if is_paused(trial) else None
    return sa.and_(
        claims.c.study == study,
        claims.c.trial_number == trial.number,
        claims.c.counts,
        claims.c.owner.is_not_distinct_from(owner),
        claims.c.paused_at.is_not_distinct_from(paused_at),
        is_unfinished(trial_id_of(trial)),
    )


def end_unclaimed(
    connection: sa.Connection, study: str, trial: FrozenTrial, owner: str | None, reason: str
) -> bool:
    """End a trial that `owner` (None: nobody) does not run any more, unless it has changed meanwhile.

    A trial that has come to a rung ends as PRUNED, with its values there. Any other trial is given up: it
    FAILs, which samplers do not see, and does not count among the trials of the study.
    """
    rungs = rungs_of(trial.user_attrs)
    change = sa.update(claims).where(is_as_seen(study, trial, owner))
    change = change.values(owner=None, counts=bool(rungs), paused_at=None)
    row = connection.execute(change.returning(claims.c.facts)).one_or_none()
    if row is None:
        return False
    if not rungs:
        return give_up(connection, trial, Outcome.PREEMPTED, reason)
    at: dict[str, Any] = {**[*rungs.values()][-1]}
    facts = json.loads(row.facts or "{}")
    return end_trial(
        connection,
        trial_id_of(trial),
        TrialState.PRUNED,
        values=at["values"],
        user_attrs={**facts, "outcome": Outcome.PRUNED, "outcome_reason": reason},
        constraints=at.get("constraints"),
    )


def give_up(connection: sa.Connection, trial: FrozenTrial, outcome: Outcome, reason: str) -> bool:
    """End a trial as FAIL, which samplers do not see; False: it has ended already."""
    attributes = {"outcome": outcome, "outcome_reason": reason}
    return end_trial(connection, trial_id_of(trial), TrialState.FAIL, user_attrs=attributes)
