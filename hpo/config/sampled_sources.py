"""Checks of the settings that say how often each source of the data is drawn."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.config.data_config import DataConfig
from hpo.config.search_space import CategoricalDistribution, SearchSpace
from hpo.config.study_file import KeyPath, Problem
from hpo.config.trial_settings import OF_SOURCES, TrialSettings
from hpo.errors import did_you_mean

_TEMPERATURE = "sampling_temperature"
((_PREFIX, _WEIGHT),) = OF_SOURCES.items()


def sampling_problems(data: DataConfig, training: TrialSettings, space: SearchSpace) -> Iterator[Problem]:
    """Report settings without sources, weights of unknown sources, and weights that may all be 0."""
    names = [source.name for source in data.sources]
    weights: dict[str, KeyPath] = {name: ("training", _WEIGHT, name) for name in training.sampling_weight}
    for setting in space:
        if setting.startswith(_PREFIX):
            weights[setting.removeprefix(_PREFIX)] = ("search_space", setting)
    if not names:
        given = list(weights.values())
        if _TEMPERATURE in space or training.sampling_temperature != 1:
            given.append(("search_space" if _TEMPERATURE in space else "training", _TEMPERATURE))
        yield from (Problem(where, "is read with `data.sources`, but there are none.") for where in given)
        return
    for name, where in weights.items():
        if name not in names:
            yield Problem(where, f"there is no such source.{did_you_mean(name, names)}")
    if all(_lowest_weight(name, training, space) == 0 for name in names):
        message = "must be above 0 for one source in every trial, but here each of them can be 0."
        yield Problem(weights[names[0]], message)


def _lowest_weight(source: str, training: TrialSettings, space: SearchSpace) -> float:
    searched = space.get(f"{_PREFIX}{source}")
    if searched is None:
        return training.sampling_weight.get(source, 1.0)
    choices = searched.choices if isinstance(searched, CategoricalDistribution) else (searched.low,)
    return float(min(choices))
