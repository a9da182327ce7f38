from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_study

from hpo.config.trial_config import build_trial_config
from hpo.errors import InputError, StudyFileError

STATES = {"type": "categorical", "choices": ["fp32", "int8"]}
OPTIMIZERS = {"type": "categorical", "choices": ["adamw", "sgd"]}


@pytest.mark.parametrize(
    ("training", "space", "told"),
    [
        ({"optimizer_state": "int8", "optimizer": "sgd"}, {}, "training.optimizer_state: must be fp32 with"),
        ({"optimizer_state": "bf16"}, {"optimizer": OPTIMIZERS}, "`optimizer: sgd`; adamw, adam, lion can"),
        (
            {},
            {"optimizer": OPTIMIZERS, "optimizer_state": STATES},
            r"search_space.optimizer_state: .* Search it with `when: \{optimizer: \[adamw, adam, lion\]\}`",
        ),
        ({"optimizer": "adafactor"}, {"optimizer_state": STATES}, "must be fp32 with `optimizer: adafactor`"),
        ({"optimizer_state": "int4"}, {}, "training.optimizer_state: .*fp32, bf16, int8"),
    ],
)
def test_what_cannot_be_is_refused_before_the_study_is_made(
    tmp_path: Path, training: dict[str, Any], space: dict[str, Any], told: str
) -> None:
    with pytest.raises(StudyFileError, match=told):
        tiny_study(tmp_path, training={"max_steps": 1, **training}, search_space=space)


def test_searched_where_the_optimizer_has_moments(tmp_path: Path) -> None:
    state = {**STATES, "when": {"optimizer": "adamw"}}
    study = tiny_study(tmp_path, search_space={"optimizer": OPTIMIZERS, "optimizer_state": state})
    config = build_trial_config(study, {"optimizer": "adamw", "optimizer_state": "int8"}, "fp32")
    assert config.optimizer_state == "int8"
    assert build_trial_config(study, {"optimizer": "sgd"}, "fp32").optimizer_state == "fp32"
    with pytest.raises(InputError, match="must be fp32 with `optimizer: sgd`"):
        build_trial_config(study, {"optimizer": "sgd", "optimizer_state": "int8"}, "fp32")
