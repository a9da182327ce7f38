"""A text gets the same logits alone and in a batch, or the model is refused while it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.tiny_encoders import BERT, DECODERS, FAMILIES, KIND_TASKS, LABEL, SIZES, SPANS, make_model
from torch import Tensor, nn

from hpo.errors import ModelError
from hpo.models.batch_independence import check_texts_are_independent
from hpo.models.build import build_model
from hpo.models.encoder import load_encoder
from hpo.models.multitask import HeadSettings

TINY: dict[str, Any] = {"hidden_size": 32, **SIZES, "max_position_embeddings": 256}
BIG_BIRD = {**TINY, "model_type": "big_bird", "block_size": 4}

INDEPENDENT: dict[str, dict[str, Any]] = {
    **{name: config for name, (config, _) in FAMILIES.items()},
    **DECODERS,
    "albert": {**TINY, "model_type": "albert", "embedding_size": 16},
    "big_bird, short": {**BIG_BIRD, "block_size": 64},
    "deberta": {**TINY, "model_type": "deberta"},
    "ernie": {**TINY, "model_type": "ernie"},
    "esm": {**TINY, "model_type": "esm"},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2},
    "ibert": {**TINY, "model_type": "ibert"},
    "longformer": {**TINY, "model_type": "longformer", "attention_window": 8},
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2},
    "megatron-bert": {**TINY, "model_type": "megatron-bert"},
    "mobilebert": {**TINY, "model_type": "mobilebert", "embedding_size": 32},
    "rembert": {**TINY, "model_type": "rembert", "input_embedding_size": 16},
    "roformer": {**TINY, "model_type": "roformer"},
    "squeezebert": {**TINY, "model_type": "squeezebert", "embedding_size": 32},
    "xlm": {"model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 2},
    "xlm-roberta": {**TINY, "model_type": "xlm-roberta"},
    "xlnet": {"model_type": "xlnet", "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
}
DEPENDENT: dict[str, dict[str, Any]] = {
    "big_bird": BIG_BIRD,
    "canine": {**TINY, "model_type": "canine"},
    "convbert": {**TINY, "model_type": "convbert", "embedding_size": 32},
    "fnet": {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    "nystromformer": {**TINY, "model_type": "nystromformer"},
    "yoso": {**TINY, "model_type": "yoso"},
}


Mix = Callable[[Tensor, Tensor], Tensor]


def build(encoder: Any, max_length: int = 64, **heads: Any) -> Any:
    return build_model(encoder, (LABEL, SPANS), HeadSettings(**heads), max_length=max_length)


def first_of(logits: dict[str, Tensor], length: int) -> Tensor:
    """All logits of the first text, of `length` tokens."""
    rows = (value[0] if value.ndim == 2 else value[0, :length].flatten() for value in logits.values())
    return torch.cat(list(rows))


def alone_and_in_batches(model: nn.Module, length: int, padded: int) -> tuple[Tensor, list[Tensor]]:
    """A text's logits of all tasks: alone, and beside one or two other texts with padding."""
    generator = torch.Generator().manual_seed(1)
    ids_BL = torch.randint(1000, 2000, (3, padded), generator=generator)
    mask_BL = torch.ones_like(ids_BL)
    ids_BL[0, length:] = mask_BL[0, length:] = 0
    with torch.no_grad():
        alone = first_of(model(ids_BL[:1, :length], None), length)
        rows = ([0, 1], [0, 2], [0, 1, 2])
        return alone, [first_of(model(ids_BL[of], mask_BL[of]), length) for of in rows]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_an_encoder_is_built_if_a_text_keeps_its_logits_in_a_batch(name: str) -> None:
    torch.manual_seed(0)
    model = build(load_encoder(INDEPENDENT[name], attention="eager"), max_length=60).eval()
    for length, padded in ((9, 16), (3, 60), (40, 60)):
        alone, in_batches = alone_and_in_batches(model, length, padded)
        for in_batch in in_batches:
            torch.testing.assert_close(in_batch, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DEPENDENT)
