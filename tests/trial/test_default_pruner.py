"""The pruner of a study file without one, chosen by its rows."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import CPU, TRAINING, tiny_executor, write_study

from hpo.config.study_config import StudyConfig, load_study
from hpo.trial.parts import fit_pruner


def fitted(folder: Path, epochs: float, **changes: Any) -> tuple[StudyConfig, str]:
    """48 rows to train on and 24 to evaluate: an evaluation costs 1/6 of an epoch."""
    path = write_study(folder, training=TRAINING | {"max_steps": None, "epochs": epochs}, **changes)
    content = yaml.safe_load(path.read_text())
    if "pruner" not in changes:
        del content["pruner"]
    path.write_text(yaml.safe_dump(content))
    return fit_pruner(load_study(path), tiny_executor(folder, CPU).dataset)


@pytest.mark.parametrize(("epochs", "name"), [(1, "none"), (1.5, "none"), (2, "promote"), (20, "promote")])
def test_pruner_depends_on_the_cost_of_evaluations(tmp_path: Path, epochs: float, name: str) -> None:
    """`promote` tries at least three configurations for the rows of one whole trial."""
    config, reason = fitted(tmp_path, epochs)
    assert config.pruner.name == name
    assert f"stage of a trial {'costs' if name == 'promote' else 'would cost with `promote`'}" in reason


@pytest.mark.parametrize("name", ["promote", "median"])
def test_pruner_of_the_file_stays(tmp_path: Path, name: str) -> None:
    config, reason = fitted(tmp_path, 1, pruner={"name": name})
    assert config.pruner.name == name
    assert reason.startswith("it is set in the study file")
