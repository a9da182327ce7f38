from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.command_line import hpo_command, ok, stored
from support.tiny import write_study

import hpo
from hpo.errors import InputError, StorageError
from hpo.study.sampling.promotion import PAUSED_ATTR

SPACE = {"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True}}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hpo.Study:
    """A study in the database, of which nothing has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    made = hpo.Study(write_study(tmp_path, search_space=SPACE, n_trials=3), quiet=True)
    made.init()
    return made


@pytest.mark.parametrize("params", [{"learning_rate": 1e-3}, ["learning_rate=1e-3"]])
def test_a_configuration_is_a_mapping_or_a_list_of_texts(study: hpo.Study, params: Any) -> None:
    first, second = study.enqueue(params), study.enqueue(params, whole=True)
    assert (first.enqueued, first.ahead, first.whole) == ({"learning_rate": 1e-3}, 0, False)
    assert (second.ahead, second.whole) == (1, True)
    assert second.text().endswith("learning_rate=0.001 and run to its end; 1 are enqueued before it.")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "must have at least one setting"),
        ({"learning_rat": 1e-3}, "Did you mean `learning_rate`"),
        ({"learning_rate": "fast"}, "must be a number, but got `fast`"),
        ({"dropout": 0.1}, "^The study does not search `dropout`"),
        ({"learning_rate": 5}, "^learning_rate=5 is outside [^ ]* to [^ ]*$"),
        ({1: 2}, "^1: there is no such setting"),
        (5, "must be a mapping, or texts NAME=VALUE, but got `5`"),
        ("learning_rate=5", "^learning_rate=5 is outside"),
    ],
)
def test_a_configuration_of_no_trial_is_refused(
    study: hpo.Study, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        study.enqueue(params)
    assert study.record.trials == []


def test_a_whole_trial_neither_pauses_nor_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `promote`, which promotes at most two of these eight trials."""
    monkeypatch.chdir(tmp_path)
    pruner = {"name": "promote", "starts": 0.25, "keep": 1}
    training = {"max_steps": 8, "batch_size": 8, "max_length": 64, "seed": 1}
    path = write_study(tmp_path, search_space=SPACE, n_trials=8, pruner=pruner, training=training)
    study = hpo.Study(path, quiet=True)
    study.init()
    for rate, whole in ((1e-4, True), (1.1e-4, False)):
        study.enqueue({"learning_rate": rate}, whole=whole)
    study.run()
    trials = {trial.params["learning_rate"]: trial for trial in study.record.trials}
    assert trials[1e-4].outcome == "complete"
    assert PAUSED_ATTR not in trials[1e-4].attributes
    assert PAUSED_ATTR in trials[1.1e-4].attributes


def test_pause_resume_and_cancel(study: hpo.Study, tmp_path: Path) -> None:
    counts = {"open": 3, "running": 0, "done": 0}
    paused = study.pause()
    assert (paused.state, paused.before, paused.trials, paused.ended) == ("paused", "open", counts, 0)
    assert study.run().ended == "closed"
    assert study.resume().before == "paused"
    assert study.resume().text().startswith("The study tiny was not paused")
    assert "3 not started" in ok(hpo_command(tmp_path, "status", "tiny")).out
    assert study.cancel().as_json() == {
        "study": "tiny",
        "state": "cancelled",
        "before": "open",
        "trials": counts,
        "ended": 0,
    }
    assert "not started" not in ok(hpo_command(tmp_path, "status", "tiny")).out


def test_copy_and_delete(study: hpo.Study, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    copied = study.copy(other)
    assert (copied.trials, copied.counts["open"]) == (0, 3)
    described: list[str] = []
    assert study.delete(described.append).as_json()["deleted"] is True
    assert described == [f"the study tiny with 0 finished trials from {study.place}"]
    with pytest.raises(StorageError):
        study.delete()
    assert hpo.Study("tiny", storage=other).record.name == "tiny"


def test_a_study_is_kept_if_its_deletion_is_not_confirmed(study: hpo.Study) -> None:
    def refuse(_: str) -> None:
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        study.delete(refuse)
    assert study.record.name == "tiny"


def test_a_name_never_deletes_the_study_of_a_file_of_this_name(study: hpo.Study, tmp_path: Path) -> None:
    assert study.name == "tiny"
    (tmp_path / "studies").mkdir()
    (tmp_path / "tiny.yaml").rename(tmp_path / "studies" / "other.yaml")
    with pytest.raises(StorageError, match="other"):
        hpo.Study("other").delete()
    assert stored(tmp_path).name == "tiny"
    hpo.Study("studies/other.yaml").delete()
    with pytest.raises(StorageError):
        stored(tmp_path)
