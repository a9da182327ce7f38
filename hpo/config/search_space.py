"""The search space: which settings are searched, from which distribution, and a trial's values of them.

A parameter in Optuna has its setting's name, so the dashboard shows the names of the study file. Optuna
holds choices that are text, numbers, booleans or null; a choice that is a list or a mapping (`betas`, a
fresh encoder) is kept there as its JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Annotated, Any, Literal

from optuna.trial import BaseTrial
from pydantic import BeforeValidator, Field, ValidationError

from hpo.config.study_file import CheckedSection, KeyPath, Problem, one_of, problems_of, refuse, show
from hpo.config.trial_settings import Positive, check_name, setting_value, takes_whole_numbers
from hpo.errors import did_you_mean
from hpo.json_safe import is_number
from hpo.precision.table import PRECISION
from hpo.section import Count, Section, Switch, Whole


def _as_lists(conditions: Any) -> Any:
    """`when: {a: 1}` is `when: {a: [1]}`."""
    if not isinstance(conditions, Mapping):
        return conditions
    return {key: value if isinstance(value, (list, tuple)) else [value] for key, value in conditions.items()}


_WHOLE = 1e-8
"""So near to a whole number of steps a value is one of the range, as for Optuna."""
Values = Annotated[tuple[Any, ...], Field(min_length=1, strict=False)]
Conditions = Annotated[dict[str, Values], BeforeValidator(_as_lists)]


class CategoricalDistribution(Section):
    """One of the listed choices."""

    type: Literal["categorical"] = "categorical"
    choices: Values
    """The values to choose from. They cannot change once the study exists."""
    when: Conditions = Field(default_factory=dict)
    """Search this setting only where these hold, as `{setting: value}` or `{setting: [value, value]}` of
    categorical settings without `when`; elsewhere it has its default."""

    def grid(self) -> tuple[Any, ...]:
        return self.choices

    def suggest(self, name: str, trial: BaseTrial) -> Any:
        return self.decode(trial.suggest_categorical(name, [encode(choice) for choice in self.choices]))

    def refusal(self, value: Any) -> str:
        """Return why `value`, as Optuna holds it, is none of the choices; empty: it is one."""
        if any(encode(choice) == value for choice in self.choices):
            return ""
        return f"is none of its choices, which are {', '.join(map(shown, self.choices))}"

    def decode(self, value: Any) -> Any:
        """The choice that Optuna holds as `value`, or `value` itself where it is none of them."""
        return next((choice for choice in self.choices if encode(choice) == value), value)


class Range(CheckedSection):
    """A range of numbers, both ends included."""

    type: str
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    step: Positive | None = None
    """Only `low`, `low + step`, ... `high`; not with `log`."""
    log: Switch = False
    """Sample the logarithm uniformly; needs `low > 0`."""
    when: Conditions = Field(default_factory=dict)
    """Search this setting only where these hold, as `{setting: value}` or `{setting: [value, value]}` of
    categorical settings without `when`; elsewhere it has its default."""

    def problems(self) -> Iterator[Problem]:
        low, high, step = self.low, self.high, self.step
        is_stepped = step is not None and step != type(self).model_fields["step"].default
        if low > high:
            yield Problem(("low",), f"`low <= high` must hold, but got low {low} and high {high}.")
        if self.log and low <= 0:
            yield Problem(("low",), f"`low > 0` must hold with `log: true`, but got {low}.")
        if self.log and is_stepped:
            yield Problem(("step",), "`step` and `log: true` exclude each other. Keep one.")
        elif is_stepped and low <= high:
            rest = (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step))
            if rest:
                nearest = Decimal(str(high)) - rest
                message = f"must be `low` plus a multiple of `step`; {nearest} is, {high} is not."
                yield Problem(("high",), message)

    def grid(self) -> tuple[float, ...]:
        """All values; a range of floats must have a `step`."""
        low, high, step = (Decimal(str(number)) for number in (self.low, self.high, self.step))
        number = type(self.low)
        return tuple(number(low + index * step) for index in range(int((high - low) / step) + 1))

    def refusal(self, value: Any) -> str:
        """Return why `value` is not in the range; empty: it is."""
        kind = "a whole number" if isinstance(self.low, int) else "a number"
        if not is_number(value) or (isinstance(self.low, int) and value != int(value)):
            return f"must be {kind}"
        ends = f"{shown(self.low)} to {shown(self.high)}"
        if not self.low <= value <= self.high:
            return f"is outside {ends}"
        step = self.step or 1
        steps = 0.0 if self.step is None else (value - self.low) / step
        if abs(steps - round(steps)) < _WHOLE:
            return ""
        near = (self.low + count * step for count in (math.floor(steps), math.ceil(steps)))
        return f"is between the steps of {ends}. The nearest are {' and '.join(map(shown, near))}"


class FloatDistribution(Range):
    """A number from low to high, both included."""

    type: Literal["float"] = "float"

    def suggest(self, name: str, trial: BaseTrial) -> float:
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


class IntDistribution(Range):
    """A whole number from low to high, both included."""

    type: Literal["int"] = "int"
    low: Whole
    """Smallest value."""
    high: Whole
    """Largest value."""
    step: Count = 1
    """Only `low`, `low + step`, ... `high`; not with `log`."""

    def suggest(self, name: str, trial: BaseTrial) -> int:
        return trial.suggest_int(name, self.low, self.high, step=self.step, log=self.log)


Distribution = CategoricalDistribution | FloatDistribution | IntDistribution
SearchSpace = Mapping[str, Distribution]
DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "categorical": CategoricalDistribution,
    "float": FloatDistribution,
    "int": IntDistribution,
}


def encode(value: Any) -> Any:
    """`value` as Optuna holds it: a list or a mapping as its JSON text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, (list, tuple, dict)) else value


