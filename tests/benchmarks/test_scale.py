from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import scale
from scale import NAME, copy_trials, make_study, work

from hpo.study.reading.reader import read_study
from hpo.study.store.storage import open_storage


@pytest.mark.parametrize("pruner", ["promote", "none"])
def test_the_study_grows_by_whole_trials(
    pruner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_study("sqlite:///s.db", pruner, "random")
    times = work("sqlite:///s.db", pruner, "random", 50)
    assert len(times) > 50
    with open_storage("sqlite:///s.db", create=False) as storage:
        before = read_study(storage, NAME)
        copy_trials("sqlite:///s.db", 150)
        after = read_study(storage, NAME)
    assert [trial.number for trial in after.trials] == sorted({trial.number for trial in after.trials})
    assert len(after.trials) == 150
    states = Counter(trial.outcome for trial in before.trials)
    assert {trial.outcome for trial in after.trials} == states.keys()
    assert after.counts["done"] == 150 - states["paused"]
    ended = next(trial for trial in after.trials[len(before.trials) :])
    assert (len(ended.params), len(ended.telemetry), len(ended.evaluations)) >= (8, 5, 1)


def test_plain_optuna_has_the_same_parameters_and_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_study("sqlite:///plain.db", "plain", "random")
    assert len(work("sqlite:///plain.db", "plain", "random", 4)) == 4 + scale.WARM_UP + 1
    copy_trials("sqlite:///plain.db", 30)
