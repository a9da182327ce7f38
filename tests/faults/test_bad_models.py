"""Every way in which an encoder can be wrong ends in one clear ModelError, and quickly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_encoders import BERT, make_model, save_encoder
from transformers import CanineTokenizer

from hpo.errors import ModelError
from hpo.models.encoder import load_encoder, load_tokenizer

WORDS = "embeddings.word_embeddings.weight"
FNET = {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder, for a test to break."""
    return save_encoder(tmp_path / "encoder")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# Names and folders.


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", ""])
def test_a_name_that_is_neither_folder_nor_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match=r"must be `minilm`, a hub id .* is no folder"):
        load_encoder(name)


def without_tensors(folder: Path, *names: str) -> None:
    """Remove the weights whose key holds one of these names."""
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if not any(name in key for name in names)}
    kept["other.weight"] = torch.ones(3)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"must hold a config\.json, but there is none"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is no valid JSON: Expecting"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\x00"), "config.json is no valid JSON: "),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json must hold a JSON object"),
        (lambda folder: change_config(folder, hidden_act="gelo"), "'gelo' is missing .* does not know it"),
        (lambda folder: change_config(folder, hidden_size="16"), "'hidden_size' expected int, got str"),
        (
            lambda folder: change_config(folder, vocab_size=31000),
            f"1 tensor has another: {WORDS} is .30522, 32. ",
        ),
        (
            lambda folder: change_config(folder, hidden_size=64),
            r"tensors have others: .* and must be \(64,\)",
        ),
        (
            lambda folder: change_config(folder, max_position_embeddings=7),
            r"position_embeddings\.weight is \(\d+, 32\) and must be \(7, 32\)\. Use the config",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no file named model\.safetensors"),
        (
            lambda folder: cut_in_half(folder / "model.safetensors"),
            "model.safetensors is damaged: .*Download or",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors is damaged: "),
        (
            lambda folder: (folder / "model.safetensors").write_text(
                "version https://git-lfs.github.com/spec"
            ),
            "model.safetensors is a pointer of Git LFS. Run `git lfs pull` there",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pytorch_model.bin is damaged",
        ),
        (
            lambda folder: without_tensors(folder, "layer.1.output.dense.weight"),
            r"1 tensors are missing .*: encoder\.layer\.1\.output\.dense\.weight",
        ),
        (lambda folder: change_config(folder, model_type="bertt"), "has model type `bertt`"),
    ],
)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        make_model(str(folder))


def change_weight(folder: Path, name: str, value: float) -> None:
    """Change the first number of a stored weight."""
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["encoder.layer.1.output.dense.weight", "embeddings.LayerNorm.bias"])
def test_a_weight_must_be_finite(folder: Path, name: str, value: float) -> None:
    change_weight(folder, name, value)
    with pytest.raises(
        ModelError, match=rf"weights must be finite, .* infinite numbers in {name}\. Download"
    ):
        load_encoder(str(folder))


def test_finite_weights_may_give_numbers_that_are_not(folder: Path) -> None:
    """The model is built all the same, and checked on the data of its study."""
    change_weight(folder, "embeddings.LayerNorm.weight", 3e38)
    change_weight(folder, "encoder.layer.0.attention.self.query.weight", 3e38)
    make_model(str(folder), pooling="cls")


def test_a_pooler_may_be_missing_or_broken(folder: Path) -> None:
    """No head reads it."""
    change_weight(folder, "pooler.dense.weight", math.nan)
    make_model(str(folder))
    without_tensors(folder, "pooler")
    make_model(str(folder))


def lose_the_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


