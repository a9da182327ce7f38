"""The life of a study in its database."""

from pathlib import Path
from typing import Any

import pytest
from support.command_line import stored
from support.tiny import write_study

import hpo
from hpo.errors import InputError, StorageError
from hpo.study.sampling.promotion import PAUSED_ATTR, WHOLE_ATTR

SPACE = {
    "learning_rate": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True},
    "fp_precision": {"type": "categorical", "choices": ["fp32", "fp16"]},
    "init_scale": {"type": "categorical", "choices": [8.0, 64.0], "when": {"fp_precision": "fp16"}},
}


@pytest.fixture
def study(folder: Path) -> hpo.Study:
    """A study in the database, without trials."""
    made = hpo.Study(write_study(folder, search_space=SPACE, n_trials=2), quiet=True)
    made.init()
    return made


def test_enqueue_takes_a_mapping_or_texts_until_no_trial_is_left(study: hpo.Study) -> None:
    first = study.enqueue(["fp_precision=16-mixed", "init_scale=8"])
    second = study.enqueue({"learning_rate": 1e-3}, whole=True)
    enqueued = {"fp_precision": "fp16", "init_scale": 8.0}
    assert first.as_json() == {"study": "tiny", "enqueued": enqueued, "ahead": 0, "whole": False}
    assert second.text().endswith("learning_rate=0.001, to run to its end. Before it in the queue: 1.")
    assert [trial.attributes.get(WHOLE_ATTR) for trial in study.record.trials] == [None, True]
    with pytest.raises(InputError, match="a trial left to begin, but has 2, and 2 are enqueued"):
        study.enqueue(["learning_rate=1e-3"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "must have at least one setting"),
        ({"learning_rat": 1e-3}, "Did you mean `learning_rate`"),
        ({"learning_rate": "fast"}, "must be a number, but got `fast`"),
        ({"dropout": 0.1}, "^The study does not search `dropout`"),
        ({"learning_rate": 5}, "^learning_rate=5 is outside [^ ]* to [^ ]*$"),
        (["init_scale=8"], "searched only with fp_precision=fp16. Give that, too"),
        (["fp_precision=bf16"], "none of its choices, which are fp32, fp16"),
        ({1: 2}, "^1: there is no such setting"),
        (5, "must be a mapping, or texts NAME=VALUE, but got `5`"),
        (["nonsense"], "must be written as NAME=VALUE"),
    ],
)
def test_enqueue_refuses_an_impossible_configuration(study: hpo.Study, params: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        study.enqueue(params)
    assert study.record.trials == []


def test_a_whole_trial_neither_pauses_nor_ends_early(folder: Path) -> None:
    """Under `promote`, which promotes at most two of these eight trials."""
    pruner = {"name": "promote", "starts": 0.25, "keep": 1}
    training = {"max_steps": 8, "batch_size": 8, "max_length": 64, "seed": 1}
    space = {"learning_rate": SPACE["learning_rate"]}
    study = hpo.Study(
        write_study(folder, search_space=space, n_trials=8, pruner=pruner, training=training), quiet=True
    )
    study.init()
    for rate, whole in ((1e-4, True), (1.1e-4, False)):
        study.enqueue({"learning_rate": rate}, whole=whole)
    study.run()
    trials = {trial.params["learning_rate"]: trial for trial in study.record.trials}
    assert trials[1e-4].outcome == "complete"
    assert PAUSED_ATTR not in trials[1e-4].attributes
    assert PAUSED_ATTR in trials[1.1e-4].attributes


def test_pause_resume_and_cancel(study: hpo.Study) -> None:
    paused = study.pause()
    assert (paused.state, paused.before, paused.ended) == ("paused", "open", 0)
    assert study.run().ended == "closed"
    assert study.resume().before == "paused"
    assert study.resume().text().startswith("The study tiny was not paused")
    counts = {"open": 2, "running": 0, "done": 0}
    changed = {"study": "tiny", "state": "cancelled", "before": "open", "trials": counts, "ended": 0}
    assert study.cancel().as_json() == changed


def test_a_name_means_the_study_in_the_database_before_a_file(folder: Path) -> None:
    """`studies/foo.yaml` has `name: bar`, and both are in the database."""
    (folder / "studies").mkdir()
    write_study(folder / "studies", name="bar").rename(folder / "studies" / "foo.yaml")
    assert hpo.Study("foo").file.name == "bar"
    hpo.Study("studies/foo.yaml", quiet=True).init()
    assert hpo.Study("foo").record.name == "bar", "the database has no foo yet"
    write_study(folder, name="foo")
    hpo.Study("./tiny.yaml", quiet=True).init()
    for given, name in (("foo", "foo"), ("bar", "bar"), ("studies/foo.yaml", "bar")):
        assert hpo.Study(given).record.name == name
    foo = hpo.Study("foo")
    assert foo.config_of(foo.record).name == "foo"
    foo.delete()
    with pytest.raises(StorageError, match="foo"):
        hpo.Study("foo").delete()
    assert stored(folder, "bar").name == "bar", "the study of the file is kept"
