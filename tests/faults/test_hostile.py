"""Databases, checkpoints, encoders and caches of others: nothing of them runs or leads out of runs/."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
import torch
from command_line import hpo_command, ok
from tiny import ENCODER, tiny_executor, tiny_study, write_study
from transformers import AutoConfig, AutoTokenizer

from hpo.errors import CheckpointError, HpoError, ModelError
from hpo.models.encoder import encoder_folder, load_encoder
from hpo.study.samplers import build_sampler
from hpo.study.schema import evaluations, slots, studies, workers
from hpo.study.storage import open_storage
from hpo.training.checkpoint import CheckpointStore, read_checkpoint
from hpo.trial.executor import Executor


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def bomb(tmp_path: Path) -> Bomb:
    made = Bomb(tmp_path / "it ran")
    pickle.loads(pickle.dumps(made))
    made.marker.rmdir()  # raises where the bomb does not work
    return made


def test_a_checkpoint_that_is_a_pickle_is_not_run(bomb: Bomb, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, "key") as store:
        for step in (1, 2):
            store.save(step, {"w": torch.ones(2)}, state={"step": step})
    path = tmp_path / "step-00000002"
    torch.save({"step": bomb}, path / "state.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["state.pt"] = hashlib.sha256((path / "state.pt").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(path)
    with CheckpointStore(tmp_path, "key") as store:
        last = store.latest()
    assert last is not None
    assert last.state == {"step": 1}, "the one before is taken"
    assert not bomb.marker.exists()


def test_weights_of_an_encoder_that_are_a_pickle_are_not_run(bomb: Bomb, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    settings = {key: value for key, value in ENCODER.items() if key != "model_type"}
    AutoConfig.for_model("bert", vocab_size=30522, **settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_folder("minilm")).save_pretrained(folder)
    for save in (torch.save, lambda what, path: path.write_bytes(pickle.dumps(what))):
        save({"embeddings.word_embeddings.weight": bomb}, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match="could not be loaded"):
            load_encoder(str(folder))
    assert not bomb.marker.exists()


def test_code_that_comes_with_an_encoder_is_not_run(bomb: Bomb, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(encoder_folder("minilm"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(bomb.marker)!r})\n")
    with pytest.raises(ModelError, match="comes with its own Python code"):
        load_encoder(str(folder))
    assert not bomb.marker.exists()


def test_a_token_cache_of_objects_is_made_anew(bomb: Bomb, tmp_path: Path) -> None:
    from hpo.config.trial_config import build_trial_config

    def tokens(executor: Executor) -> Any:
        config = build_trial_config(executor.study, {"learning_rate": 1e-4}, "fp32")
        return executor.tokens("train", config).lengths_W.tolist()

    expected = tokens(tiny_executor(tmp_path))
    (contents,) = tmp_path.glob("runs/cache/tokens/train-*/contents.json")
    made = json.loads(contents.read_text())
    for name, (_, shape) in made["arrays"].items():
        array = contents.parent / name
        made["arrays"][name] = ["|O", [8, *shape[1:]]]
        size = 8 * 8 * int(torch.tensor(shape[1:]).prod())
        array.write_bytes(pickle.dumps(bomb).ljust(size, b"\0")[:size])
    contents.write_text(json.dumps(made))
    assert tokens(tiny_executor(tmp_path)) == expected
    assert not bomb.marker.exists()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder in another one, with the tiny study in its database."""
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    ok(hpo_command(folder, "init", str(write_study(folder))))
    return folder


def change(folder: Path, action: Callable[[sa.Connection], object]) -> None:
    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage, storage.engine.begin() as connection:
        action(connection)


NAMES = ("../../out", "..", "/tmp/hpo-out", "a/../../../out", "-rf", "")


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_study_in_a_database_leads_nowhere(made: Path, name: str) -> None:
    """Its name in all tables, also in the definition."""

    def rename(connection: sa.Connection) -> None:
        row = connection.execute(sa.select(studies)).one()
        definition = json.loads(row.definition) | {"name": name}
        connection.execute(sa.update(studies).values(name=name, definition=json.dumps(definition)))
        for table in (slots, workers, evaluations):
            connection.execute(sa.update(table).values(study=name))
        connection.execute(sa.text("UPDATE studies SET study_name = :name"), {"name": name})

    change(made, rename)
    (made / "tiny.yaml").unlink()
    before = sorted(path for path in made.parent.parent.rglob("*") if "hpo.db" not in path.name)
    nameless = ok(hpo_command(made, "worker", "--json"))
    assert list(nameless.json["left_out"]) == [name]
    listed = ok(hpo_command(made, "studies", "--json")).json
    assert [study["name"] for study in listed] == [name]
    for command in ("worker", "report", "status", "best", "delete"):
        options = ["--yes"] if command == "delete" else []
        assert hpo_command(made, command, *options, "--", name).exit_code == 2
    after = sorted(path for path in made.parent.parent.rglob("*") if "hpo.db" not in path.name)
    assert after == before
    assert not Path("/tmp/hpo-out").exists()


def test_the_token_of_a_study_in_a_database_leads_nowhere(made: Path) -> None:
    other = made / "runs" / "x"
    other.mkdir()

    def change_token(connection: sa.Connection) -> None:
        connection.execute(sa.update(studies).values(token="/../../x"))
        token = {"value": json.dumps("/../../x")}
        connection.execute(sa.text("UPDATE study_system_attributes SET value_json = :value"), token)

    change(made, change_token)
    for command in (["worker", "tiny"], ["run", "tiny.yaml"], ["delete", "tiny", "--yes"]):
        refused = hpo_command(made, *command)
        assert refused.exit_code == 2
        assert "The token of the study `tiny`" in refused.err
    assert other.is_dir()
    assert not any(other.iterdir())


@pytest.mark.parametrize("task", ["../../out", "a/b", "..", "a\0b"])
def test_the_name_of_a_task_leads_nowhere(tmp_path: Path, task: str) -> None:
    tasks = {task: {"kind": "regression"}}
    with pytest.raises(HpoError, match="task's name must be a letter"):
        tiny_executor(tmp_path, data={"source": "jsonl", "path": ".", "tasks": tasks})


def test_the_state_of_a_sampler_in_a_database_is_not_run(bomb: Bomb, tmp_path: Path) -> None:
    """CMA-ES keeps its state as a pickle."""
    space = {name: {"type": "float", "low": 0.1, "high": 0.2} for name in ("learning_rate", "weight_decay")}
    config = tiny_study(tmp_path, sampler={"name": "cmaes"}, search_space=space)

    def objective(trial: optuna.Trial) -> float:
        return sum(trial.suggest_float(name, 0.1, 0.2) for name in space)

    def states(trial: optuna.trial.FrozenTrial) -> list[str]:
        return [name for name in trial.system_attrs if name.startswith("cma:optimizer:")]

    study = optuna.create_study(sampler=build_sampler(config.sampler, config.search_space))
    study.optimize(objective, n_trials=20)
    generations = [trial.system_attrs.get("cma:generation", 0) for trial in study.trials]
    assert max(generations) > 1, "what is its own is read"
    last = [trial for trial in study.trials if states(trial)][-1]
    last.system_attrs |= dict.fromkeys(states(last), pickle.dumps(bomb).hex())
    study.add_trial(last)
    study.optimize(objective, n_trials=4)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 25
    assert not bomb.marker.exists()
