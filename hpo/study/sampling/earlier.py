"""The configurations that a study tries first: those of its file, of earlier results and of the portfolio."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.config.known import EarlierResults, fitting
from hpo.config.limits import violation
from hpo.config.portfolio import portfolio
from hpo.config.study_file import parse_yaml_value
from hpo.config.trial_settings import setting_value
from hpo.errors import StorageError, StudyFileError

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.store.storage import Storage

SOURCE_ATTR = "source"
"""User attribute of a trial that was tried first: where its configuration comes from."""

Configuration = tuple[dict[str, Any], str]
"""Parameters, as Optuna holds them, and where they come from."""

_logger = logging.getLogger(__name__)


def tried_first(storage: Storage, config: StudyConfig) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """The parameters and user attributes of the trials with which a study begins when it is made: those of
    `first`, then those of the portfolio, at most one for each slot.

    Raises:
        StudyFileError: the earlier results are not there, or cannot be ranked.
    """
    if config.comparison is not None:
        return []
    if isinstance(config.first, EarlierResults):
        found = list(_fitting_ones(storage, config, config.first))
    else:
        fits = [fitting(config.search_space, params) for params in config.first]
        found = [(params, f"first.{index}") for index, params in enumerate(fits)]
    if (surplus := len(found) - config.num_slots) > 0:
        _logger.warning("first: the last %d are left out of %d trials.", surplus, config.num_slots)
    asked_for = [params for params, _ in found]
    found += [(params, f"portfolio: {of}") for params, of in portfolio(config) if params not in asked_for]
    return [(params, {SOURCE_ATTR: source}) for params, source in found[: config.num_slots]]


def _fitting_ones(storage: Storage, config: StudyConfig, earlier: EarlierResults) -> Iterator[Configuration]:
    """The best earlier configurations as far as they fit this search space, each once."""
    if earlier.study is None:
        best_first = _of_table(config, str(earlier.csv))
    else:
        ranked = _ranked(_load_earlier(storage, config, earlier.study))
        best_first = [(one.params, f"trial {one.number} of {earlier.study}") for one in ranked]
    taken: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for params, source in best_first:
        fits = fitting(config.search_space, params)
        left_out |= params.keys() - fits.keys()
        if fits and fits not in taken:
            taken.append(fits)
            yield fits, source
        if len(taken) == earlier.top:
            break
    if left_out or len(taken) < earlier.top:
        names = ", ".join(f"`{name}`" for name in sorted(left_out)) or "nothing"
        told = "first: of the earlier trials %d configurations are tried; left out, as it does not fit: %s."
        _logger.warning(told, len(taken), names)


def _load_earlier(storage: Storage, config: StudyConfig, name: str) -> optuna.Study:
    """The earlier study that `first.study` names. Raises StudyFileError."""
    try:
        study = storage.load_study(name)
    except StorageError as error:
        raise StudyFileError(f"{config.path}: first.study: {error}") from None
    if len(study.directions) > 1:
        message = f"must have one objective, but `{name}` has several."
        raise StudyFileError(f"{config.path}: first.study: {message}")
    return study


def _ranked(study: optuna.Study) -> list[FrozenTrial]:
    """The complete trials of a study, the best first; those that break its limits come last."""
    sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(complete, key=lambda trial: (violation(trial.constraints), sign * trial.values[0]))


def _of_table(config: StudyConfig, csv_path: str) -> list[Configuration]:
    """The configurations of a report's table, the best first."""
    path, objective = config.path.parent / csv_path, config.objective[0]
    sign = -1 if objective.direction == "maximize" else 1
    try:
        with path.open(newline="", encoding="utf-8") as file:
            complete = [row for row in csv.DictReader(file) if row["outcome"] == "complete"]
        complete.sort(key=lambda row: sign * float(row[f"objective.{objective.metric}"]))
        return [(_params_of(row), f"trial {row['number']} of {path.name}") for row in complete]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise StudyFileError(
            f"{config.path}: first.csv: {path} must be the `trials.csv` of a report on this objective, but: "
            f"{type(error).__name__}: {error}."
        ) from None


def _params_of(row: Mapping[str, str]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for column, text in row.items():
        if column.startswith("param.") and text:  # else the trial had no such setting
            name = column.removeprefix("param.")
            params[name] = parse_yaml_value(text)
            with suppress(ValueError):  # `fitting` leaves it out
                params[name] = setting_value(name, params[name])
    return params
