"""Plan a study from measured costs: of its complete trials, or of some steps on this device."""

import logging
from dataclasses import replace

from hpo.api.opening import RUNS
from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import StudyConfig
from hpo.data.dataset import load_data
from hpo.device import cuda_devices, probe_device
from hpo.errors import RunError
from hpo.report.plan import Plan, costs_of, default_comparison_limit, make_plan, measure_cost
from hpo.report.status import num_shares
from hpo.study.reading.study_record import StudyRecord
from hpo.study.running.open_study import check_precisions
from hpo.trial.parts import fit_pruner

_logger = logging.getLogger(__name__)


def plan_study(config: StudyConfig, record: StudyRecord | None, workers: int | None) -> Plan:
    """Return the plan of a study, with the limit of a comparison on its data.

    `workers` defaults to the live ones, or one. Raises RunError if no precision could be measured.
    """
    data, why_pruner = None, "it is stored with the study"
    if record is None:
        data = load_data(config.data)
        config, why_pruner = fit_pruner(config, data)
    else:
        config = config.resumed(record.definition)
    plan = _measured_plan(config, record, workers, why_pruner)
    shares = shares_of(config, record, workers)
    return replace(plan, limit=default_comparison_limit(config, data), num_shares=shares)


def shares_of(config: StudyConfig, record: StudyRecord | None, workers: int | None) -> int:
    """Return the number of workers or devices that share the work, like `num_shares` for live workers."""
    if workers is None:
        return (num_shares(record) if record else 0) or 1
    return workers if config.budget is None else min(workers, max(1, len(cuda_devices(config.device))))


def _measured_plan(
    config: StudyConfig, record: StudyRecord | None, workers: int | None, why_pruner: str
) -> Plan:
    """Plan by the complete trials; in a precision without one, by some steps on this device."""
    resolved = resolve_study(config, probe_device(config.device))
    lacking = check_precisions(resolved)
    costs = costs_of(record) if record else {}
    for name in resolved.precisions:
        if name not in costs and name not in lacking:
            _logger.info("measuring %s ...", name)
            costs[name] = measure_cost(resolved, RUNS, name)
    if not costs:
        raise RunError("No precision of the study was measured.")
    live = sum(worker.alive for worker in record.workers) if record else 0
    return make_plan(config, list(costs.values()), record, workers or live or 1, why_pruner)
