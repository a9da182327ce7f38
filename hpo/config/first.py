"""Configurations to try first, before the sampler of a study draws any."""

from collections.abc import Iterator, Mapping
from typing import Any

from hpo.config.search_space import SearchSpace, decode, encode, refusal, shown
from hpo.config.study_file import Problem, refuse, show
from hpo.config.trial_settings import setting_value
from hpo.section import Count, Section


class EarlierResults(Section):
    """The best configurations of an earlier study. `first` may also be a list of mappings of settings to
    values; the sampler draws missing settings."""

    study: str
    """An earlier study of the same database."""
    top: Count = 3
    """Number of its best configurations. Settings that this study does not search, or not in that range, are
    left out."""


First = tuple[dict[str, Any], ...] | EarlierResults


def parse_first(raw: Any, space: SearchSpace) -> First:
    """Return the validated value of `first:`. Raises all of its problems."""
    if isinstance(raw, Mapping):
        return EarlierResults.model_validate(raw)
    if not isinstance(raw, (list, tuple)):
        refuse(Problem((), f"must be a list of mappings, or `{{study: NAME, top: 3}}`, but got {show(raw)}."))
    configurations: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for index, given in enumerate(raw):
        if not isinstance(given, Mapping) or not given:
            problems.append(Problem((index,), f"must be a mapping of settings, but got {show(given)}."))
            continue
        params = {str(name): value for name, value in given.items()}
        wrong = {}
        for name in params.keys() & space.keys():
            try:
                params[name] = setting_value(name, params[name])
            except ValueError as error:
                wrong[name] = str(error)
        configurations.append(params)
        problems += [Problem((index, name), message) for name, message in wrong.items()]
        problems += [
            Problem((index, *problem.where), problem.message)
            for problem in fixed_problems(space, params)
            if problem.where[0] not in wrong
        ]
    refuse(*problems)
    return tuple(configurations)


def fixed_problems(space: SearchSpace, params: Mapping[str, Any]) -> Iterator[Problem]:
    """Report values that no trial can have. The sampler may draw missing settings."""
    params = decode(space, params)
    for name, value in params.items():
        if error := refusal(space, {name: encode(value)}):
            yield Problem((name,), error)
            continue
        for parent, values in space[name].when.items():
            if params.get(parent) not in values:
                needed = " or ".join(f"{parent}={shown(value)}" for value in values)
                hint = (
                    f", not with {parent}={shown(params[parent])}."
                    if parent in params
                    else ". Give that, too."
                )
                yield Problem((name,), f"{name} is searched only with {needed}{hint}")


def fitting(space: SearchSpace, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `params` that a trial of the study can have, as Optuna stores them."""
    while wrong := {problem.where[0] for problem in fixed_problems(space, params)}:
        params = {name: value for name, value in params.items() if name not in wrong}
    return {name: encode(value) for name, value in params.items()}
