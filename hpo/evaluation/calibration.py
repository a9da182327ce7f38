"""Whether probabilities are what they say: of what gets 0.8, eight of ten should be right.

Probabilities are put into 15 bins of equal width; the expected calibration error is the mean distance of a
bin's mean probability (confidence) from the share that is right (frequency), weighted by the bins' counts
(Naeini et al., AAAI 2015; Guo et al., ICML 2017). It depends on the bins, and with few rows it is above 0 by
chance alone.

single_label: the probability of the predicted class against its being right. multi_label: the probability of
every class in every row against its being true. There the many that are rightly near 0 keep the error low:
look at the bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpo.data.examples import Example
from hpo.data.tasks import Task
from hpo.tasks.kind import indicators
from hpo.tasks.registry import kind_of

NUM_BINS = 15
_AT_ONCE = 2**20
"""So many probabilities are put into bins at a time, for the memory."""


@dataclass(frozen=True)
class CalibrationBin:
    """Probabilities `low < p <= high`; the first bin holds 0 as well."""

    low: float
    high: float
    confidence: float
    """The mean probability."""
    frequency: float
    """The share that is right."""
    count: int


@dataclass(frozen=True)
class Calibration:
    """The expected calibration error, and the bins that hold anything, ascending."""

    ece: float
    bins: tuple[CalibrationBin, ...]


def calibration(
    task: Task, probabilities_NC: NDArray[np.float64], examples: Sequence[Example]
) -> Calibration | None:
    """Of a single_label or multi_label task and its annotated examples; None without any."""
    if not len(examples):
        return None
    kind = kind_of(task)
    true_NC = indicators(task, [kind.held(example) for example in examples])
    if kind.is_list:
        return calibration_of(probabilities_NC.ravel(), true_NC.ravel())
    best_N = probabilities_NC.argmax(axis=1)
    return calibration_of(probabilities_NC.max(axis=1), true_NC[np.arange(len(best_N)), best_N])


def calibration_of(probability_M: NDArray[np.float64], is_right_M: NDArray[np.bool_]) -> Calibration:
    """Of M > 0 probabilities, each with whether what it was given to is right."""
    count_K = np.zeros(NUM_BINS, np.intp)
    confidence_K, frequency_K = np.zeros((2, NUM_BINS))
    for first in range(0, len(probability_M), _AT_ONCE):
        p_P, is_right_P = (of[first : first + _AT_ONCE] for of in (probability_M, is_right_M))
        bin_P = np.clip(np.ceil(p_P * NUM_BINS).astype(np.intp) - 1, 0, NUM_BINS - 1)
        count_K += np.bincount(bin_P, minlength=NUM_BINS)
        confidence_K += np.bincount(bin_P, weights=p_P, minlength=NUM_BINS)
        frequency_K += np.bincount(bin_P, weights=is_right_P, minlength=NUM_BINS)
    confidence_K /= np.maximum(count_K, 1)
    frequency_K /= np.maximum(count_K, 1)
    ece = float((count_K * np.abs(confidence_K - frequency_K)).sum() / len(probability_M))
    bins = [
        CalibrationBin(k / NUM_BINS, (k + 1) / NUM_BINS, confidence, frequency, count)
        for k, (confidence, frequency, count) in enumerate(
            zip(confidence_K.tolist(), frequency_K.tolist(), count_K.tolist(), strict=True)
        )
        if count
    ]
    return Calibration(ece, tuple(bins))
