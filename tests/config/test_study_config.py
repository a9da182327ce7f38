import hashlib
import inspect
from pathlib import Path
from typing import Any, get_args

import optuna
import pytest

from hpo.config.sampler_config import PrunerConfig, SamplerConfig
from hpo.config.study_config import StudyConfig, load_study, study_of
from hpo.errors import InputError, StudyFileError
from hpo.precision.table import AmpConfig

STUDIES = Path(__file__).parents[2] / "studies"
BASE = "name: s\ndata: {source: synthetic}\n"


def load(folder: Path, text: str) -> StudyConfig:
    path = folder / "study.yaml"
    path.write_text(text)
    return load_study(path)


def test_name_and_data_suffice(tmp_path: Path) -> None:
    study = load(tmp_path, BASE)
    assert study.search_space == {}
    assert study.model.encoder == "minilm"
    assert study.amp == AmpConfig()
    assert study.pruner.options == {"starts": 0.04, "keep": 2, "reduction_factor": 3}
    assert (study.sampler.name, study.sampler.seed) == ("tpe", 42)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("training: {epochs: 4}", "promote"),
        ("objective: [{metric: score}, {metric: peak_memory_bytes, direction: minimize}]", "promote"),
        ("objective: [{metric: train_tokens_per_second}, {metric: train_examples_per_second}]", "none"),
        ("search_space: {epochs: {type: int, low: 2, high: 10}}", "none"),
    ],
)
def test_default_pruner(tmp_path: Path, lines: str, name: str) -> None:
    study = load(tmp_path, BASE + lines)
    assert study.pruner.name == name
    assert StudyConfig.model_validate(study.definition()).pruner == study.pruner


def test_working_folder_comes_before_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_study("smoke").path == STUDIES / "smoke.yaml"
    (tmp_path / "studies").mkdir()
    for name in ("smoke", "emotions"):
        (tmp_path / "studies" / f"{name}.yaml").write_text("name: mine\ndata: {source: synthetic}\n")
    assert load_study("smoke").name == "mine"
    with pytest.raises(StudyFileError, match=r"no study `emotion` in studies or .*Did you mean `emotions`\?"):
        load_study("emotion")


@pytest.mark.parametrize("given", ["tickets", "tickets/", "./tickets"])
def test_copy_comes_before_example(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tickets").mkdir()
    if given == "tickets":
        assert load_study(given).path == STUDIES / "examples/tickets/study.yaml"
    content = "name: {}\ndata: {{source: synthetic}}\n"
    (tmp_path / "tickets" / "study.yaml").write_text(content.format("copy"))
    assert load_study(given).name == "copy"
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "tickets.yaml").write_text(content.format("mine"))
    assert load_study("tickets").name == "mine"


def test_paths_are_relative_to_study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = "{source: jsonl, path: set, tasks: set/my_tasks.json, files: {test: /absolute/test.jsonl}}"
    study = load(tmp_path, f"name: s\ndata: {data}\n")
    assert study.data.path == tmp_path / "set"
    assert study.data.tasks == tmp_path / "set" / "my_tasks.json"
    assert study.data.files.test == Path("/absolute/test.jsonl")


@pytest.mark.parametrize(
    ("config", "module"), [(SamplerConfig, optuna.samplers), (PrunerConfig, optuna.pruners)]
)
def test_options_exist_in_optuna(config: Any, module: Any) -> None:
    assert set(config.CLASSES) == set(get_args(config.model_fields["name"].annotation))
    for name, of_optuna in config.CLASSES.items():
        arguments = inspect.signature(getattr(module, of_optuna)).parameters
        # `promote` does not use Optuna's pruner.
        assert name == "promote" or config.OPTIONS.get(name, {}).keys() <= arguments.keys()
        assert config.OPTIONS.get(name, {}).keys() <= config.model_fields.keys()


def test_a_mapping_has_the_keys_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.py").write_text("")
    monkeypatch.chdir(tmp_path)
    content = {"name": "s", "code": "empty.py", "data": {"source": "synthetic"}}
    assert study_of(content).code == {"empty.py": hashlib.sha256(b"").hexdigest()}
    with pytest.raises(InputError, match=r"^path: there is no such key.*\ncode: .*absent.py must be a file"):
        study_of(content | {"path": "x", "code": "absent.py"})
