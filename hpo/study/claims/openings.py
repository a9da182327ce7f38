"""Which slots of a study may be claimed: those of paused trials that go on, and fresh ones as long as the
budget lasts and a better result is not improbable."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial

from hpo.study.claims.budget import StudyBudget
from hpo.study.claims.chance import chance_of_better, num_begun
from hpo.study.sampling.fronts import loss_signs
from hpo.study.sampling.promotion import Promotion
from hpo.study.store.optuna_internals import set_study_attribute, study_id_of
from hpo.study.store.schema import slots, studies
from hpo.study.store.storage import ENDED_EARLY_ATTR


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
    stop_when_unlikely: float | None = None
    """At such a chance of a better result no other trial begins; None: at none."""

    def __post_init__(self) -> None:
        self._of_study = slots.c.study == self.study.study_name
        self._fresh = (self._of_study, slots.c.state == "open", slots.c.trial_number.is_(None))
        self._may_begin = True
        self._chance: float | None = None

    def may_begin(self, connection: sa.Connection) -> bool:
        """Whether another trial may begin: there is budget enough for it, and a better result is
        not improbable."""
        if self.budget is None and self.stop_when_unlikely is None:
            return True
        unfinished = self.states(connection).keys()
        trials = self.study.get_trials(deepcopy=False)  # after the slots: all that these have is there
        self._chance = None
        self._may_begin = self.budget is None or self.budget.may_begin(connection, trials, unfinished)
        if self._may_begin and self.stop_when_unlikely is not None:
            self._chance = self._chance_of_better(connection, trials)
            self._may_begin = self._chance > self.stop_when_unlikely
        return self._may_begin

    def _chance_of_better(self, connection: sa.Connection, trials: list[FrozenTrial]) -> float:
        count = sa.select(sa.func.count()).where(*self._fresh)
        num_to_come = float(connection.execute(count).scalar_one())
        if self.budget is not None:
            num_to_come = min(num_to_come, self.budget.trials_left(connection, num_begun(trials)))
        (loss_sign,) = loss_signs([direction.name.lower() for direction in self.study.directions])
        return chance_of_better(trials, loss_sign, num_to_come)

    def drop_fresh_slots(self, connection: sa.Connection) -> None:
        """Let a study end that may begin no other trial, once those that have begun have ended."""
        states = self.states(connection)
        if states == {None: "open"}:
            connection.execute(sa.delete(slots).where(*self._fresh))
            num_slots = connection.execute(sa.select(sa.func.count()).where(self._of_study)).scalar_one()
            of_study = studies.c.name == self.study.study_name
            connection.execute(sa.update(studies).where(of_study).values(n_trials=num_slots))
            if self._chance is not None:
                why = {"chance": self._chance, "num_slots": num_slots}
                set_study_attribute(connection, study_id_of(self.study), ENDED_EARLY_ATTR, why)

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
