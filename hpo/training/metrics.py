"""Scores of predictions, for each kind of task.

A prediction is what a person would read: a class name, a list of class names, a number, or spans
`(name, start, end)`, each the characters `text[start:end]`. So scores do not depend on the tokenizer, on
windows or on truncation: a span that truncation cut off counts as missed.

Names are scikit-learn's and SQuAD's. Rows whose truth for the task is missing are left out. No metric is
ever NaN or infinite:

- F1 is 2 TP / (2 TP + FP + FN), and 1 where there is nothing to find and nothing was found
  (scikit-learn's `zero_division=1`).
- `f1_macro` is the mean over the classes (or span names) that are true somewhere in the split. One that is
  not has no F1 that a split can tell: one row of 400 that is predicted as such a class would take a whole
  class's share off the mean. Where no class is true, it is `f1_micro`.
- `r2` of a constant target is 1 if all predictions are exact, else 0 (`force_finite=True`); of a single
  row it is left out.
- The `exact_match` and `span_overlap_f1` of span_extraction are SQuAD's EM and F1, the mean over rows. Its
  `span_f1` is the F1 of exact character spans, in which rows without answer and prediction do not count.
- `span_f1` of the other kinds is micro over spans, `span_overlap_f1` micro over (example, span name, word).
- Without an annotated row there is no metric at all, and none for a regression with a prediction that is
  not finite.

Every metric is a function of sums over rows (`RowStatistics`), so a resample of the rows is a vector of
weights, and thousands of resamples are matrix products. One that a study's own code brings may be any
function of truths and predictions: for it the rows themselves are kept, and each resample is a call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.code import errors_of_code
from hpo.config.study_file import show
from hpo.errors import InputError
from hpo.extensions import metrics_of
from hpo.tasks.example import Example
from hpo.tasks.kind import FloatArray, Task, kind_of


@dataclass(frozen=True)
class RowStatistics:
    """What each annotated row adds to the sums that a task's metrics are made of.

    Suffixes: N annotated rows, C classes or span names, B weightings.
    """

    task: Task
    num_examples: int
    """Of the split, with those that are not annotated for the task."""
    index_N: NDArray[np.intp]
    """The annotated examples, ascending."""
    counts_NC: Mapping[str, Any]
    """`hits`, `true` and `predicted` by class or span name, sparse; none for a regression."""
    values_N: Mapping[str, FloatArray]
    """Whatever else a kind sums up, by name."""
    rows: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    """The truths and the predictions, where the study's own code has metrics of them."""
    _drawn: dict[bytes, dict[str, FloatArray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """These metrics of weightings that were asked for: all intervals see the same, and a call may be slow."""

    @property
    def num_rows(self) -> int:
        """The annotated rows."""
        return len(self.index_N)

    def class_counts(self) -> tuple[FloatArray, ...]:
        """True positives, true and predicted ones by class: each [C]; none of a regression."""
        return tuple(np.asarray(one.sum(axis=0)) for one in self.counts_NC.values())

    def scores(self) -> dict[str, float]:
        """The metrics of the whole; see the module for what is left out."""
        if not self.num_rows:
            return {}
        values = kind_of(self.task).whole_scores(self.num_rows, self.counts_NC, self.values_N)
        own = self._own_scores([range(self.num_rows)])
        return values | {name: float(value_B[0]) for name, value_B in own.items() if np.isfinite(value_B[0])}

    def _own_scores(self, samples: Iterable[Sequence[int]]) -> dict[str, FloatArray]:
        """Each metric of the study's own code for samples of the rows, [B]; none if the rows are not kept."""
        metrics = metrics_of(self.task.kind)
        if not metrics or not self.rows[0]:
            return {}
        values: dict[str, list[float]] = {name: [] for name in metrics}
        for sample in samples:
            for name, metric in metrics.items():
                given = [[of_row[n] for n in sample] for of_row in self.rows]  # its own: it may sort them
                with errors_of_code():
                    values[name].append(_number(name, metric.make(*given)) if sample else math.nan)
        return {name: np.array(of_samples) for name, of_samples in values.items()}

    def scores_without_each(self) -> dict[str, FloatArray]:
        """The metrics [N] of all rows but one, each left out in turn: what the jackknife needs.

        `f1_macro` is the mean over the classes of the whole, as in `weighted_scores`.
        """
        sums = {name: values_N.sum() - values_N for name, values_N in self.values_N.items()}
        counts = {
            name: counts_NC.sum(axis=0) - counts_NC.toarray() for name, counts_NC in self.counts_NC.items()
        }
        rows_N = np.full(self.num_rows, self.num_rows - 1.0)
        values = kind_of(self.task).scores(rows_N, counts, sums, self.class_counts())
        rows = range(self.num_rows)
        return values | self._own_scores([*rows[:n], *rows[n + 1 :]] for n in rows)

    def weighted_scores(self, weights_BE: NDArray[Any]) -> dict[str, FloatArray]:
        """The metrics [B] where example e of the split counts `weights_BE[b, e]` times; NaN where there are
        none.

        `f1_macro` is the mean over the classes of the whole: one that has no part in a weighting keeps its F1
        of the whole. Without it, a rare class that is always missed would leave the mean wherever it is not
        drawn, and the mean would rise.
        """
        weights_BN = weights_BE if self.num_rows == self.num_examples else weights_BE[:, self.index_N]
        sums = {name: weights_BN @ values_N for name, values_N in self.values_N.items()}
        counts = {name: weights_BN @ counts_NC for name, counts_NC in self.counts_NC.items()}
        rows_B = weights_BN.sum(axis=1)
        values = kind_of(self.task).scores(rows_B, counts, sums, self.class_counts())
        drawn = (np.repeat(np.arange(self.num_rows), of_N.astype(int)).tolist() for of_N in weights_BN)
        if metrics_of(self.task.kind):
            key = hashlib.sha256(weights_BN.tobytes()).digest()
            if key not in self._drawn:
                self._drawn[key] = self._own_scores(drawn)
            values |= self._drawn[key]
        return {name: np.where(rows_B > 0, value_B, np.nan) for name, value_B in values.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"the metric `{name}` must return a number, but got {show(value)}.") from None


def score(task: Task, predictions: Sequence[Any], examples: Sequence[Example]) -> dict[str, float]:
    """The metrics `task.metrics` of one prediction an example; see the module for what is left out."""
    return row_statistics(task, predictions, examples).scores()


def primary_mean(tasks: Sequence[Task], metrics: Mapping[str, Mapping[str, Any]]) -> Any:
    """The objective `score`: the mean of the tasks' primary metrics; None where a task has none.

    The mean of the other tasks would be another quantity by the same name.

    An r2 below 0 counts as 0: it has no lower bound as the others have, so that one regression that diverged
    would decide the search. Metrics are numbers, or arrays of one shape.
    """
    of_tasks = [metrics[task.name].get(task.primary_metric) for task in tasks]
    primary = [np.maximum(value, 0) for value in of_tasks if value is not None]
    return sum(primary) / len(primary) if 0 < len(primary) == len(of_tasks) else None


def row_statistics(task: Task, predictions: Sequence[Any], examples: Sequence[Example]) -> RowStatistics:
    """Of one prediction an example; rows that are not annotated for the task have no part."""
    pairs = zip(predictions, examples, strict=True)
    rows = [(e, *pair) for e, pair in enumerate(pairs) if task.name in pair[1].annotated]
    index_N = np.array([e for e, _, _ in rows], np.intp)
    predicted = [prediction for _, prediction, _ in rows]
    annotated = [example for _, _, example in rows]
    kind = kind_of(task)
    counts_NC, values_N = kind.row_values(predicted, annotated)
    of_own = ([kind.truth(one) for one in annotated], predicted) if metrics_of(task.kind) else ((), ())
    return RowStatistics(task, len(examples), index_N, counts_NC, values_N, of_own)
