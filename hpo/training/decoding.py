"""From logits to predictions: class names, numbers, and spans of characters.

Logits come for a whole split as flat float32 arrays in window order: [W, C] of sequence tasks, [T, K] of
token tasks (`hpo.training.spans`). Windows of one long text are joined: the mean of log-probabilities
(single_label), the largest probability (multi_label: a criterion met anywhere is met), the mean
(regression).

What a decision needs beyond the logits (a probability threshold, a null offset) is chosen on the
validation split and kept with the model as a `DecodingThresholds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.data.tasks import Task
from hpo.data.tokenized_split import TokenizedSplit
from hpo.training.metrics import answer_row, f1_macro, f1_micro, indicators, score
from hpo.training.spans import Evidence, FloatArray, best_answers, bio_spans, sigmoid

THRESHOLD_LOG_ODDS = np.linspace(-7, 7, 141)
"""The thresholds tried for multi_label: rare classes may all stay under a probability of 0.05."""
EVIDENCE_THRESHOLDS = tuple(np.arange(1, 10) / 10)
EVIDENCE_MERGE_GAPS = (0, 2, 5)


@dataclass(frozen=True)
class DecodingThresholds:
    """What turns a task's scores into predictions; a kind uses what it needs and ignores the rest.

    `threshold`: multi_label and span_per_label predict what has a probability above it.
    `null_offset`: span_extraction answers when the answer's logits exceed those of no answer by more.
    `merge_gap`: span_per_label joins two runs with at most so many tokens between them.
    """

    threshold: float = 0.5
    null_offset: float = 0.0
    merge_gap: int = 0


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
    """One prediction an example, in the order of `split.examples`.

    single_label a class, multi_label a list of classes, regression a number in raw units, the span kinds
    a sorted list of (name, start, end) in characters. span_per_label finds spans for
    `predicted_labels`, the predictions of its `evidence_for` task, alone. NaN logits give some
    prediction, not an error: look for them before.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        match task.kind:
            case "single_label":
                best_E = _mean_of_windows(_log_softmax(logits), split).argmax(axis=1)
                return [task.labels[best] for best in best_E]
            case "multi_label":
                above_EC = class_probabilities(task, logits, split) > decision.threshold
                return [[task.labels[c] for c in np.flatnonzero(above_C)] for above_C in above_EC]
            case "regression":
                output_E = _mean_of_windows(logits, split)[:, 0]
                return [float(y) for y in output_E * (task.target_std or 1.0) + task.target_mean]
            case "token_classification":
                return bio_spans(task, logits, split)
            case "span_extraction":
                answers, margin_E = best_answers(task, logits, split)
                above_E = margin_E > decision.null_offset
                return [spans if above else [] for spans, above in zip(answers, above_E, strict=True)]
            case _:
                evidence = Evidence(task, logits, split, predicted_labels)
                return evidence.spans(decision.threshold, decision.merge_gap)


def class_probabilities(task: Task, logits: FloatArray, split: TokenizedSplit) -> NDArray[np.float64]:
    """Each example's probability of each class of a single_label or multi_label task: [E, C].

    Those of single_label are proportional to the geometric mean over the windows, and sum to 1.
    """
    if task.kind == "multi_label":
        return sigmoid(_max_of_windows(logits, split))
    return np.asarray(np.exp(_log_softmax(_mean_of_windows(_log_softmax(logits), split))))


def choose_decision(
    task: Task,
    logits: FloatArray,
    split: TokenizedSplit,
    predicted_labels: Sequence[Any] | None = None,
    metric: str | None = None,
) -> DecodingThresholds:
    """The decision that maximises a metric of the task (default: its primary one) on this split.

    Only the rows annotated for the task count; without any, or for a kind with nothing to decide, it is
    `DecodingThresholds()`.
    """
    metric = metric or task.primary_metric
    rows = [row for row, example in enumerate(split.examples) if task.name in example.annotated]
    if not rows:
        return DecodingThresholds()
    with np.errstate(invalid="ignore", over="ignore"):
        match task.kind:
            case "multi_label":
                return _choose_threshold(task, logits, split, rows, metric)
            case "span_extraction":
                return _choose_null_offset(task, logits, split, rows, metric)
            case "span_per_label":
                return _choose_evidence(task, Evidence(task, logits, split, predicted_labels), rows, metric)
    return DecodingThresholds()


