import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_encoders import BERT, DECODERS, FAMILIES, KIND_TASKS, LABEL, SIZES, SPANS, make_model
from torch import Tensor, nn

from hpo.errors import ModelError
from hpo.models.batch_independence import check_texts_are_independent
from hpo.models.encoder import load_encoder
from hpo.models.multitask import HeadSettings, build_model

FIXED = torch.eye(32) / 100
TINY: dict[str, Any] = {"hidden_size": 32, **SIZES, "max_position_embeddings": 256}
BIG_BIRD = {**TINY, "model_type": "big_bird", "block_size": 4}
LIKE_BERT = ("deberta", "ernie", "esm", "ibert", "megatron-bert", "roformer", "xlm-roberta")
NARROW = {name: "embedding_size" for name in ("albert", "mobilebert", "squeezebert")}  # noqa: C420

INDEPENDENT: dict[str, dict[str, Any]] = {
    **{name: config for name, (config, _) in FAMILIES.items()},
    **DECODERS,
    **{name: {**TINY, "model_type": name} for name in LIKE_BERT},
    **{name: {**TINY, "model_type": name, key: 32} for name, key in NARROW.items()},
    "big_bird, short": {**BIG_BIRD, "block_size": 64},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2},
    "longformer": {**TINY, "model_type": "longformer", "attention_window": 8},
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2},
    "xlm": {"model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 2},
    "xlnet": {"model_type": "xlnet", "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
}
DEPENDENT: dict[str, dict[str, Any]] = {
    "big_bird": BIG_BIRD,
    "convbert": {**TINY, "model_type": "convbert", "embedding_size": 32},
    "fnet": {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    **{name: {**TINY, "model_type": name} for name in ("canine", "nystromformer", "yoso")},
}


def build(encoder: Any, max_length: int = 64, **heads: Any) -> Any:
    return build_model(encoder, (LABEL, SPANS), HeadSettings(**heads), max_length=max_length)


def assert_independent(model: nn.Module, length: int, padded: int) -> None:
    """Compare a text's logits alone, and beside one or two other texts with padding."""
    ids_BL = torch.randint(1000, 2000, (3, padded), generator=torch.Generator().manual_seed(1))
    mask_BL = torch.ones_like(ids_BL)
    ids_BL[0, length:] = mask_BL[0, length:] = 0

    def first(logits: dict[str, Tensor]) -> Tensor:
        rows = (value[0] if value.ndim == 2 else value[0, :length].flatten() for value in logits.values())
        return torch.cat(list(rows))

    with torch.no_grad():
        alone = first(model(ids_BL[:1, :length], None))
        for rows in ([0, 1], [0, 1, 2]):
            in_batch = first(model(ids_BL[rows], mask_BL[rows]))
            torch.testing.assert_close(in_batch, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_encoder_with_masked_padding_is_built(name: str) -> None:
    torch.manual_seed(0)
    model = build(load_encoder(INDEPENDENT[name], attention="eager"), max_length=60).eval()
    for length, padded in ((9, 16), (40, 60)):
        assert_independent(model, length, padded)


@pytest.mark.parametrize("name", DEPENDENT)
def test_encoder_with_mixed_texts_is_refused(name: str) -> None:
    torch.manual_seed(0)
    encoder = load_encoder(DEPENDENT[name], attention="eager")
    with pytest.raises(ModelError, match=rf"^encoder: {type(encoder).__name__} must .* Use another encoder"):
        build(encoder)


class MixedStates(nn.Module):
    """Embedding with a function `mix` of the states and the mask."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.config = type("Config", (), {"hidden_size": 32})()
        self.embedding = nn.Embedding(3000, 32)
        self.mix = mix

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        states = self.mix(self.embedding(input_ids), attention_mask[..., None].float())
        return type("Output", (), {"last_hidden_state": states})()


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (lambda states, _: states - states.mean(0), "beside a longer one"),
        (lambda states, mask: states + (states * mask).sum((0, 1)) / mask.sum(), "beside a longer one"),
        (lambda states, _: states + 1e-3 * torch.randn_like(states), "at each call"),
    ],
)
def test_other_modules_are_measured(mix: Any, message: str) -> None:
    with pytest.raises(ModelError, match=f"^encoder: MixedStates must .*{message}"):
        build(MixedStates(mix))


def mean_of_text(states: Tensor, mask: Tensor) -> Tensor:
    """Add the mean over a text's own tokens: rounding depends on the padded length."""
    weights = mask.to(states) / mask.sum(1, keepdim=True) / states.shape[1] * 3
    return states + (states * weights).sum(1, keepdim=True) * states.shape[1] / 3


def float32_inside(states: Tensor, mask: Tensor) -> Tensor:
    """Norm the states in fp32, as many decoders do in any format."""
    sums = mean_of_text(1e4 + states, mask).float()
    return ((sums - sums.mean(-1, keepdim=True)) * sums.var(-1, keepdim=True).rsqrt()).to(states.dtype)


def leak_under_constants(states: Tensor, mask: Tensor) -> Tensor:
    """A leak of other texts that is as small as the rounding."""
    return float32_inside(states + 1e-4 * states.mean((0, 1)), mask)


def longer_text_in_another_way(states: Tensor, mask: Tensor) -> Tensor:
    """Depends on the padded length, and not on the padding."""
    return float32_inside(states, mask) + (0.01 * states if states.shape[1] > 8 else 0)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_named_and_not_refused(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(seed)
    model = build(MixedStates(float32_inside))
    assert re.search(r"^\w.*: rounding in fp32 changes a text's values by \d", caplog.messages[0])
    assert {one.dtype for one in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("mix", [leak_under_constants, longer_text_in_another_way])
def test_leaks_beside_large_constants_are_refused(mix: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="beside a longer one"):
        build(MixedStates(mix))


def test_rounding_of_an_encoder_that_has_no_fp64(caplog: pytest.LogCaptureFixture) -> None:
    def fp32_alone(states: Tensor, mask: Tensor) -> Tensor:
        return float32_inside(states, mask) + torch.linalg.multi_dot([states[0], FIXED, FIXED])

    torch.manual_seed(0)
    build(MixedStates(fp32_alone))
    assert "rounding in fp32" in caplog.messages[0]


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "attention", "last"])
@pytest.mark.parametrize("head_type", ["linear", "mlp"])
def test_pooling_and_heads_read_no_padding(pooling: str, head_type: str) -> None:
    model = make_model(BERT, tasks=KIND_TASKS, pooling=pooling, head_type=head_type).eval()
    assert_independent(model, 5, 16)


def test_own_pooling_and_heads_are_measured_once() -> None:
    torch.manual_seed(0)
    model = build(load_encoder(BERT)).train()
    calls: list[object] = []
    model.encoder.register_forward_hook(lambda *_: calls.append(torch.rand(1)))
    before = torch.get_rng_state()
    for _ in range(2):
        check_texts_are_independent(model, 57)
        assert len(calls) == 4
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training for module in model.modules())
    pool, model.pool = model.pool, lambda states, _: states.mean(1)
    with pytest.raises(ModelError, match=r"^pooling: `mean` must .*beside a longer one"):
        check_texts_are_independent(model, 16)
    model.pool, head = pool, model.heads[1]
    head.forward = lambda states: head[1](states + states.mean(1, keepdim=True))
    with pytest.raises(ModelError, match=r"^head_type: `linear` of the task `spans` must "):
        check_texts_are_independent(model, 16)
