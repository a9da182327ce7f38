"""The plan of a study, by what was measured or can be measured here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpo.api.in_advance import limit_in_advance
from hpo.api.opening import RUNS
from hpo.compare.planning import DEFAULTS
from hpo.data.dataset import load_data
from hpo.device import probe_device
from hpo.errors import DataError, RunError
from hpo.precision.table import apply_preset
from hpo.report.formats import format_bytes, format_number, format_seconds
from hpo.report.plan import Plan, costs_of, make_plan, measure_cost
from hpo.study.running.run import check_precisions
from hpo.tasks.registry import is_error
from hpo.trial.objectives import quality_objective

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.study.reading.study_record import StudyRecord

_logger = logging.getLogger(__name__)


def measured_plan(
    config: StudyConfig, record: StudyRecord | None, workers: int | None = None, why_pruner: str = ""
) -> Plan:
    """Return the plan of a study by its complete trials, and by some steps here in a precision that has none.

    Raises RunError if the steps did not work.

    Args:
        workers: left out, the live ones, or one.
        why_pruner: why the study has its pruner.
    """
    device = probe_device(config.device)
    lacking = check_precisions(config, device)
    costs = costs_of(record) if record else {}
    for name in config.precisions or apply_preset(config.amp, device)[1:]:
        if name not in costs and name not in lacking:
            _logger.info("measuring %s ...", name)
            costs[name] = measure_cost(config, device, RUNS, name)
    if not costs:
        raise RunError("No precision of the study was measured.")
    live = sum(worker.alive for worker in record.workers) if record else 0
    return make_plan(
        config, list(costs.values()), record, workers or live or 1, _pruner_told(config, why_pruner)
    )


def _pruner_told(config: StudyConfig, why: str) -> str:
    rungs = ", ".join(f"{float(rung):.0%}" for rung in config.pruner.rungs)
    pauses = f", trials pause at {rungs} of their budget" if rungs else ""
    return f"{config.pruner.name}{pauses}; {why or 'it is stored with the study'}"


def comparison_limit(config: StudyConfig, data: DataSet | None) -> str:
    """The losses that `hpo compare` cannot exclude with its default margin.

    Empty: there is no default margin, or this machine has no data. A study that was measured needs none.
    """
    if is_error(quality_objective(config.objective).metric):
        return ""
    try:
        data = data or load_data(config.data)
    except DataError as error:
        _logger.warning("The losses that `hpo compare` cannot exclude are not known here: %s", error)
        return ""
    return limit_in_advance(config, data, DEFAULTS["margin"])


def plan_told(plan: Plan) -> Iterator[str]:
    """Return the plan in sentences, one on a line."""
    for cost in plan.costs:
        rate = cost.examples_per_second
        speed = "" if rate is None else f", at {format_number(rate)} examples/s"
        yield f"A trial in {cost.precision}: {format_seconds(cost.seconds)}{speed} ({cost.measured_by})."
    yield f"Pruner: {plan.pruner}."
    start, *later = (f"{stage.num_trials} to {stage.end:.0%}" for stage in plan.stages)
    going_on = f"; of these go on {', '.join(later)}" if later else ""
    if any(stage.num_trials for stage in plan.stages):
        yield f"Trials: {start} of their budget{going_on}. That is {plan.whole_trials:.3g} whole trials."
    else:
        yield "Trials: none is left to run."
    of = "" if plan.budget_hours is None else f" of the budget of {plan.budget_hours:.3g}"
    spent = f", {plan.spent_hours:.3g} of them spent" if plan.spent_hours else ""
    yield f"Device-hours: about {plan.hours:.3g}{of}{spent}."
    if plan.budget_hours is not None and plan.hours > plan.budget_hours:
        yield "The budget may not be enough for one whole trial. Raise it, or shorten the trials."
    if plan.paused_bytes is not None:
        yield f"Checkpoints of paused trials: at most {format_bytes(plan.paused_bytes)} of disk space."
    clock = format_seconds(3600 * plan.hours_to_the_end)
    if plan.limit:
        yield f"`hpo compare`: {plan.limit}"
    yield f"With {plan.num_workers} worker{'s' * (plan.num_workers > 1)}: about {clock} from now."
