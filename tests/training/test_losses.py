"""Losses against formulas in fp64."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import tiny_batch, tiny_model, tiny_objective
from torch import Tensor, nn

from hpo.errors import InputError
from hpo.tasks.kind import KINDS, Task, kind_of
from hpo.tasks.options import LossOptions
from hpo.training.losses import check_loss, count_items, loss_sum

TASKS = {
    "single_label": Task("t", "single_label", ("a", "b", "c")),
    "multi_label": Task("t", "multi_label", ("a", "b", "c")),
    "token_classification": Task("t", "token_classification", ("a", "b")),
    "overlapping": Task("t", "token_classification", ("a", "b"), spans_may_overlap=True),
    "span_extraction": Task("t", "span_extraction", ("a",)),
    "span_per_label": Task("t", "span_per_label", ("a", "b", "c"), "labels", spans_may_overlap=True),
    "regression": Task("t", "regression", target_mean=3.0, target_std=2.0),
}
CLASS_WEIGHTS = {name: [0.5, 2.0, 1.5] for name in ("single_label", "multi_label", "span_per_label")}
CLASS_WEIGHTS |= {"token_classification": [0.2, 1.0, 2.0, 3.0, 4.0], "overlapping": [0.2, 1.0, 2.0]}
UNLABELLED = dict.fromkeys(TASKS, -100) | {"multi_label": -1, "span_per_label": -1, "regression": math.nan}
CASES = [(name, loss) for name, task in TASKS.items() for loss in KINDS[task.kind].losses]
LOSSES = ("auto", "focal", "huber")
GAMMA_CASES = [(*case, gamma) for case in CASES for gamma in ((0.5, 2.0) if case[1] == "focal" else (2.0,))]


def make_batch(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, target with missing labels, and an attention mask with padding, of a task of TASKS."""
    task = TASKS[name]
    generator = torch.Generator().manual_seed(0)
    b, n, k = 6, 7, task.num_outputs
    lengths = torch.randint(3, n + 1, (b,), generator=generator)
    mask = (torch.arange(n)[None] < lengths[:, None]).long()
    shape = (b, k) if task.level == "sequence" else (b, n, k)
    logits = 3 * torch.randn(shape, generator=generator)
    missing = torch.rand((b,), generator=generator) < 0.3
    missing[0], missing[1] = True, False
    high, *sizes = {
        "single_label": (k, b),
        "multi_label": (2, b, k),
        "token_classification": (k, b, n),
        "overlapping": (3, b, n, 2),
        "span_extraction": (3, b, 2),
        "span_per_label": (2, b, n, k),
        "regression": (9, b),
    }[name]
    target = torch.randint(high, sizes, generator=generator)
    if name in ("multi_label", "span_per_label", "regression"):
        target = target.float()
    if task.level == "token" and name != "span_extraction":
        target[mask == 0] = UNLABELLED[name]
    target[missing] = UNLABELLED[name]
    if name in ("multi_label", "span_per_label"):
        target[1, ..., 1] = UNLABELLED[name]
    return logits, target, mask


