"""A comparison from what it costs, before it begins, over one look after another to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hpo.compare import words
from hpo.compare.companion import caught_up, grown
from hpo.compare.price import Price, expected_before, price_of
from hpo.compare.race import judge_race
from hpo.compare.results import Result, judge_precisions
from hpo.compare.runs import Runs
from hpo.config.study_config import StudyConfig
from hpo.errors import RunError
from hpo.study.reading.row_statistics import read_row_statistics
from hpo.study.reading.study_record import StudyRecord
from hpo.trial.objectives import quality_objective, unit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpo.data.dataset import DataSet
    from hpo.data.tasks import Task
    from hpo.study.store.storage import Storage


def price_before(search: StudyRecord, companion: StudyConfig, data: DataSet) -> tuple[Price | None, str]:
    """What a comparison of precisions costs, and the sentence that says so; None where nothing tells."""
    plan = companion.comparison
    assert plan is not None
    if plan.is_race:
        most = len(plan.configurations) * plan.max_seeds
        return None, f"Price: at most {most} trials, and fewer as configurations are beaten."
    split = "test" if companion.evaluation.test else "validation"
    num_rows = len(data.splits[split])
    compared = {configuration.trial for configuration in plan.configurations}
    seconds = [trial.seconds for trial in search.trials if trial.number in compared and trial.seconds]
    in_points = unit_of(quality_objective(companion.objective).metric) == "points"
    expected = expected_before(search, num_rows, plan.setting) if in_points else None
    mean = sum(seconds) / len(seconds) if seconds else None
    cost = None if expected is None else price_of(plan, expected, mean)
    return cost, words.price(cost, plan, num_rows, split)


def run_looks(
    storage: Storage,
    companion: StudyConfig,
    search: StudyRecord,
    tasks: Sequence[Task],
    run_look: Callable[[StudyConfig], StudyRecord],
    price: Price | None = None,
) -> Result:
    """Run the trials of a comparison up to its next look, judge and store that, until it is decided.

    Args:
        search: the study whose configurations are compared.
        run_look: trains what the plan names and has no result yet.
        price: as it was said before the first trial.

    Raises RunError where trials of a look that has ended are not there.
    """
    while True:
        companion = caught_up(storage, companion)
        looked = run_look(companion)
        rows = read_row_statistics(storage, companion.name, tasks)
        result = judge(Runs(looked, companion, tasks, rows), search, price)
        storage.store_comparison(search.name, result.plan.question, result.content)
        if result.next_plan is None:
            return result
        if result.next_plan.num_seeds == result.plan.num_seeds:
            raise RunError(f"The comparison `{companion.name}` has ended without all of its trials.")
        companion = grown(companion, result.next_plan)


def judge(runs: Runs, search: StudyRecord, price: Price | None = None) -> Result:
    """What the trials of a comparison say so far."""
    if runs.plan.is_race:
        return judge_race(runs, runs.of_search(search))
    return judge_precisions(runs, search, price)
