"""Pauses at rungs, with real training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.command_line import hpo_command, ok, stored
from support.tiny import write_study

from hpo.study.reading.study_record import StudyRecord, TrialRecord
from hpo.study.sampling.promotion import RESUMED_ATTR

RATES = {"learning_rate": {"type": "categorical", "choices": [1e-6, 3e-4, 1e-3, 3e-3]}}
PROMOTE = {"name": "promote", "starts": 0.2, "keep": 1, "reduction_factor": 2}
"""Its rungs are at 0.2 and 0.4: after steps 2 and 4 of ten."""
FEW_ROWS = {"num_train": 48, "num_validation": 12, "num_test": 4, "max_sentences": 4}
DROPOUT = {"max_steps": 10, "batch_size": 8, "max_length": 64, "dropout": 0.1}


def write(folder: Path, location: str | None = None, **changes: Any) -> None:
    """The tiny study; its trials have five evaluations."""
    folder.mkdir(exist_ok=True)
    content = {"n_trials": 4, "sampler": {"name": "grid"}, "search_space": RATES, "training": DROPOUT}
    checkpoint = {"top_k": 4, "location": location}
    data = {"source": "synthetic", "synthetic": FEW_ROWS}
    write_study(folder, **content, data=data, evaluation={"per_trial": 5}, checkpoint=checkpoint, **changes)


def run(folder: Path, **changes: Any) -> StudyRecord:
    """The same, run to its end."""
    write(folder, **changes)
    ok(hpo_command(folder, "run", "tiny.yaml"))
    return stored(folder)


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with pauses, run on one machine."""
    folder = tmp_path_factory.mktemp("paused")
    run(folder, pruner=PROMOTE)
    return folder


def weights(folder: Path, trial: TrialRecord) -> dict[str, list[float]]:
    """Of the trial's best checkpoint."""
    (file,) = folder.glob(f"runs/tiny/checkpoints-*/trial-{trial.number:05d}/best-*/model.safetensors")
    return {name: weight.flatten().tolist() for name, weight in load_file(file).items()}


def by_rate(trials: list[TrialRecord]) -> dict[float, TrialRecord]:
    return {trial.params["learning_rate"]: trial for trial in trials}


def test_resumed_trial_ends_as_without_a_pause(paused: Path, tmp_path: Path) -> None:
    whole, short = run(tmp_path / "whole"), stored(paused)
    undisturbed = by_rate(whole.trials)
    for trial in short.trials:
        expected = undisturbed[trial.params["learning_rate"]].evaluations
        assert [row.metrics for row in trial.evaluations] == [row.metrics for row in expected][
            : len(trial.evaluations)
        ]
        assert (
            trial.telemetry.get("resumed_from_step")
            == {None: None, 0.2: 2, 0.4: 4}[trial.attributes.get(RESUMED_ATTR)]
        )
    complete = by_rate([trial for trial in short.trials if trial.outcome == "complete"])
    assert complete
    best = max(undisturbed, key=lambda rate: undisturbed[rate].evaluations[0].metrics["score"])
    went_on = {trial.params["learning_rate"] for trial in short.trials if RESUMED_ATTR in trial.attributes}
    assert complete.keys() | {best} <= went_on
    for rate, trial in complete.items():
        assert trial.values == undisturbed[rate].values
        assert len(trial.evaluations) == 5
        assert weights(paused, trial) == weights(tmp_path / "whole", undisturbed[rate])
    kept = {path.name for path in paused.glob("runs/tiny/checkpoints-*/trial-*")}
    assert kept == {f"trial-{trial.number:05d}" for trial in complete.values()}
    exported = ok(hpo_command(paused, "best", "tiny.yaml", "--export", "model", "--json")).json
    assert exported["trials"][0]["number"] in {trial.number for trial in complete.values()}
