from pathlib import Path
from typing import Any

import pytest
from support.several_sources import write_sources
from support.tiny import tiny_study, write_study

from hpo.config.study_config import load_study, stored_study
from hpo.errors import StudyFileError

EITHER = {"type": "categorical", "choices": ["none", "lora"]}
BASE = {"type": "categorical", "choices": ["fp32", "nf4"]}
LAYERS = {"type": "int", "low": 0, "high": 2}
STATES = {"type": "categorical", "choices": ["fp32", "int8"]}
OPTIMIZERS = {"type": "categorical", "choices": ["adamw", "sgd"]}
PRECISIONS = {"type": "categorical", "choices": ["bf16", "bf16-true"]}
WEIGHT = {"type": "float", "low": 0.0, "high": 2.0}
MAYBE = {"type": "categorical", "choices": [1, 0]}
BOTH_WEIGHTS = {"training": {"sampling_weight.news": 0}, "search_space": {"sampling_weight.mail": WEIGHT}}
SYNTHETIC = {"name": "a", "source": "synthetic"}


@pytest.mark.parametrize(
    ("training", "space", "message"),
    [
        ({"lora_rank": 4}, {}, "training.lora_rank: needs an adapter, but there is none. Set"),
        ({"base_precision": "nf4"}, {}, "training.base_precision: needs an adapter, but there is none."),
        ({}, {"base_precision": BASE}, "search_space.base_precision: needs an adapter, but there is none."),
        ({"base_precision": "int8"}, {"adapter": EITHER}, "training.base_precision: must be fp32 without an"),
        ({}, {"adapter": EITHER, "base_precision": BASE}, r"must be fp32 .*`when: \{adapter: \[lora\]\}`"),
        ({"adapter": "lora", "freeze_layers": 2}, {}, "training.freeze_layers: must be 0 with an adapter"),
        ({}, {"adapter": EITHER, "freeze_layers": LAYERS}, r"must be 0 .*`when: \{adapter: \[none\]\}`"),
        ({"adapter": "lora", "lora_targets": []}, {}, "training.lora_targets: must be `all-linear` or a"),
        ({"optimizer_state": "int8", "optimizer": "sgd"}, {}, "training.optimizer_state: must be fp32"),
        ({"optimizer": "adafactor"}, {"optimizer_state": STATES}, "must be fp32 with `optimizer: adafactor`"),
        ({}, {"optimizer": OPTIMIZERS, "optimizer_state": STATES}, r"`when: \{optimizer: \[adamw\]\}`"),
        ({"fp32_parts": ["heads"]}, {"fp_precision": PRECISIONS}, r"be \[\] .*\{fp_precision: \[bf16\]\}`"),
    ],
)
def test_impossible_combination(tmp_path: Path, training: Any, space: Any, message: str) -> None:
    with pytest.raises(StudyFileError, match=message) as refused:
        tiny_study(tmp_path, training=training, search_space=space)
    assert str(refused.value).count("\n") == 0, "one error"


@pytest.mark.parametrize(
    ("training", "space"),
    [
        ({}, {"adapter": EITHER, "base_precision": {**BASE, "when": {"adapter": "lora"}}}),
        ({}, {"adapter": EITHER, "freeze_layers": {**LAYERS, "when": {"adapter": "none"}}}),
        ({}, {"optimizer": OPTIMIZERS, "optimizer_state": {**STATES, "when": {"optimizer": "adamw"}}}),
        ({"lora_rank": 4}, {"adapter": EITHER}),
        ({"adapter": "dora"}, {"base_precision": BASE}),
        ({"base_precision": "fp32", "lora_rank": 8}, {}),
    ],
)
def test_possible_combination(tmp_path: Path, training: dict[str, Any], space: dict[str, Any]) -> None:
    assert tiny_study(tmp_path, training=training, search_space=space)


def test_a_grid_has_no_more_combinations_than_a_study_has_trials(tmp_path: Path) -> None:
    wide = {"seed": {"type": "int", "low": 1, "high": 50_001}, "fp_precision": PRECISIONS}
    with pytest.raises(StudyFileError, match=r"search_space: must have at most 100,000 .* has 100,002\."):
        tiny_study(tmp_path, sampler={"name": "grid"}, search_space=wide)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"sampling_weight.new": 2}}, "there is no such source. Did you mean `news`?"),
        ({"search_space": {"sampling_weight.new": WEIGHT}}, "there is no such source. Did you mean `news`?"),
        ({"training": {"sampling_weight": {"news": 0, "mail": 0}}}, "one source must have a weight above 0"),
        (BOTH_WEIGHTS, "one source must have a weight above 0"),
        ({"search_space": {"sampling_weight.news": MAYBE, "sampling_weight.mail": WEIGHT}}, "all can have 0"),
        ({"search_space": {"sampling_weight": WEIGHT}}, "Did you mean `sampling_weight.<source>`?"),
        ({"data": {"source": "synthetic"}, "training": {"sampling_weight.a": 2}}, "there is no such source"),
        ({"data": {"source": "synthetic"}, "training": {"sampling_temperature": 2}}, "needs `data.sources`"),
    ],
)
def test_sampling_must_fit_sources(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StudyFileError) as refused:
        tiny_study(tmp_path, **{"data": write_sources(tmp_path), **changes})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "jsonl"}, "data.source: must be given in each of `sources`, not outside them."),
        ({"sources": []}, "data.source: must be given."),
        ({"sources": [{"source": "synthetic"}]}, "data.sources.0.name: must be given."),
        ({"sources": [{"name": "a"}]}, "data.sources.0.source: must be given."),
        ({"sources": [{"name": "a.b", "source": "synthetic"}]}, "a source's name must be a letter followed"),
        ({"sources": [SYNTHETIC, dict(SYNTHETIC)]}, "sources.1.name: `a` is there twice."),
        ({"sources": [{"name": "a", "source": "jsonl"}]}, "data.sources.0.path: must be given for jsonl"),
        ({"sources": [SYNTHETIC], "pair_segments": ["a", "b"]}, "is read with source jsonl, but the source"),
    ],
)
def test_each_source_is_checked(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StudyFileError) as refused:
        tiny_study(tmp_path, data=write_sources(tmp_path) | change)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_definition_of_several_sources(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, data=write_sources(tmp_path, rename={"tone": "mood"}))
    definition = study.definition()
    news, mail = definition["data"]["sources"]
    assert "hub" not in news
    assert "source" not in definition["data"]
    assert mail["rename"] == {"tone": "mood"}
    assert stored_study("tiny", definition).data == study.data
    (tmp_path / "moved").mkdir()
    data = write_sources(tmp_path / "moved", rename={"tone": "mood"})
    moved = load_study(write_study(tmp_path, data=data))
    assert moved.resumed(definition).data == moved.data
