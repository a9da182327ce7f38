"""The kind with one span of a row, an answer, or none."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from hpo.tasks.example import Example
from hpo.tasks.kind import (
    IGNORE_INDEX,
    ByName,
    Counts,
    FloatArray,
    Predicted,
    RowLabels,
    RowSpans,
    RowValues,
    Scores,
    Segments,
    Span,
)
from hpo.tasks.options import DecodingThresholds, LossOptions
from hpo.tasks.spans import SpanKind, character_spans
from hpo.tasks.sums import f1_micro
from hpo.tasks.tokenized_split import AnyArray, BoolArray, TokenizedSplit, WindowSpans

MAX_ANSWER_TOKENS = 30
"""SQuAD's customary bound."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class SpanExtraction(SpanKind):
    """Logits of the answer's first and last token; the first token of the window means no answer."""

    name = "span_extraction"
    metrics = ("span_f1", "span_overlap_f1", "exact_match")
    proportions = ("exact_match",)
    # Not focal: its classes are positions, without the imbalance that focal corrects.
    losses = ("cross_entropy",)
    is_by_row = True
    needed_key = "span_names"
    max_span_names = 1
    at_first_token = "no answer"

    @property
    def num_outputs(self) -> int:
        return 2

    def span_problems(self, spans: RowSpans, labels: RowLabels, segments: Segments) -> list[str]:
        name, segment = self.task.name, self.task.inside_segment
        problems = [f"`{name}` takes one span a row, but got {len(spans)}"] if len(spans) > 1 else []
        if segment is not None:
            low, high = segments.get(segment, (0, 0))
            problems += [
                f"spans.{name}: [{start}, {end}] must lie inside segment `{segment}` [{low}, {high}]"
                for start, end, name in spans
                if not low <= start < end <= high
            ]
        return problems

    def window_targets(self, spans: WindowSpans, annotated_W: BoolArray) -> AnyArray:
        """Return the first and last token of a complete answer in a window, else (0, 0): no answer."""
        target_W2 = np.zeros((len(annotated_W), 2), dtype=np.int32)
        window_S = np.repeat(np.arange(len(annotated_W)), np.diff(spans.start_W1))
        is_whole_S = spans.rows_S4[:, 3] == 0
        target_W2[window_S[is_whole_S]] = spans.rows_S4[is_whole_S, 1:3]
        target_W2[~annotated_W] = IGNORE_INDEX
        return target_W2

    def labelled(self, target: Tensor) -> Tensor:
        return (target >= 0).any(dim=-1)

    def loss_sum(
        self, logits: Tensor, target: Tensor, options: LossOptions, weight: Tensor | None, mask_BL: Tensor
    ) -> Tensor:
        """Return the mean of start and end cross-entropy over the real positions, summed over rows."""
        real_BL1, smoothing = (mask_BL != 0)[:, :, None], options.label_smoothing
        masked_BL2 = torch.where(real_BL1, logits, torch.finfo(torch.float32).min)
        log_p_BL2 = masked_BL2.log_softmax(dim=1)
        loss_B2 = -log_p_BL2.gather(1, target.clamp(min=0)[:, None, :]).squeeze(1)
        if smoothing:
            uniform_B2 = -torch.where(real_BL1, log_p_BL2, 0.0).sum(dim=1) / real_BL1.sum(dim=1)
            loss_B2 = (1 - smoothing) * loss_B2 + smoothing * uniform_B2
        return torch.where(target != IGNORE_INDEX, loss_B2, 0.0).sum() / 2

    def best_answers(
        self, logits_T2: FloatArray, split: TokenizedSplit
    ) -> tuple[list[list[Span]], NDArray[np.float64]]:
        """Return each example's best answer, and the margin of its logits over no answer.

        An answer starts at an owned token of its window, has at most MAX_ANSWER_TOKENS tokens, and lies
        inside the task's segment. No answer is position 0 of the same window. The margin is -inf without any
        possible answer.
        """
        window_T = np.repeat(np.arange(len(split.window_example_W)), np.diff(split.window_start_W1))
        example_T = split.window_example_W[window_T]
        name = self.task.inside_segment or ""
        segments = [example.segments.get(name, (0, len(example.text))) for example in split.examples]
        low_T, high_T = np.array(segments).reshape(-1, 2)[example_T].T
        end_ok_T = (split.char_start_T >= np.maximum(low_T, 0)) & (split.char_end_T <= high_T)
        start_ok_T = end_ok_T & split.owned_T
        start_T, end_T = logits_T2.astype(np.float64).T
        best_T, last_T = np.full(len(start_T), -np.inf), np.arange(len(start_T))
        for length in range(min(MAX_ANSWER_TOKENS, len(start_T))):
            n = len(start_T) - length
            total = start_T[:n] + end_T[length:]
            fits = start_ok_T[:n] & end_ok_T[length:] & (window_T[:n] == window_T[length:])
            better = fits & (total > best_T[:n])
            best_T[:n][better] = total[better]
            last_T[:n][better] = np.flatnonzero(better) + length
        null_W = (start_T + end_T)[split.window_start_W1[:-1]]
        margin_T = best_T - null_W[window_T]

        order = np.flatnonzero(np.isfinite(margin_T))
        order = order[np.lexsort((-margin_T[order], example_T[order]))]
        example_S, first_of_example = np.unique(example_T[order], return_index=True)
        first_S = order[first_of_example]
        margin_E = np.full(len(split.examples), -np.inf)
        margin_E[example_S] = margin_T[first_S]
        names = [self.task.labels[0]] * len(first_S)
        return character_spans(split, example_S, names, first_S, last_T[first_S]), margin_E

    def decode(
        self, logits: FloatArray, split: TokenizedSplit, decision: DecodingThresholds, labels: Predicted
    ) -> list[Any]:
        answers, margin_E = self.best_answers(logits, split)
        above_E = margin_E > decision.null_offset
        return [spans if above else [] for spans, above in zip(answers, above_E, strict=True)]

    def choose(
        self, logits: FloatArray, split: TokenizedSplit, rows: list[int], metric: str, labels: Predicted
    ) -> DecodingThresholds:
        """Answer the rows with the largest margins: try every number of rows."""
        answers, margin_E = self.best_answers(logits, split)
        margin_N = margin_E[rows]
        order = np.argsort(-margin_N, kind="stable")[: np.isfinite(margin_N).sum()]
        margin_K = margin_N[order]
        if len(order) == 0:
            return DecodingThresholds()
        with_N5 = np.array([self.answer_row(answers[e], split.examples[e]) for e in rows])
        without_N5 = np.array([self.answer_row([], split.examples[e]) for e in rows])
        gain_K5 = (with_N5 - without_N5)[order].cumsum(axis=0)
        sum_K15 = without_N5.sum(axis=0) + np.concatenate([np.zeros((1, 5)), gain_K5])
        hits_K1, exact_K1, overlap_K1 = sum_K15[:, :3].T
        answered_K1 = np.arange(len(order) + 1)
        value_K1 = {
            "span_f1": 2 * hits_K1 / np.maximum(with_N5[:, 3].sum() + answered_K1, 1),
            "exact_match": exact_K1,
            "span_overlap_f1": overlap_K1,
        }[metric]
        # Rows with equal margins are answered together or not at all.
        offset_K1 = np.r_[margin_K[0] + 1, (margin_K[1:] + margin_K[:-1]) / 2, margin_K[-1] - 1]
        splits_tie_K1 = np.r_[False, margin_K[1:] == margin_K[:-1], False]
        best = np.where(splits_tie_K1, -np.inf, value_K1).argmax()
        return DecodingThresholds(null_offset=float(offset_K1[best]))

    def accepted(self, example: Example) -> list[tuple[int, int]]:
        """Return the accepted answers; empty: there is no answer."""
        name = self.task.labels[0]
        return [(start, end) for start, end in example.alt_spans.get(name) or example.spans.get(name, ())]

    def answer_row(self, spans: Sequence[Span], example: Example) -> tuple[float, float, float, float, float]:
        """Return one row's span hit, SQuAD exact match, SQuAD F1, and 1 or 0 for a true and a predicted
        answer.

        Exact match and F1 compare normalised words with the best accepted answer. A row without an answer
        counts 1 without a prediction (or with one without a word), else 0.
        """
        accepted = self.accepted(example)
        words = [word for _, start, end in spans[:1] for word in squad_words(example.text[start:end])]
        texts = [squad_words(example.text[start:end]) for start, end in accepted]
        answers = [answer for answer in texts if answer] or [[]]
        return (
            float(any((start, end) in accepted for _, start, end in spans[:1])),
            float(words in answers),
            max(_squad_f1(words, answer) for answer in answers),
            float(bool(accepted)),
            float(bool(spans)),
        )

    def row_values(self, predicted: Sequence[Any], examples: Sequence[Example]) -> RowValues:

        rows = [self.answer_row(spans, example) for spans, example in zip(predicted, examples, strict=True)]
        hit_N, exact_N, overlap_N, true_N, predicted_N = np.array(rows).reshape(-1, 5).T
        columns = {"hits": hit_N, "true": true_N, "predicted": predicted_N}
        counts_NC = {name: csr_array(values_N[:, None]) for name, values_N in columns.items()}
        return counts_NC, {"exact": exact_N, "overlap": overlap_N}

    def scores(self, rows_B: FloatArray, counts_BC: ByName, sums_B: ByName, whole: Counts) -> Scores:
        rows_B = np.maximum(rows_B, 1)
        counts = counts_BC["hits"], counts_BC["true"], counts_BC["predicted"]
        overlap_B, exact_B = sums_B["overlap"] / rows_B, sums_B["exact"] / rows_B
        micro_B = np.atleast_1d(f1_micro(*counts))
        return {"span_overlap_f1": overlap_B, "span_f1": micro_B, "exact_match": exact_B}

    def row_bound(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> float | FloatArray:
        # It is a mean over rows here.
        return 1.0 if metric == "span_overlap_f1" else super().row_bound(metric, counts_NC, values_N)

    def constant_rows(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> RowValues | None:
        """Predict no answer in any row."""
        none = counts_NC["true"] * 0
        is_right_N = 1.0 - np.asarray(counts_NC["true"].sum(axis=1))
        counts = {"hits": none, "true": counts_NC["true"], "predicted": none}
        return counts, {"exact": is_right_N, "overlap": is_right_N}

    def decided_by(self, decision: DecodingThresholds) -> str:
        return f" at the null offset {decision.null_offset:.3g}"

    def shown_spans(self, example: Example) -> set[Span]:
        """Return the true answer, or the first accepted one."""
        name = self.task.labels[0]
        return self.true_spans(example) or {(name, *answer) for answer in self.accepted(example)[:1]}

    def wrong_spans(self, predicted: Sequence[Span], example: Example) -> set[Span]:
        """Return the missed and the spurious spans; empty for an accepted answer."""
        accepted = self.accepted(example)
        is_right = any((start, end) in accepted for _, start, end in predicted[:1])
        return set() if is_right else super().wrong_spans(predicted, example)


def squad_words(text: str) -> list[str]:
    """Return the words after SQuAD's normalisation: lower case, no ASCII punctuation, no articles.

    The order of the steps is that of SQuAD 2.0's `evaluate-v2.0.py`.
    """
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _squad_f1(predicted: list[str], answer: list[str]) -> float:
    if not predicted or not answer:
        return float(predicted == answer)
    same = sum((Counter(predicted) & Counter(answer)).values())
    return 2 * same / (len(predicted) + len(answer))
