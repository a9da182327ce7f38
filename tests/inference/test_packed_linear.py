import pytest
import torch
from support.tiny_encoders import KIND_TASKS, make_batch, make_model
from torch import nn

from hpo.inference.packed_linear import PackedLinears


def test_packed_model_gives_the_same_logits() -> None:
    model, packed = make_model(tasks=KIND_TASKS).eval(), PackedLinears()
    with torch.no_grad():
        plain = model(*make_batch())
        for _ in range(2):
            with packed.used_in(model):
                assert "forward" in vars(model.heads[0][-1])
                torch.testing.assert_close(model(*make_batch()), plain, rtol=1e-5, atol=1e-6)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_changed_weights_are_packed_again() -> None:
    layer, packed, inputs = nn.Linear(8, 4), PackedLinears(), torch.randn(3, 5, 8)
    model, other = nn.Sequential(layer), nn.Linear(8, 4).state_dict()
    for change in (lambda: None, lambda: layer.weight.mul_(2), lambda: layer.load_state_dict(other)):
        with torch.no_grad():
            change()
            expected = model(inputs)
            with packed.used_in(model):
                torch.testing.assert_close(model(inputs), expected)


def test_bf16_layers_are_left_alone_and_errors_restore_the_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    with torch.no_grad(), PackedLinears().used_in(model):
        torch.testing.assert_close(model(torch.ones(1, 8)), model[0].weight.sum(1)[None])
    with pytest.raises(KeyError), PackedLinears().used_in(model):
        raise KeyError
    assert "forward" not in vars(model[0])
    with PackedLinears().used_in(model.bfloat16()):
        assert "forward" not in vars(model[0])
