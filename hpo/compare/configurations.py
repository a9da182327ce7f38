"""The best configurations on new seeds: the mean score of each, with an interval.

No winner is named, since a few seeds cannot tell the best configurations apart. A run without a score counts
as the baseline, the best constant prediction. Runs of another precision, or with a bug, do not count.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpo.compare.results import Result, comparison_facts
from hpo.compare.runs import Runs
from hpo.evaluation.contributions import Scored
from hpo.evaluation.decision import mean_interval
from hpo.evaluation.verdict import Question
from hpo.study.reading.study_record import StudyRecord
from hpo.tasks.kind import is_error
from hpo.trial.objectives import objective_value


def show_configurations(runs: Runs, search: StudyRecord) -> Result:
    """Return the mean of each configuration; `search` is their study."""
    plan, is_minimized = runs.plan, is_error(runs.metric)
    facts = runs.facts(Question(runs.metric, plan.margin))
    baseline = facts.baseline if facts else None
    content = {**comparison_facts(runs), "has_ended": True}
    metrics = {trial.number: trial.telemetry["metrics"] for trial in search.trials if trial.values}
    for index, row in enumerate(content["configurations"]):
        value = objective_value(runs.metric, metrics[row["trial"]], runs.tasks, {})
        row["precision"] = plan.configurations[index].precision
        row["search"] = value if is_minimized else 100 * value
        row |= _new_seeds(runs, index, baseline)
    sign = -1 if is_minimized else 1
    content |= {
        "baseline": sign * baseline.value if baseline else math.nan,
        "num_rows": facts.num_rows if facts else 0,
        "test_seen": plan.test_seen if runs.split == "test" else "",
    }
    return Result(plan, {**content, **_sentences(content)}, None)


def _new_seeds(runs: Runs, index: int, baseline: Scored | None) -> dict[str, Any]:
    """The mean of the runs of one configuration in the direction of the metric, with its interval."""
    plan = runs.plan
    arm = index, plan.configurations[index].precision
    trials = [trial for seed in range(plan.seeds) if (trial := runs.trial(arm, seed))]
    known = [runs.scored(trial, runs.metric) for trial in trials if runs.is_evidence(trial)]
    scores = [run for one in known if (run := one or baseline)]
    mean, low, high = math.nan, -math.inf, math.inf
    if scores and len(scores) == len(known):
        values_R = np.array([run.value for run in scores])
        groups_G, bounds_G = (
            np.mean([getattr(run, name) for run in scores], 0) for name in ("groups_G", "bounds_G")
        )
        mean, low, high = mean_interval(values_R, groups_G, bounds_G=bounds_G)
        most = 0.0 if is_error(runs.metric) else 100.0
        high = min(high, most) if mean <= most and math.isfinite(high) else high
    if is_error(runs.metric):
        mean, low, high = -mean, -high, -low
    failed = sum(one is None for one in known)
    return {"mean": mean, "low": low, "high": high, "num_runs": len(known), "num_failed": failed}


def _sentences(content: Mapping[str, Any]) -> dict[str, str]:
    """The result and the meaning of its numbers."""
    num_seeds = max(content["num_seeds"].values())
    parts = [f"trial {row['trial']}: {_mean(row)}" for row in content["configurations"]]
    if math.isfinite(content["baseline"]):
        parts.append(f"best constant prediction: {content['baseline']:.2f}")
    text = (
        f"{content['metric']} ({content['unit']}) on {num_seeds} new seeds and {content['num_rows']:,} "
        f"labelled rows of {content['split']}. {', '.join(parts)}."
    )
    if not content["num_rows"]:
        text = f"On {num_seeds} new seeds no run has a score."
    meaning = (
        "No winner is named. An interval (95%) is about one configuration on new seeds and rows, not about a "
        "difference of two. Scores in the search are too high on average, since the search chose by them."
    )
    if seen := content["test_seen"]:
        meaning += f" Scores on test may be too high: they were seen before this selection ({seen})."
    return {"recommendation": text, "error": meaning}


def _mean(row: Mapping[str, Any]) -> str:
    if math.isnan(row["mean"]):
        return "unknown"
    interval = f" [{row['low']:.2f}, {row['high']:.2f}]" if math.isfinite(row["low"]) else " (no interval)"
    return f"{row['mean']:.2f}{interval}"
