"""The search space in Optuna's hands: ask a trial for its values, name the space, say how two differ.

A parameter in Optuna has its setting's name, so the dashboard shows the names of the study file. Optuna
holds choices that are text, numbers, booleans or null; a choice that is a list or a mapping (`betas`, a
fresh encoder) is kept there as its JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from hpo.config.study_file import KeyPath, Problem, problems_of, refused, show, validation_error
from hpo.config.trial_settings import (
    LOSS_WEIGHT,
    Section,
    is_setting,
    setting_names,
    setting_value,
    takes_whole_numbers,
)
from hpo.errors import did_you_mean


def _as_tuples(conditions: Any) -> Any:
    """`when: {a: 1}` is `when: {a: [1]}`."""
    if not isinstance(conditions, Mapping):
        return conditions
    return {key: value if isinstance(value, (list, tuple)) else [value] for key, value in conditions.items()}


Conditions = Annotated[
    dict[str, Annotated[tuple[Any, ...], Field(min_length=1, strict=False)]], BeforeValidator(_as_tuples)
]


_WHEN = (
    "Search this setting only where these hold, as `{setting: value}` or `{setting: [value, value]}`; "
    "elsewhere it has its default."
)


class CategoricalDistribution(Section):
    """One of the listed choices."""

    type: Literal["categorical"] = Field("categorical", description="One of the listed choices.")
    choices: Annotated[tuple[Any, ...], Field(min_length=1, strict=False)] = Field(
        description="The values to choose from. They cannot change once the study exists."
    )
    when: Conditions = Field(default_factory=dict, description=_WHEN)

    def grid(self) -> tuple[Any, ...]:
        """All values."""
        return self.choices


class FloatDistribution(Section):
    """A number from low to high, both included."""

    type: Literal["float"] = Field("float", description="A number from `low` to `high`, both included.")
    low: float = Field(description="Smallest value.")
    high: float = Field(description="Largest value.")
    step: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Only `low`, `low + step`, ... `high`; not with `log`."
    )
    log: bool = Field(False, description="Sample the logarithm uniformly; needs `low > 0`.")
    when: Conditions = Field(default_factory=dict, description=_WHEN)

    @model_validator(mode="after")
    def _check_range(self) -> FloatDistribution:
        return _checked_range(self)

    def grid(self) -> tuple[float, ...]:
        """All values; there must be a `step`."""
        low, high, step = (Decimal(str(number)) for number in (self.low, self.high, self.step))
        return tuple(float(low + index * step) for index in range(int((high - low) / step) + 1))


class IntDistribution(Section):
    """A whole number from low to high, both included."""

    type: Literal["int"] = Field("int", description="A whole number from `low` to `high`, both included.")
    low: int = Field(description="Smallest value.")
    high: int = Field(description="Largest value.")
    step: Annotated[int, Field(ge=1)] = Field(
        1, description="Only `low`, `low + step`, ... `high`; not with `log`."
    )
    log: bool = Field(False, description="Sample the logarithm uniformly; needs `low >= 1`.")
    when: Conditions = Field(default_factory=dict, description=_WHEN)

    @model_validator(mode="after")
    def _check_range(self) -> IntDistribution:
        return _checked_range(self)

    def grid(self) -> tuple[int, ...]:
        """All values."""
        return tuple(range(self.low, self.high + 1, self.step))


Distribution = CategoricalDistribution | FloatDistribution | IntDistribution


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "categorical": CategoricalDistribution,
    "float": FloatDistribution,
    "int": IntDistribution,
}


_Numeric = TypeVar("_Numeric", FloatDistribution, IntDistribution)


def _checked_range(distribution: _Numeric) -> _Numeric:
    low, high, step = distribution.low, distribution.high, distribution.step
    stepped = step is not None and (isinstance(distribution, FloatDistribution) or step != 1)
    problems = []
    if low > high:
        problems.append(Problem(("low",), f"`low <= high` must hold, but got low {low} and high {high}."))
    if distribution.log and low <= 0:
        problems.append(Problem(("low",), f"`low > 0` must hold with `log: true`, but got {low}."))
    if distribution.log and stepped:
        problems.append(Problem(("step",), "`step` and `log: true` exclude each other. Keep one."))
    elif stepped and low <= high:
        rest = (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step))
        if rest:
            nearest = Decimal(str(high)) - rest
            problems.append(
                Problem(("high",), f"must be `low` plus a multiple of `step`; {nearest} is, {high} is not.")
            )
    if problems:
        raise validation_error(problems)
    return distribution


def parse_search_space(raw: Any) -> tuple[dict[str, Distribution], list[Problem]]:
    """The distributions of a `search_space:`, with values as the settings hold them, and all problems."""
    if not isinstance(raw, Mapping):
        return {}, [Problem((), f"must be a mapping of settings to distributions, but got {show(raw)}.")]
    space: dict[str, Distribution] = {}
    problems: list[Problem] = []
    raw = {str(name): value for name, value in raw.items()}
    for name, value in raw.items():
        try:
            space[name] = _parse_distribution(name, value)
        except ValidationError as error:
            found = problems_of(error, _distribution_type(value), value)
            problems += [Problem((name, *problem.where), problem.message) for problem in found]
    for name in list(space):
        conditions = {}
        for parent, values in space[name].when.items():
            where = (name, "when", parent)
            if parent not in raw:
                others = [other for other in raw if other != name]
                hint = did_you_mean(parent, others) if others else ""
                problems.append(Problem(where, f"must name another setting of `search_space`.{hint}"))
            elif parent in space:
                conditions[parent] = tuple(
                    _condition_value(parent, space[parent], value, where, problems) for value in values
                )
        space[name] = space[name].model_copy(update={"when": conditions})
    try:
        parents_first(space)
    except CycleError as error:
        cycle = error.args[1]
        circle = " -> ".join(reversed(cycle))
        problems.append(Problem((cycle[0], "when"), f"the conditions form a circle: {circle}."))
    return space, problems


def parents_first(space: Mapping[str, Distribution]) -> tuple[str, ...]:
    """The names of `space`, each after those that its `when` names. Raises graphlib.CycleError."""
    return tuple(TopologicalSorter({name: tuple(space[name].when) for name in space}).static_order())


def _distribution_type(value: Any) -> type[Distribution] | None:
    return DISTRIBUTIONS.get(str(value.get("type"))) if isinstance(value, Mapping) else None


def _condition_value(
    parent: str, distribution: Distribution, value: Any, where: KeyPath, problems: list[Problem]
) -> Any:
    """`value` as the setting `parent` holds it; a value that `parent` never has is added to `problems`."""
    if isinstance(distribution, FloatDistribution):
        problems.append(Problem(where, f"`{parent}` is a float; a condition needs a categorical or an int."))
        return value
    num_problems = len(problems)
    value = _value_of(parent, value, where, problems)
    if len(problems) > num_problems:
        return value
    if isinstance(distribution, CategoricalDistribution):
        if value not in distribution.choices:
            choices = ", ".join(show(choice) for choice in distribution.choices)
            problems.append(Problem(where, f"`{parent}` is never {show(value)}: its choices are {choices}."))
    elif not distribution.low <= value <= distribution.high:
        between = f"it is between {distribution.low} and {distribution.high}"
        problems.append(Problem(where, f"`{parent}` is never {show(value)}: {between}."))
    return value


def _parse_distribution(name: str, value: Any) -> Distribution:
    if not is_setting(name):
        hint = (
            f" Search `{LOSS_WEIGHT}<task>`."
            if name == "loss_weight"
            else did_you_mean(name, setting_names())
        )
        raise refused((), f"there is no such setting.{hint}")
    if isinstance(value, Section):
        value = value.model_dump()
    if not isinstance(value, Mapping):
        example = "`{type: categorical, choices: [...]}`"
        raise refused((), f"must be a mapping such as {example}, but got {show(value)}.")
    if "type" not in value:
        raise refused(("type",), f"must be given: one of {', '.join(DISTRIBUTIONS)}.")
    kind = _distribution_type(value)
    if kind is None:
        hint = did_you_mean(str(value["type"]), list(DISTRIBUTIONS))
        raise refused(("type",), f"unknown type {show(value['type'])}.{hint}")
    distribution = kind.model_validate(value)
    if isinstance(distribution, CategoricalDistribution):
        return distribution.model_copy(update={"choices": _choices(name, distribution.choices)})
    if isinstance(distribution, FloatDistribution) and takes_whole_numbers(name):
        raise refused(("type",), "must be `int`: the setting takes whole numbers.")
    problems: list[Problem] = []
    for bound in ("low", "high"):
        _value_of(name, getattr(distribution, bound), (bound,), problems)
    if problems:
        raise validation_error(problems)
    return distribution


def _value_of(name: str, value: Any, where: KeyPath, problems: list[Problem]) -> Any:
    """The setting's own form of `value`; what it refuses is added to `problems`."""
    if value is None and name in ("fp_precision", "encoder"):
        problems.append(
            Problem(where, "must be named: `null` leaves it open, which a search cannot compare.")
        )
        return None
    try:
        return setting_value(name, value)
    except ValidationError as error:
        problems += [Problem(where, problem.message) for problem in problems_of(error, None, None)]
        return None


def _choices(name: str, given: Sequence[Any]) -> tuple[Any, ...]:
    problems: list[Problem] = []
    choices: list[Any] = []
    for index, value in enumerate(given):
        num_problems = len(problems)
        choice = _value_of(name, value, ("choices", index), problems)
        if len(problems) > num_problems:
            continue
        if choice in choices:
            first = given[choices.index(choice)]
            same = "is there twice" if first == value else f"means the same as {show(first)}"
            problems.append(Problem(("choices", index), f"{show(value)} {same}. Keep one."))
        choices.append(choice)
    if problems:
        raise validation_error(problems)
    return tuple(choices)


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
