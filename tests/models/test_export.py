"""Exports: the same logits from a folder that others can read, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_encoders import FAMILIES, KIND_TASKS, dropout_rates, make_batch, make_model
from transformers import AutoModel, AutoTokenizer

from hpo.errors import ModelError, RunError
from hpo.models.encoder import load_tokenizer
from hpo.models.export import ExportSettings, export_model, load_exported
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import prepare_model
from hpo.precision.table import PRECISIONS
from hpo.tasks.options import DecodingThresholds
from hpo.tasks.tokenized_split import Windowing


def spoil(model: MultitaskModel) -> MultitaskModel:
    """Move every weight a little, so that nothing equals what a fresh load would give."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model.eval()


def exported(folder: Path, model: MultitaskModel | None = None, **changes: Any) -> Path:
    """An export of this model, or of a fresh one."""
    settings = {"windowing": Windowing(16), "attention": "sdpa", "precision": "fp32", **changes}
    return export_model(model or make_model(), load_tokenizer("minilm"), folder, ExportSettings(**settings))


@pytest.fixture(scope="module")
def tiny_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("tiny") / "x", csv={"delimiter": ";"})


@pytest.fixture
def folder(tiny_export: Path, tmp_path: Path) -> Path:
    """An export, for a test to change."""
    return Path(shutil.copytree(tiny_export, tmp_path / "x"))


def test_weights_in_bf16_leave_rotary_frequencies_in_fp32(tmp_path: Path) -> None:
    """In bf16 the angle of a distance of 8192 would be off by 7.8 rad."""
    model = spoil(make_model(FAMILIES["modernbert"][0]))
    frequencies = {name: value.clone() for name, value in model.named_buffers()}
    assert {value.dtype for value in frequencies.values()} == {torch.float32}
    prepare_model(model, PRECISIONS["bf16-true"])
    exported(tmp_path / "export", model, precision="bf16-true")
    loaded = prepare_model(load_exported(tmp_path / "export")[0], PRECISIONS["bf16-true"])
    for one in (model, loaded):
        assert {weight.dtype for weight in one.parameters()} == {torch.bfloat16}
        for name, value in one.named_buffers():
            torch.testing.assert_close(value, frequencies[name], rtol=0, atol=0)
    batch = make_batch()
    for name, logits in model(*batch).items():
        assert torch.equal(loaded(*batch)[name], logits)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2", "electra", "minilm"])
def test_export_gives_the_same_logits_bit_for_bit(family: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "pooling": "attention",
        "head_type": "mlp",
        "head_hidden_size": 24,
        "head_dropout": 0.2,
        "dropout": 0.15,
        "loss_weighting": "uncertainty",
        "tasks": KIND_TASKS,
    }
    config, attention = (family, "sdpa") if family == "minilm" else FAMILIES[family]
    model = spoil(make_model(config, attention=attention, **settings))
    tokenizer = load_tokenizer("minilm")
    decisions: dict[str, Any] = {"multi": DecodingThresholds(threshold=0.25), "single": {}}
    exported(tmp_path / "export", model, attention=attention, precision="bf16", decisions=decisions)
    loaded, loaded_tokenizer, settings_read = load_exported(tmp_path / "export")

    assert loaded.tasks == KIND_TASKS
    assert not loaded.training
    assert settings_read == ExportSettings(
        windowing=Windowing(16),
        attention=attention,
        precision="bf16",
        decisions={"multi": asdict(decisions["multi"]), "single": {}},
    )
    assert model.encoder.config._attn_implementation == loaded.encoder.config._attn_implementation
    text = "Anxious and tired, [SEP] can't sleep"
    assert loaded_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert dropout_rates(loaded) == dropout_rates(model)
    with torch.no_grad():
        for name, logits in model(*make_batch()).items():
            assert torch.equal(loaded(*make_batch())[name], logits), name
        of_transformers = AutoModel.from_pretrained(tmp_path / "export", attn_implementation=attention)
        hidden = of_transformers(*make_batch()).last_hidden_state
        assert torch.equal(hidden, model.encoder(*make_batch()).last_hidden_state)
    by_transformers = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert by_transformers(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_an_export_of_an_earlier_version_loads(folder: Path) -> None:
    """It has no checksums, and no format of csv files."""
    assert load_exported(folder)[2].csv == {"delimiter": ";"}
    metadata = json.loads((folder / "hpo.json").read_text())
    del metadata["csv"], metadata["checksums"]
    (folder / "hpo.json").write_text(json.dumps(metadata))
    assert load_exported(folder)[2].csv == {}


def test_export_replaces_an_export_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    exported(folder, windowing=Windowing(12))
    assert load_exported(folder)[2].windowing == Windowing(12)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("...")
    with pytest.raises(ModelError, match="this one holds other files"):
        exported(other)
    assert [path.name for path in other.iterdir()] == ["chapter1.tex"]


def test_an_export_that_fails_leaves_the_old_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpo.models.export.save_file", full_disk)
    with pytest.raises(RunError, match=r"x could not be written: .*No space left on device\. Free space"):
        exported(folder, windowing=Windowing(12))
    assert load_exported(folder)[2].windowing == Windowing(16)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases = {
        tmp_path / "file": "an export needs a new or empty folder, but: Not a directory",
        tmp_path / "file" / "x": f"but: {tmp_path}/file cannot be written",
        tmp_path / ("x" * 300): "but: File name too long",
    }
    for folder, message in cases.items():
        with pytest.raises(ModelError, match=message):
            exported(folder)
    # Beside the name there must be room for that of the folder that it is written to first.
    with pytest.raises(ModelError, match="File name too long"):
        exported(tmp_path / ("x" * 255))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_exported_files_can_be_read_by_others(folder: Path) -> None:
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert set(modes.values()) == {modes["hpo.json"]}


@pytest.mark.parametrize(
    "change",
    [
        {"head_type": "mlp"},  # the stored weights are of a linear head
        {"pooling": "media"},
        {"head_dropout": 2.0},
        {"precision": "fp31"},
        {"attention": "flush"},
        {"windowing": {"max_length": 16, "long_text": "truncate", "stride": 0, "pair_segments": ["one"]}},
        {"decisions": True},
        {"tasks": [{"name": {}, "kind": "regression"}]},
        {"tasks": [{"name": "t", "kind": "regresion"}]},
        {"tasks": [{"name": "t", "kind": "token_classification"}]},
    ],
    ids=str,
)
def test_an_invalid_setting_is_refused(change: dict[str, Any], folder: Path) -> None:
    content = json.loads((folder / "hpo.json").read_text())
    (folder / "hpo.json").write_text(json.dumps(content | change))
    with pytest.raises(ModelError, match=f"{folder} must be a whole folder"):
        load_exported(folder)
