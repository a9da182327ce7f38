"""The kinds with classes of a row: one class, or any number."""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hpo.errors import did_you_mean, shorten
from hpo.tasks.example import Example, Label
from hpo.tasks.kind import (
    BITS,
    IGNORE_INDEX,
    MULTI_HOT,
    ByName,
    Counts,
    FloatArray,
    Kind,
    Likely,
    Predicted,
    RowValues,
    Scores,
    class_name,
    indicators,
    not_classes,
)
from hpo.tasks.losses import Binary, Multiclass
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.sums import (
    counted,
    f1_macro,
    f1_micro,
    log_softmax,
    macro_f1_bound,
    max_of_windows,
    mean_of_windows,
    micro_f1_bound,
    sigmoid,
)
from hpo.tasks.tokenized_split import AnyArray, BoolArray, TokenizedSplit

THRESHOLD_LOG_ODDS = np.linspace(-7, 7, 141)
"""Candidate thresholds of multi_label; rare classes may all have a probability below 0.05."""

_WHOLE = re.compile(r"(-?\d+)\.0+")
"""A whole number from pandas, in a csv column with an empty cell."""
_LIST = re.compile(r"""\[\s*([\["'{].*|-?\d.*)?\]""", re.DOTALL)
"""A list of JSON, pandas or NumPy. Its first item begins with a quote, a bracket or a digit."""
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ITEM = rf"(?:{_QUOTED}|-?\d+)"
_LISTS = {
    "[": re.compile(rf"\[\s*(?:(?:{_QUOTED})(?:\s*,\s*|\s+|(?=\])))*\]"),
    "(": re.compile(rf"\(\s*(?:{_ITEM}\s*,\s*)*(?:(?<=,)|(?<=, )){_ITEM}?\s*\)|\(\)"),
    "{": re.compile(rf"\{{\s*(?:(?:{_QUOTED}|[^\s'\"{{}},:][^'\"{{}},:]*)(?:\s*,\s*|(?=\}})))*\}}"),
}
"""By first character: a list of Python or NumPy, a tuple, a set or an array of PostgreSQL."""
_LEAST_PROBABILITY = 1e-15
"""Probabilities in losses lie between this and 1 minus this."""
_AT_ONCE = 2**20
"""Number of probabilities in one step of `row_losses`, for the memory."""


