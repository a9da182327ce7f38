#!/usr/bin/env bash
# An expert expects: an operation that adds many numbers keeps its sum in fp32 and rounds it once, as sum() and
#   scatter_add_ do in bf16.
#
# What happens, on a CPU: index_put_(..., accumulate=True) rounds after each addition. In bf16 a sum of ones stops at
#   256, because 256 + 1 rounds to 256; in fp16 it stops at 2048. The gradients of p[ids] and of an embedding are
#   such sums, so a row that is read 5,000 times gets the gradient 256. There is no error and no warning.
#   scatter_add_ and the gradient of gather are right.
#
# Seen with: torch 2.13.0.
# Who is hurt: who trains weights in bf16 (not under autocast) and reads rows of a parameter by index: relative
#   position biases, class or token tables, codebooks. Frequent rows get gradients that are too small.
# Instead: gather in place of p[ids], scatter_add_ in place of index_put_, or such parameters in fp32.
set -uo pipefail
folder=$(mktemp -d) || exit 3
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" && "$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 ||
    exit 3

"$folder/venv/bin/python" -I - <<'PY'
import sys

import torch
from torch.nn.functional import embedding

N = 5000
ids = torch.zeros(N, dtype=torch.long)


def gradient(read, dtype):
    p = torch.zeros(1, dtype=dtype, requires_grad=True)
    read(p).sum().backward()
    return p.grad.item()


def sums(dtype):
    """Return the sum of N ones: by index_put_, as gradients of p[ids] and embedding, by scatter_add_, as one of gather."""
    zero, ones = torch.zeros(1, dtype=dtype), torch.ones(N, dtype=dtype)
    return (
        zero.clone().index_put_((ids,), ones, accumulate=True).item(),
        gradient(lambda p: p[ids], dtype),
        gradient(lambda p: embedding(ids, p.view(1, 1)), dtype),
        zero.clone().scatter_add_(0, ids, ones).item(),
        gradient(lambda p: p.gather(0, ids), dtype),
    )


expected = {torch.bfloat16: 256, torch.float16: 2048, torch.float32: N}
found = {dtype: sums(dtype) for dtype in expected}
for dtype, values in found.items():
    put, indexed, embedded, added, gathered = map(int, values)
    print(f"{dtype}: sum of {N} ones by index_put_ {put}, gradient of p[ids] {indexed}, of embedding {embedded}; "
          f"by scatter_add_ {added}, gradient of gather {gathered}")
sys.exit(any(
    values[:3] != (expected[dtype],) * 3 or values[3:] != (torch.tensor(float(N)).to(dtype).item(),) * 2
    for dtype, values in found.items()
))
PY
