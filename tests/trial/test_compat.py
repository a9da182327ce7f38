"""What a check's result is kept under, and what is found wrong with a study before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import CPU, ENCODER, tiny_executor

import hpo.trial.check
from hpo.config.trial_config import build_trial_config
from hpo.errors import ModelError
from hpo.precision.table import resolve
from hpo.trial.check import cache_key
from hpo.trial.executor import Executor
from hpo.trial.trial_parts import TrialParts

ENCODERS = {"type": "categorical", "choices": [ENCODER, "/no/such/folder"]}


def parts_of(executor: Executor, **params: Any) -> TrialParts:
    config = build_trial_config(executor.study, params, "fp32", executor.amp)
    return executor.parts(config, resolve("fp32", CPU, config.amp))


def key_of(executor: Executor, **params: Any) -> str:
    parts = parts_of(executor, **params)
    return cache_key(parts, executor.study, executor.dataset.fingerprint, CPU)


def test_batches_of_the_shortest_and_the_longest_windows(tmp_path: Path) -> None:
    parts = parts_of(tiny_executor(tmp_path))
    lengths = sorted(parts.train_split.lengths_W)
    assert sorted(parts.batch(2, 1).lengths_B) == [*lengths[:2], lengths[-1]]
    assert sorted(parts.batch(0, 10**6).lengths_B) == lengths == sorted(parts.batch(10**6).lengths_B)


def test_attention_with_dropout_is_another_measurement(tmp_path: Path) -> None:
    """It has a kernel of its own; its rate does not matter, since the check drops nothing."""
    executor = tiny_executor(tmp_path)
    keys = {rate: key_of(executor, attention_dropout=rate) for rate in (None, 0.0, 0.1, 0.2)}
    assert len(set(keys.values())) == 3
    assert keys[0.1] == keys[0.2]
    assert key_of(executor, attention_dropout=0.0, learning_rate=1e-5) == keys[0.0]


def test_a_new_way_to_measure_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = tiny_executor(tmp_path)
    before = key_of(executor)
    monkeypatch.setattr(hpo.trial.check, "MEASUREMENT_VERSION", 10**6)
    assert key_of(executor) != before


def test_a_sound_study_leaves_nothing_but_tokens(tmp_path: Path) -> None:
    space = {
        "fp_precision": {"type": "categorical", "choices": ["tf32", "fp16"]},
        "encoder": {"type": "categorical", "choices": [ENCODER, ENCODER | {"num_hidden_layers": 1}]},
        "max_length": {"type": "int", "low": 16, "high": 64},
        "init_scale": {"type": "float", "low": 1.0, "high": 2.0, "when": {"fp_precision": ["fp16"]}},
    }
    training = {"max_steps": 1, "batch_size": 8}
    executor = tiny_executor(tmp_path, model={}, training=training, search_space=space)
    executor.check_study()
    made = {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {("tiny.yaml",), *(path for path in made if path[:3] == ("runs", "cache", "tokens"))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"encoder": "/no/such/folder"}}, "/no/such/folder"),
        ({"model": {}, "search_space": {"encoder": ENCODERS}}, "/no/such/folder"),
        ({"model": {"encoder": ENCODER | {"vocab_size": 9}}}, "vocab_size|cannot run a batch"),
        (
            {"training": {"max_steps": 1, "max_length": 64, "freeze_layers": 9}},
            "freeze_layers must be between 0 and the encoder's 2 layers",
        ),
        ({"training": {"max_steps": 1, "max_length": 600}}, "512"),
    ],
)
def test_what_a_model_cannot_do_is_found(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    executor = tiny_executor(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        executor.check_study()


def test_a_choice_that_cannot_be_built_is_one_trials_end(tmp_path: Path) -> None:
    space = {"freeze_layers": {"type": "categorical", "choices": [9, 0]}}
    tiny_executor(tmp_path, search_space=space).check_study()
