from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

import pytest
from support.tiny import CPU
from support.tiny import study_of as study

from hpo.config.resolved_study import resolve_study
from hpo.config.trial_config import build_trial_config, parse_params
from hpo.config.trial_settings import TrialSettings
from hpo.errors import InputError
from hpo.models.encoder import ATTENTION_IMPLEMENTATIONS
from hpo.models.multitask import _POOLINGS
from hpo.precision.table import AmpConfig
from hpo.tasks.kind import KINDS
from hpo.training.optim import OPTIMIZERS, SCHEDULES

SEARCHED = {"fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]}}


@pytest.mark.parametrize(
    ("setting", "known"),
    [
        ("pooling", {*_POOLINGS, "attention"}),
        ("attention", ATTENTION_IMPLEMENTATIONS),
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULES),
        ("loss", {"auto", *(loss for kind in KINDS.values() for loss in kind.losses)}),
    ],
)
def test_choices_of_setting_are_implemented(setting: str, known: Collection[str]) -> None:
    given = get_args(TrialSettings.model_fields[setting].annotation)
    choices = {each for one in given if one is not type(None) for each in get_args(one) or [one]}
    assert choices == set(known)


@pytest.mark.parametrize(
    ("changes", "precisions"),
    [
        ({}, ("fp32",)),
        ({"amp": {"preset": "ultra"}}, ("bf16",)),
        ({"training": {"fp_precision": "fp16"}, "amp": {"preset": "ultra"}}, ("fp16",)),
        ({"search_space": SEARCHED, "amp": {"preset": "ultra"}}, ("fp32", "bf16", "fp16")),
    ],
)
def test_preset_decides_open_precision(changes: dict[str, Any], precisions: tuple[str, ...]) -> None:
    """The described CPU supports only fp32 natively, which is the choice of the preset `auto`."""
    assert resolve_study(study(**changes), CPU).precisions == precisions


def test_default_precision_is_last_choice() -> None:
    assert build_trial_config(study(), {}, "bf16").fp_precision == "bf16"
    assert build_trial_config(study(), {"fp_precision": "none"}, "bf16").fp_precision == "fp32"
    fixed = study(training={"fp_precision": "16-mixed"})
    assert build_trial_config(fixed, {}, "bf16").fp_precision == "fp16"


@pytest.mark.parametrize(
    ("training", "params", "budget"),
    [
        ({}, {}, (3.0, None, None)),
        ({"max_seconds": 15}, {}, (None, None, 15.0)),
        ({"max_seconds": 15}, {"max_steps": 7}, (None, 7, None)),
        ({"epochs": None, "max_steps": 5}, {}, (None, 5, None)),
    ],
)
def test_trial_has_one_budget(training: dict[str, Any], params: dict[str, Any], budget: Any) -> None:
    config = build_trial_config(study(training=training), params, "fp32")
    assert (config.epochs, config.max_steps, config.max_seconds) == budget


def test_amp_has_init_scale_of_trial() -> None:
    preset = AmpConfig(track_stats=True, growth_interval=100)
    config = build_trial_config(study(training={"init_scale": 4.0}), {"init_scale": 1024.0}, "fp16", preset)
    assert config.amp == AmpConfig(track_stats=True, growth_interval=100, init_scale=1024.0)
    assert build_trial_config(study(amp={"init_scale": 8.0}), {}, "fp16").amp.init_scale == 8.0


def test_params_replace_training_and_defaults() -> None:
    training = {"learning_rate": 1e-3, "pooling": "cls", "loss_weight.a": 2.0}
    params = {"learning_rate": 3e-4, "loss_weight.b": 0.5}
    config = build_trial_config(study(training=training), params, "fp32")
    assert (config.learning_rate, config.pooling, config.batch_size) == (3e-4, "cls", 16)
    assert config.loss_weight == {"a": 2.0, "b": 0.5}
    with pytest.raises(InputError, match=r"^batch_size: must be >= 1, but got `0`\.$"):
        build_trial_config(study(), {"batch_size": 0}, "fp32")


def test_encoder_folder_is_relative_to_study_file(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    path = tmp_path / "study.yaml"

    def encoder(given: Any) -> Any:
        return build_trial_config(study(model={"encoder": given}, path=path), {}, "fp32").encoder

    assert encoder("encoder") == str(tmp_path / "encoder")
    assert encoder("org/name") == "org/name"
    fresh = {"model_type": "bert", "tokenizer": "encoder"}
    assert encoder(fresh) == {"model_type": "bert", "tokenizer": str(tmp_path / "encoder")}


def test_params_may_be_stored_ones() -> None:
    """Optuna stores lists and mappings as JSON text."""
    choices = {"betas": [[0.9, 0.999], [0.9, 0.99]], "encoder": ["minilm", {"model_type": "bert", "a": 32}]}
    space = {name: {"type": "categorical", "choices": values} for name, values in choices.items()}
    params = {"betas": "[0.9, 0.99]", "encoder": '{"a": 32, "model_type": "bert"}'}
    config = build_trial_config(study(search_space=space), params, "fp32")
    assert config.betas == (0.9, 0.99)
    assert config.encoder == {"model_type": "bert", "a": 32}


def test_parse_params_of_command_line() -> None:
    given = {"fp_precision=bf16-mixed": "bf16", "learning_rate=3e-5": 3e-5, "betas=[0.9, 0.95]": (0.9, 0.95)}
    given |= {"compile=none": "none", "gradient_checkpointing=yes": True, "loss_weight.criteria=2": 2.0}
    given |= {"dropout=null": None, "init_scale=1024": 1024.0}
    assert parse_params([*given]) == {text.partition("=")[0]: value for text, value in given.items()}


def test_all_wrong_params_are_reported() -> None:
    given = ["learning_rate", "lerning_rate=1", "weight_decay=-1", "loss_weight=2"]
    given += ["epochs=1", "max_steps=5", "seed=1", "seed=2"]
    with pytest.raises(InputError) as refused:
        parse_params(given)
    expected = [
        "learning_rate: must be written as NAME=VALUE.",
        "lerning_rate=1: there is no such setting. Did you mean `learning_rate`?",
        "weight_decay=-1: must be >= 0, but got `-1`.",
        "loss_weight=2: there is no such setting.",
        "seed=2: seed is given twice.",
        "A trial has one budget",
    ]
    lines = str(refused.value).splitlines()
    assert [line.startswith(text) for line, text in zip(lines, expected, strict=True)] == [True] * 6
