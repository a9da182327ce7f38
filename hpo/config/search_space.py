"""The search space in Optuna's hands: ask a trial for its values, name the space, say how two differ.

A parameter in Optuna has its setting's name, so the dashboard shows the names of the study file. Optuna
holds choices that are text, numbers, booleans or null; a choice that is a list or a mapping (`betas`, a
fresh encoder) is kept there as its JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from hpo.config.distributions import (
    DISTRIBUTIONS,
    CategoricalDistribution,
    Distribution,
    FloatDistribution,
    IntDistribution,
    parents_first,
)
from hpo.config.study_file import show

__all__ = [
    "CategoricalDistribution",
    "Distribution",
    "FloatDistribution",
    "IntDistribution",
    "grid",
    "is_searched",
    "space_diff",
    "space_hash",
    "space_to_json",
    "suggest",
]

SearchSpace = Mapping[str, Distribution]


class Suggester(Protocol):
    """What is asked for values: a trial of Optuna's, or what stands in for one."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...

    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int: ...

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None, log: bool
    ) -> float: ...


def suggest(space: SearchSpace, trial: Suggester) -> dict[str, Any]:
    """Ask `trial` for a value of every setting whose conditions hold, those that others depend on first."""
    params: dict[str, Any] = {}
    for name in parents_first(space):
        distribution = space[name]
        if _conditions_hold(distribution, params):
            params[name] = _decode(distribution, _suggest_one(name, distribution, trial))
    return params


def is_searched(space: SearchSpace, names: Iterable[str]) -> bool:
    """Whether the study searches any of the settings `names`."""
    return any(name in space for name in names)


def is_finite(space: SearchSpace) -> bool:
    """Whether the space has finitely many configurations: no range of floats without a `step`."""
    return not any(
        isinstance(distribution, FloatDistribution) and distribution.step is None
        for distribution in space.values()
    )


def grid(space: SearchSpace) -> dict[str, list[Any]]:
    """All values of each setting, for Optuna's GridSampler."""
    return {name: [_encode(value) for value in distribution.grid()] for name, distribution in space.items()}


def space_to_json(space: SearchSpace) -> dict[str, Any]:
    """The search space as JSON, as a study's definition holds it."""
    return {name: distribution.model_dump(mode="json") for name, distribution in space.items()}


def space_hash(space: SearchSpace) -> str:
    """A name for what is searched: the same in every process, whatever the order of the settings."""
    text = json.dumps(space_to_json(space), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def space_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How the search space `new` differs from `old` (both as JSON), a line for each difference."""
    lines = [f"- {name}: {_brief(old[name])}" for name in old if name not in new]
    lines += [f"+ {name}: {_brief(new[name])}" for name in new if name not in old]
    for name in old:
        before, after = old[name], new.get(name, old[name])
        if before.get("type") != after.get("type"):
            lines.append(f"~ {name}: {_brief(before)} -> {_brief(after)}")
            continue
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                lines.append(f"~ {name}: {key} {show(before.get(key), 200)} -> {show(after.get(key), 200)}")
    return lines


def _conditions_hold(distribution: Distribution, params: Mapping[str, Any]) -> bool:
    return all(parent in params and params[parent] in values for parent, values in distribution.when.items())


def _suggest_one(name: str, distribution: Distribution, trial: Suggester) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, [_encode(choice) for choice in distribution.choices])
    if isinstance(distribution, IntDistribution):
        step, log = distribution.step, distribution.log
        return trial.suggest_int(name, distribution.low, distribution.high, step=step, log=log)
    return trial.suggest_float(
        name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
    )


def _encode(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, (list, tuple, dict)) else value


def _decode(distribution: Distribution, value: Any) -> Any:
    """The choice that Optuna holds as `value`; numbers are as they are."""
    if isinstance(distribution, CategoricalDistribution):
        return next((choice for choice in distribution.choices if _encode(choice) == value), value)
    return value


def _brief(dumped: Mapping[str, Any]) -> str:
    """`categorical, choices [1, 2]`: a distribution without the keys that are at their default."""
    fields = DISTRIBUTIONS[dumped["type"]].model_fields
    told = [
        f"{key} {show(value, 200)}"
        for key, value in dumped.items()
        if key != "type" and value != fields[key].get_default(call_default_factory=True)
    ]
    return ", ".join([dumped["type"], *told])
