"""The check of a study before its first trial, and its default pruner."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny import CPU, ENCODER, TRAINING, altered_executor, parts_of, tiny_executor, write_study

from hpo.config.study_config import StudyConfig, load_study
from hpo.errors import ModelError
from hpo.trial.parts import fit_pruner
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


def fitted(folder: Path, epochs: float, **changes: Any) -> tuple[StudyConfig, str]:
    """48 rows to train on and 24 to evaluate: an evaluation costs 1/6 of an epoch."""
    path = write_study(folder, training=TRAINING | {"max_steps": None, "epochs": epochs}, **changes)
    content = yaml.safe_load(path.read_text())
    if "pruner" not in changes:
        del content["pruner"]
    path.write_text(yaml.safe_dump(content))
    return fit_pruner(load_study(path), tiny_executor(folder, CPU).dataset)


@pytest.mark.parametrize(("epochs", "name"), [(1, "none"), (1.5, "none"), (2, "promote"), (20, "promote")])
def test_pruner_depends_on_the_cost_of_evaluations(tmp_path: Path, epochs: float, name: str) -> None:
    """`promote` tries at least three configurations for the rows of one whole trial."""
    config, reason = fitted(tmp_path, epochs)
    assert config.pruner.name == name
    assert f"stage of a trial {'costs' if name == 'promote' else 'would cost with `promote`'}" in reason


@pytest.mark.parametrize("name", ["promote", "median"])
def test_pruner_of_the_file_stays(tmp_path: Path, name: str) -> None:
    config, reason = fitted(tmp_path, 1, pruner={"name": name})
    assert config.pruner.name == name
    assert reason.startswith("it is set in the study file")
