from pathlib import Path
from typing import Any

import pytest
from support.tiny import write_study

from hpo.config.study_config import load_study, stored_study
from hpo.errors import StudyFileError

SPACE = {
    "learning_rate": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True},
    "betas": {"type": "categorical", "choices": [[0.9, 0.999], [0.9, 0.98]]},
    "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]},
    "init_scale": {"type": "categorical", "choices": [8, 64], "when": {"fp_precision": "fp16"}},
}


BF16 = "first.1.fp_precision: fp_precision=bf16 is"


def test_configurations_are_validated(tmp_path: Path) -> None:
    given = [{"fp_precision": "16-mixed", "init_scale": 8}, {"betas": [0.9, 0.98]}]
    config = load_study(write_study(tmp_path, search_space=SPACE, first=given))
    assert config.first == ({"fp_precision": "fp16", "init_scale": 8.0}, {"betas": (0.9, 0.98)})
    assert stored_study("tiny", config.definition()).first == config.first


@pytest.mark.parametrize(
    ("first", "problems"),
    [
        ("best", ["first: must be a list of mappings, or `{study: NAME, top: 3}`, but got `best`."]),
        ([3, {}], ["first.0: must be a mapping of settings", "first.1: must be a mapping of settings"]),
        ([{"learning_rat": 1e-3}], ["first.0.learning_rat: The study does not search"]),
        ([{"learning_rate": "fast"}], ["first.0.learning_rate: must be a number, but got `fast`."]),
        ([{"learning_rate": 1}, {"fp_precision": "bf16"}], ["first.0.learning_rate: learning_rate=1", BF16]),
        ([{"init_scale": 8}], ["first.0.init_scale: init_scale is searched only with fp_precision=fp16."]),
        ({"top": 2}, ["first.study: must be given."]),
        ({"study": "a", "best": 2}, ["first.best: there is no such key."]),
    ],
)
def test_all_wrong_configurations_are_reported(tmp_path: Path, first: Any, problems: list[str]) -> None:
    path = write_study(tmp_path, search_space=SPACE, first=first)
    with pytest.raises(StudyFileError) as refused:
        load_study(path)
    lines = str(refused.value).splitlines()
    assert [problem in line for line, problem in zip(lines, problems, strict=True)] == [True] * len(lines)
