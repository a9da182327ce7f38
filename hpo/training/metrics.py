"""Scores of predictions, for each kind of task.

A prediction is what a person would read: a class name, a list of class names, a number, or spans
`(name, start, end)` of characters, end exclusive. So scores do not depend on the tokenizer, on windows or
on truncation: a span that truncation cut off counts as missed.

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
weights, and thousands of resamples are matrix products.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from hpo.data.examples import Example
from hpo.data.tasks import Task

FloatArray = NDArray[np.float64]
Span = tuple[str, int, int]

_WORD = re.compile(r"\S+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

_ROUNDING = 1e-12
"""A variance that is smaller in relation to the sum of squares is that of equal values, but for rounding."""


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
        sums = {name: values_N.sum(keepdims=True) for name, values_N in self.values_N.items()}
        counts = {name: counts_NC.sum(axis=0)[None] for name, counts_NC in self.counts_NC.items()}
        values = _metrics(self.task, np.array([float(self.num_rows)]), counts, sums, self.class_counts())
        return {name: float(value_B[0]) for name, value_B in values.items() if np.isfinite(value_B[0])}

    def scores_without_each(self) -> dict[str, FloatArray]:
        """The metrics [N] of all rows but one, each left out in turn: what the jackknife needs.

        `f1_macro` is the mean over the classes of the whole, as in `weighted_scores`.
        """
        sums = {name: values_N.sum() - values_N for name, values_N in self.values_N.items()}
        counts = {
            name: counts_NC.sum(axis=0) - counts_NC.toarray() for name, counts_NC in self.counts_NC.items()
        }
        return _metrics(
            self.task, np.full(self.num_rows, self.num_rows - 1.0), counts, sums, self.class_counts()
        )

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
        values = _metrics(self.task, rows_B, counts, sums, self.class_counts())
        return {name: np.where(rows_B > 0, value_B, np.nan) for name, value_B in values.items()}


def score(task: Task, predictions: Sequence[Any], examples: Sequence[Example]) -> dict[str, float]:
    """The metrics `task.metrics` of one prediction an example; see the module for what is left out."""
    return row_statistics(task, predictions, examples).scores()


def primary_mean(tasks: Sequence[Task], metrics: Mapping[str, Mapping[str, Any]]) -> Any:
    """The objective `score`: the mean of the tasks' primary metrics, of those that have one; else None.

    An r2 below 0 counts as 0: it has no lower bound as the others have, so that one regression that diverged
    would decide the search. Metrics are numbers, or arrays of one shape.
    """
    of_tasks = [metrics[task.name].get(task.primary_metric) for task in tasks]
    primary = [np.maximum(value, 0) for value in of_tasks if value is not None]
    return sum(primary) / len(primary) if primary else None


def row_statistics(task: Task, predictions: Sequence[Any], examples: Sequence[Example]) -> RowStatistics:
    """Of one prediction an example; rows that are not annotated for the task have no part."""
    pairs = zip(predictions, examples, strict=True)
    rows = [(e, *pair) for e, pair in enumerate(pairs) if task.name in pair[1].annotated]
    index_N = np.array([e for e, _, _ in rows], np.intp)
    predicted = [prediction for _, prediction, _ in rows]
    annotated = [example for _, _, example in rows]
    counts_NC: dict[str, Any] = {}
    match task.kind:
        case "regression":
            values_N = _regression_values(task, predicted, annotated)
        case "single_label" | "multi_label":
            counts_NC, values_N = _label_counts(task, predicted, annotated)
        case "span_extraction":
            counts_NC, values_N = _answer_values(task, predicted, annotated)
        case _:
            counts_NC, values_N = _span_counts(task, predicted, annotated)
    return RowStatistics(task, len(examples), index_N, counts_NC, values_N)


def f1_micro(hits_C: NDArray[Any], true_C: NDArray[Any], predicted_C: NDArray[Any]) -> Any:
    """F1 of the counts summed over classes, the last axis: true positives, true and predicted ones."""
    total = (true_C + predicted_C).sum(axis=-1)
    return np.where(total > 0, 2 * hits_C.sum(axis=-1) / np.maximum(total, 1), 1.0)[()]


def f1_macro(
    whole: tuple[FloatArray, ...], hits_BC: FloatArray, true_BC: FloatArray, predicted_BC: FloatArray
) -> FloatArray:
    """Mean F1 [B] of the classes that are true in the whole, whose counts [C] are `whole`.

    A class that has no part in a weighting keeps its F1 of the whole.
    """
    hits_C, true_C, predicted_C = whole
    is_true_C = true_C > 0
    if not is_true_C.any():
        return np.atleast_1d(f1_micro(hits_BC, true_BC, predicted_BC))
    f1_C = 2 * hits_C / np.maximum(true_C + predicted_C, 1)
    total_BC = true_BC + predicted_BC
    f1_BC = np.where(total_BC > 0, 2 * hits_BC / np.maximum(total_BC, 1), f1_C)
    return np.asarray(f1_BC[:, is_true_C].mean(axis=1))


def indicators(task: Task, label_lists: Sequence[Any]) -> NDArray[np.bool_]:
    """Return lists of labels as rows of booleans: [N, C]."""
    index = {label: i for i, label in enumerate(task.labels)}
    indicators_NC = np.zeros((len(label_lists), len(index)), bool)
    for row, labels in zip(indicators_NC, label_lists, strict=True):
        row[[index[label] for label in labels]] = True
    return indicators_NC


def _counts(columns_of_rows: Sequence[Sequence[int]], num_columns: int) -> Any:
    """How often each row names each column, sparse: [N, C]."""
    ends = np.cumsum([0, *map(len, columns_of_rows)])
    columns = np.array([column for columns in columns_of_rows for column in columns], np.int32)
    return csr_array((np.ones(len(columns)), columns, ends), shape=(len(columns_of_rows), num_columns))


def _label_counts(
    task: Task, predicted: Sequence[Any], examples: Sequence[Example]
) -> tuple[dict[str, Any], dict[str, FloatArray]]:
    index = {label: i for i, label in enumerate(task.labels)}
    is_single = task.kind == "single_label"

    def columns(labels: Any) -> list[int]:
        return [index[labels]] if is_single else sorted({index[label] for label in labels})

    true = _counts([columns(example.labels[task.name]) for example in examples], len(index))
    predicted_NC = _counts([columns(labels) for labels in predicted], len(index))
    hits = csr_array(true.multiply(predicted_NC))
    is_right_N = 2 * hits.sum(axis=1) == true.sum(axis=1) + predicted_NC.sum(axis=1)
    return {"hits": hits, "true": true, "predicted": predicted_NC}, {"right": is_right_N.astype(np.float64)}


def _span_counts(
    task: Task, predicted: Sequence[Any], examples: Sequence[Example]
) -> tuple[dict[str, Any], dict[str, FloatArray]]:
    index = {name: i for i, name in enumerate(task.labels)}
    columns: dict[str, list[list[int]]] = {"hits": [], "true": [], "predicted": []}
    words = np.zeros((2, len(examples)))
    for i, (spans, example) in enumerate(zip(predicted, examples, strict=True)):
        truth, given = true_spans(task, example), set(spans)
        for name, some in (("hits", truth & given), ("true", truth), ("predicted", given)):
            columns[name].append([index[span[0]] for span in some])
        words[:, i] = word_counts(example.text, truth, given)
    counts_NC = {name: _counts(of_rows, len(index)) for name, of_rows in columns.items()}
    return counts_NC, {"shared_words": words[0], "words": words[1]}


def _answer_values(
    task: Task, predicted: Sequence[Any], examples: Sequence[Example]
) -> tuple[dict[str, Any], dict[str, FloatArray]]:
    rows = [answer_row(task, spans, example) for spans, example in zip(predicted, examples, strict=True)]
    hit_N, exact_N, overlap_N, true_N, predicted_N = np.array(rows).reshape(-1, 5).T
    columns = {"hits": hit_N, "true": true_N, "predicted": predicted_N}
    counts_NC = {name: csr_array(values_N[:, None]) for name, values_N in columns.items()}
    return counts_NC, {"exact": exact_N, "overlap": overlap_N}


def _regression_values(
    task: Task, predicted: Sequence[Any], examples: Sequence[Example]
) -> dict[str, FloatArray]:
    """Targets from their mean, so that their variance is not lost to rounding in the sum of their squares."""
    truth_N = np.array([example.labels[task.name] for example in examples], np.float64)
    predicted_N = np.array(predicted, np.float64)
    error_N = np.where(np.isfinite(predicted_N), predicted_N, np.nan) - truth_N
    target_N = truth_N - (truth_N.mean() if len(truth_N) else 0.0)
    return {
        "absolute": np.abs(error_N),
        "squared": error_N**2,
        "target": target_N,
        "target_squared": target_N**2,
    }


def _metrics(
    task: Task,
    rows_B: FloatArray,
    counts_BC: Mapping[str, FloatArray],
    sums_B: Mapping[str, FloatArray],
    whole: tuple[FloatArray, ...],
) -> dict[str, FloatArray]:
    """The metrics of sums over so many rows; NaN or infinite where one is not defined.

    `whole` has the counts of the whole split, by class.
    """
    rows_B = np.maximum(rows_B, 1)
    if task.kind == "regression":
        residual_B, squares_B = sums_B["squared"], sums_B["target_squared"]
        total_B = squares_B - sums_B["target"] ** 2 / rows_B
        is_constant_B = total_B <= _ROUNDING * squares_B
        ratio_B = residual_B / np.where(is_constant_B, 1, total_B)
        constant_B = np.where(np.isfinite(residual_B), residual_B == 0, np.nan)
        return {
            "mae": sums_B["absolute"] / rows_B,
            "rmse": np.sqrt(residual_B / rows_B),
            "r2": np.where(rows_B > 1, np.where(is_constant_B, constant_B, 1 - ratio_B), np.nan),
        }
    counts = counts_BC["hits"], counts_BC["true"], counts_BC["predicted"]
    micro_B = np.atleast_1d(f1_micro(*counts))
    if task.kind == "span_extraction":
        overlap_B, exact_B = sums_B["overlap"] / rows_B, sums_B["exact"] / rows_B
        return {"span_overlap_f1": overlap_B, "span_f1": micro_B, "exact_match": exact_B}
    macro_B = f1_macro(whole, *counts)
    if task.kind in ("single_label", "multi_label"):
        right = "accuracy" if task.kind == "single_label" else "exact_match"
        return {"f1_macro": macro_B, "f1_micro": micro_B, right: sums_B["right"] / rows_B}
    words_B = sums_B["words"]
    overlap_B = np.where(words_B > 0, 2 * sums_B["shared_words"] / np.maximum(words_B, 1), 1.0)
    return {"span_overlap_f1": overlap_B, "span_f1": micro_B, "f1_macro": macro_B}


# What one row adds to the scores of spans


def true_spans(task: Task, example: Example) -> set[Span]:
    return {(name, start, end) for name in task.labels for start, end in example.spans.get(name, ())}


def accepted_answers(task: Task, example: Example) -> list[tuple[int, int]]:
    """The spans that are right for a span_extraction task; none: there is no answer."""
    name = task.labels[0]
    return [(start, end) for start, end in example.alt_spans.get(name) or example.spans.get(name, ())]


def word_counts(text: str, truth: set[Span], predicted: Iterable[Span]) -> tuple[int, int]:
    """Words that true and predicted spans share, and the sum of the words of either.

    A word is a run of characters other than white space; a span covers the words that it shares at least
    one character with. So the score is the same under any tokenizer. In a script that writes no spaces,
    words are as long as the text between them: use `span_f1` there.
    """
    true_words, found_words = _words(text, truth), _words(text, predicted)
    return len(true_words & found_words), len(true_words) + len(found_words)


def _words(text: str, spans: Iterable[Span]) -> set[tuple[str, int]]:
    """The words that each span shares a character with, told by where they begin."""
    words: set[tuple[str, int]] = set()
    for name, start, end in spans:
        while start > 0 and not text[start].isspace() and not text[start - 1].isspace():
            start -= 1
        words.update((name, match.start()) for match in _WORD.finditer(text, start, end))
    return words


def answer_row(
    task: Task, spans: Sequence[Span], example: Example
) -> tuple[float, float, float, float, float]:
    """One row's span hit, SQuAD exact match, SQuAD F1, whether it has an answer, whether one is predicted.

    Exact match and F1 are those of the answers' words, normalised, against the best of the accepted answers;
    a row without an answer counts 1 if none is predicted (or one without a word), else 0.
    """
    accepted = accepted_answers(task, example)
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
