"""What a trial stores of the precision that it really had, and where it is untrue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CPU, EMULATED, ENCODER, tiny_executor
from torch import Tensor, nn
from torch.nn import functional as F

from hpo.precision.table import PRECISIONS
from hpo.trial.compat import checked_on

TRAINING = {"max_steps": 2, "batch_size": 4, "max_length": 32}


class CastBack(nn.Linear):
    """fp32 inside, and nothing of it to be seen at its output."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(inputs.float(), self.weight.float(), self.bias.float()).to(torch.bfloat16)


class Rounded(nn.Linear):
    """As with a library that takes bf16 for what comes in fp32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs.bfloat16().float(), self.weight.bfloat16().float(), self.bias)


class WideInTraining(CastBack):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.training else nn.Linear.forward(self, inputs)


class Unmeasurable(nn.Linear):
    """Refuses other inputs than the model's, such as those by which products are measured."""

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs == inputs.flatten()[0]).all()):
            raise ValueError("only what it was made for")
        return super().forward(inputs)


def run(
    folder: Path,
    layer: type[nn.Linear],
    precision: str,
) -> dict[str, Any]:
    """The telemetry of a trial whose model has one layer of that class."""
    encoder = ENCODER | {"num_hidden_layers": 1}
    executor = tiny_executor(folder, training=TRAINING, model={"encoder": encoder})
    build_model = executor.loader.build_model

    def planted(config: Any) -> Any:
        model: Any = build_model(config)
        model.encoder.encoder.layer[0].output.dense.__class__ = layer
        return model

    executor.loader.build_model = planted  # type: ignore[method-assign]
    result = executor.run({"fp_precision": precision, "learning_rate": 1e-4}, None, "")
    assert result.outcome == "complete", result.reason
    return dict(result.telemetry)


NAME = "encoder.encoder.layer.0.output.dense"


@pytest.mark.parametrize(
    ("layer", "precision", "said"),
    [
        (WideInTraining, "bf16", f"{NAME} (float32, output bfloat16 in training)."),
        (Rounded, "fp32", f"did not compute in float32: {NAME} (bfloat16, output float32)."),
    ],
)
def test_a_trial_says_where_it_was_not_what_was_asked_for(
    tmp_path: Path, layer: type[nn.Linear], precision: str, said: str
) -> None:
    telemetry = run(tmp_path, layer, precision)
    found = telemetry["precision"]
    assert (found["agrees"], found["effective"]) == (False, precision)
    assert said in found["reason"]
    products = found["observed"]["linear_products"]
    assert products.pop(PRECISIONS[precision].products) > 5
    assert sum(products.values()) == 1
    assert telemetry["compatibility"]["verdict"] == "degraded"
    assert said in telemetry["compatibility"]["disagreement"]
    assert telemetry["compatibility"]["checked_on"] == checked_on(CPU), "the sampler goes by it"
    assert isinstance(telemetry["environment"], dict)


def test_a_layer_that_could_not_be_measured_is_counted(tmp_path: Path) -> None:
    telemetry = run(tmp_path, Unmeasurable, "bf16")
    found = telemetry["precision"]
    assert (found["agrees"], found["observed"]["linear_products"]["unmeasured"]) == (True, 1)
    assert telemetry["compatibility"]["verdict"] == "ok"


def test_measuring_leaves_training_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same metrics and losses as of a trial that looks at nothing."""
    from hpo.precision.effective import Observation

    found = []
    for _ in range(2):
        executor = tiny_executor(tmp_path, training=TRAINING | {"dropout": 0.1}, amp=EMULATED.model_dump())
        result = executor.run({"fp_precision": "bf16", "learning_rate": 1e-3}, None, "")
        found.append((result.values, result.telemetry["metrics"]))
        monkeypatch.setattr("hpo.trial.trial_run.observe_model", lambda *_: Observation())
    assert found[0] == found[1]
