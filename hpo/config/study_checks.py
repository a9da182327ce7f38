"""Problems between the settings of a study: each is valid alone, but not together with the others."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hpo.config.data_config import DataConfig
from hpo.config.search_space import CategoricalDistribution, FloatDistribution, SearchSpace
from hpo.config.sections import MAX_TRIALS
from hpo.config.study_file import Problem
from hpo.config.trial_settings import AUTO, BUDGETS, OF_SOURCES, OWN_LOOP_SETTINGS, TrialSettings
from hpo.errors import did_you_mean
from hpo.extensions import has_own_loop
from hpo.precision.table import BASE_PRECISION, OPTIMIZER_STATE, PRECISION


class _Dependency(NamedTuple):
    """A setting that may leave its `neutral` value only with the `allowed` values of another setting."""

    name: str
    neutral: Any
    other: str
    allowed: tuple[str, ...]
    message: str
    """`{}` stands for the other values of the other setting."""


_DEPENDENCIES = (
    _Dependency(
        *(BASE_PRECISION, "fp32", "adapter", ("lora", "dora")),
        "must be fp32 without an adapter, because no weights are frozen.",
    ),
    _Dependency(
        *("freeze_layers", 0, "adapter", ("none",)),
        "must be 0 with an adapter, which freezes the whole encoder.",
    ),
    _Dependency(
        *(OPTIMIZER_STATE, "fp32", "optimizer", ("adamw", "adam", "lion")),
        "must be fp32 with `optimizer: {}`: only adamw, adam and lion have moments in another format.",
    ),
)
_OF_ADAPTERS = (BASE_PRECISION, *(name for name in TrialSettings.model_fields if name.startswith("lora_")))


def trial_problems(settings: TrialSettings) -> Iterator[Problem]:
    for rule in _DEPENDENCIES:
        is_neutral = getattr(settings, rule.name) == rule.neutral
        if not is_neutral and getattr(settings, rule.other) not in rule.allowed:
            yield Problem((rule.name,), rule.message.format(getattr(settings, rule.other)))


def study_problems(training: TrialSettings, space: SearchSpace) -> Iterator[Problem]:
    """Report impossible combinations, and settings of adapters in a study without adapters."""
    adapters = _values("adapter", training, space)
    if set(adapters) == {"none"}:
        for name in _OF_ADAPTERS:
            if name in space or getattr(training, name) != TrialSettings.model_fields[name].default:
                message = "needs an adapter, but there is none. Set `training.adapter: lora`."
                yield Problem(_key(name, space), message)
    parts_allowed = tuple(one for one in _values(PRECISION, training, space) if one != "bf16-true")
    message = "must be [] with `fp_precision: bf16-true`, whose weights are bf16."
    parts = _Dependency("fp32_parts", (), PRECISION, parts_allowed, message)
    for rule in (*_DEPENDENCIES, parts):
        if rule.name == BASE_PRECISION and set(adapters) == {"none"}:
            continue
        others = _values(rule.other, training, space)
        if rule.name in space:
            others = space[rule.name].when.get(rule.other, others)
        is_neutral = all(value == rule.neutral for value in _values(rule.name, training, space))
        refused = [str(one) for one in others if one not in rule.allowed]
        if not is_neutral and refused:
            allowed = [one for one in _values(rule.other, training, space) if one in rule.allowed]
            hint = f" Search it with `when: {{{rule.other}: [{', '.join(allowed)}]}}`." if allowed else ""
            yield Problem(_key(rule.name, space), rule.message.format(", ".join(refused)) + hint)


def measures_parts(training: TrialSettings, space: SearchSpace) -> bool:
    """Return True if a trial may have `fp32_parts: auto`."""
    return AUTO in _values("fp32_parts", training, space)


def _values(name: str, training: TrialSettings, space: SearchSpace) -> Collection[Any]:
    return space[name].grid() if name in space else (getattr(training, name),)


def _key(name: str, space: SearchSpace) -> tuple[str, str]:
    return ("search_space" if name in space else "training", name)


def fixed_and_searched(searched: Collection[str], given: Collection[str]) -> Iterator[Problem]:
    """Report settings that are both fixed and searched, and a second budget of a trial."""
    for section in ("training", "model", "amp"):
        for name in searched:
            if f"{section}.{name}" in given:
                yield Problem((name,), f"is fixed too, as `{section}.{name}`. Fix it or search it, not both.")
    budgets = [budget for budget in BUDGETS if budget in searched and not has_own_loop()]
    fixed = [f"training.{budget}" for budget in BUDGETS if budget not in budgets]
    both = [*budgets, *(budget for budget in fixed if budget in given)]
    if budgets and len(both) > 1:
        message = f"a trial has one budget, but this study gives {' and '.join(both)}. Keep one."
        yield Problem((budgets[0],), message)


def grid_problems(space: SearchSpace) -> Iterator[Problem]:
    size = math.prod(one.size for one in space.values())
    if MAX_TRIALS < size < math.inf:
        message = f"must have at most {MAX_TRIALS:,} combinations for a grid, but has {size:,}."
        yield Problem((), message)
    for name, distribution in space.items():
        if distribution.when:
            message = "a grid combines all values: `when` would run some of them twice."
            yield Problem((name, "when"), message)
        if isinstance(distribution, FloatDistribution) and distribution.step is None:
            yield Problem((name, "step"), "must be given for a grid; or list the values as `choices`.")


def sampling_problems(data: DataConfig, training: TrialSettings, space: SearchSpace) -> Iterator[Problem]:
    """Report settings for the draws of sources that do not fit the sources of `data`."""
    names = [source.name for source in data.sources]
    weights = {f"{OF_SOURCES}{name}": weight for name, weight in training.sampling_weight.items()}
    for name, one in space.items():
        if name.startswith(OF_SOURCES):
            weights[name] = min(one.choices) if isinstance(one, CategoricalDistribution) else one.low
    if not names and ("sampling_temperature" in space or training.sampling_temperature != 1):
        yield Problem(_key("sampling_temperature", space), "needs `data.sources`, but there are none.")
    for setting in weights:
        if (name := setting.removeprefix(OF_SOURCES)) not in names:
            yield Problem(_key(setting, space), f"there is no such source.{did_you_mean(name, names)}")
    if names and all(weights.get(f"{OF_SOURCES}{name}") == 0 for name in names):
        message = "one source must have a weight above 0 in each trial, but all can have 0."
        yield Problem(_key(f"{OF_SOURCES}{names[0]}", space), message)


_UNREAD = {
    "data": "it loads its data itself",
    "model": "it builds its model itself",
    "evaluation": "it evaluates where it calls `run.report`",
    "portfolio": "the portfolio has configurations for fine-tuning encoders",
}
"""Sections that a study with its own training loop (`@hpo.trial`) must leave out, with the reasons."""
UNMEASURED = ("train_tokens_per_second", "evaluation_examples_per_second")
"""Measured metrics that its trials do not have."""


def own_loop_problems(given: Collection[str], metrics: Collection[str]) -> Iterator[Problem]:
    """Report sections and metrics that a training loop of the study's own does not have.

    Args:
        given: keys of the study file.
        metrics: metrics of its objectives and limits.
    """
    for metric in UNMEASURED:
        if metric in metrics:
            message = (
                f"{metric} is not measured if the study's code has a training loop. Report a metric in it."
            )
            yield Problem(("objective" if "constraints" not in given else "constraints",), message)
    for section, why in _UNREAD.items():
        if any(key.partition(".")[0] == section for key in given):
            message = f"must be left out: the study's code has a training loop (`@hpo.trial`), and {why}."
            yield Problem((section,), message)


def own_loop_definition(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of such a study without unread sections."""
    training = {name: dumped["training"][name] for name in (*OWN_LOOP_SETTINGS, "option")}
    return {key: value for key, value in dumped.items() if key not in _UNREAD} | {"training": training}