def suggest(space: SearchSpace, trial: BaseTrial) -> dict[str, Any]:
    return _chosen(space, lambda name: space[name].suggest(name, trial))


def lowest(space: SearchSpace) -> dict[str, Any]:
    """The first choice or the lowest number of every setting whose conditions hold."""

    def first(name: str) -> Any:
        one = space[name]
        return one.choices[0] if isinstance(one, CategoricalDistribution) else one.low

    return _chosen(space, first)


def middle(space: SearchSpace) -> dict[str, Any]:
    """The choice in the middle, or the middle of the range, of every setting whose conditions hold."""

    def of_range(name: str) -> Any:
        one = space[name]
        if isinstance(one, CategoricalDistribution):
            return one.choices[len(one.choices) // 2]
        if one.step is not None and not one.log:
            values = one.grid()
            return values[len(values) // 2]
        value = math.sqrt(one.low * one.high) if one.log else (one.low + one.high) / 2
        return round(value) if isinstance(one, IntDistribution) else value

    return _chosen(space, of_range)


def _chosen(space: SearchSpace, choose: Callable[[str], Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name in sorted(space, key=lambda name: bool(space[name].when)):  # what others depend on first
        if all(params[parent] in values for parent, values in space[name].when.items()):
            params[name] = choose(name)
    return params


def decode(space: SearchSpace, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` as Optuna holds them, or as `suggest` returned them, in the form that settings take."""
    choices = {name: one for name, one in space.items() if isinstance(one, CategoricalDistribution)}
    return {name: choices[name].decode(value) if name in choices else value for name, value in params.items()}


def choices_without(space: SearchSpace, one: Distribution) -> dict[str, tuple[Any, ...]]:
    """The choices, of each setting on which `one` depends, with which `one` is not searched; where any."""
    parents = {name: (space[name], values) for name, values in one.when.items()}
    others = {
        name: tuple(choice for choice in parent.choices if choice not in values)
        for name, (parent, values) in parents.items()
        if isinstance(parent, CategoricalDistribution)
    }
    return {name: choices for name, choices in others.items() if choices}


def is_finite(space: SearchSpace) -> bool:
    """Whether the space has finitely many configurations: no range of floats without a `step`."""
    return not any(isinstance(one, FloatDistribution) and one.step is None for one in space.values())


def grid(space: SearchSpace) -> dict[str, list[Any]]:
    return {name: [encode(value) for value in distribution.grid()] for name, distribution in space.items()}


def refusal(space: SearchSpace, params: Any) -> str:
    """Return why no trial can have these `params`, which Optuna stores as they are; empty: one can."""
    if not isinstance(params, Mapping):
        return f"`fixed_params` must be a mapping of settings to values, but got {show(params)}."
    for name, value in params.items():
        if name not in space:
            hint = did_you_mean(name, list(space)).replace(" Known:", " It searches")
            return f"The study does not search `{name}`.{hint}"
        if wrong := space[name].refusal(value):
            return f"{name}={shown(value)} {wrong}."
    return ""


def shown(value: Any) -> str:
    """Return a value as `--param` takes it."""
    return f"{value:.12g}" if isinstance(value, float) else show(value).strip("`")


def parse_search_space(raw: Any) -> tuple[dict[str, Distribution], list[Problem]]:
    """The distributions of a `search_space:`, with values as the settings hold them, and all problems."""
    if not isinstance(raw, Mapping):
        return {}, [Problem((), f"must be a mapping of settings to distributions, but got {show(raw)}.")]
    raw = {str(name): value for name, value in raw.items()}
    space: dict[str, Distribution] = {}
    problems: list[Problem] = []
    for name, value in raw.items():
        kind = DISTRIBUTIONS.get(str(value.get("type"))) if isinstance(value, Mapping) else None
        with _collected(problems, (name,), kind):
            space[name] = _parse_distribution(name, value)
    for name, distribution in space.items():
        when = {}
        for parent, values in distribution.when.items():
            with _collected(problems, (name, "when", parent)):
                if parent not in raw:
                    hint = did_you_mean(parent, [other for other in raw if other != name])
                    raise ValueError(f"must name another setting of `search_space`.{hint}")
                if parent in space:
                    when[parent] = tuple(_condition(parent, space[parent], value) for value in values)
        space[name] = distribution.model_copy(update={"when": when})
    return space, problems


@contextmanager
def _collected(
    problems: list[Problem], where: KeyPath, kind: type[Distribution] | None = None
) -> Iterator[None]:
    """Add what the body refuses of the key `where` to `problems`."""
    try:
        yield
    except ValidationError as error:
        problems += [
            Problem((*where, *problem.where), problem.message) for problem in problems_of(error, kind)
        ]
    except ValueError as error:
        problems.append(Problem(where, str(error)))


def _parse_distribution(name: str, value: Any) -> Distribution:
    check_name(name)
    if not isinstance(value, Mapping):
        example = "`{type: categorical, choices: [...]}`"
        raise ValueError(f"must be a mapping such as {example}, but got {show(value)}.")
    kind = str(value.get("type"))
    if kind not in DISTRIBUTIONS:
        missing = f"must be given: one of {', '.join(DISTRIBUTIONS)}."
        refuse(Problem(("type",), one_of(tuple(DISTRIBUTIONS), kind) if "type" in value else missing))
    distribution = DISTRIBUTIONS[kind].model_validate(value)
    if isinstance(distribution, CategoricalDistribution):
        return distribution.model_copy(update={"choices": _choices(name, distribution.choices)})
    if isinstance(distribution, FloatDistribution) and takes_whole_numbers(name):
        refuse(Problem(("type",), "must be `int`: the setting takes whole numbers."))
    problems: list[Problem] = []
    for bound in ("low", "high"):
        with _collected(problems, (bound,)):
            _value_of(name, getattr(distribution, bound))
    refuse(*problems)
    return distribution


def _choices(name: str, given: Sequence[Any]) -> tuple[Any, ...]:
    problems: list[Problem] = []
    choices: list[tuple[Any, Any]] = []  # as the setting holds it, and as it was given
    for index, value in enumerate(given):
        with _collected(problems, ("choices", index)):
            choice = _value_of(name, value)
            for other, first in choices:
                if other == choice:
                    same = "is there twice" if first == value else f"means the same as {show(first)}"
                    raise ValueError(f"{show(value)} {same}. Keep one.")
            choices.append((choice, value))
    refuse(*problems)
    return tuple(choice for choice, _ in choices)


def _condition(parent: str, distribution: Distribution, value: Any) -> Any:
    """`value` as the setting `parent` holds it. Raises ValueError where `parent` never has it."""
    if not isinstance(distribution, CategoricalDistribution) or distribution.when:
        raise ValueError(f"must name categorical settings without `when`, but `{parent}` is none.")
    value = _value_of(parent, value)
    if value not in distribution.choices:
        choices = ", ".join(show(choice) for choice in distribution.choices)
        raise ValueError(f"`{parent}` is never {show(value)}: its choices are {choices}.")
    return value


def _value_of(name: str, value: Any) -> Any:
    """`value` in the form of the setting. Raises ValueError."""
    if value is None and name in (PRECISION, "encoder"):
        raise ValueError("must be named: `null` leaves it open, which a search cannot compare.")
    return setting_value(name, value)
