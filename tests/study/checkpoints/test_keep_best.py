"""Trials that keep their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpo.study.checkpoints.keep_best import keep_best_checkpoints


def remaining(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("trial-")) for path in folder.glob("trial-*")}


@pytest.mark.parametrize("directions", [["maximize"], ["minimize"], ["maximize", "minimize"]])
@pytest.mark.parametrize("top_k", [0, 2])
def test_best_trials_keep_their_checkpoints(tmp_path: Path, directions: list[str], top_k: int) -> None:
    trial_study = optuna.create_study(directions=directions)
    values = [(0.5, 9.0), (0.9, 9.0), (0.7, 8.0), (0.1, 1.0), (0.2, 9.0)]
    for value in values:
        trial_study.tell(trial_study.ask(), value[: len(directions)])
    trial_study.tell(trial_study.ask(), state=TrialState.PRUNED)
    trial_study.tell(trial_study.ask(), state=TrialState.FAIL)
    unfinished = trial_study.ask().number
    for number in range(unfinished + 1):
        (tmp_path / f"trial-{number:05d}" / "best-00000001").mkdir(parents=True)

    keep_best_checkpoints(trial_study, tmp_path, top_k)

    best_first = {
        ("maximize",): [1, 2, 0, 4, 3],
        ("minimize",): [3, 4, 0, 2, 1],
        ("maximize", "minimize"): [1, 2, 3, 0, 4],  # 3 is on the Pareto front, though 0 has a better value
    }[tuple(directions)]
    kept = remaining(tmp_path)
    assert kept == {*best_first[:top_k], unfinished}


def test_concurrently_ended_trial_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker ends the best one after each read of the trials."""
    opened = optuna.create_study(direction="maximize")
    opened.tell(opened.ask(), 0.1)
    others = [opened.ask() for _ in range(3)]
    for number in range(4):
        (tmp_path / f"trial-{number:05d}").mkdir()
    read = type(opened).get_trials

    def get_trials(self: optuna.Study, *args: Any, **options: Any) -> Any:
        found = read(self, *args, **options)
        if others:
            trial = others.pop(0)
            self.tell(trial, 0.5 + trial.number)
        return found

    monkeypatch.setattr(type(opened), "get_trials", get_trials)
    keep_best_checkpoints(opened, tmp_path, 1)
    assert {1, 2, 3} <= remaining(tmp_path)
