"""Plan and run the comparison of `hpo.Study.compare` on this machine."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from hpo.api.opening import check_positive, make_runs_folder
from hpo.api.running import RunResult
from hpo.compare.comparison_study import open_comparison, unlabelled_test_tasks
from hpo.compare.planning import Request
from hpo.compare.sequential import run_rounds
from hpo.config.choices import CONFIGURATIONS, Question
from hpo.config.study_config import StudyConfig
from hpo.data.dataset import DataSet, load_data
from hpo.device import probe_device
from hpo.errors import InputError, RunError
from hpo.json_safe import json_safe
from hpo.report.plan import comparison_cost, comparison_limit
from hpo.report.terminal import ShownDict
from hpo.report.verdicts import comparison_parts
from hpo.study.reading.study_record import StudyRecord
from hpo.study.running.open_study import check_trust
from hpo.study.store.storage import Storage
from hpo.study.store.studies import check_data

_logger = logging.getLogger(__name__)


class ComparisonStopped(RunError):
    """A comparison ended before its verdict; its trained trials are kept."""

    def __init__(self, result: RunResult) -> None:
        super().__init__(f"The comparison `{result.record.name}` was {result.ended}. Call it again.")
        self.result = result


def check_request(request: Request) -> None:
    """Raise InputError for an unknown question or a number that is not above 0."""
    if request.question not in get_args(Question):
        raise InputError(
            f"`question` must be one of {', '.join(get_args(Question))}, but got {request.question}."
        )
    check_positive(top=request.top, seeds=request.seeds, max_seeds=request.max_seeds, margin=request.margin)


def run_comparison(
    database: Storage,
    search: StudyRecord,
    config: StudyConfig,
    request: Request,
    run: Callable[[StudyConfig], RunResult],
) -> ShownDict:
    """Plan a comparison, `run` its trials step by step and judge them, see `hpo.Study.compare`."""
    if config.has_own_loop:
        raise InputError(
            "hpo compare judges the predictions of trials row by row, but a study with its own training loop "
            "(`@hpo.trial`) returns none. Let the loop write them to a file, and give two such files to "
            "hpo.compare_predictions."
        )
    device, data = probe_device(config.device), load_data(config.data)
    check_data(database, search.name, data.fingerprint)
    if unlabelled := unlabelled_test_tasks(config, data):
        tasks = " and ".join(f"`{name}`" for name in unlabelled)
        _logger.warning("The validation split is scored: the test split has no labels of %s.", tasks)
    has_test = "test" in data.splits and not unlabelled
    comparison_study = open_comparison(database, search, config, request, device=device, has_test=has_test)
    check_trust(comparison_study, config, trust_remote_code=False)  # it may come from the database
    in_advance = _in_advance(database, search, config, data, comparison_study, request)
    make_runs_folder(comparison_study.name)

    def run_round(study: StudyConfig) -> StudyRecord:
        result = run(study)
        if result.ended != "finished":
            raise ComparisonStopped(result)
        return result.record

    result = run_rounds(database, comparison_study, search, data.tasks, run_round, in_advance)
    content: Mapping[str, Any] = json_safe(result.content)
    return ShownDict(content, lambda: comparison_parts(content))


def _in_advance(
    database: Storage,
    search: StudyRecord,
    config: StudyConfig,
    data: DataSet,
    comparison_study: StudyConfig,
    request: Request,
) -> list[str]:
    """Log and return the statements before the first trial: the limit of the data, the number of trials.

    Raises InputError for a new comparison that cannot find a precision as good, unless it runs `anyway`.
    """
    plan = comparison_study.comparison
    assert plan is not None
    is_judged = plan.question != CONFIGURATIONS
    limit = comparison_limit(config, data, plan.margin if is_judged else math.inf, plan)
    if not (limit.can_be_as_good or request.anyway or database.has_study(comparison_study.name)):
        raise InputError(f"{limit.text} To train all the same, in case a large loss shows: --anyway")
    in_advance = [limit.text, comparison_cost(search, plan)]
    for sentence in in_advance:
        _logger.info("%s", sentence)
    return in_advance
