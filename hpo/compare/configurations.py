"""The best configurations on new seeds: the mean score of each, with an interval.

No winner is named, since a few seeds cannot tell the best configurations apart. A run without a score counts
as the baseline, the best constant prediction. A run of another precision, or that failed by a bug, is left
out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpo.compare.results import Result, about
from hpo.compare.runs import Runs
from hpo.evaluation.contributions import Scored
from hpo.evaluation.decision import mean_interval
from hpo.evaluation.verdict import Question
from hpo.study.reading.study_record import StudyRecord
from hpo.tasks.kind import is_error
from hpo.trial.objectives import objective_value


def show_configurations(runs: Runs, search: StudyRecord) -> Result:
    """Return the mean of each configuration; `search` is the study that they come from."""
    plan, is_minimized = runs.plan, is_error(runs.metric)
    facts = runs.facts(Question(runs.metric, plan.margin))
    baseline = facts.baseline if facts else None
    found = {**about(runs), "has_ended": True}
    metrics = {trial.number: trial.telemetry["metrics"] for trial in search.trials if trial.values}
    factor = 1 if is_minimized else 100
    for place, row in enumerate(found["configurations"]):
        value = objective_value(runs.metric, metrics[row["trial"]], runs.tasks, {})
        own = {"precision": plan.configurations[place].precision, "search": factor * value}
        row |= {**own, **_new_seeds(runs, place, baseline)}
    sign = -1 if is_minimized else 1
    found |= {
        "baseline": sign * baseline.value if baseline else math.nan,
        "num_rows": facts.num_rows if facts else 0,
        "test_seen": plan.test_seen if runs.split == "test" else "",
    }
    return Result(plan, {**found, **_sentences(found)}, None)


def _new_seeds(runs: Runs, place: int, baseline: Scored | None) -> dict[str, Any]:
    """The runs of one configuration: their mean in the direction of the metric, with its interval."""
    plan = runs.plan
    ended = [runs.trial((place, plan.configurations[place].precision), index) for index in range(plan.seeds)]
    counted = [trial for trial in ended if trial and not runs.says_nothing(trial)]
    known = [runs.scored(trial, runs.metric) for trial in counted]
    scores = [run for one in known if (run := one or baseline)]
    mean, low, high = math.nan, -math.inf, math.inf
    if scores and len(scores) == len(known):
        values_R, rows_N = np.array([run.value for run in scores]), np.mean([run.rows_N for run in scores], 0)
        bound = float(np.mean([run.row_bound for run in scores]))
        mean, low, high = mean_interval(values_R, rows_N, row_bound=bound)
        most = 0.0 if is_error(runs.metric) else 100.0
        high = min(high, most) if mean <= most and math.isfinite(high) else high
    if is_error(runs.metric):
        mean, low, high = -mean, -high, -low
    failed = sum(one is None for one in known)
    return {"mean": mean, "low": low, "high": high, "num_runs": len(known), "num_failed": failed}


def _sentences(found: Mapping[str, Any]) -> dict[str, str]:
    """The result in words, and the meaning of the numbers."""
    rows, unit = found["configurations"], found["unit"]
    num_seeds = max(found["num_seeds"].values())
    where = f"On {num_seeds} new seeds and {found['num_rows']:,} labelled rows of {found['split']}"
    parts = [f"trial {row['trial']} has {found['metric']} {_shown(row)}" for row in rows]
    if math.isfinite(found["baseline"]):
        parts.append(f"the best constant prediction has {found['baseline']:.2f}")
    told = f"{where}: {', '.join(parts)} ({unit})."
    if not found["num_rows"]:
        told = f"On {num_seeds} new seeds no run has a score."
    meaning = (
        "No winner is named. An interval (95 %) is about one configuration on new seeds and new rows, not "
        "about a difference of two. Scores in the search are too high on average, since the search chose "
        "by them."
    )
    if seen := found["test_seen"]:
        before = f"Scores on test were seen before these configurations were selected ({seen})"
        meaning += f" {before}, so they may be too high."
    return {"recommendation": told, "error": meaning}


def _shown(row: Mapping[str, Any]) -> str:
    if math.isnan(row["mean"]):
        return "unknown"
    interval = f" [{row['low']:.2f}, {row['high']:.2f}]" if math.isfinite(row["low"]) else " (no interval)"
    return f"{row['mean']:.2f}{interval}"
