"""What a study takes from what is known already: the configurations that it tries first."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpo.config.known import EarlierResults, fitting
from hpo.config.limits import violation
from hpo.config.portfolio import portfolio
from hpo.config.search_space import encode
from hpo.config.study_file import parse_yaml_value, show
from hpo.config.trial_settings import setting_value
from hpo.errors import StorageError, StudyFileError

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.store.storage import Storage

SOURCE_ATTR = "source"
"""User attribute of a trial that was tried first: where its configuration comes from."""

Enqueued = tuple[dict[str, Any], dict[str, str]]
"""Parameters, as Optuna holds them, and user attributes."""

_logger = logging.getLogger(__name__)


def tried_first(storage: Storage, config: StudyConfig) -> list[Enqueued]:
    """The trials that a study begins with when it is made: those of `first`, then those of the portfolio, at
    most one for each slot.

    Raises:
        StudyFileError: the earlier results are not there, or cannot be ranked.
    """
    if config.comparison is not None:
        return []
    if isinstance(config.first, EarlierResults):
        found = list(_fitting_ones(config, config.first, _ranked_configurations(storage, config)))
    else:
        encoded = ({name: encode(value) for name, value in params.items()} for params in config.first)
        found = [(params, f"first.{index}") for index, params in enumerate(encoded)]
    if (surplus := len(found) - config.num_slots) > 0:
        _logger.warning("first: the last %d are left out of %d trials.", surplus, config.num_slots)
    asked_for = [params for params, _ in found]
    found += [(params, f"portfolio: {of}") for params, of in portfolio(config) if params not in asked_for]
    return [(params, {SOURCE_ATTR: source}) for params, source in found[: config.num_slots]]


def _fitting_ones(
    config: StudyConfig, earlier: EarlierResults, ranked: Sequence[tuple[dict[str, Any], str]]
) -> Iterator[tuple[dict[str, Any], str]]:
    """The best configurations of an earlier study that are not the same in this one's search space."""
    taken: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for params, source in ranked:
        if len(taken) == earlier.top:
            break
        fits = fitting(config.search_space, params)
        left_out |= params.keys() - fits.keys()
        if fits and fits not in taken:
            taken.append(fits)
            yield fits, source
    if left_out:
        names = ", ".join(f"`{name}`" for name in sorted(left_out))
        _logger.warning("first: %s of the earlier trials do not fit this search space: left out.", names)
    if len(taken) < earlier.top:
        _logger.warning("first: %d of %d configurations are there to try.", len(taken), earlier.top)


def _ranked_configurations(storage: Storage, config: StudyConfig) -> list[tuple[dict[str, Any], str]]:
    earlier = config.first
    assert isinstance(earlier, EarlierResults)
    if earlier.study is None:
        return _of_table(config, str(earlier.csv))
    study = load_earlier(storage, config, "first.study", earlier.study)
    complete = [trial for trial in ranked(study) if trial.state == TrialState.COMPLETE]
    return [(trial.params, f"trial {trial.number} of {study.study_name}") for trial in complete]


def load_earlier(storage: Storage, config: StudyConfig, key: str, name: str) -> optuna.Study:
    """The earlier study that `key` of the study file names. Raises StudyFileError."""
    try:
        study = storage.load_study(name)
    except StorageError as error:
        raise StudyFileError(f"{config.path}: {key}: {error}") from None
    if len(study.directions) > 1:
        raise StudyFileError(f"{config.path}: {key}: must have one objective, but `{name}` has several.")
    return study


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a study with one objective that are COMPLETE, the best first; those that break its limits
    last."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    sign = -1 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
    return sorted(trials, key=lambda t: (violation(t.constraints) > 0, sign * t.values[0], t.number))


def _of_table(config: StudyConfig, csv_path: str) -> list[tuple[dict[str, Any], str]]:
    """The configurations of a report's table, the best first."""
    path, objective = config.path.parent / csv_path, config.objective[0]
    column = f"objective.{objective.metric}"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            rows, columns = list(table), table.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StudyFileError(f"{config.path}: first.csv: {path} cannot be read: {error}.") from None
    if missing := {"number", "outcome", column} - {*columns}:
        raise StudyFileError(
            f"{config.path}: first.csv: {path} must be a report's `trials.csv` of this objective, but has no "
            f"column {', '.join(map(show, sorted(missing)))}."
        )
    sign = -1 if objective.direction == "maximize" else 1
    try:
        complete = [(sign * float(row[column]), row) for row in rows if row["outcome"] == "complete"]
    except ValueError as error:
        raise StudyFileError(f"{config.path}: first.csv: {path}: {column}: {error}.") from None
    complete.sort(key=lambda ranked: ranked[0])
    return [(_params_of(row), f"trial {row['number']} of {path.name}") for _, row in complete]


def _params_of(row: Mapping[str, str]) -> dict[str, Any]:
    given = {name.removeprefix("param."): text for name, text in row.items() if name.startswith("param.")}
    params = {}
    for name, text in given.items():
        if text:  # else the trial had no such setting
            value = parse_yaml_value(text)
            try:
                params[name] = setting_value(name, value)
            except ValueError:
                params[name] = value  # `fitting` leaves it out
    return params
