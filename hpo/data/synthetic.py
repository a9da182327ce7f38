"""Synthetic posts about a writer's mood, with nine criteria and their evidence sentences.

The form is that of posts screened for depression by the criteria of DSM-5; all sentences are our own
(`synthetic.json`). A post has evidence of its criteria; look-alikes of other criteria (denied, over, or
another person's); and filler. Most look-alikes are evidence sentences inside another frame ("It is not true
that ..."), and evidence has frames too, so a model has to read person, time and negation. The frequency in
the evidence gives `burden`; the number of criteria gives `severity`.

An annotator misses a criterion with probability `label_noise`, and labels a look-alike with half of it. All
labels follow the annotator. A row depends on the seed, the split and its number alone.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from hpo.tasks.example import Example, Label, Offsets

GENERATOR_VERSION = 1
"""Raise it with every change of the rows: it is part of the data's fingerprint, so token caches are new."""

_T = TypeVar("_T")
_Draw = Callable[[], float]

# Weights of the number of criteria (severity 0: none; 1-2: mild; 3-4: moderate), and of each criterion.
_COUNT_WEIGHTS = (0.27, 0.20, 0.18, 0.14, 0.10, 0.07, 0.04)
_CRITERION_WEIGHTS = (1.4, 1.2, 0.9, 1.4, 0.7, 1.2, 1.0, 1.0, 0.5)
_SECOND_EVIDENCE = 0.2
_FRAMED_LOOK_ALIKE = 0.7
_BORROWED_FILLER = 0.3

_OFTEN = (
    ("now and then", "some days", "once in a while", "on the odd evening"),
    ("most days", "more often than not", "several times a week", "most of the time"),
    ("every single day", "all the time", "without a break", "day in, day out"),
)
_OPENERS = ("", "", "", "", "", "honestly, ", "lately ", "to be fair, ", "i guess ", "these weeks ")
_ENDS = (".", ".", ".", ".", ".", "...", "!", " \N{PENSIVE FACE}.")
_SEPARATORS = (" ", " ", " ", "\n")
_OTHERS = ("my brother", "my mum", "a friend of mine", "my flatmate", "the guy next door", "my boss")

# A frame around a sentence `~` leaves it true, or makes it denied, over or another person's. A criterion has
# sentences of each of these forms.
_TEXTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
CRITERIA = tuple(_TEXTS["criteria"])
SEVERITIES = ("none", "mild", "moderate", "severe")
TASKS_JSON: dict[str, Any] = {
    "tasks": {
        "criteria": {"kind": "multi_label", "classes": list(CRITERIA)},
        "evidence": {"kind": "span_per_label", "span_names": list(CRITERIA), "evidence_for": "criteria"},
        "severity": {"kind": "single_label", "classes": list(SEVERITIES)},
        "burden": {"kind": "regression"},
    },
}
_ANNOTATED = frozenset(TASKS_JSON["tasks"])


def _expand(
    templates: Sequence[str], often: Sequence[str] = ("",), others: Sequence[str] = _OTHERS
) -> list[str]:
    """Fill in the placeholders. A template without one is repeated, so all templates stay equally likely."""
    return [t.format(often=o, other=who) for t, o, who in product(templates, often, others)]


_TRUE, *_FALSE = (_expand(frames) for frames in _TEXTS["frames"].values())
_EVIDENCE = [[_expand(of["held"], often, ("",)) for often in _OFTEN] for of in _TEXTS["criteria"].values()]
_LOOK_ALIKES = [
    (of["denied"], of["over"], [text for often in _OFTEN for text in _expand(of["of_another"], often)])
    for of in _TEXTS["criteria"].values()
]


class _Sentence(NamedTuple):
    text: str
    criterion: int = -1
    """The criterion by the annotator, -1 for none."""
    level: int = 0
    """The frequency in the sentence: an index of `_OFTEN`."""


