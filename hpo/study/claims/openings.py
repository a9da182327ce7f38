"""Which slots of a study may be claimed: those of paused trials that go on, and fresh ones while the budget
lasts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import optuna
import sqlalchemy as sa

from hpo.study.claims.budget import StudyBudget
from hpo.study.sampling.promotion import Promotion
from hpo.study.store.schema import slots, studies


def is_open_study(study: str | sa.BindParameter[str]) -> sa.ColumnElement[bool]:
    return sa.exists().where(studies.c.name == study, studies.c.state == "open")


@dataclass
class Openings:
    """What opens and closes the slots of a study that no worker has."""

    study: optuna.Study
    promotion: Promotion | None
    """How trials pause and go on; None: they do not."""
    budget: StudyBudget | None
    """What the study may spend; None: it has a number of trials."""

    def __post_init__(self) -> None:
        self._of_study = slots.c.study == self.study.study_name
        self._fresh = (self._of_study, slots.c.state == "open", slots.c.trial_number.is_(None))
        self._may_begin = True

    def may_begin(self, connection: sa.Connection) -> bool:
        """Whether the budget is enough for another trial."""
        if self.budget is None:
            return True
        unfinished = self.states(connection).keys()
        trials = self.study.get_trials(deepcopy=False)  # after the slots: all that these have is there
        self._may_begin = self.budget.may_begin(connection, trials, unfinished)
        return self._may_begin

    def drop_fresh_slots(self, connection: sa.Connection) -> None:
        """Let a study end that may begin no other trial, once those that have begun have ended."""
        states = self.states(connection)
        if states == {None: "open"}:
            connection.execute(sa.delete(slots).where(*self._fresh))
            num_slots = connection.execute(sa.select(sa.func.count()).where(self._of_study)).scalar_one()
            of_study = studies.c.name == self.study.study_name
            connection.execute(sa.update(studies).where(of_study).values(n_trials=num_slots))

    def let_go_on(self, connection: sa.Connection) -> None:
        """Open the slots of the paused trials that go on, and close those that surely do not."""
        states = self.in_work(connection)
        if "paused" not in states.values():
            return
        trials = self.study.get_trials(deepcopy=False)  # after the slots: all that these have is there
        going_on: Collection[int | None] = ()
        over: Collection[int | None] = ()
        is_spent = self.budget is not None and self.budget.is_spent(connection)
        if self.promotion is not None and not is_spent:  # else the study has another pruner by now
            going_on = self.promotion.going_on(trials, states.keys())
            over = self.promotion.hopeless(trials, states.keys())
        if is_spent or (not going_on and {*states.values()} == {"paused"}):
            over = states.keys()
        is_open = is_open_study(self.study.study_name)
        for numbers, state in ((going_on, "open"), (over, "done")):
            if numbers:
                paused = (self._of_study, slots.c.state == "paused", slots.c.trial_number.in_(numbers))
                connection.execute(sa.update(slots).where(*paused, is_open).values(state=state))

    def in_work(self, connection: sa.Connection) -> dict[int | None, str]:
        """As `states`, without slots for trials that, by the last `may_begin`, will not begin."""
        states = self.states(connection)
        if not self._may_begin and states.get(None) == "open":
            del states[None]
        return states

    def states(self, connection: sa.Connection) -> dict[int | None, str]:
        """The states of the unfinished slots by the number of their trial; None: one has none yet."""
        query = sa.select(slots.c.trial_number, slots.c.state)
        query = query.where(self._of_study, slots.c.state != "done").order_by(slots.c.state)
        rows = connection.execute(query)  # of None the last: whether any of those is running
        return {row.trial_number: row.state for row in rows}
