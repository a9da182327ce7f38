"""What the runs of one precision show: the verdict, the ratios, and the runs that collapsed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpo.compare.runs import STORED_BYTES, Pair, Ratio, Runs
from hpo.config.comparison import REFERENCE
from hpo.evaluation.verdict import Question, Verdict, judge
from hpo.study.reading.study_record import TrialRecord

RATIOS = {
    "speed_ratio": "train_examples_per_second",
    "stored_ratio": STORED_BYTES,
}
"""The ratios beside the score, each with its measurement of a trial (`hpo.compare.runs`)."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The evidence about one precision."""

    precision: str
    pairs: tuple[Pair, ...]
    verdict: Verdict
    ratios: Mapping[str, Ratio | None]
    """The value of each of `RATIOS`; None: no pair was measured."""

    @property
    def name(self) -> str:
        return self.verdict.verdict

    @property
    def is_open(self) -> bool:
        """Whether more seeds may bring a verdict."""
        return self.name == "not_shown" and not self.verdict.reason


def answer_of(runs: Runs, precision: str) -> Answer:
    ratios = {name: runs.ratio(precision, attribute) for name, attribute in RATIOS.items()}
    return Answer(precision, tuple(runs.pairs(precision)), verdict_of(runs, precision, runs.metric), ratios)


def verdict_of(runs: Runs, precision: str, metric: str) -> Verdict:
    """Judge the pairs of a precision in one metric."""
    pairs, named = [*runs.pairs(precision)], runs.plan.named
    names = named(REFERENCE), named(precision), f"rows of {runs.split}"
    asked = Question(metric, runs.plan.margin, *names, is_brief=True)
    theirs = [runs.scored(pair.theirs, metric) for pair in pairs]
    ours = [runs.scored(pair.ours, metric) for pair in pairs]
    return judge(asked, theirs, ours, runs.facts(asked))


def collapsed_runs(
    runs: Runs, answers: Mapping[str, Answer]
) -> Iterator[tuple[TrialRecord, int, float | None]]:
    """The runs that collapsed (`hpo.evaluation.verdict.Collapses`), runs of fp32 too.

    Each comes with the trial of its configuration in the search and its score (None: it has no score).
    """
    shown = set()
    for answer in answers.values():
        verdict = answer.verdict
        for pair in answer.pairs:
            for run in (pair.ours, pair.theirs):
                score = runs.scored(run, runs.metric)
                is_far = score and verdict.collapses and score.value < verdict.collapses.middle
                if run.number not in shown and (score is None or is_far):
                    shown.add(run.number)
                    configuration = runs.plan.configurations[pair.configuration].trial
                    yield run, configuration, score.value if score else None