@dataclass(eq=False)
class SyntheticRows(Sequence[Example]):
    """The rows of one synthetic split, each made when read.

    A post has `min_sentences` to `max_sentences` sentences, or more if its evidence needs more.
    """

    split: str
    num_rows: int
    seed: int = 0
    min_sentences: int = 2
    max_sentences: int = 6
    label_noise: float = 0.02
    look_alikes: float = 0.45

    @cached_property
    def _seed(self) -> int:
        key = f"{GENERATOR_VERSION}/{self.seed}/{self.split}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) << 64

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        numbers = range(self.num_rows)[index]
        return self._row(numbers) if isinstance(numbers, int) else [self._row(i) for i in numbers]

    def _row(self, index: int) -> Example:
        # Of `Random`, only random() gives the same numbers under every version of Python.
        draw = random.Random(self._seed + index).random
        sentences = self._sentences(draw)
        careless = draw() < 0.2
        post = ""
        spans: dict[str, list[Offsets]] = {}
        levels: dict[str, int] = {}
        for text, criterion, level in sentences:
            sentence = _pick(draw, _OPENERS) + text
            if not careless:
                sentence = sentence[0].upper() + sentence[1:].replace(" i ", " I ").replace('"i ', '"I ')
            sentence += _pick(draw, _ENDS)
            if post:
                post += _pick(draw, _SEPARATORS)
            if criterion >= 0:
                spans.setdefault(CRITERIA[criterion], []).append((len(post), len(post) + len(sentence)))
                levels[CRITERIA[criterion]] = level
            post += sentence
        labels: dict[str, Label] = {
            "criteria": [name for name in CRITERIA if name in levels],
            "severity": SEVERITIES[min((len(levels) + 1) // 2, 3)],
            "burden": round(sum(level + 1 for level in levels.values()) + (draw() - 0.5), 2),
        }
        return Example(f"{self.split}-{index:06d}", post, labels, spans, annotated=_ANNOTATED)

    def _sentences(self, draw: _Draw) -> list[_Sentence]:
        num_sentences = self.min_sentences + int(draw() * (self.max_sentences - self.min_sentences + 1))
        held = _weighted(draw, _CRITERION_WEIGHTS, _weighted(draw, _COUNT_WEIGHTS, 1)[0])
        sentences: list[_Sentence] = []
        for criterion in held:
            missed = draw() < self.label_noise
            level = int(draw() * 3)
            for _ in range(1 + (draw() < _SECOND_EVIDENCE)):
                text = _pick(draw, _TRUE).replace("~", _pick(draw, _EVIDENCE[criterion][level]))
                sentences.append(_Sentence(text, -1 if missed else criterion, level))
        absent = [criterion for criterion in range(len(CRITERIA)) if criterion not in held]
        while len(sentences) < num_sentences:
            if absent and draw() < self.look_alikes:
                # No criterion of the post, and none twice: a post does not contradict itself.
                criterion = absent.pop(int(draw() * len(absent)))
                if draw() < _FRAMED_LOOK_ALIKE:
                    inner = _pick(draw, _pick(draw, _EVIDENCE[criterion]))
                    text = _pick(draw, _pick(draw, _FALSE)).replace("~", inner)
                else:
                    text = _pick(draw, _pick(draw, _LOOK_ALIKES[criterion]))
                mistaken = draw() < self.label_noise / 2
                sentences.append(_Sentence(text, criterion if mistaken else -1))
            else:
                pool = "borrowed_filler" if draw() < _BORROWED_FILLER else "filler"
                sentences.append(_Sentence(_pick(draw, _TEXTS[pool])))
        for last in range(len(sentences) - 1, 0, -1):
            other = int(draw() * (last + 1))
            sentences[last], sentences[other] = sentences[other], sentences[last]
        return sentences


def _pick(draw: _Draw, items: Sequence[_T]) -> _T:
    return items[int(draw() * len(items))]


def _weighted(draw: _Draw, weights: Sequence[float], count: int) -> list[int]:
    """Draw `count` different indices in sequence, with probability in proportion to `weights`."""
    left = list(weights)
    chosen: list[int] = []
    for _ in range(count):
        at = draw() * sum(left)
        index = 0
        while index < len(left) - 1 and at >= left[index]:
            at -= left[index]
            index += 1
        chosen.append(index)
        left[index] = 0.0
    return chosen
