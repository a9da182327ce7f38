"""The words for how good a thing is against another: decided by an interval and a margin.

A loss below the margin is none. `as_good` where the whole interval is above -margin, `worse` where it is
below that, else `undecided`: the data do not tell.
"""

from __future__ import annotations

from typing import Literal

VerdictName = Literal["as_good", "worse", "undecided"]


def decide(low: float, high: float, margin: float) -> VerdictName:
    """The verdict on a difference, higher is better, with the interval [low, high]; NaN decides nothing."""
    if high < -margin:
        return "worse"
    return "as_good" if low > -margin else "undecided"
