"""A failed step is repeated in fp32, to find out whether the precision is the cause."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed_trials import run_trial
from support.tiny import TRAINING, altered_executor, wide_layer
from torch import Tensor, nn

from hpo.models.multitask import MultitaskModel

DIVERGING = {"max_steps": 30, "optimizer": "sgd", "max_grad_norm": None, "learning_rate": 10}
SCALED = {"init_scale": 1e36, "min_scale": 1e36}


def bad_head(model: MultitaskModel) -> None:
    """Give a head NaN weights."""
    nn.init.constant_(next(model.heads.parameters()), torch.nan)


def breaks_in_evaluation(model: MultitaskModel) -> None:
    """Make the logits infinite under autocast where there are no gradients."""

    def overflow(module: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        is_broken = torch.is_autocast_enabled("cpu") and not module.training
        return output + torch.inf if is_broken else None

    model.heads[0].register_forward_hook(overflow)


@pytest.mark.parametrize(
    ("alter", "precision", "settings", "expected"),
    [
        (wide_layer, "fp16", {}, True),
        (breaks_in_evaluation, "bf16", {}, True),
        (lambda _: None, "bf16", DIVERGING, False),
        (bad_head, "bf16-true", {}, False),
        (lambda _: None, "fp32", DIVERGING, None),
        (lambda _: None, "fp16", SCALED, True),
        (lambda _: None, "fp16", SCALED | {"fallback_to_fp32": True}, True),
    ],
    ids=["forward", "evaluation", "diverged", "bad weights", "fp32 itself", "loss scale", "fallback"],
)
def test_repetition_of_the_failed_step(
    tmp_path: Path, alter: Any, precision: str, settings: dict[str, Any], expected: bool | None
) -> None:
    """The repeat has no loss scale: gradients in fp32 would overflow with it, too."""
    amp = {name: value for name, value in settings.items() if name in (*SCALED, "fallback_to_fp32")}
    training = {name: value for name, value in settings.items() if name not in amp}
    study = {"compat": {"enabled": False}, "search_space": {}, "amp": {"allow_emulated": True, **amp}}
    training = TRAINING | {"max_steps": 6, "attention": "eager"} | training
    executor = altered_executor(tmp_path, alter, training=training, **study)
    result = run_trial(executor, tmp_path / "trial", fp_precision=precision)
    assert result.outcome == "nonfinite"
    assert result.telemetry.get("finite_in_fp32") == expected
