"""Sums over windows and rows: logits and probabilities of examples, counts and F1.

Suffixes: W windows, E examples, C classes, N rows, B weightings of the rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from hpo.tasks.kind import FloatArray
from hpo.tasks.tokenized_split import AnyArray, TokenizedSplit

UNSEEN_ROWS = -math.log(0.025)
"""A sample lacks a kind of row with a probability of 2.5 % if it is expected to have this many of it."""
NUM_BINS = 15
"""Bins of confidence in the calibration error."""
ROUNDING = 1e-12
"""Largest ratio of variance to sum of squares for equal values, due to rounding."""
_AT_ONCE = 2**21


def mean_of_windows(values_WC: FloatArray, split: TokenizedSplit) -> NDArray[np.float64]:
    num_examples = len(split.examples)
    sum_EC = np.zeros((num_examples, values_WC.shape[1]))
    np.add.at(sum_EC, split.window_example_W, values_WC)
    windows_E = np.bincount(split.window_example_W, minlength=num_examples)
    return sum_EC / np.maximum(windows_E, 1)[:, None]


def max_of_windows(values_WC: FloatArray, split: TokenizedSplit) -> NDArray[np.float64]:
    max_EC = np.full((len(split.examples), values_WC.shape[1]), -np.inf)
    np.maximum.at(max_EC, split.window_example_W, values_WC)
    return max_EC


def sigmoid(logits: FloatArray) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -60, 60))))


def log_softmax(logits: FloatArray) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def calibration_gaps(p_NK: FloatArray, right_NK: NDArray[Any]) -> FloatArray:
    """Return the mean over K of confidence less right (0 or 1) by bin of confidence: [N, NUM_BINS].

    The bins are (low, high] of equal width, as in Guo et al. 2017 (arXiv:1706.04599).
    """
    bins_NK = np.searchsorted(np.linspace(0, 1, NUM_BINS + 1)[1:-1], p_NK)
    gaps = np.zeros((len(p_NK), NUM_BINS))
    np.add.at(gaps, (np.arange(len(p_NK))[:, None], bins_NK), (p_NK - right_NK) / p_NK.shape[1])
    return gaps


def ratio(above: FloatArray, below: FloatArray) -> FloatArray:
    """Return the quotient, NaN where the divisor is not above 0."""
    return np.asarray(np.divide(above, below, out=np.full(np.shape(below), np.nan), where=below > 0))


def matthews(hits_BC: FloatArray, true_BC: FloatArray, predicted_BC: FloatArray) -> FloatArray:
    """Return Matthews' correlation of one class a row: [B]. NaN: the truth is constant.

    It is 0 for constant predictions, as in scikit-learn.
    """
    rows_B = true_BC.sum(axis=1)
    product_B = hits_BC.sum(axis=1) * rows_B - (true_BC * predicted_BC).sum(axis=1)
    true_B, predicted_B = (rows_B**2 - (one**2).sum(axis=1) for one in (true_BC, predicted_BC))
    return ratio(product_B, np.sqrt(true_B) * np.sqrt(np.where(predicted_B > 0, predicted_B, 1)))


def quadratic_kappa(squares_B: FloatArray, true_BC: FloatArray, predicted_BC: FloatArray) -> FloatArray:
    """Return Cohen's kappa from sums of squared differences of places: [B]. NaN: the truth is constant."""
    place_C = np.arange(true_BC.shape[1])
    cross_B = ratio((true_BC @ place_C) * (predicted_BC @ place_C), true_BC.sum(axis=1))
    expected_B = (true_BC + predicted_BC) @ place_C**2 - 2 * cross_B
    return 1 - ratio(squares_B, np.where((true_BC > 0).sum(axis=1) > 1, expected_B, 0))


def curve_areas(
    scores_M: FloatArray, is_true_M: FloatArray, rows_M: NDArray[np.intp], weights_BN: FloatArray
) -> FloatArray:
    """Return ROC-AUC and average precision of M pairs of a score and a truth, with the weights of their
    rows: [2, B]. NaN: undefined."""
    order = np.argsort(-scores_M, kind="stable")
    ends = np.flatnonzero(np.diff(scores_M[order], append=np.nan) != 0)  # equal scores are one threshold
    areas = []
    for part in in_parts(weights_BN, len(rows_M)):
        weights = part[:, rows_M[order]]
        hits = np.cumsum(weights * is_true_M[order], axis=1)[:, ends]
        found = np.cumsum(weights, axis=1)[:, ends]
        new_hits, new_false = np.diff(hits, prepend=0.0), np.diff(found - hits, prepend=0.0)
        area_B = (new_false * (hits - new_hits / 2)).sum(axis=1)
        precision_B = (new_hits * hits / np.maximum(found, np.finfo(float).tiny)).sum(axis=1)
        true_B, false_B = hits[:, -1], (found - hits)[:, -1]
        areas.append([ratio(area_B, true_B * false_B), ratio(precision_B, true_B)])
    return np.concatenate(areas, axis=1)


