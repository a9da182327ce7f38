"""Sums of gradients in fp32 on a CPU, against the same gradients in fp64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpo.precision.sums import float32_sums, summed
from hpo.precision.table import PRECISIONS

ROWS, SIZE = 3000, 48
X = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
IDS = torch.randint(0, 2, (ROWS,), generator=torch.Generator().manual_seed(1))

CASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "layer norm": ([(SIZE,), (SIZE,)], lambda x, w, b: F.layer_norm(x, (SIZE,), w, b)),
    "without bias": ([(SIZE,)], lambda x, w: F.layer_norm(x, (SIZE,), w)),
    "frozen weight": ([(SIZE,)], lambda x, b: F.layer_norm(x, (SIZE,), torch.ones(SIZE).to(x), b)),
    "two normed dimensions": (
        [(4, 12), (4, 12)],
        lambda x, w, b: F.layer_norm(x.view(-1, 2, 4, 12).transpose(0, 1), (4, 12), w, b),
    ),
    "embedding": ([(2, SIZE)], lambda _, w: F.embedding(IDS, w)),
    "embedding with padding": ([(3, SIZE)], lambda _, w: F.embedding(IDS, w, 2)),
    "embedding bag": ([(2, SIZE)], lambda _, w: F.embedding_bag(IDS.view(-1, 4), w, mode="sum")),
    "rows by index": ([(2, SIZE)], lambda _, w: w[IDS]),
    "columns by index": ([(SIZE, 2)], lambda _, w: w[:, IDS]),
    "take": ([(2,)], lambda _, w: w.take(IDS)),
    "index_select of numbers": ([(2,)], lambda _, w: w.index_select(0, IDS)),
    "index_select of columns": ([(4, 2, 3)], lambda _, w: w.index_select(-2, IDS)),
    # Right in PyTorch, which a new version may change.
    "index_select of rows": ([(2, SIZE)], lambda _, w: w.index_select(0, IDS)),
    "gather": ([(2, SIZE)], lambda _, w: w.gather(0, IDS[:, None].expand(ROWS, SIZE))),
    "RMS norm": ([(SIZE,)], lambda x, w: F.rms_norm(x, (SIZE,), w)),
    "own norm": ([(SIZE,), (SIZE,)], lambda x, w, b: (x - x.mean(-1, keepdim=True)) * w + b),
    "group norm": ([(SIZE,), (SIZE,)], lambda x, w, b: F.group_norm(x.view(4, -1, SIZE).mT, 4, w, b)),
    "batch norm": (
        [(SIZE,), (SIZE,)],
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    ),
    "linear": ([(8, SIZE), (8,)], F.linear),
    "convolution": (
        [(8, SIZE, 3), (8,)],
        lambda x, w, b: F.conv1d(x.view(4, -1, SIZE).mT, w, b),
    ),
}
PYTORCH_IS_WRONG = [*CASES][: [*CASES].index("index_select of rows")]


def gradients(case: str, dtype: torch.dtype, weights: torch.dtype | None = None) -> list[Tensor]:
    """Return the gradients of the case's weights and, last, of its input."""
    shapes, call = CASES[case]
    draw = torch.Generator().manual_seed(2)
    given = [torch.randn(shape, generator=draw).bfloat16() + 1 for shape in shapes]
    leaves = [one.to(weights or dtype, copy=True).requires_grad_() for one in given]
    x = X.to(dtype, copy=True).requires_grad_()
    output = call(x, *leaves)
    output.backward((1 + torch.rand(output.shape, generator=draw)).bfloat16().to(output.dtype))
    return [one.grad for one in (*leaves, x) if one.grad is not None]


def worst_error(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_sums_of_gradients(case: str, dtype: torch.dtype) -> None:
    with float32_sums(PRECISIONS["bf16-true"]):
        found = gradients(case, dtype)
    assert {one.dtype for one in found} == {dtype}
    assert worst_error(found, gradients(case, torch.float64)) < 0.01


@pytest.mark.parametrize("case", PYTORCH_IS_WRONG)
def test_pytorch_alone_is_wrong_about_these_gradients(case: str) -> None:
    """If this fails, PyTorch sums in fp32, and its operator needs no replacement."""
    assert worst_error(gradients(case, torch.bfloat16), gradients(case, torch.float64)) > 0.03


def test_float32_weights_of_a_norm_with_bf16_inputs() -> None:
    with float32_sums(PRECISIONS["bf16"]):
        weight, bias, x = gradients("layer norm", torch.bfloat16, weights=torch.float32)
    assert (weight.dtype, bias.dtype, x.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    exact = gradients("layer norm", torch.float64)
    assert worst_error([weight, bias], exact[:2]) < 1e-3


@pytest.mark.parametrize("case", CASES)
def test_fp32_is_the_same_to_the_bit(case: str) -> None:
    plain = gradients(case, torch.float32)
    with float32_sums(PRECISIONS["bf16"]):
        inside = gradients(case, torch.float32)
    assert all(map(torch.equal, plain, inside))


@pytest.mark.parametrize(("precision", "is_active"), [("fp32", False), ("tf32", False), ("fp16", True)])
def test_precisions_with_such_sums(precision: str, is_active: bool) -> None:
    summed.clear()
    with float32_sums(PRECISIONS[precision]):
        gradients("layer norm", torch.bfloat16)
    assert summed == ({"layer_norm"} if is_active else set())


def test_nested_blocks_end_with_the_outer_one() -> None:
    plain = gradients("embedding", torch.bfloat16)
    with float32_sums(PRECISIONS["bf16"]):
        with float32_sums(PRECISIONS["bf16-true"]):
            right = gradients("embedding", torch.bfloat16)
        assert all(map(torch.equal, gradients("embedding", torch.bfloat16), right))
    assert all(map(torch.equal, gradients("embedding", torch.bfloat16), plain))


def test_assignment_without_a_sum_stays_in_place() -> None:
    table = torch.zeros(3, 2, dtype=torch.bfloat16)
    with float32_sums(PRECISIONS["bf16"]):
        table[torch.tensor([0, 0])] = torch.ones(2, dtype=torch.bfloat16)
        table.index_put_((torch.tensor([1, 1]),), torch.ones(2, dtype=torch.bfloat16), accumulate=True)
    assert table.tolist() == [[1, 1], [2, 2], [0, 0]]
