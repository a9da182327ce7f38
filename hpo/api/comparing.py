"""A comparison on this machine: what `hpo.Study.compare` plans and runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from hpo.api.opening import check_positive, make_runs_folder
from hpo.api.running import RunResult
from hpo.compare.comparison_study import open_comparison, unlabelled_test_tasks
from hpo.compare.sequential import run_rounds
from hpo.config.choices import CONFIGURATIONS, Question
from hpo.data.dataset import load_data
from hpo.device import probe_device
from hpo.errors import InputError, RunError
from hpo.json_safe import json_safe
from hpo.report.plan import comparison_cost, comparison_limit
from hpo.study.running.open_study import check_trust
from hpo.study.store.studies import check_data

if TYPE_CHECKING:
    from hpo.compare.planning import Request
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.study.reading.study_record import StudyRecord
    from hpo.study.store.storage import Storage

_logger = logging.getLogger(__name__)


class ComparisonStopped(RunError):
    """A comparison ended before it was decided; what has been trained is kept."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"The comparison `{result.record.name}` was {result.ended}; call it again to go on.")
        self.result = result


def planned_comparison(
    database: Storage, search: StudyRecord, config: StudyConfig, request: Request
) -> tuple[StudyConfig, DataSet, list[str]]:
    """Return the study of a comparison, a new or a stored one, its data and its statements in advance.

    Nothing is stored yet.

    Raises InputError where the study, its data or this device do not allow it.
    """
    if config.has_own_loop:
        raise InputError(
            "hpo compare judges the predictions of trials row by row, but a training loop of the study's own "
            "(`@hpo.trial`) returns none. Let it write them into a file, and give those of two trials to "
            "hpo.compare_predictions."
        )
    device, data = probe_device(config.device), load_data(config.data)
    check_data(database, search.name, data.fingerprint)
    unlabelled = unlabelled_test_tasks(config, data)
    if unlabelled:
        tasks = " and ".join(f"`{name}`" for name in unlabelled)
        _logger.warning("Scores are of the validation split: the test split has no labels of %s.", tasks)
    has_test = "test" in data.splits and not unlabelled
    companion = open_comparison(database, search, config, request, device=device, has_test=has_test)
    check_trust(companion, config, trust_remote_code=False)  # what the database has of it
    plan = companion.comparison
    assert plan is not None
    margin = math.inf if plan.question == CONFIGURATIONS else plan.margin
    in_advance = [comparison_limit(config, data, margin), comparison_cost(search, plan)]
    for sentence in in_advance:
        _logger.info("%s", sentence)
    return companion, data, in_advance


def run_comparison(
    database: Storage,
    search: StudyRecord,
    config: StudyConfig,
    request: Request,
    run: Callable[[StudyConfig], RunResult],
) -> Mapping[str, Any]:
    """Plan a comparison, `run` its trials look by look and judge them, see `hpo.Study.compare`.

    Raises ComparisonStopped.
    """
    if request.question not in get_args(Question):
        raise InputError(
            f"`question` must be one of {', '.join(get_args(Question))}, but got {request.question}."
        )
    check_positive(top=request.top, seeds=request.seeds, max_seeds=request.max_seeds, margin=request.margin)
    companion, data, in_advance = planned_comparison(database, search, config, request)
    make_runs_folder(companion.name)

    def run_round(look: StudyConfig) -> StudyRecord:
        result = run(look)
        if result.ended != "finished":
            raise ComparisonStopped(result)
        return result.record

    result = run_rounds(database, companion, search, data.tasks, run_round, in_advance)
    content: Mapping[str, Any] = json_safe(result.content)
    return content
