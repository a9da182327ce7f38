"""When a trial that kills its process is given up.

A configuration that kills its process (the kernel's out-of-memory killer, a segmentation fault) would be
taken over for ever. But most deaths say nothing of it: a node that is taken away, `kill -9`. So a trial ends
as `crashed`, which samplers see as infeasible, only when `MAX_DEATHS` of its workers died in a row, none of
them with a later checkpoint or evaluation than the one before.

A worker that takes over the slot of a dead one counts its death, in the transaction in which it does so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from hpo.study.store.schema import evaluations

MAX_DEATHS = 3
"""So many deaths without progress end a trial."""


@dataclass(frozen=True)
class Deaths:
    """The deaths of workers that had a slot's trial."""

    count: int = 0
    """Without progress in between."""
    step: int = 0
    """From where the trial would go on after the last."""

    @classmethod
    def of_slot(cls, slot: sa.Row[Any]) -> Deaths:
        """As a row of `hpo_slots` has them."""
        return cls(slot.deaths, slot.death_step)

    @property
    def columns(self) -> dict[str, int]:
        """For a row of `hpo_slots`."""
        return {"deaths": self.count, "death_step": self.step}

    @property
    def end_trial(self) -> bool:
        """Whether the trial is to end as `crashed`."""
        return self.count >= MAX_DEATHS

    @property
    def reason(self) -> str:
        """How often the trial's process died, and where."""
        where = f"after step {self.step}" if self.step else "before its first checkpoint"
        return f"its process died {self.count} times {where}, without progress."


def count_death(connection: sa.Connection, slot: sa.Row[Any], saved_step: int) -> Deaths:
    """Return the deaths of a slot with one more; `saved_step` is that of its trial's last checkpoint."""
    deaths = Deaths.of_slot(slot)
    last_evaluation = sa.select(sa.func.max(evaluations.c.step)).where(
        evaluations.c.study == slot.study, evaluations.c.trial_number == slot.trial_number
    )
    step = max(connection.execute(last_evaluation).scalar() or 0, saved_step)
    return Deaths(1 if step > deaths.step else deaths.count + 1, max(step, deaths.step))


def last_saved_step(folder: Path) -> int:
    """The step of the newest checkpoint in a trial's folder, whole or not; 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]")), default=0)
