"""Frozen weights of linear layers, stored in fewer bits: `base_precision`.

    fp32   unchanged
    bf16   8 bits of mantissa, exact for a checkpoint in bf16
    int8   w = scale * q, q in -127 .. 127, with one scale for each row, by its largest value
    nf4    4 bits: 16 levels at the quantiles of a normal distribution, times the largest value of each
           block of 64 weights (Dettmers et al. 2023, QLoRA, arXiv 2305.14314); by bitsandbytes

Embeddings are in bf16, except under fp32, and return fp32. Norms, biases and DeBERTa's relative positions are
few and stay.

Storage is independent of multiplication. Each product decodes its weights into the dtype of `fp_precision`,
forward and backward, and keeps no decoded copy in between. A merged model has the decoded weights and
computes the same. Only Gemma multiplies its embeddings by a factor in their dtype: in bf16, then in fp32.
"""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

NF4_BLOCK = 64
STORAGE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8", "nf4": "uint8"}


def encode(weight: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return the stored form of a matrix and its scales."""
    if kind == "bf16":
        return weight.to(torch.bfloat16), None
    if kind == "int8":
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return (weight / scale).round().to(torch.int8), scale
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
    return packed, state.absmax


def decode(stored: Tensor, scale: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the matrix of `encode` in `dtype`."""
    if scale is None or stored.is_floating_point():
        return stored.to(dtype)
    if stored.dtype == torch.int8:
        return (stored.to(scale.dtype) * scale).to(dtype)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(scale, shape, None, NF4_BLOCK, "nf4", dtype)  # type: ignore[no-untyped-call]
    return dequantize_4bit(stored, state)


class _Product(torch.autograd.Function):
    """x W^T + b without gradients of W and b. The backward pass decodes W again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, stored, scale, bias, shape = inputs
        ctx.save_for_backward(stored, scale)
        ctx.shape = shape
        return F.linear(x, decode(stored, scale, shape, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stored, scale = ctx.saved_tensors
        gradient = gradients[0]
        return gradient @ decode(stored, scale, ctx.shape, gradient.dtype), None, None, None, None


class FrozenLinear(nn.Module):
    """A frozen linear layer with weights in the format `kind`."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.in_features, self.out_features = linear.in_features, linear.out_features
        stored, scale = encode(linear.weight.detach().float(), kind)
        self.stored = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scale", scale, persistent=False)
        self.scale: Tensor | None
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The decoded matrix, in fp32."""
        return decode(self.stored, self.scale, self._shape, torch.float32)

    @property
    def _shape(self) -> torch.Size:
        return torch.Size((self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x.to(dtype), self.stored, self.scale, bias, self._shape
        )
        return product

    def linear(self) -> nn.Linear:
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.weight, requires_grad=False)
        plain.bias = self.bias
        return plain


def store_frozen(model: nn.Module, kind: str, dtype: torch.dtype) -> set[Tensor]:
    """Store the weights of frozen layers in the format `kind`, in place, and return them.

    Embeddings return `dtype`. A second call changes nothing.
    """
    kept: set[Tensor] = {module.stored for module in model.modules() if isinstance(module, FrozenLinear)}
    if kind == "fp32":
        return kept
    for name in [name for name, _ in model.named_modules()]:  # a list of modules would keep them alive
        module = model.get_submodule(name)
        if any(weight.requires_grad for weight in module.parameters()):
            continue
        if type(module) is nn.Linear:
            stored = FrozenLinear(module, kind)
            model.set_submodule(name, stored)
            kept.add(stored.stored)
        # DeBERTa reads its relative positions without a call, so nothing would cast them back.
        elif isinstance(module, nn.Embedding) and not name.endswith("rel_embeddings"):
            module.weight.data = module.weight.data.to(torch.bfloat16)
            if "output_dtype" not in vars(module):
                module.register_forward_hook(_cast_output)
            vars(module)["output_dtype"] = dtype
            kept.add(module.weight)
    return kept


def _cast_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return output.to(vars(module)["output_dtype"])


def plain_linears(model: nn.Module) -> None:
    """Replace stored layers by plain ones with the decoded weights, all in fp32."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FrozenLinear):
            model.set_submodule(name, module.linear())
    model.float()


def storage_facts(model: nn.Module) -> dict[str, Any]:
    """Return the real storage of frozen matrices and the bytes of all weights.

    Matrices of experts count beside linear layers; embeddings and convolutions do not. `bits_per_weight`
    includes scales.
    """
    dtypes, num_bytes, numbers = Counter[str](), 0, 0
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.dim() < 2 or weight.requires_grad or isinstance(module, nn.Embedding | _ConvNd):
                continue
            dtypes[str(weight.dtype).removeprefix("torch.")] += 1
            num_bytes += weight.nbytes
            if isinstance(module, FrozenLinear):
                num_bytes += 0 if module.scale is None else module.scale.nbytes
                numbers += module.in_features * module.out_features
            else:
                numbers += weight.numel()
    held = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return {
        "storage_dtypes": dict(dtypes),
        "bits_per_weight": round(8 * num_bytes / numbers, 3) if numbers else None,
        "weights_bytes": sum(held.values()),
    }
