"""What a comparison of precisions has found, as it is stored, and whether it goes on.

The words are in `hpo.compare.words`; the terminal, the report and the dashboard show what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.compare import words
from hpo.compare.companion import by_rank, caught_up, grown, precision_of
from hpo.compare.decision import collapse_share, decide, interval
from hpo.compare.price import Price, expected_after, next_look, price_of
from hpo.compare.runs import Differences, Ratio, Runs
from hpo.config.comparison import MOST_SEEDS, REFERENCE, ComparisonConfig
from hpo.config.search_space import encode
from hpo.config.study_config import StudyConfig
from hpo.errors import RunError
from hpo.non_inferiority import VerdictName
from hpo.non_inferiority import decide as verdict_of
from hpo.study.reading.reader import COMPARISON_FORM
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.trial.objectives import unit_of

if TYPE_CHECKING:
    from hpo.study.store.storage import Storage

COLLAPSE = 10
"""A run that loses more than so many margins has collapsed."""
RATIOS = {"speed_ratio": "train_examples_per_second", "memory_ratio": "peak_memory_bytes"}


@dataclass(frozen=True)
class Result:
    """What a comparison says so far."""

    plan: ComparisonConfig
    content: Mapping[str, Any]
    """As it is stored and printed."""
    next_plan: ComparisonConfig | None
    """With the seeds of the next look; None when all is decided or the seeds are used up."""


def stored_form(
    plan: ComparisonConfig, content: Mapping[str, Any], next_plan: ComparisonConfig | None
) -> Result:
    """The result with what every comparison stores of itself."""
    about = {
        "form": COMPARISON_FORM,
        "study": plan.study,
        "question": plan.question,
        "num_seeds": plan.num_seeds,
        "configurations": [
            {
                "trial": found.trial,
                "precisions": list(found.precisions),
                "params": {name: encode(value) for name, value in found.params.items()},
            }
            for found in plan.configurations
        ],
        "has_ended": next_plan is None,
    }
    return Result(plan, {**about, **content}, next_plan)


def look_by_look(
    storage: Storage,
    companion: StudyConfig,
    run_look: Callable[[StudyConfig], StudyRecord],
    judge_look: Callable[[StudyRecord, StudyConfig], Result],
) -> Iterator[Result]:
    """Run the trials of a comparison up to its next look, judge, and go on until it is decided.

    Raises RunError where trials of a look that has ended are not there.
    """
    while True:
        companion = caught_up(storage, companion)
        found = judge_look(run_look(companion), companion)
        yield found
        if found.next_plan is None:
            return
        if found.next_plan.num_seeds == found.plan.num_seeds:
            raise RunError(f"The comparison `{companion.name}` has ended without all of its trials.")
        companion = grown(companion, found.next_plan)


@dataclass(frozen=True, eq=False)
class Answer:
    """What is known of one precision."""

    precision: str
    verdict: VerdictName
    found: Differences
    difference: float
    low: float
    high: float
    """NaN and infinite where nothing is known."""
    num_collapsed: int
    speed: Mapping[str, Ratio]
    """Training examples per second over fp32's, by kind of device."""
    memory: Mapping[str, Ratio]
    reason: str = ""
    """Why it is not decided, where more seeds would not help."""
    price: Price | None = None
    """Of the seeds that would decide; None: decided, not asked, or nobody knows."""

    @property
    def num_runs(self) -> int:
        return len(self.found.pairs)

    @property
    def collapse_share(self) -> float:
        """Of all runs, that may collapse."""
        return collapse_share(self.num_runs, self.num_collapsed)


