"""Study files whose own code trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.own_loops import LOOP, SPACE, write_own
from support.tiny import write_study

from hpo.code import use_code
from hpo.config.first import fixed_problems
from hpo.config.study_config import load_study, stored_study
from hpo.errors import InputError, StorageError, StudyFileError

pytestmark = pytest.mark.usefixtures("forgotten")


def test_names_are_free(tmp_path: Path) -> None:
    number = {"type": "float", "low": 0.5, "high": 1.5}
    space = {**SPACE, **{name: dict(number) for name in ("batch_size", "epochs", "max_steps")}}
    study = load_study(write_own(tmp_path, search_space=space))
    assert study.has_own_loop
    assert study.search_space["learning_rate"].high == 20.0, "the package's own loop allows 10 at most"
    assert study.training.option == {"width": 8, "rounds": 3}
    assert study.training.seed == 3


def test_the_definition_is_read_back_with_and_without_the_code(tmp_path: Path) -> None:
    study = load_study(write_own(tmp_path))
    definition = json.loads(json.dumps(study.definition()))
    assert not definition.keys() & {"data", "model", "evaluation", "portfolio"}
    assert definition["training"].keys() == {"fp_precision", "init_scale", "max_grad_norm", "seed", "option"}
    assert study.resumed(definition).definition() == study.definition()
    use_code({}, "a reader")
    reader = stored_study("tiny", definition)
    assert reader.has_own_loop
    assert reader.training == study.training
    assert reader.search_space == study.search_space


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": "synthetic"}}, "data: must be left out: .*loads its data itself"),
        ({"data": {"source": "none"}}, "data: must be left out"),
        ({"model": {"encoder": "minilm"}}, "model: must be left out: .*builds its model itself"),
        ({"evaluation": {"per_trial": 2}}, "evaluation: must be left out: .*run.report"),
        ({"portfolio": False}, "portfolio: must be left out"),
        ({"training": {"seed": -1}}, "training.seed: must be >= 0"),
        ({"training": {"precision": "bf16"}}, "training.precision: .*Did you mean `fp_precision`"),
        ({"search_space": {"fp_precison": SPACE["learning_rate"]}}, "fp_precison: .*mean `fp_precision`"),
        ({"search_space": {"fp_precision": {"type": "categorical", "choices": ["fp7"]}}}, "fp7"),
        (
            {"training": {"width": 8}, "search_space": {"width": {"type": "int", "low": 1, "high": 2}}},
            "is fixed too",
        ),
    ],
)
def test_useless_sections_and_bad_values_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(StudyFileError, match=message):
        load_study(write_own(tmp_path, **changes))


def test_without_a_training_loop_the_data_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(
        StudyFileError, match=r"data: must be given\.(.|\n)*metric: unknown metric `accuracy`"
    ):
        load_study(write_own(tmp_path, LOOP.replace("@hpo.trial", "")))
    (tmp_path / "plain").mkdir()
    content = yaml.safe_load(write_study(tmp_path / "plain").read_text())
    content["data"] = {"source": "none"}
    (tmp_path / "plain" / "tiny.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(StudyFileError, match=r"data\.source: must be one of synthetic, .* but got `none`"):
        load_study(tmp_path / "plain" / "tiny.yaml")


def test_an_ordinary_study_is_read_beside_the_code_of_a_training_loop(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"fp32_parts": ["heads"]}}, "which this cannot change"),
        ({"objective": {"metric": "train_tokens_per_second"}}, "train_tokens_per_second is not measured"),
    ],
)
def test_settings_and_metrics_without_a_meaning_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_study(write_own(tmp_path, **changes))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (LOOP + LOOP.replace("def train", "def again"), r"there is a training loop `trial` already"),
        (LOOP.replace("@hpo.trial", "@hpo.trial('net')"), r"must decorate a function .* got 'net'"),
    ],
)
def test_code_has_one_training_loop_without_a_name(tmp_path: Path, loop: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_study(write_own(tmp_path, loop))


def test_an_enqueued_value_may_leave_the_range_of_the_setting_of_that_name(tmp_path: Path) -> None:
    study = load_study(write_own(tmp_path))
    assert list(fixed_problems(study.search_space, {"learning_rate": 15.0})) == []
