"""Conversion to float8 by torchao or its stand-in."""

import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from hpo.config.sections import CompatConfig
from hpo.precision.amp import prepare_model
from hpo.precision.effective import observe
from hpo.precision.float8 import float8_facts
from hpo.precision.parts import float32_modules, run_in_float32
from hpo.precision.table import PRECISIONS
from hpo.trial.compat import judge
from hpo.trial.measure import Measurement

FP8 = PRECISIONS["fp8"]


class Float8Linear(nn.Linear):
    pass


def stand_in() -> ModuleType:
    """Return the used part of torchao.float8 0.18: the filter by size and the conversion."""

    def auto_filter(recipe: str, filter_fqns: list[str]) -> Any:
        assert (recipe, filter_fqns) == ("tensorwise", [])

        def is_large(outputs: int, inputs: int) -> bool:
            return outputs % 16 == inputs % 16 == 0 and (inputs > 4096 or outputs > 1024)

        return lambda module, _: isinstance(module, nn.Linear) and is_large(*module.weight.shape)

    def convert(model: nn.Module, *, module_filter_fn: Any, config: Any) -> nn.Module:
        assert config.pad_inner_dim
        for name, module in model.named_modules():
            if module_filter_fn(module, name):
                module.__class__ = Float8Linear
        return model

    module: Any = ModuleType("torchao.float8")
    module._auto_filter_for_recipe = auto_filter
    module.convert_to_float8_training = convert
    module.Float8LinearConfig = SimpleNamespace
    return module


@pytest.fixture(params=["stand-in", "torchao"])
def torchao(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "stand-in":  # `patch.dict` would drop modules of transformers that a test imports
        monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
        monkeypatch.setitem(sys.modules, "torchao.float8", stand_in())
    elif find_spec("torchao") is None:
        pytest.skip("torchao is not installed")


@pytest.mark.parametrize(
    ("encoder", "layers"),
    [
        ({"model_type": "bert"}, 12),  # the first of the two feed-forward layers alone
        ({"model_type": "bert", "hidden_size": 240, "intermediate_size": 960}, 0),
        ({"model_type": "xlm-roberta-xl"}, 217),
    ],
)
@pytest.mark.usefixtures("torchao")
def test_only_large_layers_are_converted(encoder: dict[str, Any], layers: int) -> None:
    with torch.device("meta"):
        model = prepare_model(AutoModel.from_config(AutoConfig.for_model(**encoder)), FP8)
    with observe(model) as seen:
        pass
    assert float8_facts(model)["float8_linears"] == layers
    assert seen.telemetry()["float8_linears"] == layers
    assert ("large enough for float8" in seen.agreement(FP8).reason) == (not layers)


@pytest.mark.usefixtures("torchao")
def test_agreement_of_converted_layers(request: pytest.FixtureRequest) -> None:
    """The stand-in's layers are float8 only by name. A part in fp32 is not converted."""
    model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 4), nn.Sequential(nn.Linear(4096, 8192)))
    run_in_float32(model[2])
    prepare_model(model, FP8)
    assert not float32_modules(model), "it computes in bf16"
    with observe(model) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model[0](torch.randn(16, 64))
        model[1](hidden)
        model[2](hidden)
    is_real = "stand-in" not in request.node.name
    formats = {"0.weight": {"float8" if is_real else "bfloat16"}, "1.weight": {"bfloat16"}}
    assert seen.products == formats | {"2.0.weight": {"bfloat16"}}
    assert seen.agreement(FP8).agrees is is_real


@pytest.mark.parametrize(
    ("float8", "compiled", "verdict", "said"),
    [
        (0, True, "incompatible", "no linear layer .* is large enough .* so fp8 would be bf16. Use bf16."),
        (217, True, "ok", "^$"),
        (217, False, "degraded", "fp8 needs `compile`: .* `compile: default`, or use bf16."),
    ],
)
def test_verdict_of_fp8(float8: int, compiled: bool, verdict: str, said: str) -> None:
    counts = {"float8_linears": float8, "num_linears": 217, "compiled": compiled}
    measurement = Measurement("fp8", observed=counts)
    found = judge(measurement, CompatConfig())
    assert found.verdict == verdict
    assert re.search(said, " ".join(found.reasons))
    assert judge(replace(measurement, precision="bf16"), CompatConfig()).reasons == ()
