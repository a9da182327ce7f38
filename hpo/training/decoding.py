"""From logits to predictions: class names, numbers, and spans of characters.

Logits come for a whole split as flat float32 arrays in window order: [W, C] of sequence tasks, [T, K] of
token tasks, special tokens included and padding not. The kinds of task (`hpo.tasks`) join the windows of one
long text, each in its way. A token that several windows hold is read in the one that owns it, so a long text
is one row of tokens. Everything per token is vectorised over T; Python loops run over the spans found only.

What a decision needs beyond the logits (a probability threshold, a null offset) is chosen on the
validation split and kept with the model as a `DecodingThresholds`.
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
    """The predictions of every task, evidence after the task whose predicted classes it belongs to, and
    the decisions that they were made with.

    Without `decisions` they are chosen on this split; `metrics` maps a task to the metric to maximise.
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
    """One prediction an example, in the order of `split.examples`; see `Kind.decode`.

    NaN logits give some prediction, not an error: look for them before.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return kind_of(task).decode(logits, split, decision, predicted_labels)


def class_probabilities(
    tasks: Sequence[Task], logits: Mapping[str, FloatArray], split: TokenizedSplit
) -> dict[str, NDArray[np.float64]]:
    """Each example's probability of each class of the tasks that have classes: [E, C]."""
    by_task = {task.name: kind_of(task).probabilities(logits[task.name], split) for task in tasks}
    return {name: of_task for name, of_task in by_task.items() if of_task is not None}


def choose_decision(
    task: Task,
    logits: FloatArray,
    split: TokenizedSplit,
    predicted_labels: Sequence[Any] | None = None,
    metric: str | None = None,
) -> DecodingThresholds:
    """The decision that maximises a metric of the task (default: its primary one) on this split; in place of
    one that a study's own code brings, the first of its kind.

    Only the rows annotated for the task count; without any, or for a kind with nothing to decide, it is
    `DecodingThresholds()`.
    """
    kind = kind_of(task)
    metric = metric or task.primary_metric
    metric = metric if metric in kind.metrics else kind.metrics[0]
    rows = [row for row, example in enumerate(split.examples) if task.name in example.annotated]
    if not rows:
        return DecodingThresholds()
    with np.errstate(invalid="ignore", over="ignore"):
        return kind.choose(logits, split, rows, metric, predicted_labels)
