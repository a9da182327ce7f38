"""The kind with evidence: spans for the classes of another task.

More suffixes than in `hpo.tasks.spans`: Q (example, predicted class) pairs, P the tokens of all pairs.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from hpo.tasks.example import Example
from hpo.tasks.kind import FloatArray, Predicted, RowLabels, RowSpans, Segments, Span, Task, indicators
from hpo.tasks.losses import Binary
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.spans import SpanKind, character_spans, runs_of, text_tokens
from hpo.tasks.sums import sigmoid
from hpo.tasks.tokenized_split import AnyArray, BoolArray, IntArray, TokenizedSplit

EVIDENCE_THRESHOLDS = tuple(np.arange(1, 10) / 10)
EVIDENCE_MERGE_GAPS = (0, 2, 5)


class SpanPerLabel(SpanKind, Binary):
    """Each token is evidence or not, for each class independently."""

    name = "span_per_label"
    min_labels = 1
    needed_key = "evidence_for"

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        labelled = self.task.evidence_for
        if labelled is None or labelled not in labels:
            return []
        held = labels[labelled]
        classes = held if isinstance(held, list) else [held]
        return [
            f"spans.{name} is evidence for a class that labels.{labelled} does not name"
            for name in sorted({name for _, _, name in spans}.difference(map(str, classes)))
        ]

    def row_targets(self, examples: Sequence[Example], has_E: BoolArray) -> AnyArray:
        """Return 1 for the classes with evidence somewhere in the text: int8 [W, C]."""
        names = set(self.task.labels)
        lists = [[name for name in example.spans if name in names] for example in examples]
        return indicators(self.task, lists).astype(np.int8)

    def batch_target(self, split: TokenizedSplit, windows_B: IntArray, is_text_BL: BoolArray) -> AnyArray:
        inside, _ = split.spans[self.task.name].placed(windows_B)
        holds_BC = split.targets[self.task.name][windows_B] == 1
        evidence_BLC = np.zeros((*is_text_BL.shape, len(self.task.labels)), dtype=np.float32)
        evidence_BLC[inside] = 1.0
        known_BL = self._known(split, windows_B, is_text_BL)
        evidence_BLC[~(known_BL[:, :, None] & holds_BC[:, None, :])] = -1.0
        return evidence_BLC

    def initial_bias(self) -> list[float]:
        return [-math.log(9)] * self.num_outputs

    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        evidence = Evidence(self.task, logits, split, labels)
        return evidence.spans(decision.threshold, decision.merge_gap)

    def choose(
        self, logits: FloatArray, split: TokenizedSplit, rows: list[int], metric: str, labels: Predicted
    ) -> DecodingThresholds:
        """Try thresholds and gaps; the overlap decides between equal values (exact spans may all be 0)."""
        evidence = Evidence(self.task, logits, split, labels)
        examples = [split.examples[row] for row in rows]

        @cache  # many thresholds and gaps give the same spans
        def value_of(predicted: tuple[tuple[Span, ...], ...]) -> tuple[float, float]:
            scores = self.whole_scores(len(rows), *self.row_values(predicted, examples))
            return scores[metric], scores["span_overlap_f1"]

        def value(decision: DecodingThresholds) -> tuple[float, float]:
            predicted = evidence.spans(decision.threshold, decision.merge_gap)
            return value_of(tuple(tuple(predicted[row]) for row in rows))

        candidates = [
            DecodingThresholds(threshold=float(threshold), merge_gap=gap)
            for threshold, gap in product(EVIDENCE_THRESHOLDS, EVIDENCE_MERGE_GAPS)
        ]
        return max(candidates, key=value)

    def decided_by(self, decision: DecodingThresholds) -> str:
        gap = f"{decision.merge_gap} token{'s' * (decision.merge_gap != 1)}"
        return f" at the threshold {decision.threshold:.3g} and the merge gap of {gap}"


class Evidence:
    """Probabilities of the text tokens of each (example, predicted class), all pairs in sequence."""

    def __init__(
        self, task: Task, logits_TC: FloatArray, split: TokenizedSplit, predicted_labels: Sequence[Any] | None
    ) -> None:
        if predicted_labels is None:
            raise ValueError(f"{task.name} needs the predicted labels of its task {task.evidence_for}.")
        token_O, example_O, begins_O = text_tokens(split)
        count_E = np.bincount(example_O, minlength=len(split.examples))
        start_E = count_E.cumsum() - count_E
        index = {label: c for c, label in enumerate(task.labels)}
        pairs = [
            (example, index[label])
            for example, labels in enumerate(predicted_labels)
            if count_E[example]
            for label in ([labels] if isinstance(labels, str) else labels)
            if label in index
        ]
        self.task, self.split = task, split
        self.example_Q, self.class_Q = np.array(pairs, np.int64).reshape(-1, 2).T
        count_Q = count_E[self.example_Q]
        first_Q = count_Q.cumsum() - count_Q
        self.pair_P = np.repeat(np.arange(len(pairs)), count_Q)
        text_P = np.repeat(start_E[self.example_Q] - first_Q, count_Q) + np.arange(count_Q.sum())
        self.token_P, self.begins_P = token_O[text_P], begins_O[text_P]
        self.probability_P = sigmoid(logits_TC[self.token_P, self.class_Q[self.pair_P]])
        self.peak_Q = np.maximum.reduceat(self.probability_P, first_Q) if pairs else np.zeros(0)

    def spans(self, threshold: float, merge_gap: int) -> list[list[Span]]:
        """Return the runs of tokens above the threshold; runs at most `merge_gap` tokens apart are joined.

        A predicted class always gets evidence: without a token above the threshold, the run around the
        likeliest token above half its probability.
        """
        fallback_Q = ~(self.peak_Q > threshold)
        limit_Q = np.where(fallback_Q, self.peak_Q / 2, threshold)
        first, last = runs_of(self.probability_P > limit_Q[self.pair_P], self.begins_P)
        # The first run begins a span, and a run after a wide gap or in a new text.
        texts_P = self.begins_P.cumsum()
        new = np.ones(len(first), bool)
        new[1:] = (first[1:] - last[:-1] - 1 > merge_gap) | (texts_P[first[1:]] != texts_P[last[:-1]])
        first, last = first[new], last[np.concatenate([new, [True]])[1 : len(last) + 1]]
        pair = self.pair_P[first]
        if len(first):
            bounds = np.ravel((first, last + 1), order="F")
            peak = np.maximum.reduceat(np.concatenate([self.probability_P, [0.0]]), bounds)[::2]
            keep = ~fallback_Q[pair] | (peak == self.peak_Q[pair])
            first, last, pair = first[keep], last[keep], pair[keep]
        names = [self.task.labels[c] for c in self.class_Q[pair]]
        tokens = self.token_P[first], self.token_P[last]
        return character_spans(self.split, self.example_Q[pair], names, *tokens)