def reference_loss(
    name: str, logits: Tensor, target: Tensor, mask: Tensor, options: LossOptions, weight: Tensor | None
) -> Tensor:
    """The sum over labelled items in float64, from the formulas."""
    task, x, eps = TASKS[name], logits.double(), options.label_smoothing
    gamma = options.focal_gamma if options.loss == "focal" else 0.0
    weight = torch.ones(()) if weight is None else weight
    if task.kind in ("single_label", "token_classification"):
        rows = x.reshape(-1, 3 if task.spans_may_overlap else task.num_outputs)
        rows, y = rows[target.reshape(-1) != -100], target[target != -100]
        p = torch.exp(rows) / torch.exp(rows).sum(1, keepdim=True)
        q = (1 - eps) * torch.eye(p.shape[1])[y] + eps / p.shape[1]
        return -(weight * q * (1 - p) ** gamma * torch.log(p)).sum()
    if task.kind in ("multi_label", "span_per_label"):
        p, q = 1 / (1 + torch.exp(-x)), target * (1 - eps) + eps / 2
        losses = -weight * q * (1 - p) ** gamma * torch.log(p) - (1 - q) * p**gamma * torch.log(1 - p)
        return losses[target >= 0].sum()
    if task.kind == "span_extraction":
        total = torch.zeros((), dtype=torch.float64)
        for b, end in np.argwhere(target.numpy() != -100):
            scores = x[b, : int(mask[b].sum()), end]
            log_p = scores - torch.log(torch.exp(scores).sum())
            total = total - ((1 - eps) * log_p[target[b, end]] + eps * log_p.mean()) / 2
        return total
    error = (x[:, 0] - (target.double() - 3.0) / 2.0).abs()[~target.isnan()]
    huber = torch.where(error <= 1, error**2 / 2, error - 0.5)
    return (huber if options.loss == "huber" else error**2).sum()


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss, logits)
    return result


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize(("name", "loss", "gamma"), GAMMA_CASES)
def test_loss_and_gradient_equal_fp64(name: str, loss: str, eps: float, gamma: float, weighted: bool) -> None:
    logits, target, mask = make_batch(name)
    logits.requires_grad_()
    weight = torch.tensor(CLASS_WEIGHTS[name]) if weighted and name in CLASS_WEIGHTS else None
    options = LossOptions(loss=loss, label_smoothing=eps, focal_gamma=gamma)
    ours = loss_sum(TASKS[name], logits, target, options, weight, mask)
    rounded = logits.detach().bfloat16()
    in_fp32 = loss_sum(TASKS[name], rounded.float(), target, options, weight, mask)
    assert torch.equal(loss_sum(TASKS[name], rounded, target, options, weight, mask), in_fp32)
    reference = reference_loss(name, logits, target, mask, options, weight)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), reference, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(gradient(ours, logits), gradient(reference, logits), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "target", "count"),
    [
        ("single_label", [0, -100, 2], 2),
        ("multi_label", [[0.0, 1.0, 0.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]], 2),
        ("regression", [0.0, math.nan, -1.0], 2),
        ("token_classification", [[0, 3, -100], [-100, -100, -100]], 2),
        ("overlapping", [[[0, 3], [1, -100], [-100, -100]]], 2),
        ("span_extraction", [[0, 0], [-100, -100], [3, 4]], 2),
        ("span_per_label", [[[0.0, -1.0, 1.0], [-1.0, -1.0, -1.0]]], 2),
    ],
)
def test_count_items(name: str, target: list[Any], count: int) -> None:
    assert count_items(TASKS[name], torch.tensor(target)) == count


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_batch_without_labels(name: str, loss: str) -> None:
    logits, target, mask = make_batch(name)
    logits.requires_grad_()
    target.fill_(UNLABELLED[name])
    ours = loss_sum(TASKS[name], logits, target, LossOptions(loss, label_smoothing=0.1), None, mask)
    assert count_items(TASKS[name], target) == 0
    assert ours.item() == 0.0
    assert torch.equal(gradient(ours, logits), torch.zeros_like(logits))


@pytest.mark.parametrize("size", [30.0, 60000.0])
@pytest.mark.parametrize(("name", "loss", "gamma"), GAMMA_CASES)
def test_gradients_at_extreme_logits(name: str, loss: str, size: float, gamma: float) -> None:
    logits, target, mask = make_batch(name)
    logits = (logits.sign() * size).requires_grad_()
    options = LossOptions(loss, label_smoothing=0.1, focal_gamma=gamma)
    ours = loss_sum(TASKS[name], logits, target, options, None, mask)
    assert torch.isfinite(ours)
    assert torch.isfinite(gradient(ours, logits)).all()


