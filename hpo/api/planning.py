"""The plan of a study, by what was measured or can be measured here."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from hpo.api.opening import RUNS
from hpo.config.resolved_study import resolve_study
from hpo.data.dataset import load_data
from hpo.device import cuda_devices, probe_device
from hpo.errors import RunError
from hpo.report.plan import Plan, costs_of, default_comparison_limit, make_plan, measure_cost
from hpo.report.status import num_shares
from hpo.study.running.open_study import check_precisions
from hpo.trial.parts import fit_pruner

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.reading.study_record import StudyRecord

_logger = logging.getLogger(__name__)


def plan_study(config: StudyConfig, record: StudyRecord | None, workers: int | None) -> Plan:
    """Return the plan of a study, with the losses that a comparison cannot exclude.

    Raises RunError if the steps did not work.

    Args:
        workers: None: the live ones, or one.
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
    """Return into how many parts the device time is divided, as `num_shares` does for live workers."""
    if workers is None:
        return (num_shares(record) if record else 0) or 1
    return workers if config.budget is None else min(workers, max(1, len(cuda_devices(config.device))))


def _measured_plan(
    config: StudyConfig, record: StudyRecord | None, workers: int | None, why_pruner: str
) -> Plan:
    """The plan by the complete trials, and by some steps here in a precision that has none."""
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
