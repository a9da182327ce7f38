"""How a worker of a comparison goes on from look to look, between which all slots are done for a while.

`hpo compare` judges then, and adds the trials of the next look. It says so with the study that is compared
(`StudyRecord.comparisons`): whether the comparison has ended, and after how many seeds.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator

from hpo.config.comparison import ComparisonConfig
from hpo.config.study_config import StudyConfig, stored_study
from hpo.errors import StorageError
from hpo.study.running.stopping import WORKERS_ON_DEVICE, Stop
from hpo.study.running.worker import read_plan
from hpo.study.store.lifecycle import read_state
from hpo.study.store.storage import COMPARISON_ATTR, Storage, open_storage

NEXT_LOOK_SECONDS = 600.0
"""So long a worker waits for the next look: nobody adds it where `hpo compare` was stopped."""
_POLL_SECONDS = 2.0

_logger = logging.getLogger(__name__)


def look_by_look(config: StudyConfig, url: str, stop: Stop) -> Iterator[StudyConfig]:
    """The study for each time that it has trials to run: once, but for a comparison once a look.

    The processes of `run_workers` leave after each look, as their parent looks for the next one. A `timeout`
    of the study is for all looks together.
    """
    stop.deadline = min(stop.deadline, time.monotonic() + (config.timeout or math.inf))
    yield config
    while config.comparison is not None and WORKERS_ON_DEVICE not in os.environ:
        seconds = min(stop.deadline - time.monotonic(), NEXT_LOOK_SECONDS)
        with open_storage(url, create=False, stop=stop) as storage:
            if not wait_for_next_look(storage, config.name, stop, seconds=seconds):
                return
            config = stored_study(config.name, storage.read_definition(config.name))
        yield config


def wait_for_next_look(storage: Storage, name: str, stop: Stop, *, seconds: float) -> bool:
    """Wait until the comparison `name`, whose slots are all done, has others.

    Returns False where it has ended, is paused, cancelled or deleted, got no trial within `seconds`, or
    `stop` is set.
    """
    deadline = time.monotonic() + seconds
    while not stop.is_set() and read_state(storage, name) == "open":
        counts = storage.slot_counts(name)
        if counts["open"] or counts["running"]:
            return True
        if has_ended(storage, read_plan(storage, name)):
            return False
        if time.monotonic() >= deadline:
            _logger.warning("`hpo compare` has added no trials to `%s` for %.0f s.", name, seconds)
            return False
        stop.wait(_POLL_SECONDS)
    return False


def has_ended(storage: Storage, plan: ComparisonConfig) -> bool:
    """Whether a comparison has ended with the seeds that it has; also where its study is deleted."""
    try:
        attributes = storage.persist(lambda: storage.load_study(plan.study).user_attrs)
    except StorageError:
        return True
    stored = attributes.get(f"{COMPARISON_ATTR}{plan.question}")
    return stored is not None and stored["has_ended"] and stored["num_seeds"] == plan.num_seeds
