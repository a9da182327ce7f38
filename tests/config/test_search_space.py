from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optuna
import pytest

from hpo.config.search_space import (
    DISTRIBUTIONS,
    Distribution,
    grid,
    parse_search_space,
    refusal,
    suggest,
)
from hpo.config.study_config import StudyConfig
from hpo.study.store.optuna_internals import is_in

RAW: dict[str, Any] = {
    # A child before its parent: the order of the file must not matter.
    "init_scale": {"type": "categorical", "choices": [1024, 65536], "when": {"fp_precision": "16-mixed"}},
    "head_hidden_size": {
        "type": "int",
        "low": 100,
        "high": 2000,
        "log": True,
        "when": {"dropout": [0.1], "fp_precision": "fp16"},
    },
    "fp_precision": {"type": "categorical", "choices": ["none", "bf16-mixed", "fp16"]},
    "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True},
    "head_dropout": {"type": "float", "low": 0.0, "high": 0.5, "step": 0.1},
    "batch_size": {"type": "int", "low": 8, "high": 32, "step": 8},
    "betas": {"type": "categorical", "choices": [[0.9, 0.99], [0.9, 0.999]]},
    "encoder": {"type": "categorical", "choices": ["minilm", {"model_type": "bert", "hidden_size": 32}]},
    "dropout": {"type": "categorical", "choices": [None, 0.1]},
    "loss_weight.criteria": {"type": "float", "low": 0.5, "high": 2.0},
}


def parse(raw: Mapping[str, Any]) -> dict[str, Distribution]:
    space, problems = parse_search_space(raw)
    assert problems == []
    return space


def test_choices_are_held_as_the_settings_hold_them() -> None:
    space = parse(RAW)
    assert space["fp_precision"].grid() == ("fp32", "bf16", "fp16")
    assert space["init_scale"].grid() == (1024.0, 65536.0)
    assert space["init_scale"].when == {"fp_precision": ("fp16",)}
    assert space["betas"].grid() == ((0.9, 0.99), (0.9, 0.999))


def test_suggest_gives_values_that_trials_take_under_the_settings_own_names() -> None:
    space = parse(RAW)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen: dict[str, set[str]] = {}
    for _ in range(60):
        trial = study.ask()
        params = suggest(space, trial)
        assert set(params) == set(trial.params)
        assert ("init_scale" in params) == (params["fp_precision"] == "fp16")
        has_both = (params["dropout"], params["fp_precision"]) == (0.1, "fp16")
        assert ("head_hidden_size" in params) == has_both
        for name, value in params.items():
            seen.setdefault(name, set()).add(str(value))
        study.tell(trial, 0.0)
    assert set(seen) == set(RAW)
    assert seen["betas"] == {"(0.9, 0.99)", "(0.9, 0.999)"}
    assert seen["encoder"] == {"minilm", "{'model_type': 'bert', 'hidden_size': 32}"}
    assert seen["dropout"] == {"None", "0.1"}
    assert seen["batch_size"] == {"8", "16", "24", "32"}


def test_optuna_holds_numbers_as_such_and_lists_and_mappings_as_json() -> None:
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)).ask()
    suggest(parse(RAW), trial)
    held = trial.distributions
    assert held["betas"].choices == ("[0.9, 0.99]", "[0.9, 0.999]")  # type: ignore[attr-defined]
    encoders = ("minilm", '{"hidden_size": 32, "model_type": "bert"}')
    assert held["encoder"].choices == encoders  # type: ignore[attr-defined]
    assert held["learning_rate"] == optuna.distributions.FloatDistribution(1e-5, 1e-3, log=True)
    assert held["batch_size"] == optuna.distributions.IntDistribution(8, 32, step=8)
    assert held["head_dropout"] == optuna.distributions.FloatDistribution(0.0, 0.5, step=0.1)


def test_the_grid_is_what_optunas_grid_sampler_takes() -> None:
    space = parse({name: RAW[name] for name in ("fp_precision", "head_dropout", "betas")})
    values = grid(space)
    assert values["head_dropout"] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(values))
    study.optimize(lambda trial: float(suggest(space, trial)["head_dropout"]), n_trials=100)
    configurations = {tuple(trial.params.items()) for trial in study.trials}
    assert len(configurations) == len(study.trials) == 3 * 6 * 2


def test_the_hash_names_what_is_searched() -> None:
    def space_hash(raw: Mapping[str, Any]) -> str:
        content = {"name": "s", "data": {"source": "synthetic"}, "search_space": raw}
        return StudyConfig.model_validate(content).space_hash

    assert space_hash(RAW) == space_hash(dict(reversed(RAW.items())))
    same = RAW | {"fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "16-mixed"]}}
    assert space_hash(RAW) == space_hash(same)
    # Optuna refuses other choices and another order of them, so both are other spaces.
    reordered = RAW | {"fp_precision": {"type": "categorical", "choices": ["bf16", "fp32", "fp16"]}}
    narrower = RAW | {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-4, "log": True}}
    assert len({space_hash(raw) for raw in (RAW, reordered, narrower)}) == 3


REFUSED = {
    "a": ({"type": "float", "low": 1e-4, "high": 1e-2, "log": True}, 5, "a=5 is outside 0.0001 to 0.01."),
    "b": ({"type": "float", "low": 0, "high": 0.4}, -0.1, "b=-0.1 is outside 0 to 0.4."),
    "c": (
        {"type": "float", "low": 0, "high": 0.4, "step": 0.1},
        0.15,
        "c=0.15 is between the steps of 0 to 0.4. The nearest are 0.1 and 0.2.",
    ),
    "d": ({"type": "int", "low": 4, "high": 64, "log": True}, 100, "d=100 is outside 4 to 64."),
    "e": (
        {"type": "int", "low": 1, "high": 10**9, "step": 3},
        6,
        "e=6 is between the steps of 1 to 1000000000. The nearest are 4 and 7.",
    ),
    "f": ({"type": "int", "low": 1, "high": 3}, 2.5, "f=2.5 must be a whole number."),
    "g": ({"type": "int", "low": 1, "high": 3}, True, "g=true must be a whole number."),
    "h": ({"type": "float", "low": 0, "high": 1}, "x", "h=x must be a number."),
    "i": ({"type": "float", "low": 0, "high": 1}, math.nan, "i=nan must be a number."),
    "j": ({"type": "categorical", "choices": [8, 16]}, 32, "j=32 is none of its choices, which are 8, 16."),
    "k": (
        {"type": "categorical", "choices": [True, None, "x", [1, 2]]},
        False,
        "k=false is none of its choices, which are true, null, x, [1, 2].",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_outside_the_space_is_refused_in_one_line(name: str) -> None:
    raw, value, message = REFUSED[name]
    one = DISTRIBUTIONS[str(raw["type"])].model_validate(raw)
    assert refusal({name: one}, {name: value}) == message


@pytest.mark.parametrize(
    ("kind", "step", "optunas"),
    [
        ("float", 0.1, optuna.distributions.FloatDistribution(0, 3, step=0.1)),
        ("int", 1, optuna.distributions.IntDistribution(0, 3, step=1)),
    ],
)
def test_optuna_agrees_about_the_steps_of_a_range(
    kind: str, step: float, optunas: optuna.distributions.BaseDistribution
) -> None:
    one = DISTRIBUTIONS[kind].model_validate({"type": kind, "low": 0, "high": 3, "step": step})
    for value in (*one.grid(), *(number / 7 for number in range(-2, 30))):
        assert (refusal({"x": one}, {"x": value}) == "") == is_in(optunas, value), value
