"""Which configurations a comparison has, and in what they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpo.config.comparison import ComparedConfiguration, ComparisonConfig
from hpo.config.search_space import encode


def configurations_json(plan: ComparisonConfig) -> list[dict[str, Any]]:
    """Trial, questions and settings of each configuration, as `hpo compare --json` prints them."""
    return [
        {
            "trial": found.trial,
            "paired": found.paired,
            "tuned": list(found.tuned),
            "precisions": list(found.precisions),
            "params": {name: encode(value) for name, value in found.params.items()},
        }
        for found in plan.configurations
    ]


def differing_settings(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all of these; of one configuration, all."""
    names = dict.fromkeys(name for params in configurations for name in params)
    return [
        name
        for name in names
        if len(configurations) < 2 or len({repr(params.get(name)) for params in configurations}) > 1
    ]


def own_settings(plan: ComparisonConfig, precision: str) -> str:
    """How a precision's own configurations differ from the shared ones: `learning_rate 1e-05, not 0.0001`.

    Empty where they do not.
    """
    shared = [found for found in plan.configurations if found.paired]
    own = [found for found in plan.configurations if precision in found.tuned]
    told = []
    for name in differing_settings([found.params for found in (*shared, *own)]):
        here, there = (_values(side, name) for side in (own, shared))
        if here and there and set(here) != set(there):
            told.append(f"{name} {' or '.join(here)}, not {' or '.join(there)}")
    return "; ".join(told)


def _values(configurations: Sequence[ComparedConfiguration], name: str) -> list[str]:
    return list(
        dict.fromkeys(
            f"{value:.3g}" if isinstance(value, float) else str(value)
            for found in configurations
            if (value := found.params.get(name)) is not None
        )
    )
