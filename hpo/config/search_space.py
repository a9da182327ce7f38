"""The search space: searched settings, their distributions, and a trial's values.

A parameter in Optuna has the name of its setting, so the dashboard shows the names of the study file. Optuna
stores choices of text, numbers, booleans and null, and a list or a mapping (`betas`, a fresh encoder) as
JSON text.
"""

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


_TOLERANCE = 1e-8
"""Largest distance of a value from a step of its range, in steps, as in Optuna."""
Values = Annotated[tuple[Any, ...], Field(min_length=1, strict=False)]
Conditions = Annotated[dict[str, Values], BeforeValidator(_as_lists)]


class CategoricalDistribution(Section):
    """One of the listed choices."""

    type: Literal["categorical"] = "categorical"
    choices: Values
    """Values to choose from. They cannot change in an existing study."""
    when: Conditions = Field(default_factory=dict)
    """Search this setting only under these conditions, as `{setting: value}` or `{setting: [value, value]}`
    of categorical settings without `when`. Otherwise it has its default."""

    @property
    def size(self) -> int:
        return len(self.choices)

    def grid(self) -> tuple[Any, ...]:
        return self.choices

    def suggest(self, name: str, trial: BaseTrial) -> Any:
        return self.decode(trial.suggest_categorical(name, [encode(choice) for choice in self.choices]))

    def refusal(self, value: Any) -> str:
        """Return an error if `value`, as Optuna stores it, is no choice; empty otherwise."""
        if any(encode(choice) == value for choice in self.choices):
            return ""
        return f"is none of its choices, which are {', '.join(map(shown, self.choices))}"

    def decode(self, value: Any) -> Any:
        """Return the choice that Optuna stores as `value`, or `value` itself if there is none."""
        return next((choice for choice in self.choices if encode(choice) == value), value)


class Range(CheckedSection):
    """A range of numbers, both ends included."""

    type: str
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    step: Positive | None = None
    """Restrict values to `low`, `low + step`, ... `high`. Not with `log`."""
    log: Switch = False
    """Sample the logarithm uniformly. Needs `low > 0`."""
    when: Conditions = Field(default_factory=dict)
    """Search this setting only under these conditions, as `{setting: value}` or `{setting: [value, value]}`
    of categorical settings without `when`. Otherwise it has its default."""

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

    @property
    def size(self) -> float:
        """Number of values; infinite without a `step`."""
        if self.step is None:
            return math.inf
        low, high, step = (Decimal(str(number)) for number in (self.low, self.high, self.step))
        return int((high - low) / step) + 1

    def grid(self) -> Sequence[float]:
        """Return all values. A range of floats must have a `step`."""
        low, step = Decimal(str(self.low)), Decimal(str(self.step))
        return tuple(float(low + index * step) for index in range(int(self.size)))

    def refusal(self, value: Any) -> str:
        """Return an error if `value` is not in the range; empty otherwise."""
        if not is_number(value) or (isinstance(self.low, int) and value != int(value)):
            return f"must be {'a whole number' if isinstance(self.low, int) else 'a number'}"
        steps = 0.0 if self.step is None else (value - self.low) / self.step
        if self.low <= value <= self.high and abs(steps - round(steps)) < _TOLERANCE:
            return ""
        in_steps = f" in steps of {shown(self.step)}" if self.step not in (None, 1) else ""
        return f"is outside {shown(self.low)} to {shown(self.high)}{in_steps}"


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
    """Restrict values to `low`, `low + step`, ... `high`. Not with `log`."""

    def grid(self) -> Sequence[int]:
        return range(self.low, self.high + 1, self.step)

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
    """Return `value` as Optuna stores it: a list or a mapping is JSON text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, (list, tuple, dict)) else value


def suggest(space: SearchSpace, trial: BaseTrial) -> dict[str, Any]:
    return _chosen(space, lambda name: space[name].suggest(name, trial))


def lowest(space: SearchSpace) -> dict[str, Any]:
    """Return the first choice or the lowest number of every active setting."""

    def first(name: str) -> Any:
        one = space[name]
        return one.choices[0] if isinstance(one, CategoricalDistribution) else one.low

    return _chosen(space, first)


def middle(space: SearchSpace) -> dict[str, Any]:
    """Return the middle choice or the middle of the range of every active setting."""

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
    for name in sorted(space, key=lambda name: bool(space[name].when)):  # the settings of conditions first
        if all(params[parent] in values for parent, values in space[name].when.items()):
            params[name] = choose(name)
    return params


def decode(space: SearchSpace, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of settings for `params` as Optuna stores them. Decoded values stay."""
    choices = {name: one for name, one in space.items() if isinstance(one, CategoricalDistribution)}
    return {name: choices[name].decode(value) if name in choices else value for name, value in params.items()}


def choices_without(space: SearchSpace, one: Distribution) -> dict[str, tuple[Any, ...]]:
    """Return the choices of other settings with which `one` is not searched."""
    parents = {name: (space[name], values) for name, values in one.when.items()}
    others = {
        name: tuple(choice for choice in parent.choices if choice not in values)
        for name, (parent, values) in parents.items()
        if isinstance(parent, CategoricalDistribution)
    }
    return {name: choices for name, choices in others.items() if choices}


def grid(space: SearchSpace) -> dict[str, list[Any]]:
    return {name: [encode(value) for value in distribution.grid()] for name, distribution in space.items()}


def refusal(space: SearchSpace, params: Any) -> str:
    """Return an error if no trial can have these `params`, as Optuna stores them; empty otherwise."""
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
    """Return a value in the form of `--param`."""
    return f"{value:.12g}" if isinstance(value, float) else show(value).strip("`")


def parse_search_space(raw: Any) -> tuple[dict[str, Distribution], list[Problem]]:
    """Return the distributions of `search_space:`, with validated values, and all problems."""
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
    """Catch errors of the body and add them to `problems`, below the key `where`."""
    try:
        yield
    except ValidationError as error:
        problems += [Problem((*where, *one.where), one.message) for one in problems_of(error, kind)]
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
    choices: list[tuple[Any, Any]] = []  # validated value and given value
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
    """Return the validated value of a condition. Raises ValueError if `parent` cannot have it."""
    if not isinstance(distribution, CategoricalDistribution) or distribution.when:
        raise ValueError(f"must name categorical settings without `when`, but `{parent}` is none.")
    value = _value_of(parent, value)
    if value not in distribution.choices:
        choices = ", ".join(show(choice) for choice in distribution.choices)
        raise ValueError(f"`{parent}` is never {show(value)}: its choices are {choices}.")
    return value


def _value_of(name: str, value: Any) -> Any:
    if value is None and name in (PRECISION, "encoder"):
        raise ValueError("must be named: a search cannot compare `null`.")
    return setting_value(name, value)
