"""Parts of a model in fp32 under autocast."""

import copy
from typing import Any

import pytest
import torch
from support.tiny import amp_of
from support.tiny_encoders import family_model, make_batch
from torch import Tensor, nn

from hpo.models.encoder import encoder_layers
from hpo.precision.amp import prepare_model
from hpo.precision.effective import observe_model
from hpo.precision.parts import float32_modules, float32_weights, run_in_float32
from hpo.precision.table import PRECISIONS

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


class Stubborn(nn.Linear):
    """A layer with its own autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class Model(nn.Module):
    def __init__(self, second: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.second = nn.Sequential(second(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(self.first(x)))
        return result


def call(model: nn.Module) -> Any:
    return model(X)


class Dtypes(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> tuple[torch.dtype, torch.dtype]:
        return x.dtype, index.dtype


def test_integer_inputs_of_a_part() -> None:
    part = Dtypes()
    run_in_float32(part)
    assert part(X.half(), torch.arange(2)) == (torch.float32, torch.int64)


def test_names_weights_and_copies() -> None:
    plain, model = Model(), Model()
    run_in_float32(model.second)
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert isinstance(model.second, nn.Sequential)
    assert [*float32_modules(copy.deepcopy(model))] == ["second", "second.0", "second.1", "second.2"]
    model.second[2].weight = model.first.weight
    assert "first.weight" in float32_weights(model), "the first name of a shared weight"
    prepare_model(model, PRECISIONS["bf16-true"])
    assert type(model.second) is nn.Sequential
    assert not float32_modules(model), "weights in bf16 have no parts"
    table = nn.Embedding(3, 4)
    run_in_float32(table)
    assert type(table) is nn.Embedding, "a lookup has no product"


def test_part_in_bf16_disagrees() -> None:
    model = Model(Stubborn)
    run_in_float32(model.second)
    agreement = observe_model(model, amp_of("bf16"), call).agreement(PRECISIONS["bf16"])
    said = "1 of 4 weights were not multiplied in bfloat16, or in float32 inside fp32_parts: "
    assert agreement == (False, f"{said}second.0.weight (bfloat16).")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_relative_positions_have_the_formats_of_their_layers(name: str) -> None:
    model, precision, batch = family_model("deberta-v2"), PRECISIONS[name], make_batch()
    run_in_float32(encoder_layers(model.encoder)[1])
    seen = observe_model(model, amp_of(name), lambda model: model(*batch))
    assert seen.agreement(precision) == (True, "")
    table = "encoder.encoder.rel_embeddings.weight"
    assert (seen.products[table], seen.shared_weights) == ({precision.products}, {table})


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_part_equals_fp32_beyond_the_range_of_fp16(name: str) -> None:
    model, precision = Model(), PRECISIONS[name]
    with torch.no_grad():
        model.second[2].bias.fill_(1e6)
    plain, seen = copy.deepcopy(model), dict[str, tuple[Tensor, Tensor]]()
    run_in_float32(model.second)
    for part, module in model.named_children():
        note = lambda _, inputs, output, part=part: seen.update({part: (inputs[0], output)})  # noqa: E731
        module.register_forward_hook(note)
    with amp_of(name).autocast():
        model(X)
    (given, made), reduced = seen["second"], getattr(torch, precision.autocast)
    assert (given.dtype, made.dtype, seen["last"][1].dtype) == (reduced, torch.float32, reduced)
    torch.testing.assert_close(made, plain.second(given.float()), rtol=0, atol=0)
    observed = observe_model(model, amp_of(name), call)
    in_part = {name: {"float32"} for name in ("second.0.weight", "second.2.weight")}
    others = {name: {precision.products} for name in ("first.weight", "last.weight")}
    assert observed.products == in_part | others
    assert observed.agreement(precision).agrees
