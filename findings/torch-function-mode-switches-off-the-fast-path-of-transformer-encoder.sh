#!/usr/bin/env bash
# An expert expects: a TorchFunctionMode that only calls the function changes nothing. Nor does
#   `with torch.device("cpu")` or torch.set_default_device("cpu") for a model that is on the CPU already.
#
# What happens: nn.TransformerEncoder in evaluation takes its fused fast path only if no function mode is active.
#   (torch.device as a context and set_default_device are such modes.) Inside a mode it takes the slow path:
#   other kernels, other bits of the result, and with a padding mask other values: the fast path returns zeros at padded
#   positions, the slow path numbers.
#
# Seen with: torch 2.13.0. nn.TransformerEncoderLayer and nn.MultiheadAttention ask the same question.
# Who is hurt: who watches a model with a function mode (to record operations, types, FLOPs): watching changes the
#   kernels and the result. Who averages over all positions: the mean depends on whether a mode is active.
# Instead: watch with a TorchDispatchMode, which leaves the fast path on, or switch the fast path off in all runs
#   (torch.backends.mha.set_fastpath_enabled(False)). Average with the mask.
set -uo pipefail
folder=$(mktemp -d) || exit 3
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" && "$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 ||
    exit 3

"$folder/venv/bin/python" -I -W ignore - <<'PY'
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Empty(TorchFunctionMode):
    """Only calls the function."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Records the names of the operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


torch.manual_seed(0)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
inputs = torch.randn(8, 16, 64)
padding = torch.arange(16).expand(8, 16) >= 10


@torch.no_grad()
def fast(mode):
    """Return whether the fused kernel is called."""
    with Kernels() as kernels, mode:
        encoder(inputs)
    return "_transformer_encoder_layer_fwd" in kernels.names


@torch.no_grad()
def results(mode):
    """Return the output without a mask, and with one."""
    with mode:
        return encoder(inputs), encoder(inputs, src_key_padding_mask=padding)


modes = {"no mode": nullcontext(), "an empty mode": Empty(), 'torch.device("cpu")': torch.device("cpu")}
fused = {name: fast(mode) for name, mode in modes.items()}
plain, repeated, *watched = [results(mode) for mode in (nullcontext(), *modes.values())]
bits = [torch.equal(plain[0], other[0]) for other in (repeated, *watched)]
close = all(torch.allclose(plain[0], other[0], atol=1e-4) for other in watched)
padded = [other[1][padding].abs().max().item() for other in (repeated, *watched)]

print("; ".join(f"{name}: fused kernel {'on' if on else 'off'}" for name, on in fused.items()))
print(f"in this order: bits as in a first run {bits}; "
      f"largest output at padded positions {[round(one, 2) for one in padded]}")
sys.exit(not (
    list(fused.values()) == [True, False, False]
    and bits == [True, False, False] and close
    and padded[0] == 0 and min(padded[1:]) > 0.1
))
PY
