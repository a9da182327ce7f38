"""Scores of predictions, for each kind of task.

A prediction is a class name, a list of class names, a number, or spans `(name, start, end)`, each the
characters `text[start:end]`. So scores do not depend on the tokenizer, on windows or on truncation: a span
beyond the truncation counts as missed.

Names are scikit-learn's and SQuAD's. Rows without a truth for the task are left out. No metric is NaN or
infinite:

- F1 is 2 TP / (2 TP + FP + FN), and 1 if there is nothing to find and nothing was predicted
  (scikit-learn's `zero_division=1`).
- `f1_macro` is the mean over the classes (or span names) with a true row in the split. The F1 of other
  classes is unknown: one row of 400 with such a prediction would take a whole class's share off the mean.
  Without any true class, it is `f1_micro`.
- `r2` of a constant target is 1 if all predictions are exact, else 0 (`force_finite=True`). A single row has
  no `r2`.
- `exact_match` and `span_overlap_f1` of span_extraction are SQuAD's EM and F1, the mean over rows. Its
  `span_f1` is the F1 of exact character spans, without the rows without answer and prediction.
- `span_f1` of the other kinds is micro over spans, `span_overlap_f1` micro over (example, span name, word).
- Without an annotated row there is no metric, and none for a regression with an infinite or NaN prediction.

Every metric is a function of sums over rows (`RowStatistics`). So a resample of the rows is a vector of
weights, and thousands of resamples are matrix products. A metric of the study's own code may be any function
of truths and predictions. For it the rows themselves are stored, and each resample is a call.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.code import errors_of_code
from hpo.extensions import as_number, metrics_of
from hpo.tasks.example import Example
from hpo.tasks.kind import SHARES, FloatArray, Likely, Task, kind_of
from hpo.tasks.sums import in_parts


@dataclass(frozen=True)
class RowStatistics:
    """The terms of each annotated row in the sums of a task's metrics.

    Suffixes: N annotated rows, C classes or span names, B weightings.
    """

    task: Task
    num_examples: int  # all examples of the split, also without annotation
    index_N: NDArray[np.intp]  # numbers of the annotated examples, ascending
    counts_NC: Mapping[str, Any]
    """`hits`, `true` and `predicted` by class or span name, sparse. Empty for a regression."""
    values_N: Mapping[str, FloatArray]  # other terms of the kind by name
    rows: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    """Truths and predictions, for metrics of the study's own code."""
    group_E: NDArray[np.intp] | None = None
    """Number of each example's group: its rows are one piece of evidence. None: each row is a group."""
    _drawn: dict[bytes, dict[str, FloatArray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of these metrics by weighting, because a call may be slow."""

    @property
    def num_rows(self) -> int:
        return len(self.index_N)

    def class_counts(self) -> tuple[FloatArray, ...]:
        """Return true positives, true and predicted rows by class, each [C]. Empty for a regression."""
        return tuple(np.asarray(one.sum(axis=0)) for one in self.counts_NC.values())

    def groups(self, index: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the numbers, from 0, of the groups of the examples `index`."""
        if self.group_E is None:
            return np.arange(len(index))
        return np.unique(self.group_E[index], return_inverse=True)[1]

    def scores(self) -> dict[str, float]:
        if not self.num_rows:
            return {}
        values = kind_of(self.task).whole_scores(self.num_rows, self.counts_NC, self.values_N)
        own = self._own_scores([range(self.num_rows)])
        return values | {name: float(value_B[0]) for name, value_B in own.items() if np.isfinite(value_B[0])}

    def _own_scores(self, samples: Iterable[Sequence[int]]) -> dict[str, FloatArray]:
        """Return each metric of the study's own code for samples of the rows, [B]."""
        metrics = metrics_of(self.task.kind)
        if not metrics or not self.rows[0]:
            return {}
        values: dict[str, list[float]] = {name: [] for name in metrics}
        for sample in samples:
            for name, metric in metrics.items():
                copies = [[column[n] for n in sample] for column in self.rows]  # the metric may sort them
                with errors_of_code():
                    value = as_number(f"metric `{name}`", metric.make(*copies)) if sample else math.nan
                values[name].append(value)
        return {name: np.array(by_sample) for name, by_sample in values.items()}

    def scores_without_each(self, metric: str) -> FloatArray:
        """Return a metric [N] without each row in turn, for the jackknife, with the classes of all rows."""
        sums = {name: values_N.sum(axis=0) - values_N for name, values_N in self.values_N.items()}
        counts = {
            name: counts_NC.sum(axis=0) - counts_NC.toarray() for name, counts_NC in self.counts_NC.items()
        }
        rows_N = np.full(self.num_rows, self.num_rows - 1.0)
        values = kind_of(self.task).scores(rows_N, counts, sums, self.class_counts())
        if metric in values:
            return values[metric]
        rows = range(self.num_rows)
        if metric in metrics_of(self.task.kind):
            return self._own_scores([*rows[:n], *rows[n + 1 :]] for n in rows)[metric]
        all_N = np.arange(self.num_rows)
        others = (1.0 - (part[:, None] == all_N) for part in in_parts(all_N, self.num_rows))
        kind, rows_of = kind_of(self.task), (self.counts_NC, self.values_N)
        return np.concatenate([kind.rank_scores(one, *rows_of)[metric] for one in others])

    def weighted_scores(
        self, weights_BE: NDArray[Any], num_ranked: int | None = None
    ) -> dict[str, FloatArray]:
        """Return the metrics [B] if example e of the split counts `weights_BE[b, e]` times; NaN: no metric.

        Metrics of ranks cost a sort and are of the first `num_ranked` weightings alone; None: of all.

        `f1_macro` is the mean over the classes of all rows. A class without a row in a weighting keeps its F1
        of all rows. Otherwise a rare, always missed class would leave the mean, and the mean would rise.
        """
        weights_BN = weights_BE if self.num_rows == self.num_examples else weights_BE[:, self.index_N]
        sums = {name: weights_BN @ values_N for name, values_N in self.values_N.items()}
        counts = {name: weights_BN @ counts_NC for name, counts_NC in self.counts_NC.items()}
        rows_B = weights_BN.sum(axis=1)
        values = kind_of(self.task).scores(rows_B, counts, sums, self.class_counts())
        ranked = kind_of(self.task).rank_scores(weights_BN[:num_ranked], self.counts_NC, self.values_N)
        values |= {name: np.append(of, np.full(len(rows_B) - len(of), np.nan)) for name, of in ranked.items()}
        if metrics_of(self.task.kind):
            key = hashlib.sha256(weights_BN.tobytes()).digest()
            if key not in self._drawn:
                rows = np.arange(self.num_rows)
                samples = (np.repeat(rows, counts_N.astype(int)).tolist() for counts_N in weights_BN)
                self._drawn[key] = self._own_scores(samples)
            values |= self._drawn[key]
        return {name: np.where(rows_B > 0, value_B, np.nan) for name, value_B in values.items()}


def score(
    task: Task, predictions: Sequence[Any], examples: Sequence[Example], probabilities: Likely = None
) -> dict[str, float]:
    """Return the metrics; without the `probabilities` [E, C] of classes, only those of predictions."""
    return row_statistics(task, predictions, examples, None, probabilities).scores()


def counted(metric: str, value: Any) -> Any:
    """Return a primary metric as a part of `score`: errors as in `SHARES`, a value below 0 as 0."""
    return SHARES[metric](value) if metric in SHARES else np.maximum(value, 0)


def primary_mean(tasks: Sequence[Task], metrics: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the objective `score`: the mean of the tasks' primary metrics; None if a task lacks its metric.

    An r2 below 0 counts as 0, or one diverged regression would decide the search. Metrics are numbers, or
    arrays of one shape.
    """
    values = [(task.primary_metric, metrics[task.name].get(task.primary_metric)) for task in tasks]
    primary = [counted(metric, value) for metric, value in values if value is not None]
    return sum(primary) / len(primary) if 0 < len(primary) == len(values) else None


def row_statistics(
    task: Task,
    predictions: Sequence[Any],
    examples: Sequence[Example],
    groups: Sequence[int] | None = None,
    probabilities: Likely = None,
) -> RowStatistics:
    """Return the statistics of one prediction per example, from rows annotated for the task.

    `groups` has the number of each example's group; None: each row counts as independent. `probabilities`
    [E, C] are those of the classes, if any.
    """
    pairs = zip(predictions, examples, strict=True)
    rows = [(e, *pair) for e, pair in enumerate(pairs) if task.name in pair[1].annotated]
    index_N = np.array([e for e, _, _ in rows], np.intp)
    predicted = [prediction for _, prediction, _ in rows]
    annotated = [example for _, _, example in rows]
    kind = kind_of(task)
    counts_NC, values_N = kind.row_values(predicted, annotated)
    p_NC = probabilities if probabilities is None else probabilities[index_N]
    values_N = {**values_N, **kind.score_values(p_NC, counts_NC)}
    kept = ([kind.truth(one) for one in annotated], predicted) if metrics_of(task.kind) else ((), ())
    group_E = None if groups is None else np.asarray(groups, np.intp)
    return RowStatistics(task, len(examples), index_N, counts_NC, values_N, kept, group_E)


def right_statistics(
    task: Task, examples: Sequence[Example], groups: Sequence[int] | None = None
) -> RowStatistics:
    """Return the statistics of right and certain predictions."""
    kind = kind_of(task)
    truths = [kind.truth(one) if task.name in one.annotated else None for one in examples]
    return row_statistics(task, truths, examples, groups, kind.certain(truths))
