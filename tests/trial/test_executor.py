"""The check of a study before its first trial."""

from pathlib import Path

import pytest
import torch
from support.tiny import ENCODER, altered_executor, parts_of, tiny_executor

from hpo.errors import ModelError
from hpo.trial.run import checkpoint_key


def test_fresh_model_must_be_finite(tmp_path: Path) -> None:
    """The weights themselves are finite. No precision is to blame."""
    break_encoder = lambda model: model.encoder.embeddings.LayerNorm.weight.fill_(1e38)  # noqa: E731
    executor = altered_executor(tmp_path, break_encoder)
    message = r"the logits .*, in fp32 and before any training; first: aten\..* in encoder\."
    with pytest.raises(ModelError, match=message):
        executor.check_study()
    result = executor.run({"fp_precision": "bf16"}, None, "")
    assert (result.outcome, "not finite in fp32" in result.reason) == ("invalid", True)
    altered_executor(tmp_path, break_encoder, compat={"enabled": False}).check_study()


def test_check_tries_the_longest_text_and_keeps_only_tokens(tmp_path: Path) -> None:
    def refuse(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[1] > 60:
            raise IndexError("index out of range in self")

    executor = altered_executor(tmp_path, lambda model: model.register_forward_pre_hook(refuse))
    with pytest.raises(ModelError, match=r"cannot run a batch .* IndexError: index out of range"):
        executor.check_study()
    made = {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {("tiny.yaml",), ("runs", "cache", "tokens")}
    assert executor.run({"fp_precision": "fp32"}, None, "").outcome == "invalid"


def test_checkpoint_key_depends_on_the_model(tmp_path: Path) -> None:
    """A folder's encoder may have been replaced under its name."""
    keys = set()
    for layers in (2, 1, 2):
        executor = tiny_executor(tmp_path, model={"encoder": ENCODER | {"num_hidden_layers": layers}})
        keys.add(checkpoint_key("trial", parts_of(executor, fp_precision="fp32")))
    assert len(keys) == 2
