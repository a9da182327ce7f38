"""Statements before the first trial: the losses that no comparison can exclude, and its largest cost."""

from __future__ import annotations

import logging
import math
from statistics import fmean
from typing import TYPE_CHECKING

from hpo.compare.companion import unlabelled_in_test
from hpo.compare.planning import DEFAULTS
from hpo.data.dataset import load_data
from hpo.errors import DataError
from hpo.evaluation.verdict import Question, facts_in_advance
from hpo.report.formats import format_seconds
from hpo.report.plan import whole_seconds
from hpo.study.reading.study_record import complete_trials
from hpo.tasks.kind import is_error
from hpo.trial.objectives import quality_objective

if TYPE_CHECKING:
    from hpo.config.comparison import ComparisonConfig
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.study.reading.study_record import StudyRecord

_logger = logging.getLogger(__name__)


def limit_in_advance(config: StudyConfig, data: DataSet, margin: float) -> str:
    """State the losses that the split of a comparison cannot exclude, from its labels alone.

    An infinite margin: nothing is judged by one.
    """
    is_test = "test" in data.splits and not unlabelled_in_test(config, data)
    split = "test" if is_test else "validation"
    question = Question(quality_objective(config.objective).metric, margin, rows=f"rows of {split}")
    facts = facts_in_advance(data.tasks, data.splits[split], question)
    if facts is None:
        return f"{question.metric} has no value for right predictions of {split}, so no loss can be excluded."
    told = facts.limit(question)
    if facts.excludable < margin or math.isinf(margin):
        return told
    more = "" if math.isinf(facts.row_bound) else f" Label more {question.rows} to change that."
    return f"{told} So no precision can be shown to be as good as fp32.{more}"


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


def trials_in_advance(search: StudyRecord, plan: ComparisonConfig) -> str:
    """State the largest number of trials and their time, by the complete trials of the search."""
    num = len(plan.arms()) * plan.max_seeds
    seconds = fmean(whole_seconds(trial) for trial in complete_trials(search))
    return f"At most {num} trials, about {format_seconds(num * seconds)} on one worker."
