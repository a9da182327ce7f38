"""The words for how good a thing is against another: decided by an interval and a margin.

A loss below the margin is none. `as_good` where the whole interval is above -margin, `worse` where it is
below that, else `undecided`: the data do not tell.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

VerdictName = Literal["as_good", "worse", "undecided"]


def decide(low: float, high: float, margin: float) -> VerdictName:
    """The verdict on a difference, higher is better, with the interval [low, high]; NaN decides nothing."""
    sign = float(signs(np.asarray(low), np.asarray(high), margin))
    return "undecided" if not sign else "as_good" if sign > 0 else "worse"


def signs(low: NDArray[Any], high: NDArray[Any], margin: float) -> NDArray[np.float64]:
    """The verdicts on many: +1 for `as_good`, -1 for `worse`, 0 for `undecided`."""
    return np.asarray((low > -margin) * 1.0 - (high < -margin) * 1.0)
