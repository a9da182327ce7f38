"""The planner: the rest of a study, its time, and the number of trials within a budget.

A run of a trial begins at its start or at a rung. Its setup and evaluation cost a fixed time; its training
grows with the share of the trial's budget. The two are measured apart: a start that trains 4 % of a budget
may spend most of its time on the setup, and 25 such starts take much longer than a whole trial.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from hpo.study.sampling.promotion import (
    PAUSED_ATTR,
    RESUMED_ATTR,
    RUNGS_ATTR,
    Promotion,
    Rung,
    is_at_rung,
)
from hpo.study.store.studies import BUDGET_SPENT


@dataclass(frozen=True)
class Stage:
    """A number of trials and their training, from one share of the budget to another."""

    begin: float
    end: float
    num_trials: int

    @property
    def whole_trials(self) -> float:
        return self.num_trials * (self.end - self.begin)


@dataclass(frozen=True)
class Cost:
    """Device time of a trial."""

    run_seconds: float  # setup and evaluation of each run
    training_seconds: float  # training of the whole trial, in any number of runs

    def of(self, stages: Iterable[Stage]) -> float:
        return sum(
            stage.num_trials * self.run_seconds + stage.whole_trials * self.training_seconds
            for stage in stages
        )

    def of_trial(self, num_runs: int, trained: float) -> float:
        """Return the seconds for training this share of a trial's budget in a number of runs."""
        return num_runs * self.run_seconds + trained * self.training_seconds


@dataclass(frozen=True)
class Measured:
    """Device time of an ended or paused trial."""

    seconds: float
    training_seconds: float
    num_runs: int
    trained: float  # share of its budget


def measured_trial(
    promotion: Promotion | None,
    attributes: Mapping[str, Any],
    is_complete: bool,
    seconds: tuple[float, float],
) -> Measured | None:
    """Return the cost of an ended or paused trial; None if it was stopped somewhere between two rungs.

    A trial that broke or was pruned counts as if it had reached the next rung, since others will break too.
    `seconds` are its device-seconds, and their part in training.
    """
    num_runs = len(attributes.get(RUNGS_ATTR, {}))
    if is_at_rung(attributes):
        return Measured(*seconds, num_runs, attributes[PAUSED_ATTR])
    if attributes.get("outcome_reason") == BUDGET_SPENT:
        return None
    end = 1.0 if is_complete else _next_rung(promotion, attributes.get(RESUMED_ATTR, 0.0))
    return Measured(*seconds, num_runs + 1, end)


def _next_rung(promotion: Promotion | None, share: float) -> float:
    return next((rung for rung in (promotion.used if promotion else ()) if rung > share), 1.0)


def training_share(training_seconds: float | None, active_seconds: float) -> float:
    """Return the share of training in a trial's time with a worker; 1 if it is not known."""
    return min(1.0, training_seconds / active_seconds) if training_seconds and active_seconds else 1.0


def measured_cost(trials: Iterable[Measured]) -> Cost | None:
    """Return the mean cost of these trials; None if nothing was trained."""
    seconds = training = num_runs = trained = 0.0
    for trial in trials:
        seconds += trial.seconds
        training += trial.training_seconds
        num_runs += trial.num_runs
        trained += trial.trained
    return Cost((seconds - training) / num_runs, training / trained) if num_runs and trained else None


@dataclass(frozen=True)
class Forecast:
    """The rest of a study."""

    num_new: int  # number of future trials
    stages: Sequence[Stage]  # the remaining runs, if no trial breaks

    @property
    def whole_trials(self) -> float:
        return sum(stage.whole_trials for stage in self.stages)


def forecast(
    promotion: Promotion | None,
    rungs: Sequence[Rung],
    num_starts: int,
    most: int,
    cost: Cost | None = None,
    seconds: float | None = None,
) -> Forecast:
    """Return how many trials may still begin (at most `most`), and all remaining runs.

    A trial begins if the `seconds` left of the budget (None: no budget) are enough for it, for the
    `num_starts` begun trials before their first rung, and for the continuation of the best. Without a `cost`,
    one may begin.
    """

    def needed(num_new: int) -> float:
        assert cost is not None
        return cost.of(stages_left(promotion, rungs, num_starts + num_new))

    num_new = most
    if seconds is not None:
        # More trials never need less time. A rounding error is no reason to leave one out.
        num_new = bisect_right(range(1, most + 1), seconds * (1 + 1e-9), key=needed) if cost else min(1, most)
    return Forecast(num_new, stages_left(promotion, rungs, num_starts + num_new))


def most_whole_trials(promotion: Promotion, num_starts: int) -> float:
    """Return the training of new trials, in whole trials, that 19 of 20 random orders of results stay under.

    The best trials of a rung continue at once. So more than the promised share continue if results improve.
    """
    generator, totals = Random(0), list[float]()
    for _ in range(max(20, min(200, 20_000 // max(1, num_starts)))):
        arriving, begin, total = generator.sample(range(num_starts), num_starts), 0.0, 0.0
        for rung, at_least in zip(promotion.rungs, promotion.at_least, strict=True):
            if rung in promotion.used:
                ranked, promoted = list[int](), dict[int, None]()
                for number, result in enumerate(arriving, 1):
                    insort(ranked, result)
                    promoted |= dict.fromkeys(ranked[: number // promotion.reduction_factor])
                total, begin = total + len(arriving) * (rung - begin), rung
                arriving = [*(promoted | dict.fromkeys(ranked[:at_least]))]
        totals.append(total + len(arriving) * (1 - begin))
    return sorted(totals)[int(0.95 * len(totals))]


def seconds_ahead(
    promotion: Promotion | None, cost: Cost, attributes: Mapping[str, Any], seconds: float
) -> float:
    """Return the device-seconds of a trial's present run until now, at most its expected total."""
    begin = attributes.get(PAUSED_ATTR, 0.0)
    of_run = seconds - cost.of_trial(len(attributes.get(RUNGS_ATTR, {})), begin)
    return min(max(0.0, of_run), cost.of_trial(1, _next_rung(promotion, begin) - begin))


def stages_left(promotion: Promotion | None, rungs: Sequence[Rung], num_starts: int) -> list[Stage]:
    """Return the remaining runs if none breaks: `num_starts` trials from the start, then from each rung.

    After `n_trials` was lowered, trials may wait at a rung that no other trial will use.
    """
    stages = [Stage(0.0, _next_rung(promotion, 0.0), num_starts)]
    if promotion is None:
        return stages
    for begin, rung, at_least in zip(promotion.rungs, rungs, promotion.at_least, strict=True):
        arriving = sum(stage.num_trials for stage in stages if stage.end == begin)
        num_promoted = promotion.num_promoted(rung.num_paused + arriving, at_least)
        more = max(0, num_promoted - len(rung.promoted))
        num = min(more, len(rung.waiting) + arriving) + rung.num_running
        if num or begin in promotion.used:
            stages.append(Stage(begin, _next_rung(promotion, begin), num))
    return stages
