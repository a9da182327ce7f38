"""An exact bound of the net share of all texts that a form of a model makes worse.

A text gets worse where a form makes more errors in it than fp32 does (a wrong class, a span missed or
spurious), better where fewer. The bootstrap of a drop cannot see a loss that no row of the split shows; these
bounds can.

There are two bounds, each below the truth with a probability of at most half of `ALPHA`; the smaller one
counts. Clopper's and Pearson's of the share that gets worse ignores gains, and is sharper where few texts
change. The other is of an exact test of the net number, under the worst share of gains that is not excluded
itself (Berger and Boos, J. Am. Stat. Assoc. 89, 1994). It is sharper where many texts change both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import beta, binom

from hpo.training.metrics import RowStatistics

ALPHA = 0.025
_OF_GAINS = ALPHA / 10
"""The part of it that the share of gains is bounded with."""
_SHARES = 20
"""Of gains, that are tried."""
_NEVER = 1e-9


@dataclass(frozen=True)
class TextChanges:
    """The texts of a split that a form makes worse, and those that it makes better."""

    worse: int
    better: int
    num_rows: int

    def highest_net_share(self) -> float:
        """The bound: of all texts, those that get worse less those that get better, from 0 to 1."""
        return min(_highest_share(self.worse, self.num_rows, ALPHA / 2), self._highest_by_net_number())

    def _highest_by_net_number(self) -> float:
        def above(net: float) -> float:
            return self._probability(net) - (ALPHA / 2 - _OF_GAINS)

        if above(1.0) > 0:
            return 1.0
        return float(brentq(above, 0.0, 1.0, xtol=1e-6)) if above(0.0) > 0 else 0.0

    def _probability(self, net: float) -> float:
        """Of a net number as small as this one, where the net share of all texts is `net`: the largest over
        the shares of gains."""
        highest = min(_highest_share(self.better, self.num_rows, _OF_GAINS), (1 - net) / 2)
        gains = np.arange(int(binom.isf(_NEVER, self.num_rows, highest)) + 1)
        losses = gains + self.worse - self.better
        chances = [
            (
                binom.pmf(gains, self.num_rows, share)
                * binom.cdf(losses, self.num_rows - gains, (net + share) / (1 - share))
            ).sum()
            for share in np.linspace(0.0, highest, _SHARES)
        ]
        return float(max(chances)) + _NEVER


def text_changes(
    form: Mapping[str, RowStatistics], reference: Mapping[str, RowStatistics]
) -> TextChanges | None:
    """Those of `form` against `reference`, by task on the same split; None where no task has classes or
    spans.

    Of several tasks the text gets worse if more of them do than get better.
    """
    counted = {name: of for name, of in form.items() if of.counts_NC}
    if not counted:
        return None
    changes_E, is_labelled_E = np.zeros((2, next(iter(counted.values())).num_examples), int)
    for name, of in counted.items():
        changes_E[of.index_N] += np.sign(_errors(of) - _errors(reference[name])).astype(int)
        is_labelled_E[of.index_N] = 1
    return TextChanges(int((changes_E > 0).sum()), int((changes_E < 0).sum()), int(is_labelled_E.sum()))


def least_rows(share: float) -> int:
    """So many rows are needed to bound a net share by `share`, where no text changes."""
    return 1 if share >= 1 else ceil(log(ALPHA / 2) / log1p(-share))


def _errors(of: RowStatistics) -> NDArray[Any]:
    """[N]: what is true and not predicted, or predicted and not true."""
    hits_NC, true_NC, predicted_NC = of.counts_NC.values()
    return np.asarray((true_NC + predicted_NC - 2 * hits_NC).sum(axis=1)).ravel()


def _highest_share(count: int, num_rows: int, alpha: float) -> float:
    return 1.0 if count >= num_rows else float(beta.ppf(1 - alpha, count + 1, num_rows - count))
