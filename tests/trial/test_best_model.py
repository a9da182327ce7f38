"""Facts of an exported encoder, and scores on test."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.tiny import tiny_executor

from hpo.errors import OutOfMemory, RunError
from hpo.training.checkpoint import STATE
from hpo.trial.best_model import encoder_facts, export_checkpoint, split_predictions, with_scores
from hpo.trial.telemetry import StoredTrial


def test_encoder_facts_have_no_path(tmp_path: Path) -> None:
    (folder := tmp_path / "private" / "our-bert").mkdir(parents=True)
    assert encoder_facts(str(folder), None) == {"name": "our-bert", "hub_id": None, "revision": None}


@pytest.mark.parametrize("error", [None, OutOfMemory("one example does not fit.")], ids=["nonfinite", "oom"])
def test_trial_without_a_test_score(tmp_path: Path, monkeypatch: Any, error: Exception | None) -> None:
    """The worker goes on: it is no error of the run."""
    executor, params = tiny_executor(tmp_path, evaluation={"test": True}), {"fp_precision": "fp32"}
    result = executor.run(params, tmp_path / "trial", "key")
    predict = Mock(side_effect=error, return_value={"criteria": np.full((1, 1), np.nan, np.float32)})
    monkeypatch.setattr("hpo.trial.best_model.predict_logits", predict)
    scored, statistics = with_scores(executor, tmp_path / "trial", params, result, "test")
    assert (result.outcome, scored.outcome) == ("complete", "oom" if error else "nonfinite")
    assert (scored.values, statistics) == (None, {})
    assert scored.reason.startswith("no score on test: ")


def test_checkpoint_of_another_version(tmp_path: Path) -> None:
    """Format 11 has the values beside the evaluation; still older ones have no `fp32_parts`."""
    executor, folder, params = tiny_executor(tmp_path), tmp_path / "trial", {"fp_precision": "fp32"}
    executor.run(params, folder, "key")
    (path,) = folder.glob(f"best-*/{STATE}")
    state: dict[str, Any] = torch.load(path, weights_only=True)
    evaluation = dict(state["best"])
    nested = {"evaluation": evaluation, "values": evaluation.pop("values"), "broken": ""}
    no_parts = {name: value for name, value in state.items() if name != "fp32_parts"}
    refused = r"is of another version of hpo\. Train the trial again"
    for older in (state | {"best": nested}, no_parts):
        torch.save(older, path)
        with pytest.raises(RunError, match=refused):
            split_predictions(executor, folder, params, "validation")
        with pytest.raises(RunError, match=refused):
            export_checkpoint(executor, folder, tmp_path / "out", StoredTrial(0, params))
