"""Scores of predictions, for each kind of task.

A prediction is what a person would read: a class name, a list of class names, a number, or spans
`(name, start, end)` of characters, end exclusive. So scores do not depend on the tokenizer, on windows or
on truncation: a span that truncation cut off counts as missed.

Names are scikit-learn's and SQuAD's. Rows whose truth for the task is missing are left out. No metric is
ever NaN or infinite:

- F1 is 2 TP / (2 TP + FP + FN), and 1 where there is nothing to find and nothing was found
  (scikit-learn's `zero_division=1`).
- `f1_macro` is the mean over the classes (or span names) that are true or predicted somewhere
  (`zero_division=nan`). A class with neither is left out, so a rare class enters as 0 once it is
  predicted wrongly.
- `r2` of a constant target is 1 if all predictions are exact, else 0 (`force_finite=True`); of a single
  row it is left out.
- Without an annotated row there is no metric at all, and none for a regression with a prediction that is
  not finite.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.data.examples import Example
from hpo.data.tasks import Task

Span = tuple[str, int, int]

_WORD = re.compile(r"\S+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(task: Task, predictions: Sequence[Any], examples: Sequence[Example]) -> dict[str, float]:
    """The metrics `task.metrics` of one prediction an example; see the module for what is left out."""
    pairs = zip(predictions, examples, strict=True)
    rows = [(prediction, example) for prediction, example in pairs if task.name in example.annotated]
    if not rows:
        return {}
    predicted, annotated = zip(*rows, strict=True)
    if task.kind == "span_extraction":
        return answer_scores(task, predicted, annotated)
    if task.kind in ("token_classification", "span_per_label"):
        overlap = span_overlap_f1(task, predicted, annotated)
        return {"span_overlap_f1": overlap, **span_f1_scores(task, predicted, annotated)}
    truth = [example.labels[task.name] for example in annotated]
    if task.kind == "regression":
        return _regression_scores(np.array(truth, np.float64), np.array(predicted, np.float64))
    if task.kind == "multi_label":
        true_NC, predicted_NC = indicators(task, truth), indicators(task, predicted)
        last = {"exact_match": float((true_NC == predicted_NC).all(axis=1).mean())}
    else:
        true_NC, predicted_NC = (indicators(task, [[label] for label in side]) for side in (truth, predicted))
        last = {"accuracy": float((true_NC & predicted_NC).any(axis=1).mean())}
    counts = (true_NC & predicted_NC).sum(axis=0), true_NC.sum(axis=0), predicted_NC.sum(axis=0)
    return {"f1_macro": float(f1_macro(*counts)), "f1_micro": float(f1_micro(*counts))} | last


def f1_micro(hits_C: NDArray[Any], true_C: NDArray[Any], predicted_C: NDArray[Any]) -> Any:
    """F1 of the counts summed over classes, the last axis: true positives, true and predicted ones."""
    total = (true_C + predicted_C).sum(axis=-1)
    return np.where(total > 0, 2 * hits_C.sum(axis=-1) / np.maximum(total, 1), 1.0)[()]


def f1_macro(hits_C: NDArray[Any], true_C: NDArray[Any], predicted_C: NDArray[Any]) -> Any:
    """Mean F1 of the classes, the last axis, that occur among the true or the predicted ones."""
    total_C = true_C + predicted_C
    occurring = (total_C > 0).sum(axis=-1)
    sum_ = (2 * hits_C / np.maximum(total_C, 1)).sum(axis=-1)
    return np.where(occurring > 0, sum_ / np.maximum(occurring, 1), 1.0)[()]


def indicators(task: Task, label_lists: Sequence[Any]) -> NDArray[np.bool_]:
    """Return lists of labels as rows of booleans: [N, C]."""
    index = {label: i for i, label in enumerate(task.labels)}
    indicators_NC = np.zeros((len(label_lists), len(index)), bool)
    for row, labels in zip(indicators_NC, label_lists, strict=True):
        row[[index[label] for label in labels]] = True
    return indicators_NC


def _regression_scores(truth_N: NDArray[np.float64], predicted_N: NDArray[np.float64]) -> dict[str, float]:
    if not np.isfinite(predicted_N).all():
        return {}
    error_N = predicted_N - truth_N
    residual, total = float((error_N**2).sum()), float(((truth_N - truth_N.mean()) ** 2).sum())
    scores = {"mae": float(np.abs(error_N).mean()), "rmse": float(np.sqrt((error_N**2).mean()))}
    if len(truth_N) > 1:
        scores["r2"] = 1 - residual / total if total else float(residual == 0)
    return scores


def _true_spans(task: Task, example: Example) -> set[Span]:
    return {(name, start, end) for name in task.labels for start, end in example.spans.get(name, ())}


def span_f1_scores(
    task: Task, predictions: Sequence[Sequence[Span]], examples: Sequence[Example]
) -> dict[str, float]:
    """`span_f1`, micro over spans, and `f1_macro` over span names; a hit is exact in name, start and end."""
    hits, true, predicted = (Counter[str]() for _ in range(3))
    for spans, example in zip(predictions, examples, strict=True):
        truth, found = _true_spans(task, example), set(spans)
        hits.update(name for name, _, _ in truth & found)
        true.update(name for name, _, _ in truth)
        predicted.update(name for name, _, _ in found)
    counts = [np.array([counter[name] for name in task.labels]) for counter in (hits, true, predicted)]
    return {"span_f1": float(f1_micro(*counts)), "f1_macro": float(f1_macro(*counts))}


def span_overlap_f1(task: Task, predictions: Sequence[Sequence[Span]], examples: Sequence[Example]) -> float:
    """Return F1 over (example, span name, word), micro.

    A word is a run of characters other than white space; a span covers the words that it shares at least
    one character with. So the score is the same under any tokenizer. In a script that writes no spaces,
    words are as long as the text between them: use `span_f1` there.
    """
    hits = total = 0
    for spans, example in zip(predictions, examples, strict=True):
        truth, found = _words(example.text, _true_spans(task, example)), _words(example.text, spans)
        hits += len(truth & found)
        total += len(truth) + len(found)
    return 2 * hits / total if total else 1.0


def _words(text: str, spans: Iterable[Span]) -> set[tuple[str, int]]:
    """The words that each span shares a character with, told by where they begin."""
    words: set[tuple[str, int]] = set()
    for name, start, end in spans:
        while start > 0 and not text[start].isspace() and not text[start - 1].isspace():
            start -= 1
        words.update((name, match.start()) for match in _WORD.finditer(text, start, end))
    return words


def answer_scores(
    task: Task, predictions: Sequence[Sequence[Span]], examples: Sequence[Example]
) -> dict[str, float]:
    """Scores of one optional answer a row, against the best of its accepted answers.

    `exact_match` and `span_overlap_f1` are SQuAD's EM and F1 (of the answers' words, normalised), the
    mean over rows; a row without an answer counts 1 if none is predicted (or one without a word), else 0.
    With `_answerable` they are means over the rows that have an answer, left out if there is none.
    `span_f1` is the F1 of exact character spans, in which rows without answer and prediction do not count.
    """
    rows = [answer_row(task, spans, example) for spans, example in zip(predictions, examples, strict=True)]
    hit_N, exact_N, overlap_N, true_N, predicted_N = np.array(rows).T
    scores = {
        "span_f1": float(f1_micro(hit_N, true_N, predicted_N)),
        "exact_match": float(exact_N.mean()),
        "span_overlap_f1": float(overlap_N.mean()),
    }
    answerable_N = true_N > 0
    if answerable_N.any():
        scores["exact_match_answerable"] = float(exact_N[answerable_N].mean())
        scores["span_overlap_f1_answerable"] = float(overlap_N[answerable_N].mean())
    return scores


def answer_row(
    task: Task, spans: Sequence[Span], example: Example
) -> tuple[float, float, float, float, float]:
    """One row's span hit, SQuAD exact match, SQuAD F1, whether it has an answer, whether one is predicted."""
    name = task.labels[0]
    accepted = [tuple(span) for span in example.alt_spans.get(name) or example.spans.get(name, ())]
    words = [word for _, start, end in spans[:1] for word in squad_words(example.text[start:end])]
    answers = [answer for start, end in accepted if (answer := squad_words(example.text[start:end]))] or [[]]
    return (
        float(any((start, end) in accepted for _, start, end in spans[:1])),
        float(words in answers),
        max(_squad_f1(words, answer) for answer in answers),
        float(bool(accepted)),
        float(bool(spans)),
    )


def squad_words(text: str) -> list[str]:
    """Words after SQuAD's normalisation: lower case, no ASCII punctuation, no articles.

    The order of its steps is that of SQuAD 2.0's `evaluate-v2.0.py`.
    """
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _squad_f1(predicted: list[str], answer: list[str]) -> float:
    if not predicted or not answer:
        return float(predicted == answer)
    same = sum((Counter(predicted) & Counter(answer)).values())
    return 2 * same / (len(predicted) + len(answer))
