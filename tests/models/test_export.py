import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.tiny_encoders import DECODER_SIZES, FAMILIES, KIND_TASKS, dropout_rates, make_batch, make_model
from transformers import AutoModel

from hpo.errors import ModelError, RunError
from hpo.models.encoder import load_tokenizer
from hpo.models.export import ExportSettings, export_model, load_exported
from hpo.models.multitask import MultitaskModel
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import Windowing


def exported(folder: Path, model: MultitaskModel | None = None, **changes: Any) -> Path:
    settings = {"windowing": Windowing(16), "attention": "sdpa", "precision": "fp32", **changes}
    return export_model(model or make_model(), load_tokenizer("minilm"), folder, ExportSettings(**settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return exported(tmp_path / "x")


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "electra", "minilm"])
def test_exported_logits_are_equal_bit_for_bit(family: str, tmp_path: Path) -> None:
    heads = {"head_type": "mlp", "head_hidden_size": 24, "head_dropout": 0.2, "loss_weighting": "uncertainty"}
    config, attention = (family, "sdpa") if family == "minilm" else FAMILIES[family]
    settings: dict[str, Any] = {"pooling": "attention", "dropout": 0.15, "tasks": KIND_TASKS, **heads}
    model = make_model(config, attention=attention, **settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that none equals a fresh one
            parameter.add_(0.01 * torch.randn_like(parameter))
    decisions = {"multi": asdict(DecodingThresholds(threshold=0.25)), "single": {}}
    written = {"attention": attention, "precision": "bf16", "decisions": decisions}
    written["csv"] = {"delimiter": ";", "header": False, "names": ["id", "text"]}
    exported(tmp_path / "export", model, **written)
    loaded, tokenizer, read = load_exported(tmp_path / "export")
    assert (loaded.tasks, loaded.training) == (KIND_TASKS, False)
    assert read == ExportSettings(windowing=Windowing(16), **written)
    assert model.encoder.config._attn_implementation == loaded.encoder.config._attn_implementation
    assert dropout_rates(loaded) == dropout_rates(model)
    text = "Anxious and tired, [SEP] can't sleep"
    assert tokenizer(text)["input_ids"] == load_tokenizer("minilm")(text)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(*make_batch()), model(*make_batch()), rtol=0, atol=0)
        by_transformers = AutoModel.from_pretrained(tmp_path / "export", attn_implementation=attention)
        hidden = by_transformers(*make_batch()).last_hidden_state
        assert torch.equal(hidden, model.encoder(*make_batch()).last_hidden_state)


def test_tied_weights_of_heads_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one head, between two heads, and with the encoder."""
    build = MultitaskModel.__init__

    def tie(model: Any, *args: Any) -> None:
        build(model, *args)
        first, second = (head[-1] for head in model.heads)
        first.inner, second.inner = (torch.nn.Linear(32, 32) for _ in range(2))
        first.twin, second.inner.weight = first.inner, first.inner.weight
        second.table = model.encoder.get_input_embeddings()

    monkeypatch.setattr(MultitaskModel, "__init__", tie)
    model = make_model()
    loaded = load_exported(exported(tmp_path / "export", model))[0]
    first, second = (head[-1] for head in loaded.heads)
    assert first.twin.weight is second.inner.weight
    assert second.table.weight is loaded.encoder.get_input_embeddings().weight
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("vocab_size", [None, 31_000])
def test_tokenizer_beside_another_type_of_encoder(tmp_path: Path, vocab_size: int | None) -> None:
    """transformers would load Qwen2's tokenizer with another vocabulary."""
    config = {"model_type": "qwen2", **DECODER_SIZES} | ({"vocab_size": vocab_size} if vocab_size else {})
    tokenizer = load_exported(exported(tmp_path / "export", make_model(config)))[1]
    text = "Anxious and tired, can't sleep"
    assert tokenizer(text) == load_tokenizer("minilm")(text)


def test_export_replaces_only_an_export(folder: Path, tmp_path: Path) -> None:
    exported(folder, windowing=Windowing(12))
    assert load_exported(folder)[2].windowing == Windowing(12)
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert set(modes.values()) == {modes["hpo.json"]}, "others can read the files"
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("...")
    with pytest.raises(ModelError, match="this one holds other files"):
        exported(other)
    assert sorted(path.name for path in tmp_path.rglob("*.tex")) == ["chapter1.tex"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis", "x"]


def test_full_disk_keeps_the_old_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("hpo.models.export.save_file", full)
    with pytest.raises(RunError, match=r"x could not be written: .*No space left on device\. Free space"):
        exported(folder, windowing=Windowing(12))
    assert load_exported(folder)[2].windowing == Windowing(16)
    assert [path.name for path in folder.parent.iterdir()] == ["x"]


@pytest.mark.parametrize(
    "change",
    [
        {"head_type": "mlp"},  # the stored weights are of a linear head
        {"pooling": "media"},
        {"precision": "fp31"},
        {"windowing": {"max_length": 16, "long_text": "truncate", "stride": 0, "pair_segments": ["one"]}},
        {"checksums": []},
        {"tasks": [{"name": "t", "kind": "regresion"}]},
        {"fp32_parts": None},  # left out: a default might change predictions
    ],
    ids=str,
)
def test_invalid_setting_is_refused(change: dict[str, Any], folder: Path) -> None:
    content = json.loads((folder / "hpo.json").read_text()) | change
    (folder / "hpo.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(ModelError, match=f"{folder} must be a whole folder"):
        load_exported(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "heads.safetensors", "tokenizer.json"])
def test_changed_bytes_are_refused(folder: Path, name: str) -> None:
    """The file keeps its length, so it would load and predict nonsense."""
    content = (folder / name).read_bytes()
    half = len(content) // 2
    (folder / name).write_bytes(content[:half] + np.random.default_rng(0).bytes(len(content) - half))
    with pytest.raises(ModelError, match=rf"{folder} must be .*: {name} has changed since: its checksum"):
        load_exported(folder)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    torch.save(load_exported(folder)[0].encoder.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_exported(folder)
