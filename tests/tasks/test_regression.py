"""Targets of any size reach the loss and the metrics without a loss of digits."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
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
SIZES = [(0, 1), (1.7e9, 1), (1e15, 8), (0, 0.01), (0, 1e-140), (1e140, 1e139), (-1e12, 1)]
SHAPE_N = np.random.default_rng(0).integers(-20, 20, 24).astype(float)


def examples(values: Any) -> list[Example]:
    labels = ({"t": float(value)} for value in values)
    return [Example("id", f"word {n}", of, {}, annotated=frozenset({"t"})) for n, of in enumerate(labels)]


def fitted(rows: list[Example]) -> Task:
    return kind_of(Task("t", "regression")).fitted(rows)


@pytest.mark.parametrize(("offset", "unit"), SIZES)
def test_loss_equals_the_loss_in_float64(offset: float, unit: float) -> None:
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
        given, mask = (output_N[:, None], batch.targets["t"]), batch.attention_mask_BL
        total = loss_sum(task, *given, LossOptions(loss), None, mask)
        assert total.dtype == torch.float32
        assert total.item() == pytest.approx(expected_N.sum(), rel=1e-5)


@pytest.mark.parametrize(("offset", "unit"), SIZES)
def test_predictions_and_metrics_equal_float64(offset: float, unit: float) -> None:
    target_N = offset + unit * SHAPE_N
    rows = examples(target_N)
    task = fitted(rows)
    output_N1 = np.random.default_rng(1).normal(size=(len(rows), 1)).astype(np.float32)
    split = tokenize_split(rows, (task,), tiny_tokenizer("wordpiece"), Windowing(16))
    predicted = kind_of(task).decode(output_N1, split, None, None)
    scale = np.abs(SHAPE_N - SHAPE_N.mean()).max()
    std = ((SHAPE_N - SHAPE_N.mean()) / scale).std() * scale * unit
    np.testing.assert_allclose(predicted, target_N.mean() + output_N1[:, 0].astype(float) * std, rtol=1e-9)
    found = score(task, predicted, rows)
    expected = {
        "r2": pytest.approx(r2_score(target_N / unit, np.array(predicted) / unit), abs=1e-6),
        "mae": pytest.approx(mean_absolute_error(target_N, predicted), rel=1e-9),
        "rmse": pytest.approx(unit * root_mean_squared_error(target_N / unit, np.array(predicted) / unit)),
        "pearson": pytest.approx(np.corrcoef(SHAPE_N, output_N1[:, 0])[0, 1], abs=1e-3),
        "spearman": pytest.approx(spearmanr(SHAPE_N, output_N1[:, 0]).statistic, abs=1e-12),
    }
    assert found == expected


@pytest.mark.parametrize("value", [0.1, 1.7e9 + 0.3, 1e-12])
def test_equal_targets_have_no_spread_of_rounding(value: float) -> None:
    task = fitted(examples([value] * 7))
    assert (task.target_mean, task.target_std) == (value, 1.0)


def test_targets_without_a_square_in_float64_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be at most 1e\+150 in magnitude, but got 1e\+200"):
        kind_of(Task("t", "regression")).label(1e200)
    with pytest.raises(DataError, match=r"`t` must have a standard deviation of at least 1e-150"):
        fitted(examples([1e-170, 2e-170]))


SKEWED = np.random.default_rng(3).lognormal(3, 2, 24)


def logs(values: Any) -> Task:
    return kind_of(Task("t", "regression", target="log1p")).fitted(examples(values))


def test_log1p_trains_on_logarithms_and_predicts_numbers() -> None:
    """Against plain PyTorch and NumPy, also over the windows of one text and beyond the training targets."""
    task, rows = logs(SKEWED), examples(SKEWED)
    log_N = np.log1p(SKEWED)
    assert (task.target_mean, task.target_std) == (pytest.approx(log_N.mean()), pytest.approx(log_N.std()))
    split = tokenize_split(rows, (task,), tiny_tokenizer("wordpiece"), Windowing(16))
    target_B = collate(split, range(24), (task,), pad_id=0).targets["t"].clone()
    output_B = torch.randn(24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target_B[3] = torch.nan
    total = loss_sum(task, output_B[:, None], target_B, LossOptions("mse"), None, torch.ones(24, 1))
    error_B = output_B - torch.tensor((log_N - log_N.mean()) / log_N.std()).float()
    assert total.item() == pytest.approx((error_B.pow(2).sum() - error_B[3] ** 2).item(), rel=1e-5)
    (gradient_B,) = torch.autograd.grad(total, output_B)
    assert gradient_B.isfinite().all()
    output_N = np.append((log_N[:-1] - log_N.mean()) / log_N.std(), 1e9)
    predicted = kind_of(task).decode(output_N[:, None], split, None, None)
    assert predicted == pytest.approx([*SKEWED[:-1], np.expm1(log_N.max() + log_N.std())])
    long = [Example("id", "word " * 40, {"t": 1.0}, {}, annotated=frozenset("t"))]
    windows = tokenize_split(long, (task,), tiny_tokenizer("wordpiece"), Windowing(16, "window", 2))
    output_W1 = np.arange(windows.num_windows, dtype=np.float32)[:, None] / 8
    mean = output_W1.mean() * task.target_std + task.target_mean
    assert kind_of(task).decode(output_W1, windows, None, None) == [pytest.approx(np.expm1(mean))]


def test_log1p_of_equal_targets() -> None:
    task = logs([7.0] * 5)
    assert (task.target_mean, task.target_std) == (np.log1p(7.0), 1.0)


def test_targets_of_log1p_must_be_above_minus_1() -> None:
    assert kind_of(Task("t", "regression", target="log1p")).label(-0.9) == -0.9
    with pytest.raises(ValueError, match=r"must be above -1 for `target: log1p`, but got -1"):
        kind_of(Task("t", "regression", target="log1p")).label(-1)
