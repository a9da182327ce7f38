"""A comparison of a study's best configurations: planned, then run look by look."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpo.api.messages import progress_shown
from hpo.api.opening import existing_database, make_runs_folder
from hpo.api.running import run_here, worker_processes
from hpo.compare.companion import open_comparison, unlabelled_in_test
from hpo.compare.looks import price_before, run_looks
from hpo.data.dataset import load_data
from hpo.device import probe_device
from hpo.errors import RunError
from hpo.study.running.run import check_trust
from hpo.study.store.studies import check_data

if TYPE_CHECKING:
    from hpo.api.running import RunResult
    from hpo.compare.planning import Request
    from hpo.compare.price import Price
    from hpo.compare.results import Result
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.study.reading.study_record import StudyRecord
    from hpo.study.running.stopping import Stop
    from hpo.study.store.storage import Storage

_logger = logging.getLogger(__name__)


class ComparisonStopped(RunError):
    """A comparison ended before it was decided; what has been trained is kept."""

    def __init__(self, result: RunResult) -> None:
        name, ended = result.record.name, result.ended
        super().__init__(f"The comparison `{name}` was {ended}; call it again to go on.")
        self.result = result


@dataclass(frozen=True)
class Comparison:
    """A comparison as it is planned: `run` stores it, or goes on with it."""

    companion: StudyConfig = field(repr=False)
    """The study that its trials are in."""
    price: Price | None
    """None where nothing tells."""
    sentence: str
    """That says what it costs."""
    is_new: bool
    search: StudyRecord = field(repr=False)
    """Whose configurations are compared."""
    data: DataSet = field(repr=False)
    storage: str | None = field(repr=False)
    """As the user names it."""
    quiet: bool

    def run(self, stop: Stop, *, workers: int | None = None) -> Result:
        """Train and judge until it is decided.

        Args:
            stop: from `stop_on_signals`.
            workers: processes on this machine; None: this one.

        Raises:
            ComparisonStopped: it was interrupted.
        """
        processes = worker_processes(self.companion, self.storage, workers)
        make_runs_folder(self.companion.name)

        def run_look(companion: StudyConfig) -> StudyRecord:
            result = run_here(companion, processes, stop, self.storage, quiet=self.quiet)
            if result.ended != "finished":
                raise ComparisonStopped(result)
            return result.record

        with progress_shown(quiet=self.quiet), existing_database(self.storage) as database:
            return run_looks(database, self.companion, self.search, self.data.tasks, run_look, self.price)


def plan_comparison(
    database: Storage,
    search: StudyRecord,
    config: StudyConfig,
    request: Request,
    *,
    storage: str | None,
    quiet: bool,
) -> Comparison:
    """The comparison of a study, of which nothing is stored yet, or its next looks.

    Raises InputError where the study, its data or this device do not allow it.
    """
    device, data = probe_device(config.device), load_data(config.data)
    check_data(database, search.name, data.fingerprint)
    unlabelled = unlabelled_in_test(config, data)
    if unlabelled:
        tasks = " and ".join(f"`{name}`" for name in unlabelled)
        _logger.warning("Scores are of the validation split: the test split has no labels of %s.", tasks)
    has_test = "test" in data.splits and not unlabelled
    companion = open_comparison(database, search, config, request, device=device, has_test=has_test)
    check_trust(companion, config, trust_remote_code=False)  # what the database has of it
    price, sentence = price_before(search, companion, data)
    is_new = not database.has_study(companion.name)
    return Comparison(companion, price, sentence, is_new, search, data, storage, quiet)
