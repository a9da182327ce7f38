"""Results of a comparison so far, in their stored form, and the plan of its next round."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpo.compare import messages
from hpo.compare.runs import STORED_BYTES, Pair, Ratio, Runs
from hpo.config.comparison import REFERENCE, ComparisonConfig
from hpo.config.search_space import encode
from hpo.evaluation.contributions import unit_of
from hpo.evaluation.verdict import Question, Verdict, judge
from hpo.study.reading.study_record import TrialRecord

RATIOS = {"speed_ratio": "train_examples_per_second", "stored_ratio": STORED_BYTES}
"""Ratios beside the score, each with its measurement of a trial (`hpo.compare.runs`)."""


@dataclass(frozen=True)
class Result:
    """State of a comparison."""

    plan: ComparisonConfig
    content: Mapping[str, Any]
    """The result in its stored and printed form."""
    next_plan: ComparisonConfig | None
    """Plan with the seeds of the next round; None: every verdict is given, or the seeds are used up."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Evidence about one precision."""

    precision: str
    pairs: tuple[Pair, ...]
    verdict: Verdict
    ratios: Mapping[str, Ratio | None]
    """Value of each of `RATIOS`; None: no pair was measured."""

    @property
    def is_open(self) -> bool:
        """True if more seeds may bring a verdict."""
        return self.verdict.verdict == "not_shown" and not self.verdict.reason


def judge_runs(runs: Runs) -> Result:
    """Judge every precision from the trials so far."""
    plan = runs.plan
    evidence = [_evidence(runs, precision) for precision in plan.precisions[1:]]
    next_plan = _next_plan(plan, evidence)
    content = {
        **comparison_facts(runs),
        "has_ended": next_plan is None,
        "margin": plan.margin,
        "verdicts": [_as_json(runs, one) for one in evidence],
        "collapsed": [messages.collapse(*run, runs) for run in _collapsed_runs(runs, evidence)],
        "error": messages.stated_error(len(evidence), runs),
        "recommendation": messages.recommendation(
            {one.precision: (one.verdict, one.ratios) for one in evidence}, runs
        ),
    }
    return Result(plan, content, next_plan)


def comparison_facts(runs: Runs) -> dict[str, Any]:
    """Return the stored facts about a comparison of any question."""
    plan = runs.plan
    return {
        "study": plan.study,
        "question": plan.question,
        "num_seeds": plan.num_seeds,
        "configurations": [
            {"trial": one.trial, "params": {name: encode(value) for name, value in one.params.items()}}
            for one in plan.configurations
        ],
        "metric": runs.metric,
        "unit": unit_of(runs.metric),
        "split": runs.split,
    }


def _evidence(runs: Runs, precision: str) -> Evidence:
    ratios = {name: runs.ratio(precision, attribute) for name, attribute in RATIOS.items()}
    return Evidence(precision, tuple(runs.pairs(precision)), _judge(runs, precision, runs.metric), ratios)


def _judge(runs: Runs, precision: str, metric: str) -> Verdict:
    """Judge the pairs of a precision in one metric."""
    pairs, plan = [*runs.pairs(precision)], runs.plan
    names = plan.named(REFERENCE), plan.named(precision), f"rows of {runs.split}"
    question = Question(metric, plan.margin, *names)
    theirs = [runs.scored(pair.theirs, metric) for pair in pairs]
    ours = [runs.scored(pair.ours, metric) for pair in pairs]
    return judge(question, theirs, ours, runs.facts(question), [pair.configuration for pair in pairs])


def _collapsed_runs(
    runs: Runs, evidence: Iterable[Evidence]
) -> Iterator[tuple[TrialRecord, int, float | None]]:
    """The collapsed runs of all precisions, once each.

    Each comes with the trial of its configuration in the search and its score (None: it has no score).
    """
    shown = set()
    for one in evidence:
        collapses = one.verdict.collapses
        for index, pair in enumerate(one.pairs):
            for run, side in ((pair.ours, "other"), (pair.theirs, "reference")):
                score = runs.scored(run, runs.metric)
                is_collapsed = score is None or (collapses and getattr(collapses, side)[index])
                if run.number not in shown and is_collapsed:
                    shown.add(run.number)
                    configuration = runs.plan.configurations[pair.configuration].trial
                    yield run, configuration, score.value if score else None


def _next_plan(plan: ComparisonConfig, evidence: Iterable[Evidence]) -> ComparisonConfig | None:
    """Give more seeds to every precision with an open verdict. None: there is none."""
    more = {
        one.precision: min(messages.next_num_seeds(plan.num_seeds[one.precision]), plan.max_seeds)
        for one in evidence
        if one.is_open and plan.num_seeds[one.precision] < plan.max_seeds
    }
    if not more:
        return None
    num_reference = max(plan.num_seeds[REFERENCE], *more.values())
    return plan.model_copy(update={"num_seeds": {**plan.num_seeds, **more, REFERENCE: num_reference}})


def _as_json(runs: Runs, one: Evidence) -> dict[str, Any]:
    verdict, collapses = one.verdict, one.verdict.collapses
    row: dict[str, Any] = {
        "precision": one.precision,
        "name": runs.plan.named(one.precision),
        "metric": runs.metric,
        "unit": verdict.unit,
        "verdict": verdict.verdict,
        **_numbers(verdict),
        "num_runs": verdict.num_runs,
        "num_seeds": runs.plan.num_seeds.get(one.precision, 0),
        "num_groups": verdict.num_groups,
        "row_bound": verdict.row_bound,
        "num_collapsed": sum(collapses.other) if collapses else None,
        "condition": verdict.condition and asdict(verdict.condition),
        "reason": verdict.reason,
        "sentence": messages.verdict(verdict, one.precision, runs),
    }
    for name, ratio in one.ratios.items():
        row[name] = ratio and ratio.ratio
        row |= {f"{name}_low": ratio and ratio.low, f"{name}_high": ratio and ratio.high}
    # The metric of a single task describes, and decides nothing.
    row["tasks"] = {metric: _numbers(_judge(runs, one.precision, metric)) for metric in runs.task_metrics}
    return row


def _numbers(verdict: Verdict) -> dict[str, float]:
    return {
        "difference": verdict.difference,
        "low": verdict.interval[0],
        "high": verdict.interval[1],
        "fp32": verdict.reference_median,
        "baseline": verdict.baseline,
        "num_rows": verdict.labelled_rows,
    }
