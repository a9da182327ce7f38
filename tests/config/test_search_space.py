import math
from collections.abc import Mapping
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from support.tiny import study_of

from hpo.config.search_space import DISTRIBUTIONS, Distribution, middle, parse_search_space, refusal, suggest
from hpo.study.store.optuna_internals import is_in

CONDITIONS = {"dropout": [0.1], "fp_precision": "fp16"}
RAW: dict[str, Any] = {
    # A child before its parent: the order of the file must not matter.
    "init_scale": {"type": "categorical", "choices": [1024, 65536], "when": {"fp_precision": "16-mixed"}},
    "head_hidden_size": {"type": "int", "low": 100, "high": 2000, "log": True, "when": CONDITIONS},
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


def test_choices_are_validated() -> None:
    space = parse(RAW)
    assert space["fp_precision"].grid() == ("fp32", "bf16", "fp16")
    assert space["init_scale"].grid() == (1024.0, 65536.0)
    assert space["init_scale"].when == {"fp_precision": ("fp16",)}
    assert space["betas"].grid() == ((0.9, 0.99), (0.9, 0.999))


def test_suggest_follows_conditions() -> None:
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
    assert seen["batch_size"] == {"8", "16", "24", "32"}


def test_optuna_stores_lists_and_mappings_as_json() -> None:
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)).ask()
    suggest(parse(RAW), trial)
    stored: dict[str, Any] = trial.distributions
    assert stored["betas"].choices == ("[0.9, 0.99]", "[0.9, 0.999]")
    assert stored["encoder"].choices == ("minilm", '{"hidden_size": 32, "model_type": "bert"}')
    assert stored["learning_rate"] == FloatDistribution(1e-5, 1e-3, log=True)
    assert stored["batch_size"] == IntDistribution(8, 32, step=8)


def test_hash_ignores_order_and_spelling_alone() -> None:
    def space_hash(**changes: Any) -> str:
        return study_of(search_space=RAW | changes).space_hash

    same = space_hash(fp_precision={"type": "categorical", "choices": ["fp32", "bf16", "16-mixed"]})
    assert space_hash() == same
    # Optuna refuses other choices and another order, so both are other spaces.
    reordered = space_hash(fp_precision={"type": "categorical", "choices": ["bf16", "fp32", "fp16"]})
    narrower = space_hash(learning_rate={"type": "float", "low": 1e-5, "high": 1e-4, "log": True})
    assert len({same, reordered, narrower}) == 3


@pytest.mark.parametrize(
    ("raw", "value", "message"),
    [
        ({"type": "float", "low": 1e-4, "high": 1e-2, "log": True}, 5, "x=5 is outside 0.0001 to 0.01."),
        ({"type": "float", "low": 0, "high": 0.4}, -0.1, "x=-0.1 is outside 0 to 0.4."),
        ({"type": "float", "low": 0, "high": 0.4, "step": 0.1}, 0.15, "x=0.15 is outside 0 to 0.4 in steps"),
        ({"type": "int", "low": 4, "high": 64, "log": True}, 100, "x=100 is outside 4 to 64."),
        ({"type": "int", "low": 1, "high": 10, "step": 3}, 6, "x=6 is outside 1 to 10 in steps of 3."),
        ({"type": "int", "low": 1, "high": 3}, 2.5, "x=2.5 must be a whole number."),
        ({"type": "int", "low": 1, "high": 3}, True, "x=true must be a whole number."),
        ({"type": "float", "low": 0, "high": 1}, "x", "x=x must be a number."),
        ({"type": "float", "low": 0, "high": 1}, math.nan, "x=nan must be a number."),
        ({"type": "categorical", "choices": [True, None, "x", [1, 2]]}, False, "x=false is none of its"),
    ],
)
def test_value_outside_space_is_one_error(raw: dict[str, Any], value: Any, message: str) -> None:
    one = DISTRIBUTIONS[str(raw["type"])].model_validate(raw)
    assert refusal({"x": one}, {"x": value}).startswith(message)


def test_middle_of_a_wide_range() -> None:
    assert middle(parse({"seed": {"type": "int", "low": 0, "high": 2**32 - 2}})) == {"seed": 2**31 - 1}


@pytest.mark.parametrize("optunas", [FloatDistribution(0, 3, step=0.1), IntDistribution(0, 3, step=1)])
def test_optuna_agrees_about_steps(optunas: FloatDistribution | IntDistribution) -> None:
    kind = "float" if isinstance(optunas, FloatDistribution) else "int"
    one = DISTRIBUTIONS[kind].model_validate({"type": kind, "low": 0, "high": 3, "step": optunas.step})
    for value in (*one.grid(), *(number / 7 for number in range(-2, 30))):
        assert (refusal({"x": one}, {"x": value}) == "") == is_in(optunas, value), value
