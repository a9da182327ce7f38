"""Optimiser states in fewer bits: their record, and an exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.resumed_trials import check_resume_is_exact
from support.tiny import ENCODER, tiny_executor

from hpo.trial.executor import Executor

WIDE = {**ENCODER, "hidden_size": 64, "intermediate_size": 128}  # of which blocks of 256 divide the matrices
TRAINING = {"max_steps": 8, "batch_size": 8, "max_length": 64, "learning_rate": 1e-3}


def executor_of(folder: Path, **settings: Any) -> Executor:
    study = {"model": {"encoder": WIDE}, "training": TRAINING | settings, "search_space": {}}
    return tiny_executor(folder, **study, evaluation={"per_trial": 2})


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("fp32", "bf16"), ("fp16", "int8"), ("bf16-true", "int8"), ("bf16-true", "bf16")],
)
def test_resume_is_exact(tmp_path: Path, precision: str, kind: str) -> None:
    check_resume_is_exact(executor_of(tmp_path, optimizer_state=kind, fp_precision=precision), tmp_path)


def test_record_has_the_stored_formats(tmp_path: Path) -> None:
    names = ["fp32", "bf16", "int8"]
    kept = {
        name: executor_of(tmp_path, optimizer_state=name).run({}, None, "").telemetry["optimizer_state"]
        for name in names
    }
    assert [kept[name]["effective"] for name in names] == names
    assert [kept[name]["requested"] for name in names] == names
    assert kept["fp32"]["bytes"] == kept["fp32"]["fp32_bytes"] == kept["int8"]["fp32_bytes"]
    sizes = [kept[name]["bytes"] for name in names]
    assert sizes == sorted(sizes, reverse=True)
    assert kept["int8"]["dtypes"]["uint8"] == 2 * 12  # the two moments of six matrices of each of two layers
    assert kept["int8"]["dtypes"]["float32"] > 0, "embeddings keep fp32"
