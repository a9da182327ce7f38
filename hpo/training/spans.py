"""From the logits of token tasks to spans of characters.

Logits are flat [T, K] over the tokens of all windows of a split, in window order, special tokens included
and padding not. Everything per token is vectorised over T; Python loops run over the spans found only.
A token that several windows hold is read in the one that owns it, so a long text is one row of tokens.

Suffixes: T all tokens, W windows, E examples, O owned tokens of text in reading order, S spans found;
for evidence Q the (example, predicted class) pairs and P the tokens of all these pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.data.tasks import Task
from hpo.data.tokenized_split import BoolArray, IntArray, TokenizedSplit, ragged_arange
from hpo.training.metrics import Span

FloatArray = NDArray[np.floating[Any]]

# SQuAD's customary bound.
MAX_ANSWER_TOKENS = 30


def _text_tokens(split: TokenizedSplit) -> tuple[IntArray, IntArray, BoolArray]:
    """The owned tokens of all texts in reading order: index into T, example, and whether a text begins.

    A step back in the text (an encoded pair whose second segment is written first) begins anew too, so
    that no run of tokens spans it.
    """
    example_T = np.repeat(split.window_example_W, np.diff(split.window_start_W1))
    token_O = np.flatnonzero(split.owned_T & (split.char_start_T >= 0))
    token_O = token_O[np.argsort(example_T[token_O], kind="stable")]
    example_O, char_O = example_T[token_O], split.char_start_T[token_O]
    begins_O = np.ones(len(token_O), bool)
    begins_O[1:] = (example_O[1:] != example_O[:-1]) | (char_O[1:] < char_O[:-1])
    return token_O, example_O, begins_O


def _runs(inside_N: BoolArray, starts_N: BoolArray) -> tuple[IntArray, IntArray]:
    """First and last positions of the runs of `inside_N`, a run beginning anew wherever `starts_N`."""
    before_N = np.concatenate([[False], inside_N])[:-1]
    first_N = inside_N & (starts_N | ~before_N)
    goes_on_N = np.concatenate([inside_N & ~first_N, [False]])[1:]
    return np.flatnonzero(first_N), np.flatnonzero(inside_N & ~goes_on_N)


def _character_spans(
    split: TokenizedSplit, example_S: IntArray, name_S: Sequence[str], first_S: IntArray, last_S: IntArray
) -> list[list[Span]]:
    """Spans of tokens (indices into T, inclusive) as spans of characters, without outer white space."""
    spans: list[list[Span]] = [[] for _ in split.examples]
    start_S, end_S = split.char_start_T[first_S].tolist(), split.char_end_T[last_S].tolist()
    for example, name, start, end in zip(example_S.tolist(), name_S, start_S, end_S, strict=True):
        piece = split.examples[example].text[start:end]
        start += len(piece) - len(piece.lstrip())
        end -= len(piece) - len(piece.rstrip())
        if start < end:
            spans[example].append((name, start, end))
    return [sorted(found, key=lambda span: (span[1], span[2], span[0])) for found in spans]


def bio_spans(task: Task, logits_TK: FloatArray, split: TokenizedSplit) -> list[list[Span]]:
    """Decode BIO tags: B begins a span, I goes on with one of its own name and begins one elsewhere.

    When spans may overlap, each name has tags of its own.
    """
    token_O, example_O, begins_O = _text_tokens(split)
    num_names = len(task.labels)
    if task.spans_may_overlap:
        tag_NO = logits_TK[token_O].reshape(-1, num_names, 3).argmax(axis=2).T
        name_NO = np.where(tag_NO > 0, np.arange(num_names)[:, None], -1)
        is_b_NO = tag_NO == 1
    else:
        tag_NO = logits_TK[token_O].argmax(axis=1)[None]
        name_NO = (tag_NO - 1) // 2
        is_b_NO = tag_NO % 2 == 1
    name_P = name_NO.ravel()
    changes_P = np.ones(len(name_P), bool)
    changes_P[1:] = name_P[1:] != name_P[:-1]
    first, last = _runs(name_P >= 0, is_b_NO.ravel() | changes_P | np.tile(begins_O, len(tag_NO)))
    names = [task.labels[n] for n in name_P[first]]
    first_O, last_O = first % len(token_O), last % len(token_O)
    return _character_spans(split, example_O[first_O], names, token_O[first_O], token_O[last_O])


def best_answers(
    task: Task, logits_T2: FloatArray, split: TokenizedSplit
) -> tuple[list[list[Span]], NDArray[np.float64]]:
    """Each example's best answer, and by how much its logits exceed those of no answer.

    An answer starts at a token that its window owns and ends at the same or a later one, at most
    MAX_ANSWER_TOKENS long, all inside the task's segment. No answer is position 0 of the same window.
    The margin is -inf where there is no answer to choose.
    """
    window_T = np.repeat(np.arange(len(split.window_example_W)), np.diff(split.window_start_W1))
    example_T = split.window_example_W[window_T]
    name = task.inside_segment or ""
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
    names = [task.labels[0]] * len(first_S)
    return _character_spans(split, example_S, names, first_S, last_T[first_S]), margin_E


def sigmoid(logits: FloatArray) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -60, 60))))


class Evidence:
    """Probabilities of the text tokens of each (example, predicted class), all pairs one after another."""

    def __init__(
        self, task: Task, logits_TC: FloatArray, split: TokenizedSplit, predicted_labels: Sequence[Any] | None
    ) -> None:
        if predicted_labels is None:
            raise ValueError(f"{task.name} needs the predicted labels of its task {task.evidence_for}.")
        token_O, example_O, begins_O = _text_tokens(split)
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
        text_P = ragged_arange(start_E[self.example_Q], count_Q)
        self.token_P, self.begins_P = token_O[text_P], begins_O[text_P]
        self.probability_P = sigmoid(logits_TC[self.token_P, self.class_Q[self.pair_P]])
        self.peak_Q = np.maximum.reduceat(self.probability_P, first_Q) if pairs else np.zeros(0)

    def spans(self, threshold: float, merge_gap: int) -> list[list[Span]]:
        """Runs of tokens above the threshold, those at most `merge_gap` tokens apart joined.

        A predicted class always gets evidence: where no token passes, the run around the likeliest token
        above half its probability.
        """
        fallback_Q = ~(self.peak_Q > threshold)
        limit_Q = np.where(fallback_Q, self.peak_Q / 2, threshold)
        first, last = _runs(self.probability_P > limit_Q[self.pair_P], self.begins_P)
        # The first run begins a span, and so does one after a wide gap or after a new text's beginning.
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
        return _character_spans(self.split, self.example_Q[pair], names, *tokens)
