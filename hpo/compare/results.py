"""The results of a comparison so far, as they are stored, and whether it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpo.compare import words
from hpo.compare.answer import Answer, answer_of, collapsed_runs
from hpo.compare.decision import interval, next_look
from hpo.compare.runs import Runs
from hpo.config.comparison import REFERENCE, ComparisonConfig
from hpo.config.search_space import encode


@dataclass(frozen=True)
class Result:
    """What a comparison says so far."""

    plan: ComparisonConfig
    content: Mapping[str, Any]
    """As it is stored and printed."""
    next_plan: ComparisonConfig | None
    """With the seeds of the next look; None when all is decided or the seeds are used up."""


def judge(runs: Runs) -> Result:
    """Return the verdicts on the precisions in their sequence, from the trials so far."""
    plan = runs.plan
    answers: list[Answer] = []
    for precision in plan.precisions[1:]:
        ahead = next((one.precision for one in answers if one.verdict != "as_good"), "")
        answers.append(answer_of(runs, precision, ahead))
    next_plan = _next_plan(plan, answers)
    content = {
        "study": plan.study,
        "question": plan.question,
        "num_seeds": plan.num_seeds,
        "configurations": [
            {"trial": one.trial, "params": {name: encode(value) for name, value in one.params.items()}}
            for one in plan.configurations
        ],
        "has_ended": next_plan is None,
        "metric": runs.metric,
        "unit": runs.unit,
        "split": runs.split,
        "margin": plan.margin,
        "verdicts": [_as_json(runs, answer) for answer in answers],
        "collapsed": [words.collapsed(*one, runs) for one in collapsed_runs(runs)],
        "recommendation": words.recommendation(answers, runs),
    }
    return Result(plan, content, next_plan)


def _next_plan(plan: ComparisonConfig, answers: Sequence[Answer]) -> ComparisonConfig | None:
    """With more seeds for the first precision that is not decided and may have more; None: there is none."""
    answer = next((one for one in answers if one.verdict != "as_good"), None)
    if answer is None or answer.verdict == "worse":
        return None
    num_seeds = plan.num_seeds.get(answer.precision, 0)
    if num_seeds and (answer.reason or num_seeds >= plan.max_seeds):
        return None
    more = min(next_look(num_seeds), plan.max_seeds) if num_seeds else plan.seeds
    of_reference = max(plan.num_seeds[REFERENCE], more)
    seeds = {**plan.num_seeds, REFERENCE: of_reference, answer.precision: more}
    return plan.model_copy(update={"num_seeds": seeds})


def _as_json(runs: Runs, answer: Answer) -> dict[str, Any]:
    return {
        "precision": answer.precision,
        "name": runs.plan.named(answer.precision),
        "metric": runs.metric,
        "unit": runs.unit,
        "verdict": answer.verdict,
        "difference": answer.difference,
        "low": answer.low,
        "high": answer.high,
        "num_runs": answer.num_runs,
        "num_seeds": runs.plan.num_seeds.get(answer.precision, 0),
        "num_rows": answer.num_rows,
        "num_collapsed": answer.num_collapsed,
        "collapse_share": answer.collapse_share,
        "conditions": words.conditions(answer, runs) if answer.verdict == "as_good" else None,
        "reason": answer.reason,
        "sentence": words.verdict(answer, runs),
        **_ratios_json(answer),
        "tasks": {metric: _task_json(runs, answer.precision, metric) for metric in runs.task_metrics},
    }


def _ratios_json(answer: Answer) -> dict[str, float | None]:
    cells: dict[str, float | None] = {}
    for name, ratio in answer.ratios.items():
        ends = (None, None, None) if ratio is None else (ratio.ratio, ratio.low, ratio.high)
        cells |= zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
    return cells


def _task_json(runs: Runs, precision: str, metric: str) -> dict[str, float]:
    """The metric of a single task: a description, which decides nothing."""
    pairs = runs.differences(precision, metric)
    known = pairs.of_runs[np.isfinite(pairs.of_runs)]
    if not len(known):
        return {"difference": math.nan, "low": -math.inf, "high": math.inf}
    low, high = interval(known, pairs.of_rows)
    return {"difference": float(known.mean()), "low": float(low), "high": float(high)}
