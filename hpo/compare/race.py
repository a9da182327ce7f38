"""Which of a study's best configurations is really the best? A race on new seeds that drops the beaten.

All configurations run on the same new seeds. After each look every one is compared with every other, by the
interval of `hpo.compare.decision` over runs and rows, and is dropped where another beats it at the level
ALPHA / (K - 1): the truly best can be dropped only by one of the K - 1 comparisons with it, so in the whole
race that happens with a probability of at most ALPHA. The race ends when one is left, or with `max_seeds`:
then the best are too close to call. Scores are of the validation split: a race chooses, and what is chosen on
test has no test left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from hpo.compare.decision import ALPHA, Array, half_width, interval, next_look
from hpo.compare.results import Result, stored_form
from hpo.compare.runs import Runs, Scored
from hpo.config.comparison import MOST_SEEDS


@dataclass(frozen=True)
class Standing:
    """One configuration of a race."""

    configuration: int
    """The number of its trial in the search."""
    num_seeds: int
    """New seeds that it has run on."""
    num_failed: int
    """Its runs on them that ended without a score, which counts as 0, or as twice the largest error of all
    runs."""
    mean: float
    """Of the metric on new seeds, in hundredths where it is in points; NaN without one."""
    is_beaten: bool
    overstated: float
    """Score in the search minus the mean on new seeds: selection bias."""
    overstated_low: float
    overstated_high: float
    """The interval that holds at every look, over runs; infinite with few."""


def judge_race(runs: Runs, search_scores: Mapping[int, float]) -> Result:
    """What the trials of a race say so far.

    Args:
        search_scores: of each configuration's trial in the search, in the unit of the runs' scores.
    """
    plan = runs.plan
    of_arms = [[_scored(runs, arm, index) for index in range(plan.seeds_of(arm))] for arm in plan.arms()]
    most = max(map(len, of_arms))
    running = [place for place, scores in enumerate(of_arms) if len(scores) == most]
    known = [scored[0] for scores in of_arms for scored in scores if scored]
    nothing = 0.0 if runs.has_worst(runs.metric) or not known else 2 * min(known)
    beaten = {one for one in running if any(_beats(of_arms, other, one, nothing) for other in running)}
    left = [place for place in running if place not in beaten] or running
    standings = [
        _standing(plan.configurations[place].trial, scores, place in left, search_scores)
        for place, scores in enumerate(of_arms)
    ]
    standings.sort(key=lambda one: (one.is_beaten, -np.nan_to_num(one.mean, nan=-np.inf)))
    if runs.is_minimized(runs.metric):
        standings = [replace(one, mean=-one.mean) for one in standings]
    best = standings[0].configuration if math.isfinite(standings[0].mean) else None
    next_plan = None
    if len(left) > 1 and most < plan.max_seeds:
        seeds = {str(place): min(next_look(most), plan.max_seeds) for place in left}
        next_plan = plan.model_copy(update={"num_seeds": {**plan.num_seeds, **seeds}})
    is_close = best is not None and next_plan is None and len(left) > 1
    too_close = [one.configuration for one in standings if not one.is_beaten] if is_close else []
    content = {
        "metric": runs.metric,
        "split": runs.split,
        "standings": [asdict(one) for one in standings],
        "best": best,
        "too_close": too_close,
        "recommendation": _call(standings, best, too_close, runs),
    }
    return stored_form(plan, content, next_plan)


def _scored(runs: Runs, arm: tuple[int, str], index: int) -> Scored | None:
    trial = runs.trial(arm, index)
    return None if trial is None else runs.scored(trial, runs.metric)


def _beats(of_arms: Sequence[Sequence[Scored | None]], one: int, other: int, no_score: float) -> bool:
    """Whether a configuration is proved to be better than another; a run without a score has `no_score`."""
    some = next((scored for scores in of_arms for scored in scores if scored), None)
    if one == other or some is None:
        return False
    nothing = (no_score, np.full_like(some[1], no_score))
    pairs = [(a or nothing, b or nothing) for a, b in zip(of_arms[one], of_arms[other], strict=True)]
    differences = np.array([a[0] - b[0] for a, b in pairs])
    rows: Array = np.mean([a[1] - b[1] for a, b in pairs], axis=0)
    return bool(interval(differences, rows, alpha=ALPHA / (len(of_arms) - 1))[0] > 0)


def _standing(
    configuration: int,
    scores: Sequence[Scored | None],
    is_running: bool,
    search_scores: Mapping[int, float],
) -> Standing:
    known = np.array([scored[0] for scored in scores if scored])
    mean = float(known.mean()) if len(known) else math.nan
    over, width = search_scores.get(configuration, math.nan) - mean, float(half_width(known))
    return Standing(
        configuration,
        len(scores),
        len(scores) - len(known),
        mean,
        not is_running,
        over,
        over - width,
        over + width,
    )


def _call(standings: Sequence[Standing], best: int | None, too_close: Sequence[int], runs: Runs) -> str:
    first, plan = standings[0], runs.plan
    if best is None:
        return f"No configuration has trained on {first.num_seeds} new seeds."
    if too_close:
        names = ", ".join(map(str, too_close))
        more = next_look(plan.max_seeds)
        command = f"{plan.command} --max-seeds {more}"
        return (
            f"Too close to call: trials {names} after {first.num_seeds} new seeds; `hpo best` shows the one "
            "of them that was best in the search."
            + (f" More seeds may tell: {command}" * (more <= MOST_SEEDS))
        )
    bias = f"the search overstated it by {first.overstated:+.2f}"
    if math.isfinite(first.overstated_low):
        bias += f" ({first.overstated_low:+.2f} to {first.overstated_high:+.2f})"
    told = f"{first.mean:.2f} {runs.unit} of {runs.metric} on {first.num_seeds} new seeds; {bias}."
    if len(standings) == 1:
        return f"Trial {best} has {told} No other configuration was compared with it."
    return f"Trial {best} is the best: {told}"