def judge_precisions(runs: Runs, search: StudyRecord, price: Price | None) -> Result:
    """What the trials say so far of each precision, in their sequence.

    Args:
        search: the study whose configurations these are.
        price: as it was said before the first trial.
    """
    plan = runs.plan
    answers: list[Answer] = []
    for precision in plan.precisions[1:]:
        ahead = next((one for one in answers if one.verdict != "as_good"), None)
        answers.append(_answer(runs, precision, "" if ahead is None else ahead.precision))
    next_plan = _next_plan(plan, answers)
    context = words.Context(
        plan.study, runs.metric, unit_of(runs.metric), runs.split, plan.margin, len(plan.configurations)
    )
    tuned = _tuned(search, plan.precisions)
    content = {
        "metric": runs.metric,
        "unit": context.unit,
        "split": runs.split,
        "margin": plan.margin,
        "num_configurations": len(plan.configurations),
        "price": price and price.as_json(),
        "verdicts": [_as_json(runs, answer, context) for answer in answers],
        "collapsed": [words.collapsed(pair, context) for pair in _collapsed(runs)],
        "tuned": tuned,
        "tuned_sentence": words.tuned(tuned, context),
        "recommendation": words.recommendation(answers, context),
    }
    return stored_form(plan, content, next_plan)


def _answer(runs: Runs, precision: str, ahead: str) -> Answer:
    """`ahead` names the precision that keeps this one from being asked about; empty: none does."""
    found = runs.differences(precision, runs.metric)
    speed, memory = (runs.ratios(precision, name) for name in RATIOS.values())
    margin = runs.plan.margin
    nothing = Answer(precision, "undecided", found, math.nan, -math.inf, math.inf, 0, speed, memory)
    known = found.of_runs[np.isfinite(found.of_runs)]
    if ahead:
        return _because(nothing, f"not asked: {ahead} comes first, and is not as good")
    if not len(found.pairs):
        return _because(nothing, words.no_pair(precision, [*runs.pairs(precision)]))
    num_collapsed = found.num_lost + int((known < -COLLAPSE * margin).sum())
    if not len(known):
        lost = f"{found.num_lost} of {len(found.pairs)} runs ended without a score"
        verdict: VerdictName = "worse" if len(found.pairs) >= runs.plan.seeds else "undecided"
        return Answer(
            precision, verdict, found, math.nan, -math.inf, math.inf, num_collapsed, speed, memory, lost
        )
    decision = decide(known, found.of_rows, margin, **_of_rows(runs, found))
    bounds = float(decision.difference), float(decision.low), float(decision.high)
    verdict, reason = verdict_of(*bounds[1:], margin), ""
    if verdict == "as_good" and found.num_lost:
        verdict, reason = "undecided", f"{found.num_lost} of {len(found.pairs)} runs ended without a score"
    price, num_seeds = None, runs.plan.num_seeds[precision]
    is_open = verdict == "undecided" and not reason and num_seeds >= runs.plan.max_seeds
    if is_open and len(known) > 1 and unit_of(runs.metric) == "points":
        further = runs.plan.model_copy(update={"max_seeds": MOST_SEEDS})
        price = price_of(further, expected_after(known, found.of_rows), above=num_seeds)
    return Answer(precision, verdict, found, *bounds, num_collapsed, speed, memory, reason, price)


def _because(answer: Answer, reason: str) -> Answer:
    return Answer(**{**vars(answer), "reason": reason})


def _of_rows(runs: Runs, found: Differences) -> dict[str, float]:
    """What `decide` is told of the rows: of metrics in the labels' units, a row has no worst value."""
    if unit_of(runs.metric) != "points":
        return {"row_bound": math.inf, "step": 0.0}
    return {
        "row_bound": max(100.0, float(np.abs(found.of_rows).max())),
        "step": 100 / len(found.of_rows),
    }


def _collapsed(runs: Runs) -> Iterator[words.CollapsedRun]:
    """The runs that ended without a score where their twin trained, or far below it; fp32's too."""
    for precision in runs.plan.precisions[1:]:
        for pair in runs.pairs(precision):
            both = [runs.scored(one, runs.metric) for one in (pair.ours, pair.theirs)]
            ours, theirs = (None if one is None else one[0] for one in both)
            trial = runs.plan.configurations[pair.configuration].trial
            for run, own, twin in ((pair.ours, ours, theirs), (pair.theirs, theirs, ours)):
                if twin is None or (own is not None and own - twin >= -COLLAPSE * runs.plan.margin):
                    continue
                yield words.CollapsedRun(run, trial, None if own is None else own - twin)


