"""Common code of the kinds with spans of characters.

Suffixes: T all tokens of a split, E examples, O owned tokens of text in reading order, S predicted spans, N
any.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpo.tasks.example import Example
from hpo.tasks.kind import ByName, Counts, FloatArray, Kind, Likely, RowValues, Scores, Span
from hpo.tasks.sums import counted, f1_macro, f1_micro, macro_f1_bound, micro_f1_bound
from hpo.tasks.tokenized_split import BoolArray, IntArray, TokenizedSplit

_WORD = re.compile(r"\S+")


class SpanKind(Kind):
    """A kind with spans."""

    metrics = ("span_f1", "span_overlap_f1", "f1_macro")
    level = "token"
    in_spans = True
    is_by_row = False

    def truth(self, example: Example) -> Any:
        return sorted(self.shown_spans(example), key=lambda span: (span[1], span[2], span[0]))

    def label_names(self, example: Example) -> Sequence[str]:
        return [name for name in self.task.labels for _ in example.spans.get(name, ())]

    def _known(self, split: TokenizedSplit, windows_B: IntArray, is_text_BL: BoolArray) -> BoolArray:
        """Return a mask of the tokens with a known truth: [B, L]."""
        return is_text_BL & split.annotated[self.task.name][windows_B][:, None]

    def true_spans(self, example: Example) -> set[Span]:
        names = self.task.labels
        return {(name, start, end) for name in names for start, end in example.spans.get(name, ())}

    def row_values(self, predicted: Sequence[Any], examples: Sequence[Example]) -> RowValues:
        index = {name: i for i, name in enumerate(self.task.labels)}
        columns: dict[str, list[list[int]]] = {"hits": [], "true": [], "predicted": []}
        words = np.zeros((2, len(examples)))
        for i, (spans, example) in enumerate(zip(predicted, examples, strict=True)):
            truth, given = self.true_spans(example), set(spans)
            for name, some in (("hits", truth & given), ("true", truth), ("predicted", given)):
                columns[name].append([index[span[0]] for span in some])
            words[:, i] = word_counts(example.text, truth, given)
        counts_NC = {name: counted(lists, len(index)) for name, lists in columns.items()}
        return counts_NC, {"shared_words": words[0], "words": words[1]}

    def scores(self, rows_B: FloatArray, counts_BC: ByName, sums_B: ByName, whole: Counts) -> Scores:
        counts = counts_BC["hits"], counts_BC["true"], counts_BC["predicted"]
        words_B = sums_B["words"]
        overlap_B = np.where(words_B > 0, 2 * sums_B["shared_words"] / np.maximum(words_B, 1), 1.0)
        micro_B, macro_B = np.atleast_1d(f1_micro(*counts)), f1_macro(whole, *counts)
        return {"span_overlap_f1": overlap_B, "span_f1": micro_B, "f1_macro": macro_B}

    def row_bound(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> float | FloatArray:
        if metric == "span_f1":
            return micro_f1_bound(*(np.asarray(one.sum(axis=1)) for one in counts_NC.values()))
        if metric == "f1_macro":
            return macro_f1_bound(*counts_NC.values(), is_spurious_in_true=True)
        if metric == "span_overlap_f1":
            # `words` counts true and predicted words of a row; all may be true.
            shared_N, words_N = values_N["shared_words"], values_N["words"]
            return float(micro_f1_bound(shared_N, words_N, 0 * words_N).max(initial=0.0))
        return super().row_bound(metric, counts_NC, values_N)

    def constant_rows(self, metric: str, counts_NC: Mapping[str, Any], values_N: ByName) -> RowValues | None:
        """Predict no span in any row. `words` has one word for each true span."""
        none = counts_NC["true"] * 0
        words_N = np.asarray(counts_NC["true"].sum(axis=1), np.float64)
        counts = {"hits": none, "true": counts_NC["true"], "predicted": none}
        return counts, {"shared_words": 0 * words_N, "words": words_N}

    def shown_spans(self, example: Example) -> set[Span]:
        """Return the truth for a report."""
        return self.true_spans(example)

    def wrong_spans(self, predicted: Sequence[Span], example: Example) -> set[Span]:
        """Return the missed and the spurious spans."""
        return self.shown_spans(example) ^ set(predicted)

    def row_losses(self, predicted: Sequence[Any], examples: Sequence[Example], p_NC: Likely) -> FloatArray:
        pairs = zip(predicted, examples, strict=True)
        return np.array([float(len(self.wrong_spans(*pair))) for pair in pairs])


def word_counts(text: str, truth: set[Span], predicted: Iterable[Span]) -> tuple[int, int]:
    """Return the number of common words of true and predicted spans, and the sum of the words of both.

    A word is a run of characters other than white space. A span covers every word with a character in it, so
    the score is the same under any tokenizer. In a script without spaces, words are as long as the text
    between two spaces: use `span_f1` there.
    """
    true_words, found_words = _words(text, truth), _words(text, predicted)
    return len(true_words & found_words), len(true_words) + len(found_words)


def _words(text: str, spans: Iterable[Span]) -> set[tuple[str, int]]:
    """Return the words with a character in each span, as name and first character."""
    words: set[tuple[str, int]] = set()
    for name, start, end in spans:
        while start > 0 and not text[start].isspace() and not text[start - 1].isspace():
            start -= 1
        words.update((name, match.start()) for match in _WORD.finditer(text, start, end))
    return words


# From the logits of tokens to spans of characters


def text_tokens(split: TokenizedSplit) -> tuple[IntArray, IntArray, BoolArray]:
    """Return the owned tokens of all texts in reading order: index into T, example, and a mask of first
    tokens.

    A step back in the text (a pair with its second segment first) begins anew too, so no run of tokens
    crosses it.
    """
    example_T = np.repeat(split.window_example_W, np.diff(split.window_start_W1))
    token_O = np.flatnonzero(split.owned_T & (split.char_start_T >= 0))
    token_O = token_O[np.argsort(example_T[token_O], kind="stable")]
    example_O, char_O = example_T[token_O], split.char_start_T[token_O]
    begins_O = np.ones(len(token_O), bool)
    begins_O[1:] = (example_O[1:] != example_O[:-1]) | (char_O[1:] < char_O[:-1])
    return token_O, example_O, begins_O


def runs_of(inside_N: BoolArray, starts_N: BoolArray) -> tuple[IntArray, IntArray]:
    """Return first and last positions of the runs of `inside_N`; `starts_N` begins a new run."""
    before_N = np.concatenate([[False], inside_N])[:-1]
    first_N = inside_N & (starts_N | ~before_N)
    goes_on_N = np.concatenate([inside_N & ~first_N, [False]])[1:]
    return np.flatnonzero(first_N), np.flatnonzero(inside_N & ~goes_on_N)


def character_spans(
    split: TokenizedSplit, example_S: IntArray, name_S: Sequence[str], first_S: IntArray, last_S: IntArray
) -> list[list[Span]]:
    """Convert spans of tokens (indices into T, inclusive) to characters without outer white space."""
    spans: list[list[Span]] = [[] for _ in split.examples]
    start_S, end_S = split.char_start_T[first_S].tolist(), split.char_end_T[last_S].tolist()
    for example, name, start, end in zip(example_S.tolist(), name_S, start_S, end_S, strict=True):
        piece = split.examples[example].text[start:end]
        start += len(piece) - len(piece.lstrip())
        end -= len(piece) - len(piece.rstrip())
        if start < end:
            spans[example].append((name, start, end))
    return [sorted(each, key=lambda span: (span[1], span[2], span[0])) for each in spans]
