"""Families that are known to break: their real classes, with weights that make the known fault happen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import tiny_measurement, tiny_objective
from support.tiny_encoders import BERT, FAMILIES, LABEL, make_batch
from torch import nn
from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    T5Config,
    T5EncoderModel,
)

from hpo.config.sections import CompatConfig
from hpo.data.batches import Batch
from hpo.models.encoder import load_encoder
from hpo.models.multitask import HeadSettings, build_model
from hpo.trial.compat import Compatibility, judge

DROP_NOTHING = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISENTANGLED: dict[str, Any] = {
    **{key: value for key, value in BERT.items() if key != "model_type"},
    **DROP_NOTHING,
    "vocab_size": 100,
    "relative_attention": True,
    "position_biased_input": False,
    "max_relative_positions": 64,
    "pos_att_type": ["p2c", "c2p"],
}


def check(encoder: nn.Module, name: str) -> Compatibility:
    torch.manual_seed(0)
    model = build_model(encoder, (LABEL,), HeadSettings(head_dropout=0.0), max_length=16)
    ids_BL, mask_BL = make_batch((12, 3, 1))
    labels = {"label": torch.tensor([0, 1, 2])}
    batch = Batch(ids_BL % 90 * mask_BL, mask_BL, None, labels, np.arange(3), np.array([12, 3, 1]))
    return judge(tiny_measurement(model, batch, tiny_objective((LABEL,)), name), CompatConfig())


def t5(gain: float) -> nn.Module:
    """With products of gate and input as large as those of real T5 checkpoints (transformers 9295)."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    model = T5EncoderModel(
        T5Config(vocab_size=100, **sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    )
    layer: Any = model.encoder.block[0].layer[1].DenseReluDense
    with torch.no_grad():
        layer.wi_0.weight.mul_(gain)
        layer.wi_1.weight.mul_(gain)
        layer.wo.weight.div_(gain**2)
    return model


def deberta_v2(bias: float) -> nn.Module:
    """With queries and keys of a common part, which softmax drops and a score must hold all the same."""
    torch.manual_seed(0)
    model = DebertaV2Model(DebertaV2Config(**DISENTANGLED))
    attention: Any = model.encoder.layer[0].attention
    with torch.no_grad():
        for each in (attention.self.query_proj, attention.self.key_proj):
            each.bias.fill_(bias)
        for each in (attention.self.value_proj, attention.output.dense):
            each.weight.mul_(30)
    return model


FEED_FORWARD = "first module that made them so is encoder.encoder.block.0.layer.1.DenseReluDense"
SCORES = "first module that made them so is encoder.encoder.layer.0.attention.self"


@pytest.mark.parametrize(
    ("build", "size", "name", "verdict", "said"),
    [
        (t5, 1, "fp16", "ok", ""),
        (t5, 300, "fp16", "incompatible", FEED_FORWARD),
        (t5, 300, "bf16", "ok", ""),
        (deberta_v2, 0, "fp16", "ok", ""),
        (deberta_v2, 200, "fp16", "incompatible", SCORES),
        (deberta_v2, 60, "bf16", "incompatible", "gradients differ from fp32's"),
        (deberta_v2, 200, "fp32", "ok", ""),
    ],
)
def test_what_a_family_is_known_for_is_found(
    build: Any, size: float, name: str, verdict: str, said: str
) -> None:
    found = check(build(size), name)
    assert (found.verdict, bool(found.reasons)) == (verdict, bool(said))
    assert said in " ".join(found.reasons)


def test_modernbert_passes_with_sdpa_where_texts_are_mostly_padding() -> None:
    """Flash attention, where it gave NaN, needs a GPU. No result of one speaks for the other."""
    config, attention = FAMILIES["modernbert"]
    for name in ("bf16", "fp16", "bf16-true"):
        torch.manual_seed(0)
        encoder = load_encoder({**config, "vocab_size": 31000}, attention=attention)
        assert check(encoder, name).verdict == "ok"
