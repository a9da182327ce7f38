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
MPNET = BERT | {"model_type": "mpnet"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Intact folder of an encoder, for a test to break."""
    return save_encoder(tmp_path / "encoder")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def remove_tensors(folder: Path, *names: str) -> None:
    """Remove the weights with one of these names in their key."""
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if not any(name in key for name in names)}
    kept["other.weight"] = torch.ones(3)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickle_weights(folder: Path) -> Path:
    """Write the weights as a file of PyTorch instead, and return its path."""
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"must hold a config\.json, but there is none"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is no valid JSON: Expecting"),
        (lambda folder: change_config(folder, vocab_size=31000), f"shapes .*, but {WORDS} is .30522, 32. "),
        (lambda folder: cut_in_half(folder / "model.safetensors"), "model.safetensors is damaged.*Download"),
        (
            lambda folder: pickle_weights(folder).write_text("version https://git-lfs.github.com"),
            r"pytorch_model\.bin is damaged, or a pointer .*`git lfs pull` gets the file\)\. Download",
        ),
        (
            lambda folder: remove_tensors(folder, "layer.1.output.dense.weight"),
            r"missing .*: encoder\.layer\.1\.output\.dense\.weight",
        ),
    ],
)
def test_damaged_folder_is_refused(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        make_model(str(folder))


def change_weight(folder: Path, name: str, value: float) -> None:
    """Change the first number of a stored weight."""
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nonfinite_weight_is_refused(folder: Path, value: float) -> None:
    name = "encoder.layer.1.output.dense.weight"
    change_weight(folder, name, value)
    with pytest.raises(ModelError, match=rf"must be finite, .* infinite numbers in {name}\. Download"):
        load_encoder(str(folder))


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def save_slow_tokenizer(folder: Path) -> None:
    remove_tokenizer(folder)
    CanineTokenizer().save_pretrained(folder)


def raise_token_id(folder: Path) -> None:
    """Move one id beyond the encoder's embeddings, with as many tokens as before."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 40000
    (folder / "tokenizer.json").write_text(json.dumps(saved))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tokenizer, "a tokenizer must have a vocabulary, but there is none"),
        (save_slow_tokenizer, r"must be a fast one, .* but CanineTokenizer is not"),
        (lambda folder: change_config(folder, vocab_size=30000), r"vocab_size is 30000 .* has 30522 tokens"),
        (raise_token_id, r"vocab_size is 30522 .* 30522 tokens with ids up to 40000"),
    ],
)
def test_unfit_tokenizer_is_refused(damage: Callable[[Path], Any], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(folder))


def test_code_of_a_model_runs_only_if_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    names = {"AutoConfig": "homemade.HomemadeConfig", "AutoModel": "homemade.HomemadeModel"}
    change_config(folder, model_type="homemade", auto_map=names)
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


@pytest.mark.parametrize(
    ("encoder", "settings", "message"),
    [
        (BERT | {"hidden_sise": 64}, {}, r"`hidden_sise` is not a key of bert\. Did you mean `hidden_size`"),
        (BERT | {"vocab_size": 100}, {}, r"vocab_size is 100 and the tokenizer .* has 30522 tokens"),
        ({"model_type": "t5"}, {}, "trains encoders and decoders, but t5 is both"),
        (BERT, {"max_length": 65}, "at most the 64 positions of this BertModel, but it is 65"),
        (BERT, {"freeze_layers": 3}, "between 0 and the encoder's 2 layers, but it is 3"),
        (MPNET, {"attention": "eager", "gradient_checkpointing": True}, "MPNetModel does not support it"),
    ],
)
def test_impossible_configuration_is_refused(
    encoder: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make_model(encoder, **settings)
