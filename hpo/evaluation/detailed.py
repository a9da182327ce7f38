"""Detailed evaluation of a model on a split: intervals, classes, worst errors, warnings.

Precision, recall and F1 of a class are scikit-learn's with `zero_division=0`, and None for a class that is
neither true nor predicted. A span is right if its name, start and end are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

from hpo.evaluation.cautions import task_warnings
from hpo.evaluation.contributions import baselines
from hpo.evaluation.intervals import LEVEL, NUM_RESAMPLES, metric_intervals
from hpo.evaluation.mistakes import worst_mistakes
from hpo.evaluation.record import (
    DECIDED_ON,
    VERSION,
    ClassFigures,
    Confusion,
    DetailedEvaluation,
    Interval,
    TaskEvaluation,
)
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import TokenizedSplit
from hpo.training.decoding import class_probabilities, decode_tasks
from hpo.training.metrics import RowStatistics, row_statistics


@dataclass(frozen=True)
class SplitPredictions:
    """Predictions of a model for every example of a split."""

    tasks: tuple[Task, ...]
    examples: Sequence[Example]
    decisions: Mapping[str, DecodingThresholds]
    predictions: Mapping[str, Sequence[Any]]
    """One prediction per example, by task; see `hpo.training.decoding.decode`."""
    probabilities: Mapping[str, NDArray[np.float64]]
    """[E, C] of single_label and multi_label tasks."""

    @cached_property
    def statistics(self) -> Mapping[str, RowStatistics]:
        return {
            task.name: row_statistics(task, self.predictions[task.name], self.examples) for task in self.tasks
        }

    def metrics(self) -> dict[str, dict[str, float]]:
        return {name: statistics.scores() for name, statistics in self.statistics.items()}


def predict_split(
    tasks: Sequence[Task],
    logits: Mapping[str, NDArray[np.float32]],
    split: TokenizedSplit,
    decisions: Mapping[str, DecodingThresholds],
) -> SplitPredictions:
    """Decode the logits of a split with given decisions; a task without one has the default."""
    given = {task.name: decisions.get(task.name, DecodingThresholds()) for task in tasks}
    predictions, chosen = decode_tasks(tasks, logits, split, given)
    probabilities = class_probabilities(tasks, logits, split)
    return SplitPredictions(tuple(tasks), split.examples, chosen, predictions, probabilities)


def evaluate_predictions(
    predicted: SplitPredictions, *, split_name: str, num_resamples: int = NUM_RESAMPLES
) -> DetailedEvaluation:
    """Evaluate predictions, with intervals of `num_resamples` resamples of the examples."""
    statistics = predicted.statistics
    intervals = metric_intervals(statistics, num_resamples=num_resamples)
    baseline = baselines(statistics)
    return DetailedEvaluation(
        VERSION,
        split_name,
        len(predicted.examples),
        DECIDED_ON,
        num_resamples,
        LEVEL,
        intervals.score,
        baseline,
        {
            task.name: _evaluate_task(predicted, statistics[task.name], intervals.tasks[task.name], baseline)
            for task in predicted.tasks
        },
    )


def _evaluate_task(
    predicted: SplitPredictions,
    statistics: RowStatistics,
    metrics: Mapping[str, Interval],
    baseline: Mapping[str, float],
) -> TaskEvaluation:
    task, index_N = statistics.task, statistics.index_N
    examples = [predicted.examples[e] for e in index_N]
    predictions = [predicted.predictions[task.name][e] for e in index_N]
    probabilities_EC = predicted.probabilities.get(task.name)
    is_whole = len(examples) == len(predicted.examples)
    probabilities_NC = probabilities_EC if probabilities_EC is None or is_whole else probabilities_EC[index_N]
    decisions, classes = predicted.decisions[task.name], class_figures(statistics)
    return TaskEvaluation(
        task.kind,
        statistics.num_rows,
        metrics,
        decisions.threshold if KINDS[task.kind].has_threshold else None,
        decisions,
        classes,
        confusion(statistics),
        worst_mistakes(task, predictions, examples, probabilities_NC),
        task_warnings(statistics, classes, decisions, baseline),
    )


def class_figures(statistics: RowStatistics) -> tuple[ClassFigures, ...]:
    """Return the figures of each class in the task's order; empty for a regression or without labels."""
    if not statistics.counts_NC or not statistics.num_rows:
        return ()
    counts = zip(*(values.astype(int).tolist() for values in statistics.class_counts()), strict=True)
    return tuple(_figures(name, *of) for name, of in zip(statistics.task.labels, counts, strict=True))


def _figures(name: str, hits: int, support: int, num_predicted: int) -> ClassFigures:
    if not support + num_predicted:
        return ClassFigures(name, None, None, None, 0, 0)
    precision, recall = hits / max(num_predicted, 1), hits / max(support, 1)
    return ClassFigures(name, precision, recall, 2 * hits / (support + num_predicted), support, num_predicted)


def confusion(statistics: RowStatistics) -> Confusion | None:
    """Return the confusions of a kind with classes; None for others, or without a labelled row."""
    task = statistics.task
    if not KINDS[task.kind].has_classes or not statistics.num_rows:
        return None
    pairs = coo_array(statistics.counts_NC["true"].T @ statistics.counts_NC["predicted"])
    columns = (values.astype(int).tolist() for values in (*pairs.coords, pairs.data))
    return Confusion(task.labels, tuple(sorted(zip(*columns, strict=True))))
