from typing import Any

import pytest
from support.worker_process import study

from hpo.config.portfolio import COMMON, PORTFOLIO, portfolio
from hpo.config.trial_settings import setting_value

RATES = {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True}}
BATCHES = {"batch_size": {"type": "categorical", "choices": [8, 16, 32]}}
FRESH = {"model_type": "bert", "hidden_size": 32}


def tried(space: dict[str, Any] = RATES, **changes: Any) -> list[dict[str, Any]]:
    content = {"sampler": {"name": "tpe"}, "search_space": space} | changes
    return [params for params, _ in portfolio(study(40, **content))]


def test_configurations_are_valid_and_have_sources() -> None:
    for source, settings in PORTFOLIO:
        assert "arXiv" in source
        assert all(setting_value(name, value) == value for name, value in {**COMMON, **settings}.items())


def test_searched_settings_are_ranked() -> None:
    assert tried() == [{"learning_rate": rate} for rate in (5e-5, 1e-4, 2e-5, 3e-4)]
    assert tried(RATES | BATCHES)[2:] == [{"learning_rate": 2e-5, "batch_size": 16}, {"learning_rate": 3e-4}]
    narrow = {"learning_rate": {"type": "float", "low": 1e-4, "high": 6e-4}}
    assert tried(narrow | BATCHES) == [{"learning_rate": 1e-4, "batch_size": 32}, {"learning_rate": 3e-4}]


@pytest.mark.parametrize(
    "changes",
    [
        {"portfolio": False},
        {"space": BATCHES},
        {"space": {"learning_rate": {"type": "float", "low": 1e-3, "high": 1e-2}}},
        {"model": {"encoder": FRESH}},
        {"space": RATES | {"encoder": {"type": "categorical", "choices": ["minilm", FRESH]}}},
        {"training": {"adapter": "lora"}},
        {"training": {"optimizer": "lion"}},
        {"space": RATES | {"optimizer": {"type": "categorical", "choices": ["lion", "sgd"]}}},
        {"sampler": {"name": "random"}},
    ],
    ids=str,
)
def test_other_studies_have_no_portfolio(changes: dict[str, Any]) -> None:
    assert tried(**changes) == []
