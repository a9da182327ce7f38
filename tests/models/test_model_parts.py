"""Names of parts, and the modules that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import TASKS, TinyEncoder, tiny_model
from support.tiny_encoders import FAMILIES
from torch import nn

from hpo.errors import ModelError
from hpo.models.attention import FLASH
from hpo.models.encoder import load_encoder
from hpo.models.model_parts import (
    inner_parts,
    part_modules,
    set_float32_parts,
    smallest_named_parts,
)
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.precision.parts import float32_modules

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def bert() -> MultitaskModel:
    return MultitaskModel(load_encoder(BERT), TASKS, HeadSettings(pooling="attention"))


@pytest.fixture(scope="module")
def model() -> MultitaskModel:
    return bert()


def names(model: MultitaskModel, part: str) -> list[str]:
    named = {id(module): name for name, module in model.named_modules()}
    return [named[id(module)] for module in part_modules(model, part)]


@pytest.mark.parametrize(
    ("part", "modules"),
    [
        ("embeddings", ["encoder.embeddings"]),
        ("layers.1", ["encoder.encoder.layer.1"]),
        ("layers.1-2", ["encoder.encoder.layer.1", "encoder.encoder.layer.2"]),
        ("attention", [f"encoder.encoder.layer.{number}.attention" for number in range(3)]),
        ("heads", ["heads.0", "heads.1", "heads.2", "heads.3", "pool"]),
        ("heads.tags", ["heads.1"]),
        ("encoder.encoder.layer.0.output.dense", ["encoder.encoder.layer.0.output.dense"]),
    ],
)
def test_modules_of_a_part(model: MultitaskModel, part: str, modules: list[str]) -> None:
    assert names(model, part) == modules


def test_norms_are_those_of_embeddings_and_layers(model: MultitaskModel) -> None:
    found = part_modules(model, "norms")
    assert len(found) == 1 + 2 * 3
    assert all(isinstance(module, nn.LayerNorm) for module in found)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("layers.3", "layers must be between 0 and 2, the first before the last, but got `layers.3`"),
        ("layers.2-1", "layers must be between 0 and 2, the first before the last, but got `layers.2-1`"),
        ("heads.topik", "BertModel has no `heads.topik`. Did you mean `heads.topic`"),
        ("embedings", "BertModel has no `embedings`. Did you mean `embeddings`"),
        ("", "BertModel has no ``"),
    ],
)
def test_an_unknown_part(model: MultitaskModel, part: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        part_modules(model, part)


def test_an_encoder_without_attention_modules() -> None:
    model = tiny_model()
    model.encoder.config.num_hidden_layers = 1  # type: ignore[union-attr]
    model.encoder.layers = nn.ModuleList([nn.Linear(16, 16)])  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="TinyEncoder has no module of the part `attention`"):
        part_modules(model, "attention")


def test_flash_attention_has_no_fp32(model: MultitaskModel) -> None:
    model = bert()
    model.encoder.config._attn_implementation = FLASH  # type: ignore[union-attr]
    set_float32_parts(model, ["heads"])
    for part in ("attention", "layers.0", "encoder"):
        with pytest.raises(ModelError, match=f"`{part}` contains attention, and `attention: flash`"):
            set_float32_parts(model, [part])


def test_parts_replace_earlier_ones() -> None:
    model = bert()
    set_float32_parts(model, ["layers.0"])
    set_float32_parts(model, ["heads.topic"])
    assert all(name.startswith("heads.0") for name in float32_modules(model))


def test_the_smallest_named_parts(model: MultitaskModel) -> None:
    assert smallest_named_parts(model) == [
        "embeddings",
        *("layers.0", "layers.1", "layers.2"),
        *("encoder.pooler", "pool"),
        *("heads.topic", "heads.tags", "heads.slots", "heads.size"),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_named_parts_contain_each_weight_once(name: str) -> None:
    config, attention = FAMILIES[name]
    model = MultitaskModel(load_encoder(config, attention=attention), TASKS, HeadSettings())
    parts = smallest_named_parts(model)
    inside = [id(one) for part in parts for root in part_modules(model, part) for one in root.parameters()]
    assert sorted(inside) == sorted(id(one) for one in model.parameters())


def test_an_encoder_without_layers() -> None:
    model = MultitaskModel(TinyEncoder(), TASKS, HeadSettings())
    assert smallest_named_parts(model)[:2] == ["encoder.embedding", "encoder.dense"]


def test_modules_inside_a_part(model: MultitaskModel) -> None:
    layer = "encoder.encoder.layer.0"
    assert inner_parts(model, "layers.0") == [
        f"{layer}.{name}" for name in ("attention", "intermediate", "output")
    ]
    assert inner_parts(model, f"{layer}.output") == [f"{layer}.output.dense", f"{layer}.output.LayerNorm"]
    assert inner_parts(model, f"{layer}.output.dense") == []
    assert inner_parts(model, "heads.topic") == ["heads.0.1"]
