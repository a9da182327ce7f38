"""Foreign trials: another program, such as a plain Optuna script, added them to a study of hpo.

A worker inserts the claim of a trial in the transaction that begins the trial. So a begun trial without a
claim is foreign. Samplers and pruners do not see it, and it counts for nothing. A waiting trial is not
foreign, whoever enqueued it: the next worker runs it.

A trial of hpo stays one if another program ends it. It counts as failed, and its values are ignored.
"""

from __future__ import annotations

import sqlalchemy as sa

from hpo.study.store.optuna_tables import studies, trials
from hpo.study.store.schema import claims
from hpo.study.store.schema import studies as hpo_studies

ENDED_OUTSIDE = "somebody ended it outside of hpo."
"""Reason of a trial of hpo after another program ended it."""
_FEW = 1000  # values that a statement of any database can hold


def is_foreign(study: str) -> sa.ColumnElement[bool]:
    """Return the condition that a trial of this study is foreign, for a query of `optuna_tables.trials`."""
    claimed = sa.exists().where(claims.c.study == study, claims.c.trial_number == trials.c.number)
    return sa.and_(sa.cast(trials.c.state, sa.String) != "WAITING", ~claimed)


def in_state(study: str, state: str) -> sa.Select[tuple[int, int]]:
    """Return the query for the ids and numbers of a study's trials in this state, by number."""
    query = sa.select(trials.c.trial_id, trials.c.number).join(
        studies, studies.c.study_id == trials.c.study_id
    )
    is_state = sa.cast(trials.c.state, sa.String) == state  # an enumeration in PostgreSQL
    return query.where(studies.c.study_name == study, is_state).order_by(trials.c.number)


def claimed(connection: sa.Connection, study_id: int, numbers: list[int]) -> set[int] | None:
    """Return the claimed trials among `numbers`, or None if the study is not one of hpo."""
    few = len(numbers) < _FEW
    these = claims.c.trial_number.in_(numbers) if few else claims.c.trial_number >= min(numbers)
    of_hpo = studies.join(hpo_studies, hpo_studies.c.name == studies.c.study_name)
    with_claims = of_hpo.outerjoin(claims, sa.and_(claims.c.study == studies.c.study_name, these))
    query = sa.select(claims.c.trial_number).select_from(with_claims).where(studies.c.study_id == study_id)
    claimed_numbers = {*connection.execute(query).scalars()}
    return claimed_numbers - {None} if claimed_numbers else None
