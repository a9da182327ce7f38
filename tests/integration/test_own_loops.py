"""The examples with their own training loop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.command_line import ROOT, finish, ok, start_hpo, stored, wait_until

from hpo.study.reading.study_record import StudyRecord

EXAMPLES = ROOT / "studies" / "examples"
PARAMS = {"learning_rate": {"type": "float", "low": 1e-3, "high": 5e-3}}


def write_example(example: str, folder: Path, **changes: Any) -> None:
    """Write an example with fewer and shorter trials, in fp32, with a checkpoint after each round."""
    content = yaml.safe_load((EXAMPLES / example / "study.yaml").read_text())
    searched = {**content["search_space"], **PARAMS, "fp_precision": fp32()}
    content |= {
        "n_trials": 1,
        "pruner": {"name": "none"},
        "checkpoint": {"every_seconds": 1e-6, "top_k": 9},
        "search_space": searched,
    }
    (folder / f"{example}.yaml").write_text(yaml.safe_dump(content | changes))
    (folder / f"{example}.py").write_text((EXAMPLES / example / f"{example}.py").read_text())


def fp32() -> dict[str, Any]:
    return {"type": "categorical", "choices": ["fp32"]}


def best_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob(f"runs/{name}/checkpoints-*/trial-00000/best-*/model.safetensors")))


def saved(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f"runs/{name}/checkpoints-*/trial-00000/step-*"))


def evaluations(record: StudyRecord) -> list[Any]:
    return [(row.step, dict(row.metrics)) for row in record.trials[0].evaluations]


@pytest.mark.parametrize("name", ["own_loop", "own_trainer"])
def test_killed_example_resumes_exactly(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        # Long enough to be met in the middle.
        write_example(name, folder, training={"seed": 0, "epochs": 6, "batch_size": 50})
    # All in processes of their own: one that has trained before may differ in the last bits.
    ok(finish(start_hpo(whole, "run", f"{name}.yaml")))
    process = start_hpo(cut, "run", f"{name}.yaml")
    wait_until(lambda: len(saved(cut, name)) > 1, process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    assert stored(cut, name).trials[0].state == "RUNNING", "killed too late to test anything"
    ok(finish(start_hpo(cut, "run", f"{name}.yaml")))
    first, second = stored(whole, name), stored(cut, name)
    assert second.trials[0].telemetry["resumed_from_step"] > 0
    assert second.trials[0].outcome == "complete"
    assert second.trials[0].values == first.trials[0].values
    assert evaluations(second) == evaluations(first)
    before, after = best_weights(whole, name), best_weights(cut, name)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert second.trials[0].telemetry["precision"]["agrees"] is True
