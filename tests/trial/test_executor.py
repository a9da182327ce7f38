"""What is found wrong with a study before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import CPU, ENCODER, tiny_executor

from hpo.errors import ModelError
from hpo.trial.trial_parts import build_trial
from hpo.trial.trial_run import checkpoint_key

ENCODERS = {"type": "categorical", "choices": [ENCODER, "/no/such/folder"]}


def test_a_sound_study_leaves_nothing_but_tokens(tmp_path: Path) -> None:
    space = {
        "fp_precision": {"type": "categorical", "choices": ["tf32", "fp16"]},
        "encoder": {"type": "categorical", "choices": [ENCODER, ENCODER | {"num_hidden_layers": 1}]},
        "max_length": {"type": "int", "low": 16, "high": 64},
        "init_scale": {"type": "float", "low": 1.0, "high": 2.0, "when": {"fp_precision": ["fp16"]}},
    }
    training = {"max_steps": 1, "batch_size": 8}
    executor = tiny_executor(tmp_path, model={}, training=training, search_space=space)
    executor.check_study()
    made = {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {("tiny.yaml",), ("runs", "cache", "tokens")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {}, "search_space": {"encoder": ENCODERS}}, "/no/such/folder"),
        ({"model": {"encoder": ENCODER | {"vocab_size": 9}}}, "vocab_size|cannot run a batch"),
        ({"training": {"max_steps": 1, "max_length": 600}}, "512"),
    ],
)
def test_what_a_model_cannot_do_is_found(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    executor = tiny_executor(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        executor.check_study()


def test_a_trial_goes_on_from_checkpoints_of_its_own_model_alone(tmp_path: Path) -> None:
    """A folder's encoder may have been replaced under its name."""
    keys = set()
    for layers in (2, 1, 2):
        executor = tiny_executor(tmp_path, model={"encoder": ENCODER | {"num_hidden_layers": layers}})
        parts = build_trial(executor.study, CPU, {"fp_precision": "fp32"}, executor.loader)
        keys.add(checkpoint_key("trial", parts))
    assert len(keys) == 2
