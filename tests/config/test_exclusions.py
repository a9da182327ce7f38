from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_study

from hpo.config.trial_config import build_trial_config
from hpo.errors import InputError, StudyFileError

EITHER = {"type": "categorical", "choices": ["none", "lora"]}
BASE = {"type": "categorical", "choices": ["fp32", "nf4"]}
LAYERS = {"type": "int", "low": 0, "high": 2}
STATES = {"type": "categorical", "choices": ["fp32", "int8"]}
OPTIMIZERS = {"type": "categorical", "choices": ["adamw", "sgd"]}


@pytest.mark.parametrize(
    ("training", "space", "told"),
    [
        (
            {"lora_rank": 4},
            {},
            "training.lora_rank: needs an adapter, but there is none. Set `training.adapter",
        ),
        ({"base_precision": "nf4"}, {}, "training.base_precision: needs an adapter, but there is none."),
        ({}, {"base_precision": BASE}, "search_space.base_precision: needs an adapter, but there is none."),
        ({"base_precision": "int8"}, {"adapter": EITHER}, "training.base_precision: must be fp32 without an"),
        (
            {},
            {"adapter": EITHER, "base_precision": BASE},
            r"search_space.base_precision: must be fp32 .* Search it with `when: \{adapter: \[lora\]\}`.",
        ),
        ({"adapter": "lora", "freeze_layers": 2}, {}, "training.freeze_layers: must be 0 with an adapter"),
        (
            {},
            {"adapter": EITHER, "freeze_layers": LAYERS},
            r"search_space.freeze_layers: must be 0 .* Search it with `when: \{adapter: \[none\]\}`.",
        ),
        ({"adapter": "lorra"}, {}, "training.adapter: .*did you mean"),
        ({"adapter": "lora", "base_precision": "int4"}, {}, "training.base_precision: .*int8"),
        ({"adapter": "lora", "lora_targets": []}, {}, "training.lora_targets: must be `all-linear` or a"),
        ({"adapter": "lora", "lora_rank": 0}, {}, "training.lora_rank"),
        ({"optimizer_state": "int8", "optimizer": "sgd"}, {}, "training.optimizer_state: must be fp32"),
        ({"optimizer_state": "bf16"}, {"optimizer": OPTIMIZERS}, "must be fp32 without the moments of adamw"),
        (
            {},
            {"optimizer": OPTIMIZERS, "optimizer_state": STATES},
            r"search_space.optimizer_state: .* Search it with `when: \{optimizer: \[adamw\]\}`",
        ),
        ({"optimizer": "adafactor"}, {"optimizer_state": STATES}, "must be fp32 without the moments"),
        ({"optimizer_state": "int4"}, {}, "training.optimizer_state: .*fp32, bf16, int8"),
    ],
)
def test_a_meaningless_combination_is_refused(
    tmp_path: Path, training: dict[str, Any], space: dict[str, Any], told: str
) -> None:
    with pytest.raises(StudyFileError, match=f"(?i){told}") as caught:
        tiny_study(tmp_path, training=training, search_space=space)
    assert str(caught.value).count("\n") == 0, "one error"


@pytest.mark.parametrize(
    ("training", "space"),
    [
        ({}, {"adapter": EITHER, "base_precision": {**BASE, "when": {"adapter": "lora"}}}),
        ({}, {"adapter": EITHER, "freeze_layers": {**LAYERS, "when": {"adapter": "none"}}}),
        ({"lora_rank": 4}, {"adapter": EITHER}),
        ({"adapter": "dora"}, {"base_precision": BASE}),
        ({"base_precision": "fp32", "lora_rank": 8}, {}),
        ({"adapter": "lora", "lora_targets": ["query"], "freeze_layers": 0}, {}),
    ],
)
def test_possible_combinations(tmp_path: Path, training: dict[str, Any], space: dict[str, Any]) -> None:
    assert tiny_study(tmp_path, training=training, search_space=space)


def test_targets_are_searched(tmp_path: Path) -> None:
    space = {"lora_targets": {"type": "categorical", "choices": ["all-linear", ["query", "value"]]}}
    study = tiny_study(tmp_path, training={"adapter": "lora"}, search_space=space)
    for value in ('["query", "value"]', ["query", "value"]):  # as Optuna holds it, and as it is given
        assert build_trial_config(study, {"lora_targets": value}, "fp32").lora_targets == ("query", "value")


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (
            {"base_precision": "int8"},
            "base_precision: must be fp32 without an adapter",
        ),
        ({"adapter": "lora", "freeze_layers": 1}, "freeze_layers: must be 0 with an adapter"),
        ({"optimizer": "sgd", "optimizer_state": "int8"}, "must be fp32 without the moments"),
    ],
)
def test_one_trial_is_checked_too(tmp_path: Path, params: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        build_trial_config(tiny_study(tmp_path), params, "fp32")


def test_a_state_is_searched_with_its_optimizers(tmp_path: Path) -> None:
    state = {**STATES, "when": {"optimizer": "adamw"}}
    study = tiny_study(tmp_path, search_space={"optimizer": OPTIMIZERS, "optimizer_state": state})
    config = build_trial_config(study, {"optimizer": "adamw", "optimizer_state": "int8"}, "fp32")
    assert config.optimizer_state == "int8"
    assert build_trial_config(study, {"optimizer": "sgd"}, "fp32").optimizer_state == "fp32"
