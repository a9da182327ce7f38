"""The configurations with which a study begins: from its file, or the best of an earlier study."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.config.first import EarlierResults, fitting
from hpo.config.limits import violation
from hpo.errors import StorageError, StudyFileError

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.store.storage import Storage

SOURCE_ATTR = "source"
"""User attribute of a trial that was tried first: where its configuration comes from."""

Configuration = tuple[dict[str, Any], str]

_logger = logging.getLogger(__name__)


def tried_first(storage: Storage, config: StudyConfig) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return the parameters and user attributes of the trials that a new study enqueues, at most `n_trials`.

    Raises StudyFileError if the earlier study is not there, or has several objectives.
    """
    if config.comparison is not None:
        return []
    if isinstance(config.first, EarlierResults):
        found = list(_fitting_ones(storage, config, config.first))
    else:
        fits = [fitting(config.search_space, params) for params in config.first]
        found = [(params, f"first.{index}") for index, params in enumerate(fits)]
    if (surplus := len(found) - config.num_trials) > 0:
        _logger.warning("first: the last %d are left out of %d trials.", surplus, config.num_trials)
    return [(params, {SOURCE_ATTR: source}) for params, source in found[: config.num_trials]]


def _fitting_ones(storage: Storage, config: StudyConfig, earlier: EarlierResults) -> Iterator[Configuration]:
    """The best earlier configurations as far as they fit this search space, each once."""
    taken: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for trial in _ranked_trials(storage, config, earlier.study):
        fits = fitting(config.search_space, trial.params)
        left_out |= trial.params.keys() - fits.keys()
        if fits and fits not in taken:
            taken.append(fits)
            yield fits, f"trial {trial.number} of {earlier.study}"
        if len(taken) == earlier.top:
            break
    if left_out or len(taken) < earlier.top:
        names = ", ".join(f"`{name}`" for name in sorted(left_out)) or "nothing"
        told = "first: of the earlier trials %d configurations are tried; left out, as it does not fit: %s."
        _logger.warning(told, len(taken), names)


def _ranked_trials(storage: Storage, config: StudyConfig, name: str) -> list[FrozenTrial]:
    """The complete trials of the earlier study, the best first; those that break its limits come last."""
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
