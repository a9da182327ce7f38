"""What is known before a study begins: the configurations that it tries before its sampler draws any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpo.config.search_space import SearchSpace, decode, encode, refusal, shown
from hpo.config.study_file import Problem, refuse, show
from hpo.config.trial_settings import setting_value
from hpo.section import Count, Section


class EarlierResults(Section):
    """Configurations to try first: the best of an earlier study. A list of mappings of settings to values may
    stand in its place; the sampler draws the settings that are missing."""

    study: str
    """An earlier study of the same database."""
    top: Count = 3
    """So many of its best configurations. What this study does not search, or not in that range, is left
    out."""


First = tuple[dict[str, Any], ...] | EarlierResults


def parse_first(raw: Any, space: SearchSpace) -> First:
    """The value of `first:`, its settings in the form that trials take. Raises all of its problems."""
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
        for name in params.keys() & space.keys():
            try:
                params[name] = setting_value(name, params[name])
            except ValueError as error:
                problems.append(Problem((index, name), str(error)))
        configurations.append(params)
        refused = {problem.where for problem in problems}
        problems += [
            Problem((index, *problem.where), problem.message)
            for problem in fixed_problems(space, params)
            if (index, *problem.where) not in refused
        ]
    refuse(*problems)
    return tuple(configurations)


def fixed_problems(space: SearchSpace, params: Mapping[str, Any]) -> Iterator[Problem]:
    """Why no trial can be given `params`, while the sampler draws what they leave out."""
    params = decode(space, params)
    for name, value in params.items():
        if said := refusal(space, {name: encode(value)}):
            yield Problem((name,), said)
            continue
        for parent, values in space[name].when.items():
            if params.get(parent) not in values:
                needed = " or ".join(f"{parent}={shown(value)}" for value in values)
                given = (
                    f", not with {parent}={shown(params[parent])}."
                    if parent in params
                    else ". Give that, too."
                )
                yield Problem((name,), f"{name} is searched only with {needed}{given}")


def fitting(space: SearchSpace, params: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `params` that a trial of the study can be given, as Optuna holds them."""
    while wrong := {problem.where[0] for problem in fixed_problems(space, params)}:
        params = {name: value for name, value in params.items() if name not in wrong}
    return {name: encode(value) for name, value in params.items()}
