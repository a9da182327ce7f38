from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import write_study

from hpo.config.study_config import load_study, stored_study
from hpo.errors import StudyFileError

SPACE = {
    "learning_rate": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True},
    "betas": {"type": "categorical", "choices": [[0.9, 0.999], [0.9, 0.98]]},
    "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]},
    "init_scale": {"type": "categorical", "choices": [8, 64], "when": {"fp_precision": "fp16"}},
}


def test_configurations_have_the_values_of_settings(tmp_path: Path) -> None:
    given = [{"fp_precision": "16-mixed", "init_scale": 8}, {"betas": [0.9, 0.98]}]
    config = load_study(write_study(tmp_path, search_space=SPACE, first=given))
    assert config.first == ({"fp_precision": "fp16", "init_scale": 8.0}, {"betas": (0.9, 0.98)})
    assert stored_study("tiny", config.definition()).first == config.first


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("best", "first: must be a list of mappings, or `{study: NAME, top: 3}`, but got `best`."),
        ([3], "first.0: must be a mapping of settings, but got `3`."),
        ([{"learning_rate": 1e-3}, {}], "first.1: must be a mapping of settings, but got `{}`."),
        (
            [{}, {"betas": [0.9, 0.98]}, {"learning_rate": 1}],
            "first.2.learning_rate: learning_rate=1 is outside ",
        ),
        (
            [{"learning_rat": 1e-3}],
            "first.0.learning_rat: The study does .* Did you mean `learning_rate`?",
        ),
        (
            [{"warmup_ratio": 0.1}],
            "first.0.warmup_ratio: The study does not search `warmup_ratio`. It ",
        ),
        ([{"learning_rate": "fast"}], "first.0.learning_rate: must be a number, but got `fast`."),
        (
            [{"fp_precision": "bf16"}],
            "first.0.fp_precision: fp_precision=bf16 is none of its choices",
        ),
        (
            [{"init_scale": 8}],
            "first.0.init_scale: init_scale is searched only with fp_precision=fp16. Give that, too.",
        ),
        ({"top": 2}, "first.study: "),
        ({"study": "a", "csv": "b"}, "first.csv: this key was removed. Copy that study into this database"),
        ({"study": "a", "top": 0}, "first.top: must be >= 1, but got `0`."),
        ({"study": "a", "best": 2}, "first.best: there is no such key."),
    ],
)
def test_wrong_ones_are_refused_with_the_path_of_their_key(tmp_path: Path, first: Any, problem: str) -> None:
    path = write_study(tmp_path, search_space=SPACE, first=first)
    with pytest.raises(StudyFileError, match=rf"tiny.yaml:\d+: {problem.replace('?', '[?]')}"):
        load_study(path)


def test_every_wrong_one_is_told(tmp_path: Path) -> None:
    first = [{"learning_rate": 1, "fp_precision": "bf16"}, {"warmup_ratio": 0.1}]
    path = write_study(tmp_path, search_space=SPACE, first=first)
    path.write_text(path.read_text() + yaml.safe_dump({"n_trial": 3}))
    with pytest.raises(StudyFileError) as caught:
        load_study(path)
    keys = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert sorted(keys) == [
        *("first.0.fp_precision", "first.0.learning_rate", "first.1.warmup_ratio", "n_trial")
    ]