def _mean_of_windows(values_WC: FloatArray, split: TokenizedSplit) -> NDArray[np.float64]:
    num_examples = len(split.examples)
    sum_EC = np.zeros((num_examples, values_WC.shape[1]))
    np.add.at(sum_EC, split.window_example_W, values_WC)
    windows_E = np.bincount(split.window_example_W, minlength=num_examples)
    return sum_EC / np.maximum(windows_E, 1)[:, None]


def _max_of_windows(values_WC: FloatArray, split: TokenizedSplit) -> NDArray[np.float64]:
    max_EC = np.full((len(split.examples), values_WC.shape[1]), -np.inf)
    np.maximum.at(max_EC, split.window_example_W, values_WC)
    return max_EC


def _log_softmax(logits: FloatArray) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _choose_threshold(
    task: Task, logits: FloatArray, split: TokenizedSplit, rows: list[int], metric: str
) -> DecodingThresholds:
    """Try `THRESHOLD_LOG_ODDS`; of equal values the one nearest to a probability of a half is taken."""
    scores_NC = _max_of_windows(logits, split)[rows]
    true_NC = indicators(task, [split.examples[row].labels[task.name] for row in rows])

    def value(log_odds: float) -> float:
        found_NC = scores_NC > log_odds
        if metric == "exact_match":
            return float((found_NC == true_NC).all(axis=1).mean())
        counts_C = tuple(one_NC.sum(axis=0) for one_NC in (found_NC & true_NC, true_NC, found_NC))
        if metric == "f1_micro":
            return float(f1_micro(*counts_C))
        return float(f1_macro(counts_C, *(one_C[None] for one_C in counts_C))[0])

    best = max(THRESHOLD_LOG_ODDS, key=lambda log_odds: (value(log_odds), -abs(log_odds)))
    return DecodingThresholds(threshold=float(sigmoid(best)))


def _choose_null_offset(
    task: Task, logits: FloatArray, split: TokenizedSplit, rows: list[int], metric: str
) -> DecodingThresholds:
    """Answer the rows with the largest margins: try every number of them."""
    answers, margin_E = best_answers(task, logits, split)
    margin_N = margin_E[rows]
    order = np.argsort(-margin_N, kind="stable")[: np.isfinite(margin_N).sum()]
    margin_K = margin_N[order]
    if len(order) == 0:
        return DecodingThresholds()
    with_N5 = np.array([answer_row(task, answers[e], split.examples[e]) for e in rows])
    without_N5 = np.array([answer_row(task, [], split.examples[e]) for e in rows])
    gain_K5 = (with_N5 - without_N5)[order].cumsum(axis=0)
    sum_K15 = without_N5.sum(axis=0) + np.concatenate([np.zeros((1, 5)), gain_K5])
    hits_K1, exact_K1, overlap_K1 = sum_K15[:, :3].T
    answered_K1 = np.arange(len(order) + 1)
    value_K1 = {
        "span_f1": 2 * hits_K1 / np.maximum(with_N5[:, 3].sum() + answered_K1, 1),
        "exact_match": exact_K1,
        "span_overlap_f1": overlap_K1,
    }[metric]
    # Rows of equal margins are answered together or not at all.
    offset_K1 = np.concatenate([[margin_K[0] + 1], (margin_K[1:] + margin_K[:-1]) / 2, [margin_K[-1] - 1]])
    splits_tie_K1 = np.concatenate([[False], margin_K[1:] == margin_K[:-1], [False]])
    best = np.where(splits_tie_K1, -np.inf, value_K1).argmax()
    return DecodingThresholds(null_offset=float(offset_K1[best]))


def _choose_evidence(task: Task, evidence: Evidence, rows: list[int], metric: str) -> DecodingThresholds:
    """Try thresholds and gaps; between equal values the better overlap decides (exact spans may all be 0)."""
    examples = [evidence.split.examples[row] for row in rows]

    def value(decision: DecodingThresholds) -> tuple[float, float]:
        predicted = evidence.spans(decision.threshold, decision.merge_gap)
        scores = score(task, [predicted[row] for row in rows], examples)
        return scores[metric], scores["span_overlap_f1"]

    candidates = [
        DecodingThresholds(threshold=float(threshold), merge_gap=gap)
        for threshold, gap in product(EVIDENCE_THRESHOLDS, EVIDENCE_MERGE_GAPS)
    ]
    return max(candidates, key=value)