def _next_plan(plan: ComparisonConfig, answers: Sequence[Answer]) -> ComparisonConfig | None:
    """With more seeds for the first precision that is not decided and may have more; None: there is none."""
    for answer in answers:
        num_seeds = plan.num_seeds.get(answer.precision, 0)
        goes_on = answer.verdict == "undecided" and not answer.reason and num_seeds < plan.max_seeds
        if not num_seeds or goes_on:
            if num_seeds == 0 and answer.reason.startswith("not asked"):
                return None
            more = min(next_look(num_seeds), plan.max_seeds) if num_seeds else plan.seeds
            of_reference = max(plan.num_seeds[REFERENCE], more)
            seeds = {**plan.num_seeds, REFERENCE: of_reference, answer.precision: more}
            return plan.model_copy(update={"num_seeds": seeds})
        if answer.verdict != "as_good":
            return None
    return None


def _tuned(search: StudyRecord, precisions: Sequence[str]) -> list[dict[str, Any]]:
    """The best trial of the search in each precision: a description, of one search."""
    best: dict[str, TrialRecord] = {}
    for trial in by_rank(search):
        best.setdefault(precision_of(trial), trial)
    return [
        {"precision": name, "trial": best[name].number, "value": (best[name].values or (None,))[0]}
        for name in precisions
        if name in best
    ]


def _as_json(runs: Runs, answer: Answer, context: words.Context) -> dict[str, Any]:
    kinds = sorted({*answer.speed, *answer.memory})
    only = kinds[0] if len(kinds) == 1 else None
    ratios = {"speed_ratio": answer.speed, "memory_ratio": answer.memory}
    conditions = words.conditions(answer, context) if answer.verdict == "as_good" else None
    return {
        "precision": answer.precision,
        "question": "paired",
        "metric": context.metric,
        "unit": context.unit,
        "verdict": answer.verdict,
        "difference": answer.difference,
        "low": answer.low,
        "high": answer.high,
        "num_runs": answer.num_runs,
        "num_seeds": runs.plan.num_seeds.get(answer.precision, 0),
        "num_rows": len(answer.found.of_rows),
        "num_collapsed": answer.num_collapsed,
        "collapse_share": answer.collapse_share,
        "conditions": conditions,
        "reason": answer.reason,
        "price": answer.price and answer.price.as_json(),
        "sentence": words.verdict(answer, context),
        **_ratios_json({name: of.get(str(only)) for name, of in ratios.items()}),
        "devices": [
            {
                "device": kind,
                "difference": runs.difference_on(kind, answer.found),
                **_ratios_json({name: of.get(kind) for name, of in ratios.items()}),
            }
            for kind in kinds
        ],
        "tasks": {metric: _task_json(runs, answer.precision, metric) for metric in runs.task_metrics},
    }


def _ratios_json(ratios: Mapping[str, Ratio | None]) -> dict[str, float | None]:
    return {
        f"{name}{end}": value
        for name, ratio in ratios.items()
        for end, value in (
            ("", None if ratio is None else ratio.ratio),
            ("_low", None if ratio is None else ratio.low),
            ("_high", None if ratio is None else ratio.high),
        )
    }


def _task_json(runs: Runs, precision: str, metric: str) -> dict[str, float]:
    """A task's own metric: a description, which decides nothing."""
    found = runs.differences(precision, metric)
    known = found.of_runs[np.isfinite(found.of_runs)]
    if not len(known):
        return {"difference": math.nan, "low": -math.inf, "high": math.inf}
    low, high = interval(known, found.of_rows)
    return {"difference": float(known.mean()), "low": float(low), "high": float(high)}
