"""Every way in which an encoder can be wrong ends in one clear ModelError, and quickly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import BERT, SIZES, make_model
from transformers import BertModel, GPT2Config, GPT2Model, T5Config, T5Model, ViTConfig, ViTModel

from hpo.data.tasks import Task
from hpo.errors import ModelError
from hpo.models.encoder import load_encoder, load_tokenizer, resolve_encoder
from hpo.models.multitask import MultitaskModel

TASKS = (Task("label", "single_label", ("a", "b")),)
FNET = {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}


def build(encoder: str | dict[str, Any] = BERT, **settings: Any) -> MultitaskModel:
    return make_model(encoder, tasks=TASKS, **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good folder, for a test to break."""
    path = tmp_path / "encoder"
    module: Any = load_encoder(BERT)
    module.save_pretrained(path)
    load_tokenizer(BERT).save_pretrained(path)
    return path


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# Names and folders.


@pytest.mark.parametrize("name", ["./models/bert", "/no/such/folder", "~/nothing/here", "a/b/c", ""])
def test_a_name_that_is_neither_folder_nor_hub_id(name: str, tmp_path: Path) -> None:
    if not name:
        # The study's own folder: it is one, but holds no model.
        with pytest.raises(ModelError, match=r"must hold a config\.json, but there is none"):
            load_encoder(resolve_encoder(name, tmp_path))
        return
    with pytest.raises(ModelError, match=r"must be `minilm`, a hub id .* is no folder"):
        resolve_encoder(name, tmp_path)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    for load in (load_encoder, load_tokenizer):
        with pytest.raises(ModelError, match=r"must hold a config\.json, but there is none"):
            load(str(folder))


def without_tensors(folder: Path, *names: str) -> None:
    """Weights that lack what holds one of these names."""
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if not any(name in key for name in names)}
    save_file(
        {**kept, "other.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "must be JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must be a JSON object"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"must hold weights \(model\.safetensors .* none",
        ),
        (lambda folder: cut_in_half(folder / "model.safetensors"), "could not be loaded"),
        (
            lambda folder: without_tensors(folder, ""),
            r"\d+ tensors are missing and would be random: embeddings",
        ),
        (
            lambda folder: without_tensors(folder, "layer.1.output.dense.weight"),
            r"1 tensors are missing .*: encoder\.layer\.1\.output\.dense\.weight",
        ),
        (lambda folder: change_config(folder, hidden_size=64), "could not be loaded"),
        (
            lambda folder: change_config(folder, model_type="bertt"),
            r"it is 'bertt'\. Did you mean `\w*bert\w*`",
        ),
        (lambda folder: change_config(folder, is_decoder=True), "bert is a decoder"),
    ],
)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        build(str(folder))


def test_a_folder_with_a_shard_missing(folder: Path) -> None:
    module: Any = load_encoder(str(folder))
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size="1MB")
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"or all shards of an index\), but there are none"):
        build(str(folder))
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"or all shards of an index\), but there are none"):
        build(str(folder))


def test_weights_without_a_pooler_are_fine(folder: Path) -> None:
    without_tensors(folder, "pooler")
    build(str(folder))


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ModelError, match="a tokenizer must have a vocabulary, but there is none"):
        load_tokenizer(str(folder))


def test_a_tokenizer_with_more_tokens_than_embeddings(folder: Path) -> None:
    change_config(folder, vocab_size=30000)
    with pytest.raises(ModelError, match=r"vocab_size is 30000 and the tokenizer .* has 30522 tokens"):
        load_tokenizer(str(folder))
    with pytest.raises(ModelError, match=r"vocab_size is 100 and the tokenizer .* has 30522 tokens"):
        build({**BERT, "vocab_size": 100})


# Code that comes with the model.


def add_code(folder: Path) -> None:
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


