"""Hostile databases, encoders and caches: their code does not run, and their paths stay inside runs/."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
import torch
from support.command_line import hpo_command, ok
from support.jsonl_sets import write_set
from support.tiny import tiny_executor, write_study
from support.tiny_encoders import save_encoder

from hpo.config.study_config import load_study, stored_study
from hpo.config.trial_config import build_trial_config
from hpo.errors import ModelError
from hpo.models.encoder import load_encoder
from hpo.study.store.schema import claims, evaluations, studies, workers
from hpo.study.store.storage import open_storage
from hpo.trial.executor import Executor


class Bomb:
    """An object that makes a folder during its unpickling."""

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


def test_pickled_encoder_weights_are_refused(bomb: Bomb, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    save_encoder(folder)
    (folder / "model.safetensors").unlink()
    for save in (torch.save, lambda what, path: path.write_bytes(pickle.dumps(what))):
        save({"embeddings.word_embeddings.weight": bomb}, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match="could not be loaded"):
            load_encoder(str(folder))
    assert not bomb.marker.exists()


def test_token_cache_of_objects_is_rebuilt(bomb: Bomb, tmp_path: Path) -> None:
    def tokens(executor: Executor) -> Any:
        config = build_trial_config(executor.study, {"learning_rate": 1e-4}, "fp32")
        return executor.loader.tokens("train", config).lengths_W.tolist()

    expected = tokens(tiny_executor(tmp_path))
    arrays = sorted(tmp_path.glob("runs/cache/tokens/train-*/*.npy"))
    for array in arrays[::2]:
        np.save(array, np.array([bomb] * 8, dtype=object), allow_pickle=True)
    for array in arrays[1::2]:
        array.write_bytes(pickle.dumps(bomb))
    assert arrays
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


@pytest.mark.parametrize("name", ["../../out", "/tmp/hpo-out", ""])
def test_stored_name_of_a_study_leads_nowhere(made: Path, name: str) -> None:
    def rename(connection: sa.Connection) -> None:
        row = connection.execute(sa.select(studies)).one()
        definition = json.loads(row.definition) | {"name": name}
        connection.execute(sa.update(studies).values(name=name, definition=json.dumps(definition)))
        for table in (claims, workers, evaluations):
            connection.execute(sa.update(table).values(study=name))
        connection.execute(sa.text("UPDATE studies SET study_name = :name"), {"name": name})

    change(made, rename)
    (made / "tiny.yaml").unlink()
    before = sorted(path for path in made.parent.parent.rglob("*") if "hpo.db" not in path.name)
    listed = ok(hpo_command(made, "studies", "--json")).json
    assert [study["name"] for study in listed] == [name]
    for command in ("worker", "report", "status", "best", "delete"):
        options = ["--yes"] if command == "delete" else []
        assert hpo_command(made, command, *options, "--", name).exit_code == 2
    after = sorted(path for path in made.parent.parent.rglob("*") if "hpo.db" not in path.name)
    assert after == before
    assert not Path("/tmp/hpo-out").exists()


def test_stored_paths_need_the_permission_of_the_machine(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locations of checkpoints and of data."""
    private = write_set(made.parent / "private", {"tasks": {"size": {"kind": "regression"}}})
    outside = made.parent / "outside"
    original = load_study(made / "tiny.yaml").definition()
    of_folder = {"checkpoint": {"location": str(outside)}}

    def name_location(changes: dict[str, Any]) -> None:
        definition = stored_study("tiny", original | changes).definition()
        update = sa.update(studies).values(definition=json.dumps(definition))
        change(made, lambda connection: connection.execute(update))

    delete = ("delete", "tiny", "--yes")
    name_location({"data": {"source": "jsonl", "path": str(private)}})
    refused = [hpo_command(made, "worker", "tiny")]
    for changes in ({"checkpoint": {"location": "s3://theirs/checkpoints"}}, of_folder):
        name_location(changes)
        refused += [hpo_command(made, *command) for command in (("worker", "tiny"), delete)]
    assert {each.exit_code for each in refused} == {2}
    assert all("in a folder of HPO_ALLOW" in each.err for each in refused)
    assert not outside.exists()
    monkeypatch.setenv("HPO_ALLOW", f"s3://ours:{outside}")
    assert ok(hpo_command(made, "worker", "tiny", "--json")).json["outcomes"] == {"complete": 2}
    assert f"Its checkpoints in {outside}" in ok(hpo_command(made, *delete)).out
