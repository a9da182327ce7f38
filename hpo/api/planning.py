"""What a study's trials or its budget come to, as far as it is measured, or can be here."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from hpo.api.opening import RUNS
from hpo.data.dataset import load_data
from hpo.device import probe_device
from hpo.errors import RunError
from hpo.precision.table import apply_preset
from hpo.report.in_advance import comparison_limit
from hpo.report.plan import Plan, costs_of, make_plan, measure_cost
from hpo.study.running.run import check_precisions
from hpo.trial.trial_parts import fit_rungs

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.reading.study_record import StudyRecord

_logger = logging.getLogger(__name__)


def plan_study(config: StudyConfig, record: StudyRecord | None, workers: int | None) -> Plan:
    """The plan of a study, with the losses that a comparison cannot exclude.

    `workers` defaults to the live ones, or one. Raises RunError if the steps did not work.
    """
    data = None
    if record is None:
        data = load_data(config.data)
        config = fit_rungs(config, data)
    else:
        config = config.resumed(record.definition)
    return replace(_measured_plan(config, record, workers), limit=comparison_limit(config, data))


def _measured_plan(config: StudyConfig, record: StudyRecord | None, workers: int | None) -> Plan:
    """The plan by the complete trials, and by some steps here in a precision that has none."""
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
    return make_plan(config, list(costs.values()), record, workers or live or 1)
