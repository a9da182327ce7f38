from typing import Any

import pytest
from support.tiny import TASKS, TinyEncoder
from support.tiny_encoders import BERT, FAMILIES

from hpo.errors import ModelError
from hpo.models.attention import FLASH
from hpo.models.encoder import load_encoder
from hpo.models.model_parts import part_modules, set_float32_parts, smallest_named_parts
from hpo.models.multitask import HeadSettings, MultitaskModel

LAYER = "encoder.encoder.layer"


@pytest.fixture
def model() -> MultitaskModel:
    encoder = load_encoder({**BERT, "num_hidden_layers": 3})
    return MultitaskModel(encoder, TASKS, HeadSettings(pooling="attention"))


@pytest.mark.parametrize(
    ("part", "modules"),
    [
        ("embeddings", ["encoder.embeddings"]),
        ("layers.1", [f"{LAYER}.1"]),
        ("layers.1-2", [f"{LAYER}.1", f"{LAYER}.2"]),
        ("attention", [f"{LAYER}.{number}.attention" for number in range(3)]),
        ("heads", ["heads.0", "heads.1", "heads.2", "heads.3", "pool"]),
        ("heads.tags", ["heads.1"]),
        (f"{LAYER}.0.output.dense", [f"{LAYER}.0.output.dense"]),
    ],
)
def test_modules_of_a_part(model: MultitaskModel, part: str, modules: list[str]) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    assert [names[id(module)] for module in part_modules(model, part)] == modules


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("layers.3", "layers must be between 0 and 2, the first before the last, but got `layers.3`"),
        ("layers.2-1", "layers must be between 0 and 2, the first before the last, but got `layers.2-1`"),
        ("heads.topik", "BertModel has no `heads.topik`. Did you mean `heads.topic`"),
        ("", "BertModel has no ``"),
    ],
)
def test_unknown_part_is_refused(model: MultitaskModel, part: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        part_modules(model, part)


def test_flash_attention_has_no_fp32(model: Any) -> None:
    model.encoder.config._attn_implementation = FLASH
    set_float32_parts(model, ["heads"])
    for part in ("attention", "layers.0", "encoder"):
        with pytest.raises(ModelError, match=f"`{part}` contains attention, and `attention: flash`"):
            set_float32_parts(model, [part])


@pytest.mark.parametrize("name", FAMILIES)
def test_named_parts_contain_each_weight_once(name: str) -> None:
    config, attention = FAMILIES[name]
    model = MultitaskModel(load_encoder(config, attention=attention), TASKS, HeadSettings())
    parts = smallest_named_parts(model)
    assert {"layers.0", "layers.1", "heads.topic"} < {*parts}
    inside = [id(one) for part in parts for root in part_modules(model, part) for one in root.parameters()]
    assert sorted(inside) == sorted(id(one) for one in model.parameters())
    assert smallest_named_parts(MultitaskModel(TinyEncoder(), TASKS, HeadSettings()))[1] == "encoder.dense"
