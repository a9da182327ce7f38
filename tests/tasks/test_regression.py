"""Targets of any size reach the loss and the metrics without a loss of digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from support.jsonl_sets import write_set
from support.tiny import tiny_executor
from support.tiny_tokenizers import tiny_tokenizer, tokenize_split

from hpo.data.batches import collate
from hpo.errors import DataError
from hpo.tasks.example import Example
from hpo.tasks.kind import Task, kind_of
from hpo.tasks.options import LossOptions
from hpo.tasks.tokenized_split import Windowing
from hpo.training.losses import loss_sum
from hpo.training.metrics import score

# (offset, unit): timestamps, identifiers, cents, tiny and huge numbers, and a spread of 1e-12 of the offset.
SIZES = [(0, 1), (1.7e9, 1), (1e15, 8), (0, 0.01), (0, 1e-12), (0, 1e-140), (1e140, 1e139), (-1e12, 1)]
SHAPE_N = np.random.default_rng(0).integers(-20, 20, 24).astype(float)


def examples(values: Any) -> list[Example]:
    annotated = frozenset({"t"})
    return [
        Example(str(n), f"word {n}", {"t": float(y)}, {}, annotated=annotated) for n, y in enumerate(values)
    ]


def fitted(rows: list[Example]) -> Task:
    return kind_of(Task("t", "regression")).fitted(rows)


@pytest.mark.parametrize(("offset", "unit"), SIZES)
def test_the_loss_is_that_of_float64(offset: float, unit: float) -> None:
    target_N = offset + unit * SHAPE_N
    rows = examples(target_N)
    task = fitted(rows)
    split = tokenize_split(rows, (task,), tiny_tokenizer("wordpiece"), Windowing(16))
    batch = collate(split, range(len(rows)), (task,), pad_id=0)
    output_N = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
    standard_N = (target_N - target_N.mean()) / np.abs(target_N - target_N.mean()).max()
    standard_N /= standard_N.std()
    error_N = output_N.double().numpy() - standard_N
    huber_N = np.where(np.abs(error_N) < 1, error_N**2 / 2, np.abs(error_N) - 0.5)
    for loss, expected_N in (("mse", error_N**2), ("huber", huber_N)):
        of_batch = loss_sum(
            task,
            output_N[:, None],
            batch.targets["t"],
            LossOptions(loss),
            None,
            batch.attention_mask_BL,
        )
        assert of_batch.dtype == torch.float32
        assert of_batch.item() == pytest.approx(expected_N.sum(), rel=1e-5)


@pytest.mark.parametrize(("offset", "unit"), SIZES)
def test_predictions_and_metrics_are_those_of_float64(offset: float, unit: float) -> None:
    target_N = offset + unit * SHAPE_N
    rows = examples(target_N)
    task = fitted(rows)
    output_N1 = np.random.default_rng(1).normal(size=(len(rows), 1)).astype(np.float32)
    split = tokenize_split(rows, (task,), tiny_tokenizer("wordpiece"), Windowing(16))
    predicted = kind_of(task).decode(output_N1, split, None, None)  # type: ignore[arg-type]
    scale = np.abs(SHAPE_N - SHAPE_N.mean()).max()
    std = ((SHAPE_N - SHAPE_N.mean()) / scale).std() * scale * unit
    np.testing.assert_allclose(predicted, target_N.mean() + output_N1[:, 0].astype(float) * std, rtol=1e-9)
    assert score(task, predicted, rows) == {
        "r2": pytest.approx(r2_score(target_N / unit, np.array(predicted) / unit), abs=1e-6),
        "mae": pytest.approx(mean_absolute_error(target_N, predicted), rel=1e-9),
        "rmse": pytest.approx(unit * root_mean_squared_error(target_N / unit, np.array(predicted) / unit)),
    }


@pytest.mark.parametrize("value", [0.1, 1.7e9 + 0.3, 1e-12])
def test_equal_targets_have_no_spread_of_rounding(value: float) -> None:
    task = fitted(examples([value] * 7))
    assert (task.target_mean, task.target_std) == (value, 1.0)


def test_a_number_without_a_square_in_float64_is_refused(tmp_path: Path) -> None:
    row = {"id": "r", "text": "word", "labels": {"t": 1e200}}
    write_set(tmp_path / "set", {"t": {"kind": "regression"}}, train=[row], validation=[{**row, "id": "v"}])
    with pytest.raises(DataError, match=r"labels\.t must be at most 1e\+150 in magnitude, .* 1e\+200"):
        tiny_executor(tmp_path, data={"source": "jsonl", "path": str(tmp_path / "set")})
    with pytest.raises(DataError, match=r"`t` must have a standard deviation of at least 1e-150"):
        fitted(examples([1e-170, 2e-170]))


def test_a_shift_of_all_targets_changes_no_score(tmp_path: Path) -> None:
    scores = []
    training = {"max_steps": 20, "batch_size": 8, "max_length": 16, "dropout": 0.0, "fp_precision": "fp32"}
    for offset in (0, 2**40):
        sets = {
            split: [
                {"id": f"{split}{n}", "text": "good " * (n % 5 + 1), "labels": {"t": offset + n % 5}}
                for n in range(20)
            ]
            for split in ("train", "validation")
        }
        folder = tmp_path / str(offset)
        folder.mkdir()
        write_set(folder / "set", {"t": {"kind": "regression"}}, **sets)
        executor = tiny_executor(
            folder,
            data={"source": "jsonl", "path": str(folder / "set")},
            training=training,
        )
        result = executor.run({"learning_rate": 3e-3}, folder / "trial", "t")
        assert result.outcome == "complete", result.reason
        scores.append(result.telemetry["metrics"]["t"])
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)
    assert scores[0]["r2"] > 0.5
