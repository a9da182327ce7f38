from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_encoders import (
    BERT,
    DECODERS,
    FAMILIES,
    family_encoder,
    make_batch,
    make_model,
    save_encoder,
    scalar_loss,
)
from torch import nn
from transformers import AutoModel

from hpo.data.token_cache import tokenizer_fingerprint
from hpo.errors import ModelError
from hpo.models.encoder import attention_of, load_encoder, load_tokenizer, max_positions
from hpo.precision.amp import prepare_model
from hpo.precision.table import PRECISIONS


def test_fresh_encoder_has_the_tokenizer_s_vocabulary_and_special_tokens() -> None:
    # RoBERTa's own padding id is 1; with it, positions of minilm's padding (id 0) would count.
    config: Any = load_encoder({**BERT, "model_type": "roberta"}).config
    assert (config.vocab_size, config.pad_token_id) == (30522, 0)
    bigger: Any = load_encoder({**BERT, "vocab_size": 30528}).config
    assert bigger.vocab_size == 30528


@pytest.mark.parametrize("family", FAMILIES)
def test_each_dropout_setting_changes_its_own_dropout(family: str) -> None:
    def rates(**settings: float) -> dict[str, float]:
        """Rates by name. Some families keep the rate of attention dropout as a number."""
        found = {}
        for name, part in family_encoder(family, **settings).named_modules():
            found |= {name: part.p} if isinstance(part, nn.Dropout) else {}
            numbers = {key: getattr(part, key, None) for key in ("attention_dropout", "dropout_prob")}
            found |= {f"{name}.{key}": value for key, value in numbers.items() if isinstance(value, float)}
        return found

    default, changed = rates(), (rates(dropout=0.25), rates(attention_dropout=0.35))
    hidden, weights = (dict(found.items() - default.items()) for found in changed)
    assert (set(hidden.values()), set(weights.values())) == ({0.25}, {0.35})
    assert not hidden.keys() & weights.keys()
    assert rates(dropout=0.25, attention_dropout=0.35) == default | hidden | weights


def like_bert(family: str, **changes: Any) -> dict[str, Any]:
    return {**BERT, "model_type": family, **changes}


ONE_LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
OPT = {"model_type": "opt", "num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32}
XLNET = {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64}
FROM_ZERO = ("bert", "electra", "albert", "big_bird", "convbert", "deberta", "megatron-bert", "rembert")
AFTER_PADDING = ("roberta", "camembert", "xlm-roberta", "ibert", "data2vec-text")

TABLES: list[tuple[dict[str, Any], int]] = [
    *((like_bert(family), 64) for family in (*FROM_ZERO, "mra", "yoso", "nystromformer")),
    *((like_bert(family, type_vocab_size=1), 63) for family in AFTER_PADDING),
    (like_bert("esm"), 63),
    (like_bert("xmod", type_vocab_size=1, default_language="en_XX"), 63),
    (like_bert("longformer", attention_window=[4, 4]), 63),
    (like_bert("mpnet"), 62),
    (FAMILIES["distilbert"][0], 64),
    ({"model_type": "fnet", **ONE_LAYER}, 64),
    ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}, 64),
    (OPT | ONE_LAYER, 64),
    ({"model_type": "xlm", "emb_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64}, 64),
]


def run_length(encoder: nn.Module, length: int) -> int:
    """Run one text of this length, and return the number of hidden states."""
    input_ids, mask = make_batch((length,))
    with torch.no_grad():
        return encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state.shape[1]


MAMBA = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}


@pytest.mark.parametrize(("config", "limit"), TABLES, ids=[one["model_type"] for one, _ in TABLES])
def test_table_of_positions_limits_the_length(config: dict[str, Any], limit: int) -> None:
    encoder = load_encoder(config, attention="eager")
    assert max_positions(encoder) == limit
    assert run_length(encoder, limit) == limit
    with pytest.raises((IndexError, RuntimeError)):
        run_length(encoder, limit + 1)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (FAMILIES["modernbert"][0], 64),
        (DECODERS["llama"], 64),
        (FAMILIES["deberta-v2"][0], None),
        (XLNET, None),
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}, None),
    ],
    ids=["modernbert", "llama", "deberta-v2", "xlnet", "bloom"],
)
def test_positions_without_a_table(config: dict[str, Any], limit: int | None) -> None:
    """Rotary positions have the limit of the configuration. Relative ones have none."""
    encoder = load_encoder(config, attention="eager")
    assert max_positions(encoder) == limit
    assert run_length(encoder, 200) == 200


