"""Runs a comparison, one look after another, until it is decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hpo.compare.comparison_study import caught_up, grown
from hpo.compare.configurations import show_configurations
from hpo.compare.results import Result, judge
from hpo.compare.runs import Runs
from hpo.config.questions import CONFIGURATIONS
from hpo.config.study_config import StudyConfig
from hpo.errors import RunError
from hpo.study.reading.row_statistics import read_row_statistics
from hpo.study.reading.study_record import StudyRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpo.study.store.storage import Storage
    from hpo.tasks.kind import Task


def run_rounds(
    storage: Storage,
    companion: StudyConfig,
    search: StudyRecord,
    tasks: Sequence[Task],
    run_round: Callable[[StudyConfig], StudyRecord],
    in_advance: Sequence[str] = (),
) -> Result:
    """Run the trials of a comparison up to its next look, judge and store that, until it is decided.

    `search` is the study that is compared; `run_round` trains what the plan names and has no result yet. The
    sentences `in_advance` are stored with the result.
    Raises RunError where trials of a look that has ended are not there.
    """
    while True:
        companion = caught_up(storage, companion)
        looked = run_round(companion)
        rows = read_row_statistics(storage, companion.name, tasks)
        runs = Runs(looked, companion, tasks, rows)
        is_judged = runs.plan.question != CONFIGURATIONS
        result = judge(runs) if is_judged else show_configurations(runs, search)
        result = replace(result, content={**result.content, "in_advance": [*in_advance]})
        storage.store_comparison(search.name, result.plan.question, result.content)
        if result.next_plan is None:
            return result
        if result.next_plan.num_seeds == result.plan.num_seeds:
            raise RunError(f"The comparison `{companion.name}` has ended without all of its trials.")
        companion = grown(companion, result.next_plan)
