"""Detailed evaluation of a model on a split: intervals, classes, worst errors, warnings.

Precision, recall and F1 of a class are scikit-learn's with `zero_division=0`, and None for a class that is
neither true nor predicted. A span is right if its name, start and end are.

The loss of a wrong row is -log of the probability of the true class (single_label), the sum of the classes'
binary cross-entropies (multi_label), the absolute error (regression), or the number of missed and spurious
spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

from hpo.data.groups import groups_of
from hpo.errors import first_names
from hpo.evaluation.contributions import baselines
from hpo.evaluation.intervals import LEVEL, NUM_RESAMPLES, metric_intervals
from hpo.evaluation.record import (
    DECIDED_ON,
    VERSION,
    ClassFigures,
    Confusion,
    DetailedEvaluation,
    Interval,
    Mistake,
    TaskEvaluation,
)
from hpo.tasks.example import Example
from hpo.tasks.kind import KINDS, Kind, Span, Task, is_error, kind_of
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.spans import SpanKind
from hpo.tasks.tokenized_split import TokenizedSplit
from hpo.training.evaluate import class_probabilities, decode_tasks
from hpo.training.metrics import RowStatistics, row_statistics

MAX_MISTAKES = 20
MAX_CHARACTERS = 1000
_BEFORE = 200
"""Characters of a long text before its first wrong span."""
FEW_ROWS_OF_A_CLASS = 10
FEW_ROWS = 30
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class SplitPredictions:
    """Predictions of a model for every example of a split."""

    tasks: tuple[Task, ...]
    examples: Sequence[Example]
    decisions: Mapping[str, DecodingThresholds]
    predictions: Mapping[str, Sequence[Any]]
    """One prediction per example, by task; see `hpo.training.evaluate.decode`."""
    probabilities: Mapping[str, NDArray[np.float64]]
    """[E, C] of single_label and multi_label tasks."""

    @cached_property
    def statistics(self) -> Mapping[str, RowStatistics]:
        groups, likely = groups_of(self.examples), self.probabilities
        return {
            name: row_statistics(task, self.predictions[name], self.examples, groups, likely.get(name))
            for task in self.tasks
            for name in [task.name]
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
    has_thresholds = any(kind_of(task).decided_by(predicted.decisions[task.name]) for task in predicted.tasks)
    return DetailedEvaluation(
        VERSION,
        split_name,
        len(predicted.examples),
        DECIDED_ON if has_thresholds else "",
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


def worst_mistakes(
    task: Task,
    predicted: Sequence[Any],
    examples: Sequence[Example],
    probabilities_NC: NDArray[np.float64] | None,
    limit: int = MAX_MISTAKES,
) -> tuple[Mistake, ...]:
    """Return at most `limit` wrong rows of the labelled `examples`; of equal loss, the earlier one first.

    `probabilities_NC` are those of single_label and multi_label.
    """
    kind = kind_of(task)
    loss_N = kind.row_losses(predicted, examples, probabilities_NC) if examples else np.zeros(0)
    order = np.argsort(-loss_N, kind="stable")
    wrong = [n for n in order[np.isfinite(loss_N[order])].tolist() if loss_N[n] > 0]
    return tuple(_mistake(kind, predicted[n], examples[n], float(loss_N[n])) for n in wrong[:limit])


def _mistake(kind: Kind, predicted: Any, example: Example, loss: float) -> Mistake:
    if not isinstance(kind, SpanKind):
        truth: Any = example.labels[kind.task.name]
        if kind.is_list:  # both in the order of the task's classes
            truth, predicted = ([c for c in kind.task.labels if c in names] for names in (truth, predicted))
        return Mistake(example.id, example.text[:MAX_CHARACTERS], truth, predicted, loss)
    spans = [kind.shown_spans(example), set(predicted)]
    wrong, first = spans[0] ^ spans[1], 0
    if max(end for group in spans for _, _, end in group) > MAX_CHARACTERS:
        first_wrong = min(start for _, start, _ in wrong)
        first = max(0, min(first_wrong - _BEFORE, len(example.text) - MAX_CHARACTERS))
    text = example.text[first : first + MAX_CHARACTERS]
    outside = sum(start < first or end > first + len(text) for _, start, end in wrong)
    truth, predicted = (_in_excerpt(group, first, len(text)) for group in spans)
    return Mistake(example.id, text, truth, predicted, loss, first, outside)


def _in_excerpt(spans: set[Span], first: int, length: int) -> list[list[Any]]:
    """Spans relative to the excerpt of the text from `first` on, cut at its ends."""
    inside = [(max(0, start - first), min(length, end - first), name) for name, start, end in spans]
    return [[name, start, end] for start, end, name in sorted(inside) if start < end]


def task_warnings(
    statistics: RowStatistics,
    classes: Sequence[ClassFigures],
    decisions: DecodingThresholds,
    baseline: Mapping[str, float],
) -> tuple[str, ...]:
    """Return warnings about one task on one split, for predictions with `decisions`.

    `baseline` has the values of the best constant predictions (`hpo.evaluation.contributions.baselines`).
    """
    task, num_rows, kind = statistics.task, statistics.num_rows, kind_of(statistics.task)
    if not num_rows:
        return (f"No row of this split is labelled for {task.name}.",)
    scores, metric = statistics.scores(), task.primary_metric
    warnings = baseline_warnings(metric, scores.get(metric), baseline.get(f"{task.name}/{metric}"))
    if not scores:
        warnings.append("Some predictions are not finite, so there is no metric.")
    if num_rows < FEW_ROWS:
        warnings.append(f"Labelled rows: only {num_rows}, so all figures are uncertain.")
    threshold = kind.decided_by(decisions)
    is_everywhere = [one for one in classes if kind.is_by_row and one.num_predicted == num_rows > one.support]
    groups = {
        "Never predicted": [one for one in classes if one.support and not one.num_predicted],
        f"Predicted in every row{threshold}": is_everywhere,
        f"Fewer than {FEW_ROWS_OF_A_CLASS} {'rows' if kind.is_by_row else 'spans'}": [
            one for one in classes if 0 < one.support < FEW_ROWS_OF_A_CLASS
        ],
        "Not in this split": [one for one in classes if not one.support],
    }
    return (*warnings, *(f"{title}: {_names(group)}." for title, group in groups.items() if group))


def baseline_warnings(metric: str, value: float | None, baseline: float | None) -> list[str]:
    """Warn of a value that is not better than that of the best constant prediction."""
    if value is None or baseline is None or (value < baseline if is_error(metric) else value > baseline):
        return []
    better = "below" if is_error(metric) else "above"
    return [f"{metric} is not {better} that of the best constant prediction ({baseline:.4g})."]


def _names(classes: Sequence[ClassFigures]) -> str:
    return first_names([f"`{one.name}`" for one in classes], _NAMES_SHOWN)
