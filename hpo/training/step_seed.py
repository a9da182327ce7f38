"""The seed of a step's dropout masks, the same after a resume or when the step is repeated."""

from __future__ import annotations

from functools import cache

import numpy as np


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A seed of 64 bits for a rank's step; up to 2^32 steps of a trial differ in the lower half too.

    The CPU's generator takes the lower half alone, where random seeds of a hundred thousand steps would
    coincide about once. So it is the step sent through bijections of 32 bits (murmur3's finaliser) that
    depend on `seed` and `rank`.
    """
    *keys, high = _seed_words(seed, rank)
    for key in keys:
        step = _mix(step ^ key)
    return high << 32 | step


@cache
def _seed_words(seed: int, rank: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3)]


def _mix(bits: int) -> int:
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16
