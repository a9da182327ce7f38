"""The check of a study before its first trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import ENCODER, altered_executor, tiny_executor

from hpo.errors import ModelError
from hpo.models.multitask import MultitaskModel
from hpo.trial.parts import build_trial
from hpo.trial.run import checkpoint_key

ENCODERS = {"type": "categorical", "choices": [ENCODER, "/no/such/folder"]}


def test_check_leaves_only_tokens(tmp_path: Path) -> None:
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
def test_impossible_model_is_found(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    executor = tiny_executor(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        executor.check_study()


def test_fresh_model_must_be_finite(tmp_path: Path) -> None:
    """The weights themselves are finite. No precision is to blame."""

    def break_encoder(model: Any) -> None:
        model.encoder.embeddings.LayerNorm.weight.fill_(1e38)

    executor = altered_executor(tmp_path, break_encoder)
    message = r"the logits .*, in fp32 and before any training; first: aten\..* in encoder\."
    with pytest.raises(ModelError, match=message):
        executor.check_study()
    for precision in ("fp32", "bf16"):
        result = executor.run({"fp_precision": precision}, None, "")
        assert result.outcome == "invalid"
        assert "not finite in fp32" in result.reason
    altered_executor(tmp_path, break_encoder, compat={"enabled": False}).check_study()


def test_check_tries_the_longest_text(tmp_path: Path) -> None:
    """An encoder may break on it alone."""

    def limit(model: MultitaskModel) -> None:
        def refuse(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].shape[1] > 60:
                raise IndexError("index out of range in self")

        model.register_forward_pre_hook(refuse)

    executor = altered_executor(tmp_path, limit)
    with pytest.raises(ModelError, match=r"cannot run a batch .* IndexError: index out of range"):
        executor.check_study()
    assert executor.run({"fp_precision": "fp32"}, None, "").outcome == "invalid"


def test_checkpoint_key_depends_on_the_model(tmp_path: Path) -> None:
    """A folder's encoder may have been replaced under its name."""
    keys = set()
    for layers in (2, 1, 2):
        executor = tiny_executor(tmp_path, model={"encoder": ENCODER | {"num_hidden_layers": layers}})
        parts = build_trial(executor.resolved, {"fp_precision": "fp32"}, executor.loader)
        keys.add(checkpoint_key("trial", parts))
    assert len(keys) == 2
