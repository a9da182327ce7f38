"""Predictions from logits: class names, numbers, and spans of characters.

Logits of a split are flat float32 arrays in window order: [W, C] of sequence tasks, [T, K] of token tasks,
with special tokens and without padding. Each kind of task (`hpo.tasks`) joins the windows of one long text. A
token in several windows is read in its owner, so a long text is one row of tokens. Work per token is
vectorised over T. Python loops run only over predicted spans.

Thresholds (a probability, a null offset) are chosen on the validation split and stored with the model as
`DecodingThresholds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.tasks.kind import FloatArray, Task, kind_of
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import TokenizedSplit


def decode_tasks(
    tasks: Sequence[Task],
    logits: Mapping[str, FloatArray],
    split: TokenizedSplit,
    decisions: Mapping[str, DecodingThresholds] | None = None,
    metrics: Mapping[str, str] | None = None,
) -> tuple[dict[str, list[Any]], dict[str, DecodingThresholds]]:
    """Return the predictions of every task and their decisions.

    Without `decisions` they are chosen on this split; `metrics` maps a task to the metric to maximise.
    Evidence is decoded after the predicted classes of its task.
    """
    predictions: dict[str, list[Any]] = {}
    chosen = dict(decisions or {})
    for task in sorted(tasks, key=lambda task: task.evidence_for is not None):
        name, labels = task.name, predictions.get(task.evidence_for or "")
        if not decisions:
            chosen[name] = choose_decision(task, logits[name], split, labels, (metrics or {}).get(name))
        predictions[name] = decode(task, logits[name], split, chosen[name], labels)
    return predictions, {task.name: chosen[task.name] for task in tasks}


def decode(
    task: Task,
    logits: FloatArray,
    split: TokenizedSplit,
    decision: DecodingThresholds,
    predicted_labels: Sequence[Any] | None = None,
) -> list[Any]:
    """Return one prediction per example, in the order of `split.examples`; see `Kind.decode`.

    NaN logits give some prediction, not an error: check them before.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return kind_of(task).decode(logits, split, decision, predicted_labels)


def class_probabilities(
    tasks: Sequence[Task], logits: Mapping[str, FloatArray], split: TokenizedSplit
) -> dict[str, NDArray[np.float64]]:
    """Return each example's probability of each class, [E, C], for tasks with classes."""
    by_task = {task.name: kind_of(task).probabilities(logits[task.name], split) for task in tasks}
    return {name: values for name, values in by_task.items() if values is not None}


def choose_decision(
    task: Task,
    logits: FloatArray,
    split: TokenizedSplit,
    predicted_labels: Sequence[Any] | None = None,
    metric: str | None = None,
) -> DecodingThresholds:
    """Return the decision with the best metric of the task (default: its primary one) on this split.

    In place of a metric of the study's own code, the first of its kind decides. Only rows annotated for the
    task count.
    """
    kind = kind_of(task)
    metric = metric or task.primary_metric
    metric = metric if metric in kind.metrics else kind.metrics[0]
    rows = [row for row, example in enumerate(split.examples) if task.name in example.annotated]
    if not rows:
        return DecodingThresholds()
    with np.errstate(invalid="ignore", over="ignore"):
        return kind.choose(logits, split, rows, metric, predicted_labels)