def test_initial_bias_of_heads() -> None:
    bias = {name: torch.tensor(kind_of(task).initial_bias()) for name, task in TASKS.items()}
    assert torch.sigmoid(bias["multi_label"]).tolist() == pytest.approx([1 / 3] * 3)
    assert torch.sigmoid(bias["span_per_label"]).tolist() == pytest.approx([0.1] * 3)
    assert torch.softmax(bias["token_classification"], 0).tolist() == pytest.approx([0.75] + [1 / 16] * 4)
    by_name = torch.softmax(bias["overlapping"].reshape(2, 3), dim=1)
    assert by_name.tolist() == [pytest.approx([0.875, 0.0625, 0.0625])] * 2
    assert bias["single_label"].tolist() == [0.0] * 3


def test_loss_must_fit_a_task() -> None:
    check_loss([TASKS["single_label"], TASKS["regression"]], "focal")
    check_loss([TASKS["regression"]], "auto")
    with pytest.raises(InputError, match=r"`focal` fits the kinds single_label, .* of the kinds regression"):
        check_loss([TASKS["regression"]], "focal")


@torch.no_grad()
def test_multitask_loss() -> None:
    batch, loss_fn = tiny_batch(), tiny_objective()
    loss_fn.loss_weight = {"topic": 2.0}
    batch.targets["size"].fill_(math.nan)
    batch.targets["topic"][2:] = -100
    logits, items = tiny_model()(*batch.inputs), loss_fn.count(batch)
    means = {}
    for task in loss_fn.tasks:
        if count := items[task.name]:
            arguments = (logits[task.name], batch.targets[task.name], LossOptions(), None)
            means[task.name] = float(loss_sum(task, *arguments, batch.attention_mask_BL)) / count
    assert (items["size"], items["topic"], len(means)) == (0, 1, 3)
    tensors = {name: torch.tensor(float(count)) if count else 0 for name, count in items.items()}
    for counts in (items, tensors):
        loss_fn.log_variance = None
        expected = sum(loss_fn.loss_weight.get(name, 1.0) * mean for name, mean in means.items())
        assert float(loss_fn(logits, batch, counts, 0.5)) == pytest.approx(expected, rel=1e-6)
        loss_fn.log_variance = {task.name: nn.Parameter(torch.tensor(0.3)) for task in loss_fn.tasks}
        expected = math.exp(-0.3) * expected + 0.5 * 0.3 * (2 + 1 + 1)
        assert float(loss_fn(logits, batch, counts, 0.5)) == pytest.approx(expected, rel=1e-6)


BINARY = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
CLASSES = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [-100])
TAGS = torch.tensor([[0] * 999 + [1], [-100] * 1000])
TAGS_OF_TWO_NAMES = torch.tensor([[1, 0], [2, 0], *[[0, 0]] * 8])


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("single_label", CLASSES.split(4), [10 / (3 * 5), 10 / (3 * 3), 10 / (3 * 2)]),  # as scikit-learn's
        ("token_classification", [TAGS], [1000 / (2 * 999), 10.0, 1.0, 1.0, 1.0]),  # rare or absent classes
        ("overlapping", [TAGS_OF_TWO_NAMES[None]], [20 / (3 * 18), 20 / 3, 20 / 3]),
        ("multi_label", [BINARY[:2], BINARY[2:]], [3.0, 1.0, 0.5]),
        ("span_per_label", [BINARY[None]], [3.0, 1.0, 0.5]),
    ],
)
def test_balanced_class_weights(name: str, targets: Sequence[Tensor], expected: list[float]) -> None:
    weight = kind_of(TASKS[name]).class_weights(targets)
    assert weight.dtype == torch.float32
    assert weight.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", TASKS)
def test_other_kinds_keep_their_loss(name: str) -> None:
    logits, target, mask = make_batch(name)
    sums = {loss: loss_sum(TASKS[name], logits, target, LossOptions(loss), None, mask) for loss in LOSSES}
    for loss, found in sums.items():
        assert (found == sums["auto"]) == (loss == "auto" or loss not in KINDS[TASKS[name].kind].losses)
