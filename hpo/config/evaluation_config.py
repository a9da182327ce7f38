"""When and how a trial is evaluated on the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

from pydantic import Field

from hpo.config.study_file import CheckedSection, Problem
from hpo.section import Count, Switch


class EvaluationConfig(CheckedSection):
    """When and how a trial is evaluated on the validation split."""

    per_epoch: Count = 1
    """Evaluations in each of the trial's `epochs`; in the whole trial with another budget."""
    per_trial: Count | None = None
    """Evaluations in the whole trial, spread evenly over its budget; goes before `per_epoch`."""
    patience: Count | None = None
    """A trial ends early, as `complete` and with its best weights, after so many evaluations without a better
    first objective."""
    min_delta: float = Field(0.0, ge=0)
    """With `patience`, only a value that is better by more than this is an improvement."""
    batch_tokens: Count = 8192
    """Tokens of one batch, padding included."""
    test: Switch = False
    """Score the best weights of a complete trial on the test split too: `test_metrics` of its record."""

    def problems(self) -> Iterator[Problem]:
        if self.min_delta and self.patience is None:
            yield Problem(("min_delta",), "needs `patience`, which is not given.")

    def shares(self, epochs: float | None, rungs: Iterable[Fraction] = ()) -> tuple[Fraction, ...]:
        """The shares of its budget at which a trial is evaluated, the `rungs` among them.

        Args:
            epochs: of the trial; None: its budget is another.
        """
        count = self.per_trial or math.ceil(epochs or 1) * self.per_epoch
        return tuple(sorted({*(Fraction(index, count) for index in range(1, count + 1)), *rungs}))
