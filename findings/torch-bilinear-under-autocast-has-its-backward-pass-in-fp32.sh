#!/usr/bin/env bash
# An expert expects: backward operations run in the type that autocast chose for the forward ones (PyTorch's
#   documentation of autocast says so). This is true for nn.Linear.
#
# What happens, on a CPU under torch.autocast("cpu", torch.bfloat16): nn.Bilinear multiplies in bf16 in its forward
#   pass and in fp32 in its backward pass. Its forward pass is one operation (_trilinear) of fp32 tensors with fp32
#   output. The products inside it are cast to bf16. Autograd keeps the fp32 tensors, and backward() runs after the
#   block, without autocast.
#
# Seen with: torch 2.13.0. The errors against fp64 show it in both directions. A TorchDispatchMode shows the
#   types of the backward products; in the forward pass it sees fp32, because the casts are inside the operation.
# Who is hurt: who trains a model with biaffine or bilinear heads and measures speed or error of bf16: the larger part
#   of the work stays in fp32. Who reads the precision from output types: it says fp32, and the values have bf16's error.
# Instead: torch.einsum("bi,oij,bj->bo", x, weight, y). It multiplies in bf16 in both directions.
set -uo pipefail
folder=$(mktemp -d) || exit 3
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" && "$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 ||
    exit 3

"$folder/venv/bin/python" -I - <<'PY'
import sys

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("_trilinear", "mm", "bmm", "addmm")


class Products(TorchDispatchMode):
    """Records the types of the tensors that are multiplied."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in PRODUCTS:
            self.types |= {str(one.dtype).removeprefix("torch.") for one in args if isinstance(one, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def run(layer, inputs, weight, gradient):
    """Return the output, the gradients and the types of the backward products."""
    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs, weight)]
    with torch.autocast("cpu", torch.bfloat16, enabled=weight.dtype == torch.float32):
        output = layer(*leaves)
    with Products() as products:
        output.backward(gradient.to(output.dtype))
    return output, [leaf.grad for leaf in leaves], sorted(products.types)


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def measure(layer, number_of_inputs, *shape):
    """Return the error of the output, the largest error of a gradient, and the types of the backward products."""
    torch.manual_seed(0)
    tensors = [torch.randn(16, 64) for _ in range(number_of_inputs)], torch.randn(shape), torch.randn(16, shape[0])
    output, gradients, types = run(layer, *tensors)
    inputs, weight, gradient = tensors
    exact_output, exact, _ = run(layer, [one.double() for one in inputs], weight.double(), gradient.double())
    return error(output, exact_output), max(map(error, gradients, exact)), types


def einsum(x, y, weight):
    return torch.einsum("bi,oij,bj->bo", x, weight, y)


results = {
    "Bilinear": measure(nn.functional.bilinear, 2, 8, 64, 64),
    "Linear": measure(nn.functional.linear, 1, 8, 64),
    "einsum": measure(einsum, 2, 8, 64, 64),
}
for name, (forward, backward, types) in results.items():
    print(f"{name}: error against fp64 {forward:.0e} forward, {backward:.0e} backward; backward products in {types}")
sys.exit(not (
    all(forward > 1e-4 for forward, _, _ in results.values())
    and results["Bilinear"][1] < 1e-5 and results["Bilinear"][2] == ["float32"]
    and all(results[name][1] > 1e-4 and results[name][2] == ["bfloat16"] for name in ("Linear", "einsum"))
))
PY
