"""Optimiser states in fewer bits: their record, and an exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.resumed_trials import check_resume_is_exact
from support.tiny import ENCODER, tiny_executor

WIDE = {**ENCODER, "hidden_size": 64, "intermediate_size": 128}  # of which blocks of 256 divide the matrices


@pytest.mark.parametrize(("precision", "kind"), [("fp32", "bf16"), ("fp16", "int8"), ("bf16-true", "int8")])
def test_resume_is_exact(tmp_path: Path, precision: str, kind: str) -> None:
    training = {"max_steps": 8, "batch_size": 8, "max_length": 64, "learning_rate": 1e-3}
    settings = {"fp_precision": precision, "optimizer_state": kind}
    study = {"model": {"encoder": WIDE}, "training": training | settings, "search_space": {}}
    executor = tiny_executor(tmp_path, **study, evaluation={"per_trial": 2})
    facts = check_resume_is_exact(executor, tmp_path).telemetry["optimizer_state"]
    assert (facts["requested"], facts["effective"]) == (kind, kind)
    if kind == "int8":
        assert facts["dtypes"]["uint8"] == 2 * 12  # the two moments of six matrices of each of two layers
        assert facts["dtypes"]["float32"] > 0, "embeddings keep fp32"