def correlation(
    x_N: FloatArray, y_N: FloatArray, weights_BN: FloatArray, *, of_ranks: bool = False
) -> FloatArray:
    """Return Pearson's correlation, or Spearman's of the ranks: [B]. NaN: one side is constant."""
    values = []
    for part in in_parts(weights_BN, len(x_N)):
        rows_B1 = np.maximum(part.sum(axis=1, keepdims=True), 1)
        sides, sizes = [], []
        for one_N in (x_N, y_N):
            one = _ranks(one_N, part) if of_ranks else one_N - one_N.mean()
            square_B = (part * one**2).sum(axis=1)
            sides.append(one - (part * one).sum(axis=1, keepdims=True) / rows_B1)
            size_B = (part * sides[-1] ** 2).sum(axis=1)
            sizes.append(np.sqrt(np.where(size_B > ROUNDING * square_B, size_B, 0)))
        values.append(np.clip(ratio((part * sides[0] * sides[1]).sum(axis=1), sizes[0] * sizes[1]), -1, 1))
    return np.concatenate(values)


def _ranks(values_N: FloatArray, weights_BN: FloatArray) -> FloatArray:
    order = np.argsort(values_N, kind="stable")
    is_new = np.diff(values_N[order], prepend=np.nan) != 0
    sizes = np.add.reduceat(weights_BN[:, order], np.flatnonzero(is_new), axis=1)
    ranks_BN = np.empty(weights_BN.shape)
    ranks_BN[:, order] = (sizes.cumsum(axis=1) - sizes / 2)[:, is_new.cumsum() - 1]
    return ranks_BN + 0 * values_N  # NaN stays unknown


