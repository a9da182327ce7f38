"""When and how a trial is evaluated on the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from hpo.section import Count, Section, Switch


class EvaluationConfig(Section):
    """When and how a trial is evaluated on the validation split."""

    per_epoch: Count = 1
    """Evaluations in each of the trial's `epochs`; in the whole trial with another budget."""
    per_trial: Count | None = None
    """Evaluations in the whole trial, spread evenly over its budget; goes before `per_epoch`."""
    batch_tokens: Count = 8192
    """Tokens of one batch, padding included."""
    test: Switch = False
    """Score the best weights of a complete trial on the test split too: `test_metrics` of its record."""

    def shares(self, epochs: float | None, rungs: Iterable[Fraction] = ()) -> tuple[Fraction, ...]:
        """The shares of its budget at which a trial is evaluated, the `rungs` among them.

        Args:
            epochs: of the trial; None: its budget is another.
        """
        count = self.per_trial or math.ceil(epochs or 1) * self.per_epoch
        return tuple(sorted({*(Fraction(index, count) for index in range(1, count + 1)), *rungs}))
