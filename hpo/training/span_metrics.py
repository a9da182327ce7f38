"""What one row adds to the scores of the kinds that find spans; `hpo.training.metrics` sums it up.

A span is `(name, start, end)` in characters of the text, end exclusive.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from hpo.data.examples import Example
from hpo.data.tasks import Task

Span = tuple[str, int, int]

_WORD = re.compile(r"\S+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