def test_positions_of_longrope_end_where_a_longer_text_changes_a_short_one() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, **factors}
    encoder = load_encoder({**DECODERS["llama"], "rope_parameters": rope})
    limit = max_positions(encoder)
    assert limit == 8

    def beside(length: int) -> torch.Tensor:
        ids_BL = torch.arange(1, length + 1).repeat(2, 1)
        mask_BL = (torch.arange(length) < torch.tensor([4, length])[:, None]).long()
        with torch.no_grad():
            return encoder(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state[0, :4]

    torch.testing.assert_close(beside(limit), beside(4))
    assert not torch.allclose(beside(limit + 1), beside(4), rtol=1e-3)


def test_tokenizer_fingerprint_ignores_the_last_call(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("minilm")
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["some text"] * 2, truncation=True, max_length=3, padding=True)
    assert None not in (tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(load_tokenizer(str(save_encoder(tmp_path / "tiny")))) == before
    tokenizer.add_tokens(["[PII]"])
    assert tokenizer_fingerprint(tokenizer) != before


@pytest.mark.parametrize(("family", "text"), [("llava", "llama"), ("gemma3", "gemma3_text")])
def test_encoder_of_several_media_is_refused(family: str, text: str) -> None:
    with pytest.raises(ModelError, match=rf"must have a `hidden_size` .* \(model_type: {text}\)"):
        load_encoder({"model_type": family, "vision_config": {"num_hidden_layers": 1}})


@pytest.mark.parametrize(
    ("family", "input_name"), [("vit", "pixel_values"), ("wav2vec2", "input_values"), ("whisper", "")]
)
def test_encoder_of_pictures_or_sound_is_refused(family: str, input_name: str) -> None:
    match = rf"must read token ids, but it reads `{input_name}`" if input_name else "encoders and decoders"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with pytest.raises(ModelError, match=match):
        load_encoder({"model_type": family, **(sizes if input_name else {})})


@pytest.mark.parametrize("family", [*FAMILIES, "llama", "mamba", "deberta"])
def test_default_attention_equals_transformers(family: str) -> None:
    others = {"mamba": MAMBA, "deberta": {**BERT, "model_type": "deberta"}, "llama": DECODERS["llama"]}
    settings = others.get(family) or FAMILIES[family][0]
    torch.manual_seed(0)
    ours: Any = load_encoder(settings)
    torch.manual_seed(0)
    plain: Any = AutoModel.from_config(type(ours.config).from_dict(ours.config.to_dict())).eval()
    assert attention_of(ours) == plain.config._attn_implementation
    inputs = {"input_ids": torch.arange(5, 11)[None], "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    with torch.no_grad():
        assert torch.equal(ours(**inputs).last_hidden_state, plain(**inputs).last_hidden_state)


def test_attention_without_support_is_refused() -> None:
    with pytest.raises(ModelError, match=r"`sdpa` does not work for a fresh deberta-v2 .* Leave it out"):
        load_encoder(FAMILIES["deberta-v2"][0], attention="sdpa")


def test_token_that_a_tokenizer_lacks_keeps_the_encoder_s_default() -> None:
    """CLIP compares the ids with its end of a text."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = load_encoder({"model_type": "clip_text_model", **sizes})
    ids_BL = torch.tensor([[5, 6, 7]])
    states_BLD = encoder(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL)).last_hidden_state
    assert states_BLD.shape == (1, 3, 16)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_mamba_trains_under_every_head(precision: str) -> None:
    """Its states are fp32, whatever its weights are."""
    model = make_model(MAMBA)
    prepare_model(model, PRECISIONS[precision])
    scalar_loss(model).backward()
    assert all(head[-1].weight.grad.isfinite().all() for head in model.heads)
