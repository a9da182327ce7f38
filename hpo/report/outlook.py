"""The rest of a stored study, by the planner of its workers (`hpo.study.sampling.forecast`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hpo.config.sampler_config import PrunerConfig
from hpo.config.sections import BudgetConfig
from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.study.sampling.forecast import (
    Cost,
    Forecast,
    forecast,
    measured_cost,
    measured_trial,
    seconds_ahead,
    stages_left,
    training_share,
)
from hpo.study.sampling.promotion import (
    Promotion,
    Rung,
    Standings,
    is_paused,
    promotion_of,
    rungs_of,
)
from hpo.study.store.studies import BUDGET_SPENT

_FINISHED = ("COMPLETE", "PRUNED", "FAIL")


@dataclass(frozen=True)
class Outlook:
    """Forecast for the rest of a study."""

    cost: Cost | None
    """Measured cost of a trial; None: nothing was trained."""
    forecast: Forecast
    num_planned: int
    """Number of trials at the end of the study."""
    seconds: float
    """Remaining device time."""
    next_seconds: float
    """Device time of one more trial, with its promotions."""
    promotion: Promotion | None
    """Rule of pauses; None: trials do not pause."""


def trial_seconds(record: StudyRecord, trial: TrialRecord) -> float:
    """Return the device-seconds of a trial, or its active seconds if these are unknown."""
    return record.spent.get(trial.number) or trial.active_seconds or 0.0


def outlook(
    record: StudyRecord,
    pruner: PrunerConfig,
    num_trials: int,
    budget: BudgetConfig | None,
    cost: Cost | None = None,
) -> Outlook:
    """Forecast a study with these settings, which may differ from the stored ones.

    Args:
        cost: cost of a trial if nothing was trained yet.
    """
    before = record.definition.get("budget")
    is_raised = before is not None and (budget is None or budget.hours > before["hours"])
    trials = [_planner_trial(trial, is_raised) for trial in record.trials]
    ended = [trial for trial in trials if trial.state.name in _FINISHED]
    begun = [trial for trial in trials if trial.state.name == "RUNNING"]
    running = [trial for trial in begun if not is_paused(trial)]
    retries = sum(trial.state == "WAITING" and "retry_of" in trial.attributes for trial in record.trials)
    num_reopened = len(begun) - sum(trial.state == "RUNNING" for trial in record.trials)
    most = max(0, num_trials - record.counts["done"] - len(begun) + num_reopened - retries)

    promotion = promotion_of(pruner, record.directions, num_trials)
    rungs: list[Rung] = []
    if promotion is not None:
        standings = Standings(promotion)
        for trial in ended:
            standings.add_ended(trial)
        rungs = standings.rungs(begun, lambda _: True)
    measured = _measured(record, promotion, trials)
    num_starts = sum(not rungs_of(trial.user_attrs) for trial in begun) + retries
    known = measured or cost
    spent = {trial.number: trial_seconds(record, trial) for trial in record.trials}
    left, ahead = None, 0.0
    if known is not None:
        parts = ((trial.user_attrs, spent[trial.number]) for trial in running)
        ahead = sum(seconds_ahead(promotion, known, *part) for part in parts)
    if budget is not None:
        left = budget.seconds - sum(spent.values())
        left = left + ahead if left > 0 else 0.0
    found = forecast(promotion, rungs, num_starts, most, known, left)
    if measured is None and found.num_new == 0 and not ended and not begun:  # a worker tries one
        found = forecast(promotion, rungs, num_starts, min(1, most))
    seconds = known.of(found.stages) - ahead if known is not None else 0.0
    one_more = stages_left(promotion, rungs, num_starts + 1)
    num_planned = num_trials - most + found.num_new
    next_seconds = known.of(one_more) if known is not None else 0.0
    return Outlook(measured, found, num_planned, max(0.0, seconds), next_seconds, promotion)


def stored_outlook(record: StudyRecord) -> Outlook:
    """Forecast a study by its definition in the database."""
    definition = record.definition
    pruner = PrunerConfig.model_validate(definition.get("pruner", {}))
    given = definition.get("budget")
    budget = None if given is None else BudgetConfig.model_validate(given)
    return outlook(record, pruner, sum(record.counts.values()), budget)


def _measured(record: StudyRecord, promotion: Promotion | None, trials: Sequence[Any]) -> Cost | None:
    """Mean cost of the trained trials, ended or paused."""
    measurements = []
    for stored, trial in zip(record.trials, trials, strict=True):
        is_at_rest = trial.state.name in _FINISHED or is_paused(trial)
        if not is_at_rest or (stored.trained_seconds is None and not stored.values):
            continue
        seconds = trial_seconds(record, stored)
        active = stored.attributes.get("active_seconds", seconds)
        share = training_share(stored.trained_seconds, active)
        attributes = stored.attributes | {"outcome_reason": stored.reason}
        is_complete = trial.state.name == "COMPLETE"
        measurements.append(measured_trial(promotion, attributes, is_complete, (seconds, seconds * share)))
    return measured_cost(filter(None, measurements))


def _planner_trial(trial: TrialRecord, is_raised: bool) -> Any:
    """A trial in the form of Optuna's, without Optuna. If the budget is raised, one that it ended resumes."""
    is_reopened = is_raised and trial.reason == BUDGET_SPENT and trial.state == "PRUNED"
    state = SimpleNamespace(name="RUNNING" if is_reopened else trial.state)
    return SimpleNamespace(number=trial.number, state=state, user_attrs=trial.attributes)