class _Labels(Kind):
    has_classes = True

    @cached_property
    def _index(self) -> dict[str, int]:
        return {label: c for c, label in enumerate(self.task.labels)}

    @cached_property
    def _alike(self) -> dict[str, str]:
        return {_number_alike(class_name(label)): label for label in reversed(self.task.labels)}

    def _listed(self, label: Any) -> list[str]:
        return label if self.is_list else [label]

    def label(self, value: Any) -> Label:
        """Return the classes as strings of the task, so a million rows share them."""
        classes = self._listed(value)
        if isinstance(classes, list):
            classes = [self._known(item) for item in classes]
        if not isinstance(classes, list) or not all(isinstance(item, str) for item in classes):
            form = "a list of classes" if self.is_list else "one class"
            raise not_classes(form, value)
        unknown = [item for item in classes if item not in self._index]
        if self.is_list and len(classes) > 1 and set(classes) <= BITS and (unknown or len({*classes}) < 2):
            raise ValueError(f": {MULTI_HOT}; got {shorten(repr(value), 60)}")
        if unknown:
            hint = did_you_mean(unknown[0], self.task.labels)
            if self.is_list and {*map(str.strip, re.split("[,;/|&+]", unknown[0]))} & self._index.keys():
                hint = " If it names several, give a list, or set `data.csv.list_separator`"
            raise ValueError(f": unknown class `{unknown[0]}`.{hint}")
        if len(set(classes)) < len(classes):
            raise ValueError(f" names a class twice: {shorten(repr(value), 60)}")
        labels = [self.task.labels[self._index[item]] for item in classes]
        return labels if self.is_list else labels[0]

    def _known(self, item: Any) -> Any:
        """Return the class of the task with this name, up to white space, or 1.0 for 1."""
        if isinstance(item, str) and item in self._index:
            return item
        name = class_name(item)
        return self._alike.get(_number_alike(name), name) if isinstance(name, str) else name

    def truth(self, example: Example) -> Any:
        label: Any = example.labels[self.task.name]
        return sorted(label, key=self._index.__getitem__) if self.is_list else label

    def label_names(self, example: Example) -> Sequence[str]:
        return self._listed(example.labels[self.task.name])

    def row_values(self, predicted: Sequence[Any], examples: Sequence[Example]) -> RowValues:
        truth = [self.label_names(example) for example in examples]
        return _compared(*(self._counts(labels) for labels in (truth, map(self._listed, predicted))))

    def _counts(self, rows: Iterable[Sequence[str]]) -> Any:
        return counted([[self._index[label] for label in labels] for labels in rows], len(self._index))

    def scores(self, rows_B: FloatArray, counts_BC: ByName, sums_B: ByName, whole: Counts) -> Scores:
        counts = counts_BC["hits"], counts_BC["true"], counts_BC["predicted"]
        right_B = sums_B["right"] / np.maximum(rows_B, 1)
        values = f1_macro(whole, *counts), np.atleast_1d(f1_micro(*counts)), right_B
        return dict(zip(self.metrics, values, strict=True))

    def row_bound(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> float | FloatArray:
        if metric == "f1_macro":
            return macro_f1_bound(*counts_NC.values())
        if metric == "f1_micro" and self.is_list:
            return micro_f1_bound(*(np.asarray(one.sum(axis=1)) for one in counts_NC.values()))
        return super().row_bound(metric, counts_NC, values_N)

    def constant_rows(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> RowValues | None:
        """Predict the most frequent class in every row. A list gets the best classes for the metric: all for
        `f1_macro`, the most frequent ones for `f1_micro`, else the most frequent list."""
        true = counts_NC["true"]
        num_rows, num_classes = true.shape
        columns = self._constant(metric, true)
        return _compared(true, counted([columns] * num_rows, num_classes))

    def _constant(self, metric: str, true_NC: Any) -> list[int]:
        """Return the columns of the best constant prediction."""
        true_C = np.asarray(true_NC.sum(axis=0))
        order = np.argsort(-true_C, kind="stable")
        if not self.is_list:
            return [int(order[0])]
        if metric == "f1_macro" or not true_C.any():
            return [int(column) for column in np.flatnonzero(true_C)]
        if metric == "f1_micro":
            num_K = np.arange(1, len(order) + 1)
            f1_K = 2 * true_C[order].cumsum() / (true_C.sum() + num_K * true_NC.shape[0])
            return [int(column) for column in order[: int(f1_K.argmax()) + 1]]
        lists = np.split(true_NC.indices, true_NC.indptr[1:-1])
        return list(Counter(tuple(sorted(one.tolist())) for one in lists).most_common(1)[0][0])

    def row_losses(self, predicted: Sequence[Any], examples: Sequence[Example], p_NC: Likely) -> FloatArray:
        """Return -log of the true class's probability, or the sum of the classes' binary cross-entropies."""
        assert p_NC is not None
        truth = [self.label_names(example) for example in examples]
        pairs = zip(map(self._listed, predicted), truth, strict=True)
        wrong = np.flatnonzero([set(one) != set(other) for one, other in pairs])
        loss_N = np.zeros(len(truth))
        for rows in np.array_split(wrong, 1 + len(wrong) * self.num_outputs // _AT_ONCE):
            p_RC = np.clip(p_NC[rows], _LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY)
            true_RC = indicators(self.task, [truth[n] for n in rows])
            log_p_RC = np.log(np.where(true_RC, p_RC, 1 - p_RC))
            loss_N[rows] = -(log_p_RC.sum(axis=1) if self.is_list else np.log(p_RC[true_RC]))
        return loss_N


def _number_alike(name: str) -> str:
    whole = _WHOLE.fullmatch(name)
    return whole[1] if whole else name


def _compared(true_NC: Any, predicted_NC: Any) -> RowValues:
    """Return the row values of true and predicted classes, sparse: [N, C] each."""
    hits_NC = true_NC.multiply(predicted_NC).tocsr()
    is_right_N = 2 * hits_NC.sum(axis=1) == true_NC.sum(axis=1) + predicted_NC.sum(axis=1)
    counts_NC = {"hits": hits_NC, "true": true_NC, "predicted": predicted_NC}
    return counts_NC, {"right": is_right_N.astype(np.float64)}


class SingleLabel(_Labels, Multiclass):
    """One class of a row."""

    name = "single_label"
    metrics = ("f1_macro", "f1_micro", "accuracy")
    proportions = ("f1_micro", "accuracy")
    min_labels = 2

    @classmethod
    def from_cell(cls, cell: Any, list_separator: str, *, has_decimal_comma: bool) -> Any:
        if isinstance(cell, str) and _LIST.fullmatch(cell.strip()):
            raise not_classes("one class", cell)
        return cell

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        labels: list[Any] = [example.labels.get(self.task.name) for example in examples]
        classes = (self._index.get(label, IGNORE_INDEX) for label in labels)
        return np.fromiter(classes, dtype=np.int32, count=len(examples))

    def probabilities(self, logits: FloatArray, split: TokenizedSplit) -> NDArray[np.float64]:
        """Return the normalised geometric mean over the windows."""
        return np.asarray(np.exp(log_softmax(mean_of_windows(log_softmax(logits), split))))

    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        """Return the class with the largest mean of log-probabilities over the windows."""
        best_E = mean_of_windows(log_softmax(logits), split).argmax(axis=1)
        return [self.task.labels[best] for best in best_E]


class MultiLabel(_Labels, Binary):
    """Any number of classes of a row, also none."""

    name = "multi_label"
    metrics = ("f1_macro", "f1_micro", "exact_match")
    proportions = ("exact_match",)
    is_list = True
    min_labels = 1

    @classmethod
    def from_cell(cls, cell: Any, list_separator: str, *, has_decimal_comma: bool) -> Any:
        if not isinstance(cell, str):
            return cell if isinstance(cell, list) else [cell]
        text = cell.strip()
        with suppress(ValueError, SyntaxError):
            if text[0] == "[":
                return json.loads(text)
        with suppress(SyntaxError):
            if (form := _LISTS.get(text[0])) and form.fullmatch(text):
                items = re.findall(rf"({_QUOTED})|([^\s,][^,]*)", text[1:-1])
                return [ast.literal_eval(quoted) if quoted else other.strip() for quoted, other in items]
        if text[0] == "[" or text[0] + text[-1] == "{}":
            raise ValueError(f' must be a list, as `["a", "b"]`, but got {shorten(repr(text), 60)}')
        return [part for piece in cell.split(list_separator) if (part := piece.strip())]

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        labels: list[Any] = [example.labels.get(self.task.name, ()) for example in examples]
        held_EC = indicators(self.task, labels).astype(np.int8)
        return np.where(has_E[:, None], held_EC, np.int8(-1))

    def initial_bias(self) -> list[float]:
        return [-math.log(max(self.num_outputs - 1, 1))] * self.num_outputs

    def labelled(self, target: Tensor) -> Tensor:
        return (target >= 0).any(dim=-1)

    def probabilities(self, logits: FloatArray, split: TokenizedSplit) -> NDArray[np.float64]:
        """Return the maximum over the windows: a criterion met in one window is met."""
        return sigmoid(max_of_windows(logits, split))

    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        above_EC = self.probabilities(logits, split) > decision.threshold
        return [[self.task.labels[c] for c in np.flatnonzero(above_C)] for above_C in above_EC]

    def choose(
        self, logits: FloatArray, split: TokenizedSplit, rows: list[int], metric: str, labels: Predicted
    ) -> DecodingThresholds:
        """Try `THRESHOLD_LOG_ODDS`; of equal values, choose the nearest to a probability of 1/2."""
        truth: list[Any] = [split.examples[row].labels[self.task.name] for row in rows]
        scores_NC = max_of_windows(logits, split)[rows]
        true_NC = indicators(self.task, truth)

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

    def decided_by(self, decision: DecodingThresholds) -> str:
        return f" at the threshold {decision.threshold:.3g}"
