"""The first configurations of a study: from its file, or the best of an earlier study."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.config.first import EarlierResults, fitting
from hpo.config.limits import violation
from hpo.config.study_config import StudyConfig
from hpo.errors import StorageError, StudyFileError
from hpo.study.store.storage import Storage

SOURCE_ATTR = "source"
"""User attribute of a first trial: the source of its configuration."""

Configuration = tuple[dict[str, Any], str]

_logger = logging.getLogger(__name__)


def tried_first(storage: Storage, config: StudyConfig) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return the parameters and user attributes of the first trials of a new study, at most `n_trials`.

    Raises StudyFileError if the earlier study is missing or has several objectives.
    """
    if config.comparison is not None:
        return []
    if isinstance(config.first, EarlierResults):
        first = list(_best_fitting(storage, config, config.first))
    else:
        fits = [fitting(config.search_space, params) for params in config.first]
        first = [(params, f"first.{index}") for index, params in enumerate(fits)]
    if (surplus := len(first) - config.num_trials) > 0:
        _logger.warning("first: the last %d are left out of %d trials.", surplus, config.num_trials)
    return [(params, {SOURCE_ATTR: source}) for params, source in first[: config.num_trials]]


def _best_fitting(storage: Storage, config: StudyConfig, earlier: EarlierResults) -> Iterator[Configuration]:
    """Yield the best earlier configurations as far as they fit this search space, each once."""
    used: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for trial in _ranked_trials(storage, config, earlier.study):
        fits = fitting(config.search_space, trial.params)
        left_out |= trial.params.keys() - fits.keys()
        if fits and fits not in used:
            used.append(fits)
            yield fits, f"trial {trial.number} of {earlier.study}"
        if len(used) == earlier.top:
            break
    if left_out or len(used) < earlier.top:
        names = ", ".join(f"`{name}`" for name in sorted(left_out)) or "nothing"
        message = "first: %d configurations of earlier trials are tried; left out, as they do not fit: %s."
        _logger.warning(message, len(used), names)


def _ranked_trials(storage: Storage, config: StudyConfig, name: str) -> list[FrozenTrial]:
    """Return the complete trials of the earlier study, the best first; trials outside its limits last."""
    try:
        study = storage.load_study(name)
    except StorageError as error:
        raise StudyFileError(f"{config.path}: first.study: {error}") from None
    if len(study.directions) > 1:
        message = f"must have one objective, but `{name}` has several."
        raise StudyFileError(f"{config.path}: first.study: {message}")
    sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(complete, key=lambda trial: (violation(trial.constraints), sign * trial.values[0]))
