"""Trials that a worker can run: its device may lack precisions of the study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

from hpo.precision.table import PRECISION, named_choices


def known_params(trial: FrozenTrial) -> Mapping[str, Any]:
    """Return the parameters of a trial, including fixed ones before their suggestion."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


@dataclass(frozen=True)
class Runnable:
    """Test of parameters: a device without some precisions can run the trial."""

    precisions: Sequence[str] = ()  # all precisions of the study; empty: the device decides
    left_out: frozenset[str] = frozenset()  # precisions missing on the device, by `choice_name`

    def __call__(self, params: Mapping[str, Any]) -> bool:
        """Return true if the device can run a trial with these parameters. Some may be missing."""
        return any(self.left_out.isdisjoint(names) for names in self._needs(params))

    def lacks(self, unfinished: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the precisions that the device lacks and trials with these parameters may need."""
        needs = (names for params in unfinished for names in self._needs(params))
        needed = self.left_out & {name for names in needs for name in names}
        ordered = [name for name in self.precisions if name in needed]
        return (*ordered, *sorted(needed.difference(self.precisions)))

    def _needs(self, params: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return alternative lists of needed precisions."""
        own = named_choices(params)
        if PRECISION in params or not self.precisions:
            return [own]
        return [[name, *own] for name in self.precisions]


EVERYTHING = Runnable()
