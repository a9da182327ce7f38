from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import build_trial_config, parse_params
from hpo.errors import InputError
from hpo.precision.table import AmpConfig


def study(**keys: Any) -> StudyConfig:
    return StudyConfig.model_validate({"name": "s", "data": {"source": "synthetic"}, **keys})


@pytest.mark.parametrize(
    ("training", "params", "precision"),
    [
        ({}, {}, "bf16"),
        ({"fp_precision": "16-mixed"}, {}, "fp16"),
        ({}, {"fp_precision": "none"}, "fp32"),
    ],
)
def test_the_default_precision_counts_where_none_is_given(
    training: dict[str, Any], params: dict[str, Any], precision: str
) -> None:
    assert build_trial_config(study(training=training), params, "bf16").fp_precision == precision


@pytest.mark.parametrize(
    ("training", "params", "budget"),
    [
        ({}, {}, (3.0, None, None)),
        ({"max_seconds": 15}, {}, (None, None, 15.0)),
        ({"max_seconds": 15}, {"max_steps": 7}, (None, 7, None)),
        ({"epochs": None, "max_steps": 5}, {}, (None, 5, None)),
    ],
)
def test_a_trial_has_exactly_one_budget(
    training: dict[str, Any], params: dict[str, Any], budget: tuple[float | None, ...]
) -> None:
    config = build_trial_config(study(training=training), params, "fp32")
    assert (config.epochs, config.max_steps, config.max_seconds) == budget


def test_the_init_scale_of_the_trial_is_in_its_amp() -> None:
    preset = AmpConfig(track_stats=True, growth_interval=100)
    config = build_trial_config(study(training={"init_scale": 4.0}), {"init_scale": 1024.0}, "fp16", preset)
    assert config.amp == AmpConfig(track_stats=True, growth_interval=100, init_scale=1024.0)
    assert build_trial_config(study(amp={"init_scale": 8.0}), {}, "fp16").amp.init_scale == 8.0


def test_params_go_before_training_and_training_before_defaults() -> None:
    training = {"learning_rate": 1e-3, "pooling": "cls", "loss_weight.a": 2.0, "loss_weight.b": 3.0}
    config = build_trial_config(
        study(training=training), {"learning_rate": 3e-4, "loss_weight.b": 0.5}, "fp32"
    )
    assert (config.learning_rate, config.pooling, config.batch_size) == (3e-4, "cls", 16)
    assert config.loss_weight == {"a": 2.0, "b": 0.5}
    with pytest.raises(InputError, match=r"^batch_size: must be >= 1, but got `0`\.$"):
        build_trial_config(study(), {"batch_size": 0}, "fp32")


def test_an_encoder_folder_is_relative_to_the_study_file(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    path = tmp_path / "study.yaml"

    def encoder(given: Any) -> Any:
        return build_trial_config(study(model={"encoder": given}, path=path), {}, "fp32").encoder

    assert encoder("encoder") == str(tmp_path / "encoder")
    assert encoder("org/name") == "org/name"
    inline = {"model_type": "bert", "tokenizer": "encoder"}
    assert encoder(inline) == {"model_type": "bert", "tokenizer": str(tmp_path / "encoder")}


def test_params_are_taken_as_optuna_holds_them() -> None:
    """A display of other processes' trials reads them from the database, lists and mappings as JSON text."""
    encoder = {"model_type": "bert", "hidden_size": 32}
    choices = {"betas": [[0.9, 0.999], [0.9, 0.99]], "encoder": ["minilm", encoder]}
    space = {name: {"type": "categorical", "choices": values} for name, values in choices.items()}
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask(
        {
            "betas": optuna.distributions.CategoricalDistribution(["[0.9, 0.99]"]),
            "encoder": optuna.distributions.CategoricalDistribution([json.dumps(encoder, sort_keys=True)]),
        }
    )
    config = build_trial_config(study(search_space=space), trial.params, "fp32")
    assert config.betas == (0.9, 0.99)
    assert config.encoder == encoder


def test_params_of_the_command_line_are_read_as_in_a_study_file() -> None:
    given = ["fp_precision=bf16-mixed", "learning_rate=3e-5", "betas=[0.9, 0.95]", "compile=none"]
    given += ["gradient_checkpointing=yes", "loss_weight.criteria=2", "dropout=null"]
    assert parse_params(given) == {
        "fp_precision": "bf16",
        "learning_rate": 3e-5,
        "betas": (0.9, 0.95),
        "compile": "none",
        "gradient_checkpointing": True,
        "loss_weight.criteria": 2.0,
        "dropout": None,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("learning_rate", r"^learning_rate: must be written as NAME=VALUE\."),
        ("lerning_rate=1", r"there is no such setting\. Did you mean `learning_rate`\?"),
        ("learning_rate=-1", r"must be > 0, but got `-1`\."),
        ("batch_size=", r"must be a whole number, but got `null`\."),
        ("loss_weight=2", r"there is no such setting"),
    ],
)
def test_params_that_are_wrong_are_refused(given: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_params([given])


def test_all_wrong_params_are_told_at_once() -> None:
    given = ["a=1", "epochs=1", "max_steps=5", "seed=1", "seed=2", "pooling=median"]
    with pytest.raises(InputError) as caught:
        parse_params(given)
    assert len(str(caught.value).splitlines()) == 4
    assert "seed is given twice" in str(caught.value)
    assert "A trial has one budget" in str(caught.value)
