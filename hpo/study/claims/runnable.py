"""The trials that a worker can run: its device may lack precisions of the study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

from hpo.precision.table import PRECISION, named_choices


def known_params(trial: FrozenTrial) -> Mapping[str, Any]:
    """Return the parameters of a trial, also those that it was given and has not suggested yet."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


@dataclass(frozen=True)
class Runnable:
    """Whether a device that lacks some precisions can run a trial."""

    precisions: Sequence[str] = ()
    """All of the study; empty: the device decides."""
    left_out: frozenset[str] = frozenset()
    """Those that the device lacks, by `choice_name`."""

    def __call__(self, params: Mapping[str, Any]) -> bool:
        """Whether the device can run a trial with these parameters, of which some may be missing."""
        return any(self.left_out.isdisjoint(names) for names in self._needs(params))

    def lacks(self, unfinished: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the precisions that trials with these parameters may need and the device lacks."""
        needs = (names for params in unfinished for names in self._needs(params))
        needed = self.left_out & {name for names in needs for name in names}
        ordered = [name for name in self.precisions if name in needed]
        return (*ordered, *sorted(needed.difference(self.precisions)))

    def _needs(self, params: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """What the trial may need of a device: one of these lists."""
        own = named_choices(params)
        if PRECISION in params or not self.precisions:
            return [own]
        return [[name, *own] for name in self.precisions]


EVERYTHING = Runnable()
