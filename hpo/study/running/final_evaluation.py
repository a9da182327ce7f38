"""The detailed evaluation of a study's best trial, once, by a worker that sees the study end.

One of the workers that share a folder of checkpoints holds a lock there, and the others leave. If the
evaluation fails, `hpo best --evaluate` tries it again.
"""

import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpo.config.search_space import refusal
from hpo.errors import DeviceLostError, HpoError, Preempted, RunError
from hpo.evaluation.detailed import evaluate_predictions
from hpo.lost_device import lost_device_raised
from hpo.memory import release_free_memory
from hpo.study.checkpoints.remote_store import RemoteStore
from hpo.study.reading.detailed_evaluations import store_detailed_evaluation
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import best_trials
from hpo.study.store.storage import Storage
from hpo.trial.best_model import split_predictions
from hpo.trial.executor import Executor

_logger = logging.getLogger(__name__)


def evaluate_best(
    executor: Executor,
    storage: Storage,
    folder: Callable[[int], Path],
    stop: threading.Event,
    remote: RemoteStore | None = None,
) -> None:
    """Store the detailed evaluation of the best trial on test, or on validation if there is no test split.

    Nothing is done for an unfinished study, or if the evaluation is stored already. An error is only logged.
    When `stop` is set, this returns at the next batch. `folder` maps a trial's number to its checkpoints.
    """

    def leave_if_stopped(_: float) -> None:
        if stop.is_set():
            raise Preempted("told to stop.")

    name = executor.study.name
    if executor.study.has_own_loop:  # only its code knows how the model predicts
        return
    lock = folder(0).parent / "evaluation.lock"
    with _logged(), lost_device_raised(executor.device), _held(lock) as is_held:
        storage.check_study(name)
        if not is_held or not storage.is_finished(name):
            return
        split = "test" if "test" in executor.dataset.splits else "validation"
        token = storage.study_token(name)
        best = next(iter(best_trials(read_study(storage, name))), None)
        if best is None or split in best.detailed or stop.is_set():
            return
        if why := refusal(executor.study.search_space, best.params):  # somebody wrote to the database
            raise RunError(why)
        _logger.info("evaluating the best trial, number %d, on %s in detail", best.number, split)
        if remote is not None:
            remote.fetch_newest("best", folder(best.number))
        predicted = split_predictions(executor, folder(best.number), best.params, split, leave_if_stopped)
        document = evaluate_predictions(predicted, split_name=split).as_json()
        store_detailed_evaluation(storage, name, token, best.number, document)
        release_free_memory(executor.device)


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, HpoError) else f"{type(error).__name__}: {error}"
        is_expected = isinstance(error, Preempted | RunError) and not isinstance(error, DeviceLostError)
        level = logging.INFO if is_expected else logging.WARNING
        _logger.log(level, "The best trial is not evaluated in detail: %s", reason)


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Hold a lock during the block, and yield whether this process has it; always, if there are no locks."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            _logger.debug("%s cannot be locked", path)
        yield True
