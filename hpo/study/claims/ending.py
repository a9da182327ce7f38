"""End of trials without a worker: paused trials that do not continue, and trials that are given up."""

import json

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.outcome import Outcome
from hpo.study.sampling.promotion import PAUSED_ATTR, is_paused, rungs_of
from hpo.study.store.lifecycle import read_state
from hpo.study.store.optuna_internals import end_trial, is_unfinished, trial_id_of
from hpo.study.store.schema import claims, studies, workers
from hpo.study.store.storage import Storage
from hpo.study.store.studies import BUDGET_SPENT

CANCELLED = "the study was cancelled"
FALLEN_BEHIND = "it did not continue: enough other trials were better after as much training."
NOT_PROMOTED = "it was paused when the study ended, and not among the best at its rung."


def is_unchanged(study: str, trial: FrozenTrial, owner: str | None) -> sa.ColumnElement[bool]:
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
    """End a trial whose `owner` (None: nobody) runs it no more, unless it has changed meanwhile.

    A trial at a rung ends as PRUNED, with its values there. So does a trial without a rung after the end of
    the study's budget, with its last value, if it has an evaluation or a checkpoint. Any other trial is given
    up: it ends as FAIL, invisible to samplers, and does not count among the trials of the study.
    """
    rungs = rungs_of(trial.user_attrs)
    last = [*rungs.values()][-1] if rungs else {}
    values = last.get("values", ())
    kept: bool | sa.ColumnElement[bool] = bool(rungs)
    if reason == BUDGET_SPENT and trial.last_step is not None:
        kept, values = True, [trial.intermediate_values[trial.last_step]]
    elif reason == BUDGET_SPENT and not rungs:
        kept = claims.c.saved_step > 0
    change = sa.update(claims).where(is_unchanged(study, trial, owner))
    change = change.values(owner=None, counts=kept)
    changed = connection.execute(change.returning(claims.c.counts, claims.c.facts)).one_or_none()
    if changed is None:
        return False
    if not changed.counts:
        return give_up(connection, trial, Outcome.PREEMPTED, reason)
    facts = json.loads(changed.facts or "{}")
    return end_trial(
        connection,
        trial_id_of(trial),
        TrialState.PRUNED,
        values=values,
        user_attrs={**facts, "outcome": Outcome.PRUNED, "outcome_reason": reason},
        constraints=last.get("constraints"),
    )


def end_unfinished(storage: Storage, name: str) -> int:
    """End the unfinished trials of a cancelled study that have no live worker; return their number."""
    if read_state(storage, name) != "cancelled" or not storage.has_study(name):  # before any lock
        return 0
    trials = storage.persist(lambda: storage.load_study(name).get_trials(deepcopy=False))
    unfinished = {trial.number: trial for trial in trials if not trial.state.is_finished()}

    def end(connection: sa.Connection) -> int:
        # This lock comes first, so that nobody opens the study or claims a trial meanwhile.
        cancelled = sa.update(studies).where(studies.c.name == name, studies.c.state == "cancelled")
        if not connection.execute(cancelled.values(state="cancelled")).rowcount:
            return 0
        alive = storage.live_workers(connection, workers.c.study == name)
        query = sa.select(claims.c.trial_number, claims.c.owner).where(claims.c.study == name)
        rows = connection.execute(query.where(claims.c.trial_number.in_(list(unfinished)))).all()
        return sum(
            end_unclaimed(connection, name, unfinished[row.trial_number], row.owner, CANCELLED)
            for row in rows
            if row.owner not in alive
        )

    return storage.write(end)


def give_up(connection: sa.Connection, trial: FrozenTrial, outcome: Outcome, reason: str) -> bool:
    """End a trial as FAIL, invisible to samplers; return false if it has ended already."""
    attributes = {"outcome": outcome, "outcome_reason": reason}
    return end_trial(connection, trial_id_of(trial), TrialState.FAIL, user_attrs=attributes)
