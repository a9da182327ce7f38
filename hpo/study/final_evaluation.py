"""The detailed evaluation of a study's best trials, once, by a worker that sees the study end.

It takes as long as one evaluation of the split. The workers of a study see its end together, so one of those
that share a folder of checkpoints holds a lock there, and the others leave. A checkpoint that is not here is
fetched from the study's artifact store; without one, a worker leaves the trial to those that have it. Where
it fails, the study is what it was, and `hpo best --evaluate` is there to try again.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import HpoError, Preempted, RunError
from hpo.memory import release_free_memory
from hpo.study.checkpoint_artifacts import fetch_newest
from hpo.study.detailed_evaluations import NOT_STORED, store_detailed_evaluation
from hpo.study.storage import Storage
from hpo.study.study_record import best_trials

if TYPE_CHECKING:
    from hpo.study.artifact_store import ArtifactStore
    from hpo.trial.executor import Executor

NUM_TRIALS = 3
"""Of a Pareto front, from its beginning."""

_logger = logging.getLogger(__name__)


def evaluate_best(
    executor: Executor,
    storage: Storage,
    folder: Callable[[int], Path],
    stop: threading.Event,
    artifacts: ArtifactStore | None = None,
) -> None:
    """Store the detailed evaluation of the best trials on test, or validation where there is no test split.

    Those that are stored already stay; of a study that has trials to run, nothing is evaluated. What goes
    wrong is logged, and nothing else happens; when `stop` is set, this returns at the next batch.

    Args:
        folder: that of a trial's checkpoints by its number.
        artifacts: where the study has its checkpoints, too.
    """
    with _logged("The best trial is not evaluated in detail"):
        counts = storage.slot_counts(executor.study.name)
        if not (counts["open"] or counts["running"]):
            with _held(folder(0).parent / "evaluation.lock") as is_held:
                if is_held:
                    _evaluate_all(executor, storage, folder, stop, artifacts)


def _evaluate_all(
    executor: Executor,
    storage: Storage,
    folder: Callable[[int], Path],
    stop: threading.Event,
    artifacts: ArtifactStore | None,
) -> None:
    name = executor.study.name
    split = "test" if "test" in executor.dataset.splits else "validation"
    token = storage.study_token(name)
    for trial in best_trials(storage.read_study(name))[:NUM_TRIALS]:
        if split not in trial.detailed and not stop.is_set():
            with _logged(f"Trial {trial.number} is not evaluated on {split} in detail"):
                _logger.info("evaluating the best trial, number %d, on %s in detail", trial.number, split)
                if artifacts is not None:
                    fetch_newest("best", artifacts, storage, name, trial.number, folder(trial.number))
                document = _evaluate(executor, folder(trial.number), split, stop)
                if not store_detailed_evaluation(storage, name, token, trial.number, document):
                    raise RunError(NOT_STORED)
        release_free_memory(executor.device)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an error of the block, with `what` it means, in place of raising it."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, HpoError) else f"{type(error).__name__}: {error}"
        level = logging.INFO if isinstance(error, Preempted | RunError) else logging.WARNING
        _logger.log(level, "%s: %s", what, reason)


def _evaluate(executor: Executor, folder: Path, split: str, stop: threading.Event) -> dict[str, Any]:
    from hpo.trial.best_model import split_logits  # PyTorch

    def leave_if_stopped() -> None:
        if stop.is_set():
            raise Preempted("told to stop.")

    return split_logits(executor, folder, split, leave_if_stopped).detailed().as_json()


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether this process alone has the lock; True, too, on a file system that has no locks."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            _logger.debug("%s cannot be locked", path)
        yield True
