"""The observed precision in a trial's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny import CPU, altered_executor
from torch import Tensor, nn
from torch.nn import functional as F

from hpo.trial.compat import checked_on

TRAINING = {"max_steps": 2, "batch_size": 4, "max_length": 32}


class WideInTraining(nn.Linear):
    """fp32 inside, and nothing of it to be seen at its output."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)
        with torch.autocast("cpu", enabled=False):
            return F.linear(inputs.float(), self.weight.float(), self.bias.float()).to(torch.bfloat16)


def run(folder: Path, layer: type[nn.Linear]) -> dict[str, Any]:
    """Run a trial in bf16 with one layer of this class; return its telemetry."""

    def plant(model: Any) -> None:
        model.encoder.encoder.layer[0].output.dense.__class__ = layer

    executor = altered_executor(folder, plant, training=TRAINING)
    result = executor.run({"fp_precision": "bf16", "learning_rate": 1e-4}, None, "")
    assert result.outcome == "complete", result.reason
    return dict(result.telemetry)


def test_trial_records_a_layer_in_another_precision(tmp_path: Path) -> None:
    telemetry = run(tmp_path, WideInTraining)
    found = telemetry["precision"]
    assert (found["agrees"], found["effective"]) == (False, "bf16")
    said = "encoder.encoder.layer.0.output.dense.weight (float32)."
    assert said in found["reason"]
    products = found["observed"]["linear_products"]
    assert products.pop("bfloat16") > 5
    assert sum(products.values()) == 1
    assert telemetry["compatibility"]["verdict"] == "degraded"
    assert said in telemetry["compatibility"]["disagreement"]
    assert telemetry["compatibility"]["checked_on"] == checked_on(CPU), "the sampler goes by it"
    assert isinstance(telemetry["environment"], dict)