def in_parts(rows: AnyArray, num: int) -> list[AnyArray]:
    """Split rows, each with work on `num` numbers, into parts of at most about `_AT_ONCE` numbers."""
    return np.array_split(rows, 1 + len(rows) * num // _AT_ONCE)


def f1_micro(hits_C: NDArray[Any], true_C: NDArray[Any], predicted_C: NDArray[Any]) -> Any:
    """Return the F1 of counts summed over classes, the last axis: hits, true and predicted items."""
    total = (true_C + predicted_C).sum(axis=-1)
    return np.where(total > 0, 2 * hits_C.sum(axis=-1) / np.maximum(total, 1), 1.0)[()]


def f1_macro(
    whole: tuple[FloatArray, ...], hits_BC: FloatArray, true_BC: FloatArray, predicted_BC: FloatArray
) -> FloatArray:
    """Return the mean F1 [B] of the classes with true items in `whole`, the counts [C] of the whole.

    A class absent from a weighting keeps its F1 of the whole.
    """
    hits_C, true_C, predicted_C = whole
    is_true_C = true_C > 0
    if not is_true_C.any():
        return np.atleast_1d(f1_micro(hits_BC, true_BC, predicted_BC))
    f1_C = 2 * hits_C / np.maximum(true_C + predicted_C, 1)
    total_BC = true_BC + predicted_BC
    f1_BC = np.where(total_BC > 0, 2 * hits_BC / np.maximum(total_BC, 1), f1_C)
    return np.asarray(f1_BC[:, is_true_C].mean(axis=1))


def micro_f1_bound(hits_N: FloatArray, true_N: FloatArray, predicted_N: FloatArray) -> FloatArray:
    """Return the largest change of a micro F1 by each row, times the number of rows: [N].

    A row with t true items loses all of its hits and has p spurious items instead. With F = 2H / (T + P), the
    change is ((2 - F) t + F p) / (T + P).
    """
    total = float(true_N.sum() + predicted_N.sum())
    if not total:
        return np.full(len(true_N), math.inf)
    f1 = 2 * float(hits_N.sum()) / max(total, 1)
    change_N = (2 - f1) * true_N + f1 * _most_spurious(true_N, predicted_N)
    rest = max(total - float(true_N.max() + predicted_N.max()), 1)
    return np.asarray(len(true_N) * change_N / rest, np.float64)


def _most_spurious(true_N: FloatArray, predicted_N: FloatArray) -> FloatArray:
    """Largest number of spurious items of each row: more than its true ones by at most the most that any row
    has, and at most the largest number of a row.
    """
    surplus = max(float((predicted_N - true_N).max()), 0.0)
    most = max(float(true_N.max()), float(predicted_N.max()))
    return np.asarray(np.minimum(true_N + surplus, most), np.float64)


def macro_f1_bound(
    hits_NC: Any, true_NC: Any, predicted_NC: Any, *, is_spurious_in_true: bool = False
) -> FloatArray:
    """Return the largest change of `f1_macro` by each row, times the number of rows: [N].

    A row loses the hits of its true classes, and other classes get as many spurious items as it may have
    (`_most_spurious`). With f = 2H / (T + P), a spurious item changes the F1 of its class by at most f / (T +
    P - 1). A lost hit takes more if others are lost with it, so it takes the mean of as many as a sample may
    lack.

    Args:
        is_spurious_in_true: whether a true class of a row may have spurious items in it, as a name of spans.
    """
    hits_C, true_C, predicted_C = (np.asarray(one.sum(axis=0)) for one in (hits_NC, true_NC, predicted_NC))
    if not true_C.any():
        return micro_f1_bound(*(np.asarray(one.sum(axis=1)) for one in (hits_NC, true_NC, predicted_NC)))
    num_rows, total_C = true_NC.shape[0], true_C + predicted_C
    f1_C = 2 * hits_C / np.maximum(total_C, 1)
    lost_C = np.clip(UNSEEN_ROWS * true_NC.max(axis=0).toarray().ravel(), 1, np.maximum(hits_C, 1))
    left_C = 2 * np.maximum(hits_C - lost_C, 0) / np.maximum(total_C - lost_C, 1)
    rate_C = np.maximum((f1_C - left_C) / lost_C, (2 - f1_C) / np.maximum(total_C - 1, 1))
    loss_C = np.where(true_C > 0, rate_C, 0)
    spurious_C = np.where(true_C > 0, f1_C / np.maximum(total_C - 1, 1), 0)
    most_N = np.full(num_rows, spurious_C.max())
    if not is_spurious_in_true and len(spurious_C) > 1:
        worst = int(spurious_C.argmax())
        most_N[true_NC[:, [worst]].nonzero()[0]] = np.partition(spurious_C, -2)[-2]
    items_N = _most_spurious(*(np.asarray(one.sum(axis=1)) for one in (true_NC, predicted_NC)))
    changes_N = (true_NC @ loss_C + items_N * most_N) / (true_C > 0).sum()
    return np.asarray(num_rows * changes_N, np.float64)


def macro_f1_change(num_rows: float, hits_NC: Any, true_NC: Any, predicted_NC: Any) -> float:
    """Return a bound of the change of `f1_macro` if the predictions of `num_rows` rows change.

    With f = 2H / (T + P), x items of one class change its F1 by at most x (2 - f) / (T + P - x), and by at
    most 1. The bound takes the items of the classes with the largest rates.
    """
    hits_C, true_C, predicted_C = (np.asarray(one.sum(axis=0)) for one in (hits_NC, true_NC, predicted_NC))
    is_true_C = true_C > 0
    if not is_true_C.any():
        return math.inf
    num_items = num_rows * sum(float(one.sum(axis=1).max()) for one in (true_NC, predicted_NC))
    total_C = true_C + predicted_C
    rate_C = (2 - 2 * hits_C / np.maximum(total_C, 1)) / np.maximum(
        np.maximum(total_C - num_items, true_C), 1
    )
    rate_C = np.sort(rate_C[is_true_C])[::-1]
    items_C = 1 / np.maximum(rate_C, 1e-12)  # items for a change of the class's F1 by 1
    left_C = num_items - (items_C.cumsum() - items_C)
    return float((rate_C * np.clip(left_C, 0, items_C)).mean())


def counted(columns_of_rows: Sequence[Sequence[int]], num_columns: int) -> Any:
    """Count the columns in each row, sparse: [N, C]."""
    ends = np.cumsum([0, *map(len, columns_of_rows)])
    columns = np.array([column for columns in columns_of_rows for column in columns], np.int32)
    return csr_array((np.ones(len(columns)), columns, ends), shape=(len(columns_of_rows), num_columns))
