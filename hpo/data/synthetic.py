"""Synthetic posts of people who write about their mood: nine criteria, each with its evidence sentences.

The form is that of screening posts for depression against the nine criteria of DSM-5; all sentences are our
own. A post has evidence of the criteria that the writer has now; look-alikes of others, which are denied
("I have not lost my appetite"), over ("I used to lie awake all night, that is behind me") or another person's
("My brother skips meals most days"); filler that borrows their words ("The hotel bed was huge"); and other
filler.

Most look-alikes are the words of an evidence sentence inside another frame ("It is not true that ..."), and
evidence comes in frames too ("It is true that ..."), so a model has to read who, when and whether. How often
something happens is in the evidence sentence as well and gives `burden`; the number of criteria gives
`severity`.

Of the sentences without evidence, the share `look_alikes` are look-alikes; the fewer there are, the more the
criteria's own words tell. `label_noise` is the probability that an annotator missed a criterion that is
there, and half of it that a look-alike was taken for one. Labels, evidence, severity and burden then all
follow the annotator.

A row depends on the seed, the split's name and the row's number only, so a larger set begins with the rows
of a smaller one, and any row can be made without those before it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar, overload

from hpo.data.examples import Example, Label, Span

GENERATOR_VERSION = 1
"""To be raised with every change of the sentences or of how they are drawn: it is part of the data's
fingerprint, so that token caches are made again."""

_T = TypeVar("_T")
_Draw = Callable[[], float]

# How many criteria a post has, and how common each criterion is. 0: severity none; 1-2 mild; 3-4 moderate.
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


def _parts(text: str) -> tuple[str, ...]:
    """What stands between slashes, each on one line."""
    return tuple(" ".join(part.split()) for part in text.split("/"))


# Frames around a sentence `~` of the writer's: these leave it true ...
_TRUE_FRAMES = """~ / ~ / ~ / ~ / it is true that ~ / i cannot deny that ~ / nobody else knows that ~ /
    a year ago i was fine, now ~ / ~, and that is not over / i told {other} that ~ /
    {other} says that it will pass, but ~"""
# ... and these make it denied, over, or another person's.
_FALSE_FRAMES = """it is not true that ~ / i can deny that ~ / nobody can say that ~ /
    ~, no, that is not how it is
    | a year ago ~, now i am fine / ~, or so it was back then, and that is over /
    i remember the weeks when ~, they did pass
    | {other} told me, ~, and i did not know what to say / {other} says "~" /
    "~", that is what {other} writes to me"""

# Sentences of each criterion: of one who has it, who denies it, who had it, and another person's.
_SENTENCES = {
    "low_mood": """i feel sad and empty {often} / i end up crying in the bathroom {often} / everything looks
        grey and hopeless to me {often} / i am down {often} and cannot say why / there is this heavy gloom
        over me {often} / tears come {often}, even when nothing has happened / i wake up miserable {often} /
        my heart is like lead {often}
        | i am not sad at all / i cannot say that i feel down / no tears and no gloom on my side
        | i used to cry a lot, which is long over / last year i was miserable, now my mood is fine
        | {other} feels sad and empty {often} / {other} cries {often} and it scares me""",
    "lost_interest": """nothing is fun for me any more, {often} i just stare at the wall / i drop the hobbies
        that i loved {often} / my guitar gathers dust and i do not care {often} / i turn friends down {often}
        because nothing appeals to me / games, films, football, it all leaves me cold {often} / i get no joy
        {often} out of things that used to thrill me / i have stopped looking forward to anything, {often} it
        is just flat / even sex is of no interest to me {often}
        | i still enjoy my hobbies / i have not lost interest in my friends / football thrills me as ever
        | for a while nothing was fun, but i paint again with joy / i had dropped my guitar and took it up
        again
        | {other} has lost all interest in going out {often} / {other} gets no joy out of anything {often}""",
    "appetite_change": """i skip meals {often} since food disgusts me / i lost six kilos without trying and
        leave my plate full {often} / i stuff myself with crisps {often} and my jeans no longer close / i have
        to force every bite down {often} / hunger is gone {often} and i forget to eat / i eat whole packs of
        biscuits {often} without being hungry / my clothes hang off me and dinner stays untouched {often} / i
        gain weight because i eat {often} against the emptiness
        | i have not lost my appetite / i eat three proper meals / my weight has not changed at all
        | i could not eat in spring, that has passed / i had lost weight back then and have it all back
        | {other} skips meals {often} / {other} has lost a lot of weight and picks at the food {often}""",
    "sleep_change": """i lie awake until four {often} / i wake at three and cannot drop off again {often} / i
        sleep twelve hours {often} and stay in bed after that / insomnia gets me {often} / i toss and turn
        {often} and hear the birds start / i doze through the whole day {often} / i get maybe two hours of
        rest at night {often} / nights are the worst, {often} i watch the ceiling
        | i sleep like a log / i have no trouble falling asleep / insomnia is not my problem
        | i used to lie awake all night, that is behind me / my sleep was a mess last winter and is fine again
        | {other} barely sleeps {often} / {other} lies awake until four {often}""",
    "restless_or_slowed": """i pace up and down the hallway {often} / my legs will not keep still {often} /
        people tell me {often} that i talk and move as if through syrup / i fidget {often} until my colleagues
        stare / it takes me an hour to get dressed {often}, each movement drags / i wring my hands {often} and
        cannot sit through a meal / my speech has become so slow {often} that others finish my sentences / i
        am so keyed up {often} that i circle the table
        | i can sit still without effort / nobody says that i have slowed down / i do not fidget or pace
        | i was pacing all day in march, that has stopped / i used to move like a snail and am quick again
        | {other} paces up and down {often} / {other} has become so slow {often} that we all notice""",
    "low_energy": """i am worn out {often} before noon / a shower takes all the strength i have {often} / my
        battery is empty {often}, whatever i do / i drag myself to work {often} / climbing the stairs exhausts
        me {often} / i am tired to the bone {often} / i have no strength for the dishes {often} / fatigue
        flattens me {often}
        | i have plenty of energy / i am not tired / no fatigue here, i run after work
        | i was exhausted all autumn and have my energy back / the tiredness of last year is gone
        | {other} is worn out {often} / {other} has no strength for anything {often}""",
    "worthlessness": """i feel like a burden to everyone {often} / i blame myself {often} for things that are
        years old / i am a failure and think so {often} / guilt eats me up {often} over nothing / i tell
        myself {often} that i am worth nothing / i apologise {often} for merely existing / the others would be
        better off with someone else in my place, i think {often} / i am ashamed {often} of what i have become
        | i do not feel guilty about it / i know that i am worth something / i am no burden to anybody
        | i used to blame myself for it all, therapy ended that / i once felt worthless and no longer do
        | {other} feels like a failure {often} / {other} blames herself {often} for everything""",
    "poor_concentration": """i read the same line five times {often} / i cannot follow a film {often} / i
        stand in the shop {often} and cannot decide between two kinds of bread / my thoughts drift off in
        every meeting {often} / i lose the thread in the middle of a sentence {often} / my head is full of fog
        {often} / i make silly mistakes at work {often} because i cannot focus / i forget {often} what i have
        just been told
        | i can focus as well as ever / my concentration is fine / i read a whole novel without drifting off
        | i could not focus during the move, now i can / the fog in my head has lifted weeks ago
        | {other} cannot focus {often} / {other} forgets {often} what we agreed on""",
    "thoughts_of_death": """i wish {often} that i would not wake up / i think about ending it {often} / i
        picture my own funeral {often} / i catch myself {often} counting the pills / it would be easier to be
        dead, i think {often} / i look at the tracks {often} and wonder / i have been writing a goodbye letter
        {often} / dying seems like a relief {often}
        | i have no thoughts of killing myself / i do not want to die / suicide is not on my mind
        | years ago i wanted to die, today i am glad to be here / i once wrote a goodbye letter and burned it
        | {other} talks about dying {often} / {other} has thought about suicide {often}""",
}
CRITERIA = tuple(_SENTENCES)
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

_BORROWED = _parts(
    """the hotel bed was huge and the pillows were soft / we watched a sad film and the whole row was crying /
    dinner at the new place was a waste of money / my phone battery is dead by noon / the cat sleeps on the
    keyboard and eats like a horse / the meeting about energy prices dragged on for hours / i lost weight on
    the barbell by mistake and had to load it again / there was heavy fog on the motorway / the train tracks
    were being repaired again / the funeral scene was the best part of the show / i failed my driving test on
    the parking part / the pills for the dog cost a fortune / a slow waiter finished off what was left of the
    evening / the interest on my loan went up / the baby next door cried through the match / they moved the
    deadline, so everybody paced themselves"""
)
_FILLER = _parts(
    """i moved to another city in august / work has been busy with the new client / my sister is getting
    married in june / the weather has been odd this month / i started a course in bookkeeping / we repainted
    the kitchen over the weekend / i have an appointment with my doctor on monday / sorry for the long post /
    i have never posted here before / the bus was late again and i walked / my parents came to visit for a few
    days / i changed phones and lost some photos / our team won by two goals / rent went up by fifty a month /
    i am twenty six and live with two others / thanks for reading this far / does anybody know a good dentist
    around here / i bought a second hand bike / exams are in three weeks / the neighbours have a new dog"""
)


def _expand(
    templates: Sequence[str], often: Sequence[str] = ("",), others: Sequence[str] = _OTHERS
) -> list[str]:
    """Spell the placeholders out; a template without one is repeated, which keeps all equally likely."""
    return [t.format(often=o, other=who) for t, o, who in product(templates, often, others)]


# Every sentence and frame spelt out once, so that drawing one is drawing an index.
_TRUE = _expand(_parts(_TRUE_FRAMES))
_FALSE = [_expand(_parts(frames)) for frames in _FALSE_FRAMES.split("|")]
_GROUPS = [[_parts(group) for group in sentences.split("|")] for sentences in _SENTENCES.values()]
_EVIDENCE = [[_expand(held, often, ("",)) for often in _OFTEN] for held, *_ in _GROUPS]
_LOOK_ALIKES = [
    (denied, over, [text for often in _OFTEN for text in _expand(others, often)])
    for _, denied, over, others in _GROUPS
]


class _Sentence(NamedTuple):
    text: str
    criterion: int = -1
    """The criterion that the annotator saw in it, -1 for none."""
    level: int = 0
    """How often it says that it happens: an index of `_OFTEN`."""


@dataclass(eq=False)
class SyntheticRows(Sequence[Example]):
    """The rows of one synthetic split, each made when it is asked for.

    The seed of a row is made from `seed`, `split` and the row's number. A post has `min_sentences` to
    `max_sentences` sentences, drawn uniformly, or more where its evidence needs more. For `label_noise` see
    the head of this file.
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
        # Only random() is used: it alone gives the same numbers under every version of Python.
        draw = random.Random(self._seed + index).random
        sentences = self._sentences(draw)
        careless = draw() < 0.2
        post = ""
        spans: dict[str, list[Span]] = {}
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
                # Never one that holds, and none twice: a post does not argue with itself.
                criterion = absent.pop(int(draw() * len(absent)))
                if draw() < _FRAMED_LOOK_ALIKE:
                    inner = _pick(draw, _pick(draw, _EVIDENCE[criterion]))
                    text = _pick(draw, _pick(draw, _FALSE)).replace("~", inner)
                else:
                    text = _pick(draw, _pick(draw, _LOOK_ALIKES[criterion]))
                mistaken = draw() < self.label_noise / 2
                sentences.append(_Sentence(text, criterion if mistaken else -1))
            else:
                pool = _BORROWED if draw() < _BORROWED_FILLER else _FILLER
                sentences.append(_Sentence(_pick(draw, pool)))
        for last in range(len(sentences) - 1, 0, -1):
            other = int(draw() * (last + 1))
            sentences[last], sentences[other] = sentences[other], sentences[last]
        return sentences


def _pick(draw: _Draw, items: Sequence[_T]) -> _T:
    return items[int(draw() * len(items))]


def _weighted(draw: _Draw, weights: Sequence[float], count: int) -> list[int]:
    """Draw `count` different indices, one after the other, with probability in proportion to `weights`."""
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
