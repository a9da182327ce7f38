"""The number of slots of a study, made what its `n_trials` says."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from hpo.study.schema import slots


def resize_study(
    connection: sa.Connection, study: str, n_trials: int, live_workers: Collection[str]
) -> set[int | None]:
    """Add slots, or drop those without a live worker; return the trial numbers of dropped ones."""
    of_study = slots.c.study == study
    count, last = connection.execute(
        sa.select(sa.func.count(), sa.func.max(slots.c.slot)).where(of_study)
    ).one()
    if count < n_trials:
        first = 0 if last is None else last + 1
        new = range(first, first + n_trials - count)
        connection.execute(sa.insert(slots), [{"study": study, "slot": slot} for slot in new])
    if count <= n_trials:
        return set()
    has_no_worker = sa.or_(
        slots.c.state == "open",
        sa.and_(slots.c.state == "running", slots.c.owner.not_in(live_workers)),
    )
    surplus = connection.execute(
        sa.select(slots.c.slot, slots.c.trial_number)
        .where(of_study, has_no_worker)
        .order_by(slots.c.trial_number.is_(None).desc(), slots.c.slot.desc())
        .limit(count - n_trials)
        .with_for_update(skip_locked=True)
    ).all()
    if surplus:
        gone = sa.delete(slots).where(of_study, slots.c.slot == sa.bindparam("gone"))
        connection.execute(gone, [{"gone": row.slot} for row in surplus])
    return {row.trial_number for row in surplus}
