"""State of a study in numbers and sentences, and the rest of it by the planner of its workers.

Nothing here imports transformers, pandas or plotly, so `hpo status` starts faster.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from hpo.config.limits import Limit, violation
from hpo.config.sampler_config import PrunerConfig
from hpo.config.sections import BUDGET_TRIALS, BudgetConfig
from hpo.extensions import has_own_loop, own_loop_of
from hpo.json_safe import is_number
from hpo.outcome import Outcome, concerns_precision, shows_precision
from hpo.precision.table import PRECISION
from hpo.report.formats import format_metric, format_number, format_percent, format_seconds, plural
from hpo.study.reading.study_record import (
    StudyRecord,
    TrialRecord,
    best_trials,
    busy_devices,
    is_over,
    limit_counts,
    lost_updates,
    lost_weights,
    nearest_message,
    unverified_precisions,
)
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
    last_rung,
    promotion_of,
    rungs_of,
)
from hpo.study.store.studies import BUDGET_SPENT

_FINISHED = ("COMPLETE", "PRUNED", "FAIL")

UNSPENT_SHARE = 0.02  # largest unspent share of a budget without a reason
SCORE = "the mean of the primary metrics of all tasks"
BASELINE = "best constant"  # column of the best constant predictions


@dataclass(frozen=True)
class Outlook:
    cost: Cost | None  # measured cost of a trial; None: nothing was trained
    forecast: Forecast
    num_planned: int  # number of trials at the end of the study
    seconds: float  # remaining device time
    next_seconds: float  # device time of one more trial, with its promotions
    promotion: Promotion | None  # rule of pauses; None: trials do not pause
    left_out_rungs: str = ""  # `Standings.left_out`


def trial_seconds(record: StudyRecord, trial: TrialRecord) -> float:
    return record.spent.get(trial.number) or trial.active_seconds or 0.0


def outlook(
    record: StudyRecord,
    pruner: PrunerConfig,
    num_trials: int,
    budget: BudgetConfig | None,
    cost: Cost | None = None,
) -> Outlook:
    """Forecast a study with these settings. `cost` is the cost of a trial if nothing was trained yet."""
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
    rungs, left_out = list[Rung](), ""
    if promotion is not None:
        standings = Standings(promotion)
        for trial in ended:
            standings.add_ended(trial)
        rungs = standings.rungs(begun, lambda _: True)
        promotion, left_out = standings.promotion, standings.left_out
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
    return Outlook(measured, found, num_planned, max(0.0, seconds), next_seconds, promotion, left_out)


def stored_outlook(record: StudyRecord) -> Outlook:
    definition = record.definition
    pruner = PrunerConfig.model_validate(definition.get("pruner", {}))
    given = definition.get("budget")
    budget = None if given is None else BudgetConfig.model_validate(given)
    return outlook(record, pruner, sum(record.counts.values()), budget)


def _measured(record: StudyRecord, promotion: Promotion | None, trials: Sequence[Any]) -> Cost | None:
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


def study_status(record: StudyRecord) -> dict[str, Any]:
    """Return the content of `hpo status --json`. Only trials with some training count for the rate."""
    num_trained = sum(bool(one.ended and (one.evaluations or one.values)) for one in record.trials)
    hours = _worker_seconds(record) / 3600
    workers = [worker for worker in record.workers if worker.alive]
    ahead = stored_outlook(record)
    hours_left = ahead.seconds / 3600 / num_shares(record) if ahead.cost and workers else None
    end = datetime.now(UTC) + timedelta(hours=hours_left) if hours_left else None
    return {
        "study": record.name,
        "state": record.state,
        "n_trials": sum(record.counts.values()),
        "trials": dict(record.counts),
        "states": dict(Counter(trial.state for trial in record.trials)),
        "foreign_trials": record.num_foreign,
        "outcomes": dict(Counter(trial.outcome for trial in record.trials)),
        "best": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
            }
            for trial in best_trials(record)
        ],
        "paused": [_paused(record, trial) for trial in record.trials if trial.outcome == Outcome.PAUSED],
        "limits": limit_counts(record),
        "budget": budget_status(record, ahead),
        "workers": [
            {
                "id": worker.id,
                "number": worker.number,
                "host": worker.host,
                "device": worker.device,
                "job": worker.job,
                "trial": worker.trial_number,
                "last_seen": worker.last_seen.isoformat(timespec="seconds"),
                "silent_seconds": round(worker.silent_seconds, 1),
            }
            for worker in workers
        ],
        "left_out_rungs": ahead.left_out_rungs,
        "warnings": record_warnings(record),
        "untried": untried_message(record),
        "trials_per_hour": num_trained / hours if num_trained and hours else None,
        "estimated_end": end and end.isoformat(timespec="seconds"),
    }


def _paused(record: StudyRecord, trial: TrialRecord) -> dict[str, Any]:
    rung, reached = last_rung(trial.attributes)
    values = dict(zip(record.metric_names, reached["values"], strict=True))
    step = max((one.step for one in trial.evaluations), default=None)
    return {"number": trial.number, "rung": rung, "step": step, "values": values}


def record_warnings(record: StudyRecord) -> list[str]:
    """Warn of trials with lost weights or updates, or an unverified precision."""
    facts = (lost_weights, lost_updates, unverified_precisions, busy_devices)
    return [" ".join(pair) for fact in facts for pair in fact(record)]


def untried_message(record: StudyRecord, *arguments: str) -> str:
    """Name the precisions of the workers that no trial of an ended study shows, and the command to try one.

    `arguments` name the study in the command; none: its name.
    """
    searched = record.definition.get("search_space", {}).get(PRECISION, {}).get("choices", ())
    tried = {
        trial.params.get(PRECISION)
        for trial in record.trials
        if shows_precision(trial.outcome, trial.telemetry, bool(trial.evaluations or trial.values))
    }
    lacking = [{*worker.left_out} for worker in record.workers]
    names = [one for one in searched if one not in tried and not all(one in left_out for left_out in lacking)]
    if not names or not is_over(record):
        return ""
    if record.definition.get("budget"):
        return f"No trial shows {', '.join(names)}. Raise --hours of `hpo run`: the next trials try it."
    study = shlex.join(arguments or [record.name])
    enqueue = f"hpo enqueue {study} --param {PRECISION}={names[0]}"
    return f"No trial shows {', '.join(names)}. To try it: {enqueue} && hpo worker {study}"


def num_shares(record: StudyRecord) -> int:
    """Return the number of live workers, or under a budget of their devices: they spend time at once."""
    live = [worker for worker in record.workers if worker.alive]
    if record.definition.get("budget") is None:
        return len(live)
    return len({(worker.host, worker.device or worker.id) for worker in live})


def budget_status(record: StudyRecord, ahead: Outlook | None = None) -> dict[str, Any] | None:
    """Return the spent and remaining device-hours, and the reason if some stay unspent; None: no budget."""
    definition = record.definition.get("budget")
    if definition is None:
        return None
    trials = {trial.number: trial for trial in record.trials}
    by_precision: dict[str, float] = defaultdict(float)
    by_outcome: dict[str, float] = defaultdict(float)
    for number, seconds in record.spent.items():
        if trial := trials.get(number):
            by_outcome[trial.outcome] += seconds / 3600
            if not concerns_precision(trial.outcome, trial.telemetry):
                continue
            requested = trial.telemetry.get("precision", {}).get("requested") or trial.params.get(PRECISION)
            by_precision[requested or "not known yet"] += seconds / 3600
    spent, hours = sum(record.spent.values()) / 3600, BudgetConfig.model_validate(definition).hours
    return {
        "hours": hours,
        "spent_hours": spent,
        "left_hours": max(0.0, hours - spent),
        "by_precision": dict(by_precision),
        "by_outcome": dict(by_outcome),
        "unspent": _unspent_message(record, hours - spent, ahead or stored_outlook(record)),
    }


def _unspent_message(record: StudyRecord, hours_left: float, ahead: Outlook) -> str:
    """Tell why a study ended before its budget; empty if it goes on, or hardly anything is left."""
    if not is_over(record) or hours_left <= UNSPENT_SHARE * record.definition["budget"]["hours"]:
        return ""
    if record.state == "cancelled":
        reason = "the study was cancelled"
    elif record.counts["done"] >= record.definition.get("n_trials", BUDGET_TRIALS):
        reason = f"all of the study's {record.counts['done']} trials have ended. Raise `n_trials`"
    elif ahead.cost is None:
        reason = "no trial has trained"
    else:
        next_trial = format_seconds(ahead.next_seconds)
        reason = f"one more trial, with the continuation of the best, takes about {next_trial}"
    return f"{format_seconds(3600 * hours_left)} of device time are not spent, because {reason}."


def _worker_seconds(record: StudyRecord) -> float:
    """Seconds with at least one worker. The runs of a paused trial have no times of their own."""
    seconds, until = 0.0, 0.0
    for worker in sorted(record.workers, key=lambda one: one.started):
        end = worker.last_seen.timestamp()
        seconds += max(0.0, end - max(worker.started.timestamp(), until))
        until = max(until, end)
    return seconds


def objectives_text(metrics: Sequence[str], directions: Sequence[str]) -> str:
    return ", ".join(map(" ".join, zip(directions, metrics, strict=True)))


def score_message(record: StudyRecord) -> str:
    with own_loop_of(record.definition):
        return f"`score` is {SCORE}." if "score" in record.metric_names and not has_own_loop() else ""


def objective_values(record: StudyRecord, trial: TrialRecord) -> dict[str, str]:
    """Return the values of the objectives, each with its best constant prediction if known."""
    baseline = trial.telemetry.get("baseline") or {}
    pairs = zip(record.metric_names, trial.values or (), strict=True)
    return {
        metric: with_baseline(format_metric(metric, value), baseline.get(metric)) for metric, value in pairs
    }


def with_baseline(value: str, baseline: Any) -> str:
    return f"{value} (best constant prediction {format_number(baseline)})" if is_number(baseline) else value


def rank_name(trial: TrialRecord) -> str:
    return "nearest" if violation(trial.constraints) else "best"


def resume_message(study: str) -> str:
    """Name the commands to continue a paused or cancelled study."""
    return f"To continue it: hpo resume {study}, then hpo worker {study}"


def progress_message(counts: Mapping[str, int], *, has_budget: bool = False) -> str:
    """Describe the progress of a study. A budget may end it with fewer trials."""
    paused = f", {counts['paused']} paused" if counts.get("paused") else ""
    at_most = "at most " if has_budget else ""
    return f"{counts['done']} of {at_most}{sum(counts.values())} trials ended{paused}"


def paused_message(record: StudyRecord) -> str:
    """Tell how many trials are paused and when they continue; empty if none is paused."""
    paused = record.counts.get("paused", 0)
    factor = PrunerConfig.model_validate(record.definition.get("pruner", {})).options.get("reduction_factor")
    if not paused or not factor:
        return ""
    return (
        f"{plural(paused, 'trial')} paused. The best 1 in {factor} at each rung continue. More continue when "
        "no new trial is left."
    )


def limit_messages(record: StudyRecord) -> list[str]:
    """Count the trials within the limits, and name the nearest trial if there is none."""
    counts = limit_counts(record)
    if not counts or not (counts["complete"] or counts["ended_early"]):
        return []
    parts = [f"{counts['met']} of {plural(counts['complete'], 'complete trial')} within all limits."]
    if counts["ended_early"]:
        parts.append(f"Ended early over a limit: {plural(counts['ended_early'], 'trial')}.")
    for metric, count in counts["broken"].items():
        limit = Limit.model_validate(record.definition["constraints"][metric])
        parts += [f"Not within `{metric} {limit}`: {plural(count, 'trial')}."] if count else []
    return [" ".join(parts), *filter(None, [nearest_message(record)])]


def budget_messages(record: StudyRecord) -> list[str]:
    """Describe the spent part of the budget; empty without a budget."""
    budget = budget_status(record)
    if budget is None:
        return []
    share = format_percent(budget["spent_hours"] / budget["hours"])
    text = f"{budget['spent_hours']:.3g} of {budget['hours']:.3g} device-hours spent ({share})."
    for part in ("by_precision", "by_outcome"):
        hours = ", ".join(f"{name} {hours:.3g} h" for name, hours in budget[part].items())
        text += f" {part.replace('_', ' ').capitalize()}: {hours}." if hours else ""
    return [text, *filter(None, [budget["unspent"]])]
