"""From logits to predictions: class names, numbers, and spans of characters.

Logits come for a whole split as flat float32 arrays in window order: [W, C] of sequence tasks, [T, K] of
token tasks, special tokens included and padding not. Windows of one long text are joined: the mean of
log-probabilities (single_label), the largest probability (multi_label: a criterion met anywhere is met), the
mean (regression). A token that several windows hold is read in the one that owns it, so a long text is one
row of tokens. Everything per token is vectorised over T; Python loops run over the spans found only.

What a decision needs beyond the logits (a probability threshold, a null offset) is chosen on the
validation split and kept with the model as a `DecodingThresholds`.

Suffixes: T all tokens, W windows, E examples, O owned tokens of text in reading order, S spans found;
for evidence Q the (example, predicted class) pairs and P the tokens of all these pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.data.tasks import Task
from hpo.data.tokenized_split import BoolArray, IntArray, TokenizedSplit, ragged_arange
from hpo.training.metrics import Span, answer_row, f1_macro, f1_micro, indicators, score

FloatArray = NDArray[np.floating[Any]]

THRESHOLD_LOG_ODDS = np.linspace(-7, 7, 141)
"""The thresholds tried for multi_label: rare classes may all stay under a probability of 0.05."""
EVIDENCE_THRESHOLDS = tuple(np.arange(1, 10) / 10)
EVIDENCE_MERGE_GAPS = (0, 2, 5)
MAX_ANSWER_TOKENS = 30
"""SQuAD's customary bound."""


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


def sigmoid(logits: FloatArray) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -60, 60))))


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


# From the logits of token tasks to spans of characters


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