def test_an_encoder_is_refused_if_the_batch_changes_a_text(name: str) -> None:
    torch.manual_seed(0)
    encoder = load_encoder(DEPENDENT[name], attention="eager")
    with pytest.raises(ModelError, match=rf"^encoder: {type(encoder).__name__} must .* Use another encoder"):
        build(encoder)


def test_an_encoder_with_states_of_another_size_is_refused() -> None:
    reformer = {"model_type": "reformer", "axial_pos_embds_dim": (128, 128), "num_hidden_layers": 1}
    with pytest.raises(ModelError, match=r"ReformerModel must give states \(1, 64, 256\), .* \(1, 64, 512\)"):
        build(
            load_encoder({**reformer, "axial_pos_shape": (64, 64), "attn_layers": ["lsh"]}, attention="eager")
        )


class OwnStates(nn.Module):
    """An embedding whose states `mix` makes of their neighbours'."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.config = type("Config", (), {"hidden_size": 32})()
        self.embedding = nn.Embedding(3000, 32)
        self.mix = mix

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        states = self.mix(self.embedding(input_ids), attention_mask[..., None].float())
        return type("Output", (), {"last_hidden_state": states})()


MIXES: dict[str, tuple[Mix, str]] = {
    "mean over padding": (lambda states, _: states + states.mean(1, keepdim=True), "beside a longer one"),
    "mean over the rows": (lambda states, _: states - states.mean(0), "beside a longer one"),
    "mean of the real tokens of all rows": (
        lambda states, mask: states + (states * mask).sum((0, 1)) / mask.sum(),
        "beside a longer one",
    ),
    "noise": (lambda states, _: states + torch.randn_like(states), "at each call"),
    "faint noise": (lambda states, _: states + 1e-3 * torch.randn_like(states), "at each call"),
}


@pytest.mark.parametrize("name", MIXES)
def test_an_own_encoder_is_measured_too(name: str) -> None:
    mix, message = MIXES[name]
    with pytest.raises(ModelError, match=f"^encoder: OwnStates must .*{message}"):
        build(OwnStates(mix))


def test_an_own_encoder_with_masked_means_is_built() -> None:
    model = build(OwnStates(lambda states, mask: states + (states * mask).sum(1, True) / mask.sum(1, True)))
    alone, in_batches = alone_and_in_batches(model.eval(), 9, 16)
    torch.testing.assert_close(torch.stack(in_batches), alone.expand(3, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "attention", "last"])
@pytest.mark.parametrize("head_type", ["linear", "mlp"])
def test_pooling_and_heads_read_no_padding(pooling: str, head_type: str) -> None:
    model = make_model(BERT, tasks=KIND_TASKS, pooling=pooling, head_type=head_type).eval()
    alone, in_batches = alone_and_in_batches(model, 5, 16)
    torch.testing.assert_close(torch.stack(in_batches), alone.expand(3, -1), rtol=1e-5, atol=1e-6)


class Recurrent(nn.Module):
    """A head of tokens, which reads them in both directions and so begins at the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(32, 8, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(16, 5)

    def forward(self, states: Tensor) -> Tensor:
        return cast(Tensor, self.linear(self.layer(states)[0]))


def test_own_pooling_and_heads_are_measured_too() -> None:
    torch.manual_seed(0)
    model = build(load_encoder(BERT))
    check_texts_are_independent(model, 16)
    pool, model.pool = model.pool, lambda states, _: states.mean(1)
    with pytest.raises(ModelError, match=r"^pooling: `mean` must .*beside a longer one"):
        check_texts_are_independent(model, 16)
    model.pool, model.heads[1] = pool, Recurrent()
    with pytest.raises(ModelError, match=r"^head_type: `linear` of the task `spans` must "):
        check_texts_are_independent(model, 16)


def test_the_check_runs_once_and_leaves_everything_as_it_was() -> None:
    model = build(load_encoder(BERT)).train()
    calls: list[object] = []
    model.encoder.register_forward_hook(lambda *_: calls.append(torch.rand(1)))
    before = torch.get_rng_state()
    for num_calls in (4, 4):
        check_texts_are_independent(model, 57)
        assert len(calls) == num_calls
        assert torch.equal(torch.get_rng_state(), before)
        assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
