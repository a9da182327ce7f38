"""Rounds of a comparison, until it is decided."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hpo.compare.comparison_study import with_plan, with_stored_seeds
from hpo.compare.configurations import show_configurations
from hpo.compare.results import Result, judge_runs
from hpo.compare.runs import Runs
from hpo.config.choices import CONFIGURATIONS
from hpo.config.study_config import StudyConfig
from hpo.errors import RunError
from hpo.study.reading.detailed_evaluations import read_row_statistics
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.storage import Storage
from hpo.tasks.kind import Task


def run_rounds(
    storage: Storage,
    study: StudyConfig,
    search: StudyRecord,
    tasks: Sequence[Task],
    run_round: Callable[[StudyConfig], StudyRecord],
    in_advance: Sequence[str] = (),
) -> Result:
    """Run the trials of each round, judge them and store the result, until every verdict is given.

    Args:
        study: the comparison.
        search: the compared study.
        run_round: trains the planned trials without a result.
        in_advance: sentences to store with the result.

    Raises:
        RunError: a round has ended without all of its trials.
    """
    while True:
        study = with_stored_seeds(storage, study)
        record = run_round(study)
        runs = Runs(record, study, tasks, read_row_statistics(storage, study.name, tasks))
        is_judged = runs.plan.question != CONFIGURATIONS
        result = judge_runs(runs) if is_judged else show_configurations(runs, search)
        result = replace(result, content={**result.content, "in_advance": [*in_advance]})
        storage.store_comparison(search.name, result.plan.question, result.content)
        if result.next_plan is None:
            return result
        if result.next_plan.num_seeds == result.plan.num_seeds:
            raise RunError(f"The comparison `{study.name}` has ended without all of its trials.")
        study = with_plan(study, result.next_plan)