def test_code_of_a_model_runs_only_when_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils

    modules = tmp_path / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    add_code(folder)
    with pytest.raises(ModelError, match=r"set `model\.trust_remote_code: true`"):
        build(str(folder))
    assert not list(tmp_path.rglob("ran"))
    trusted = build(str(folder), trust_remote_code=True)
    assert isinstance(trusted.encoder, BertModel)
    assert type(trusted.encoder).__name__ == "HomemadeModel"
    assert list(tmp_path.rglob("ran"))


# Models that are no encoders.


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=30522)),
            "gpt2 is a decoder: a token sees only those before it",
        ),
        (
            lambda: T5Model(T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=30522)),
            "t5 is an encoder-decoder",
        ),
        (
            lambda: ViTModel(ViTConfig(hidden_size=32, **SIZES)),
            "must take input_ids and attention_mask, but ViTModel does not",
        ),
    ],
    ids=["decoder", "encoder-decoder", "vision"],
)
def test_only_text_encoders_are_trained(module: Any, message: str, tmp_path: Path) -> None:
    module().save_pretrained(tmp_path / "other")
    load_tokenizer("minilm").save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=message):
        build(str(tmp_path / "other"))


# Inline configurations.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_sise": 64}, r"`hidden_sise` is not a key of bert\. Did you mean `hidden_size`"),
        ({"n_layers": 4}, "`n_layers` is not a key of bert"),
        ({"dtype": "bfloat16"}, "`dtype` is not a key of bert"),
        ({"model_type": "brt"}, r"got `brt`\. Did you mean `\w*b\w*rt\w*`"),
        ({"model_type": None}, "must have a `model_type` that transformers knows"),
        ({"hidden_size": "wide"}, "a fresh bert could not be loaded .*hidden_size"),
        ({"hidden_size": 33}, "hidden size .33. is not a multiple of the number of attention heads"),
        ({"hidden_act": "gulu"}, "a fresh bert could not be loaded .*gulu"),
        ({"tokenizer": "./nowhere"}, r"`\./nowhere` must be .* no folder"),
        ({"tokenizer": 3}, "`tokenizer` must be a name or a folder, but got 3"),
    ],
)
def test_a_bad_inline_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build({**BERT, **changes})


# Settings that the encoder or the machine cannot do.


@pytest.mark.parametrize(
    ("encoder", "settings", "message"),
    [
        (
            {},
            {"max_length": 65},
            "max_length must be at most the 64 positions of this BertModel, but it is 65",
        ),
        ({"model_type": "roberta"}, {"max_length": 64}, "at most the 63 positions of this RobertaModel"),
        (
            {"model_type": "modernbert"},
            {"max_length": 65},
            "at most the 64 positions of this ModernBertModel",
        ),
        ({}, {"freeze_layers": 3}, "between 0 and the encoder's 2 layers, but it is 3"),
        ({}, {"freeze_layers": -1}, "between 0 and the encoder's 2 layers, but it is -1"),
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
        build({**BERT, **encoder}, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have flash attention")
def test_flash_attention_without_a_gpu() -> None:
    with pytest.raises(ModelError, match=r"attention: `flash` does not work for .* Use sdpa or eager"):
        build(attention="flash")


def test_a_dropout_that_the_encoder_does_not_have() -> None:
    roformer = {"model_type": "roformer", "hidden_size": 32, **SIZES, "embedding_size": 16}
    build(roformer, attention="eager", dropout=0.2, attention_dropout=0.2)
    with pytest.raises(ModelError, match="attention_dropout: a fresh fnet must have one of attention_probs"):
        build(FNET, attention="eager", attention_dropout=0.2)


def test_an_encoder_that_does_not_see_the_mask() -> None:
    with pytest.raises(ModelError, match="must take input_ids and attention_mask, but FNetModel does not"):
        build(FNET, attention="eager")


def test_no_task() -> None:
    with pytest.raises(ModelError, match="at least one task"):
        make_model(BERT, tasks=())
