"""The results of a comparison so far, as they are stored, and whether it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpo.compare import messages
from hpo.compare.answer import Answer, answer_of, collapsed_runs, verdict_of
from hpo.compare.runs import Runs
from hpo.config.comparison import REFERENCE, ComparisonConfig
from hpo.config.search_space import encode
from hpo.evaluation.contributions import unit_of
from hpo.evaluation.verdict import Verdict


@dataclass(frozen=True)
class Result:
    """The state of a comparison."""

    plan: ComparisonConfig
    content: Mapping[str, Any]
    """The result as it is stored and printed."""
    next_plan: ComparisonConfig | None
    """The plan with the seeds of the next look; None: every verdict is given, or the seeds are used up."""


def judge(runs: Runs) -> Result:
    """Judge every precision from the trials so far."""
    plan = runs.plan
    answers = {precision: answer_of(runs, precision) for precision in plan.precisions[1:]}
    next_plan = _next_plan(plan, answers.values())
    content = {
        **about(runs),
        "has_ended": next_plan is None,
        "margin": plan.margin,
        "verdicts": [_as_json(runs, answer) for answer in answers.values()],
        "collapsed": [messages.collapsed(*one, runs) for one in collapsed_runs(runs, answers)],
        "error": messages.error(answers.values(), runs),
        "recommendation": messages.recommendation([*answers.values()], runs),
    }
    return Result(plan, content, next_plan)


def about(runs: Runs) -> dict[str, Any]:
    """The facts about a comparison that every question stores."""
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


def _next_plan(plan: ComparisonConfig, answers: Iterable[Answer]) -> ComparisonConfig | None:
    """Give more seeds to every precision without a verdict that more seeds may bring. None: there is none."""
    more = {
        one.precision: min(messages.next_look(plan.num_seeds[one.precision]), plan.max_seeds)
        for one in answers
        if one.is_open and plan.num_seeds[one.precision] < plan.max_seeds
    }
    if not more:
        return None
    of_reference = max(plan.num_seeds[REFERENCE], *more.values())
    return plan.model_copy(update={"num_seeds": {**plan.num_seeds, **more, REFERENCE: of_reference}})


def _as_json(runs: Runs, answer: Answer) -> dict[str, Any]:
    found = answer.verdict
    collapses = found.collapses
    return {
        "precision": answer.precision,
        "name": runs.plan.named(answer.precision),
        "metric": runs.metric,
        "unit": found.unit,
        "verdict": found.verdict,
        **_numbers(found),
        "num_runs": found.num_runs,
        "num_seeds": runs.plan.num_seeds.get(answer.precision, 0),
        "row_bound": found.row_bound,
        "num_collapsed": collapses.num_collapsed if collapses else None,
        "collapse_share": collapses.possible_share if collapses else None,
        "reason": found.reason,
        "sentence": messages.verdict(answer, runs),
        **_ratios_json(answer),
        # The metric of a single task describes, and decides nothing.
        "tasks": {
            metric: _numbers(verdict_of(runs, answer.precision, metric)) for metric in runs.task_metrics
        },
    }


def _ratios_json(answer: Answer) -> dict[str, float | None]:
    cells: dict[str, float | None] = {}
    for name, ratio in answer.ratios.items():
        ends = (None, None, None) if ratio is None else (ratio.ratio, ratio.low, ratio.high)
        cells |= zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
    return cells


def _numbers(found: Verdict) -> dict[str, float]:
    return {
        "difference": found.difference,
        "low": found.interval[0],
        "high": found.interval[1],
        "fp32": found.reference_median,
        "baseline": found.baseline,
        "num_rows": found.labelled_rows,
    }
