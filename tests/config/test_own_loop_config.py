"""Study files with their own training loop."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.own_loops import SPACE, write_own
from support.tiny import write_study

from hpo.code import use_code
from hpo.config.first import fixed_problems
from hpo.config.study_config import load_study, stored_study
from hpo.errors import StorageError, StudyFileError

pytestmark = pytest.mark.usefixtures("forgotten")


def test_names_and_ranges_are_free(tmp_path: Path) -> None:
    number = {"type": "float", "low": 0.5, "high": 1.5}
    space = {**SPACE, **{name: dict(number) for name in ("batch_size", "epochs", "max_steps")}}
    study = load_study(write_own(tmp_path, search_space=space))
    assert study.has_own_loop
    assert study.search_space["learning_rate"].high == 20.0, "the setting of hpo has a maximum of 10"
    assert list(fixed_problems(study.search_space, {"learning_rate": 15.0})) == []
    assert study.training.option == {"width": 8, "rounds": 3}
    assert study.training.seed == 3


def test_definition_is_read_with_and_without_code(tmp_path: Path) -> None:
    study = load_study(write_own(tmp_path))
    definition = json.loads(json.dumps(study.definition()))
    assert not definition.keys() & {"data", "model", "evaluation", "portfolio"}
    assert definition["training"].keys() == {"fp_precision", "init_scale", "max_grad_norm", "seed", "option"}
    assert study.resumed(definition).definition() == study.definition()
    use_code({}, "a reader")
    reader = stored_study("tiny", definition)
    assert reader.has_own_loop
    assert (reader.training, reader.search_space) == (study.training, study.search_space)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": "none"}}, "data: must be left out: .*loads its data itself"),
        ({"model": {"encoder": "minilm"}}, "model: must be left out: .*builds its model itself"),
        ({"evaluation": {"per_trial": 2}}, "evaluation: must be left out: .*run.report"),
        ({"portfolio": False}, "portfolio: must be left out"),
        ({"training": {"seed": -1}}, "training.seed: must be >= 0"),
        ({"training": {"precision": "bf16"}}, "training.precision: .*Did you mean `fp_precision`"),
        ({"training": {"fp32_parts": ["heads"]}}, "it has no effect on the training loop"),
        ({"objective": {"metric": "train_tokens_per_second"}}, "train_tokens_per_second is not measured"),
        ({"search_space": {"fp_precison": SPACE["learning_rate"]}}, "fp_precison: .*mean `fp_precision`"),
        ({"search_space": {"fp_precision": {"type": "categorical", "choices": ["fp7"]}}}, "fp7"),
        ({"training": {"width": 8}, "search_space": {"width": SPACE["learning_rate"]}}, "is fixed too"),
    ],
)
def test_useless_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        load_study(write_own(tmp_path, **changes))


def test_study_without_loop_ignores_loaded_loop(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = load_study(write_study(tmp_path / "plain"))
    definition = json.loads(json.dumps(plain.definition()))
    load_study(write_own(tmp_path))
    read = stored_study("tiny", definition)
    assert not read.has_own_loop
    assert read.training == plain.training
    definition["training"]["width"] = 3
    definition["given"].append("training.width")
    with pytest.raises(StorageError, match=r"training\.width: there is no such key"):
        stored_study("tiny", definition)