@pytest.mark.parametrize("text", ["", "{", "[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_of_a_tokenizer_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=rf"the tokenizer of .* {name} (is no valid|must hold a) JSON"):
        load_tokenizer(str(folder))


def take_a_slow_tokenizer(folder: Path) -> None:
    lose_the_tokenizer(folder)
    CanineTokenizer().save_pretrained(folder)


def take_a_tokenizer_with_a_high_id(folder: Path) -> None:
    """As many tokens as the encoder has embeddings, but one id is beyond them."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 40000
    (folder / "tokenizer.json").write_text(json.dumps(saved))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_the_tokenizer, "a tokenizer must have a vocabulary, but there is none"),
        (take_a_slow_tokenizer, r"must be a fast one, .* but CanineTokenizer is not"),
        (
            lambda folder: change_config(folder, vocab_size=30000),
            r"vocab_size is 30000 and the tokenizer .* has 30522 tokens",
        ),
        (take_a_tokenizer_with_a_high_id, r"vocab_size is 30522 .* 30522 tokens with ids up to 40000"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(folder))


# Code that comes with the model.


def test_code_of_a_model_runs_only_when_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    change_config(
        folder,
        model_type="homemade",
        auto_map={"AutoConfig": "homemade.HomemadeConfig", "AutoModel": "homemade.HomemadeModel"},
    )
    (folder / "homemade.py").write_text(
        "from pathlib import Path\n"
        "from transformers import BertConfig, BertModel\n"
        "Path(__file__).with_name('ran').touch()\n"
        "class HomemadeConfig(BertConfig):\n"
        "    model_type = 'homemade'\n"
        "class HomemadeModel(BertModel):\n"
        "    config_class = HomemadeConfig\n"
    )
    with pytest.raises(ModelError, match=r"set `model\.trust_remote_code: true`"):
        make_model(str(folder))
    assert not list(tmp_path.rglob("ran"))
    trusted = make_model(str(folder), trust_remote_code=True)
    assert type(trusted.encoder).__name__ == "HomemadeModel"
    assert list(tmp_path.rglob("ran"))


# Models that are no encoders, or lack what is asked for.


@pytest.mark.parametrize(
    ("encoder", "options", "message"),
    [
        ({"model_type": "t5"}, {}, "trains encoders and decoders, but t5 is both"),
        (
            FNET,
            {"attention": "eager", "attention_dropout": 0.2},
            "attention_dropout: a fresh fnet must have one of attention_probs",
        ),
        pytest.param(
            BERT,
            {"attention": "flash"},
            r"attention: `flash` does not work for .* Use sdpa or eager",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it may have flash attention"),
        ),
    ],
)
def test_an_encoder_that_cannot_be_used(
    encoder: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_encoder(encoder, **options)


# Inline configurations.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_sise": 64}, r"`hidden_sise` is not a key of bert\. Did you mean `hidden_size`"),
        ({"model_type": "brt"}, r"got `brt`\. Did you mean `\w*b\w*rt\w*`"),
        ({"model_type": None}, "must have a `model_type` that transformers knows"),
        ({"vocab_size": 100}, r"vocab_size is 100 and the tokenizer .* has 30522 tokens"),
        ({"hidden_act": "gulu"}, "a fresh bert could not be loaded .*gulu"),
        ({"tokenizer": 3}, "`tokenizer` must be a name or a folder, but got 3"),
    ],
)
def test_a_bad_inline_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_model({**BERT, **changes})


# Settings that the encoder or the machine cannot do.


@pytest.mark.parametrize(
    ("encoder", "settings", "message"),
    [
        ({}, {"max_length": 65}, "at most the 64 positions of this BertModel, but it is 65"),
        ({}, {"freeze_layers": 3}, "between 0 and the encoder's 2 layers, but it is 3"),
        (
            {"model_type": "albert", "embedding_size": 16},
            {"freeze_layers": 1},
            "must have one list of its 2 layers, but it has 0. Leave freeze_layers at 0",
        ),
        (
            {"model_type": "mpnet"},
            {"attention": "eager", "gradient_checkpointing": True},
            "gradient_checkpointing: MPNetModel does not support it",
        ),
        (
            {"model_type": "mpnet"},
            {"attention": "sdpa"},
            "attention: `sdpa` does not work for a fresh mpnet here.* Use eager or flash",
        ),
    ],
)
def test_a_setting_that_the_encoder_cannot_do(
    encoder: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make_model({**BERT, **encoder}, **settings)
