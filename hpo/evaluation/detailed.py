"""How the record of a detailed evaluation is made of logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.evaluation.cautions import task_warnings
from hpo.evaluation.classes import class_figures, confusion
from hpo.evaluation.contributions import baselines
from hpo.evaluation.intervals import LEVEL, NUM_RESAMPLES, metric_intervals
from hpo.evaluation.mistakes import worst_mistakes
from hpo.evaluation.record import DECIDED_ON, VERSION, DetailedEvaluation, Interval, TaskEvaluation
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Task
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import TokenizedSplit
from hpo.training.decoding import class_probabilities, decode_tasks
from hpo.training.metrics import RowStatistics, row_statistics


@dataclass(frozen=True)
class SplitPredictions:
    """What a model predicts for every example of a split."""

    tasks: tuple[Task, ...]
    examples: Sequence[Example]
    decisions: Mapping[str, DecodingThresholds]
    predictions: Mapping[str, Sequence[Any]]
    """By task, one an example; see `hpo.training.decoding.decode`."""
    probabilities: Mapping[str, NDArray[np.float64]]
    """Of single_label and multi_label tasks: [E, C]."""

    @cached_property
    def statistics(self) -> Mapping[str, RowStatistics]:
        return {
            task.name: row_statistics(task, self.predictions[task.name], self.examples) for task in self.tasks
        }

    def metrics(self) -> dict[str, dict[str, float]]:
        return {name: of.scores() for name, of in self.statistics.items()}


def predict_split(
    tasks: Sequence[Task],
    logits: Mapping[str, NDArray[np.float32]],
    split: TokenizedSplit,
    decisions: Mapping[str, DecodingThresholds],
) -> SplitPredictions:
    """Decode the logits of a split with decisions that were made elsewhere; a task without one has the
    default."""
    given = {task.name: decisions.get(task.name, DecodingThresholds()) for task in tasks}
    predictions, chosen = decode_tasks(tasks, logits, split, given)
    probabilities = class_probabilities(tasks, logits, split)
    return SplitPredictions(tuple(tasks), split.examples, chosen, predictions, probabilities)


def evaluate_predictions(
    predicted: SplitPredictions,
    *,
    split_name: str,
    num_resamples: int = NUM_RESAMPLES,
) -> DetailedEvaluation:
    """All that the record holds, with intervals of `num_resamples` resamples of the examples."""
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
            task.name: _task_evaluation(
                predicted, statistics[task.name], intervals.tasks[task.name], baseline
            )
            for task in predicted.tasks
        },
    )


def _task_evaluation(
    predicted: SplitPredictions,
    statistics: RowStatistics,
    metrics: Mapping[str, Interval],
    baseline: Mapping[str, float],
) -> TaskEvaluation:
    task, index_N = statistics.task, statistics.index_N
    examples = [predicted.examples[e] for e in index_N]
    of_rows = [predicted.predictions[task.name][e] for e in index_N]
    probabilities_EC = predicted.probabilities.get(task.name)
    is_whole = len(examples) == len(predicted.examples)
    probabilities_NC = probabilities_EC if probabilities_EC is None or is_whole else probabilities_EC[index_N]
    has_threshold = KINDS[task.kind].has_threshold
    decisions = predicted.decisions[task.name]
    classes = class_figures(statistics)
    return TaskEvaluation(
        task.kind,
        statistics.num_rows,
        metrics,
        decisions.threshold if has_threshold else None,
        decisions,
        classes,
        confusion(statistics),
        worst_mistakes(task, of_rows, examples, probabilities_NC),
        task_warnings(statistics, classes, decisions, baseline),
    )
