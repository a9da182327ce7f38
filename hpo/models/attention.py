"""Attention with dropout on a CPU, a few texts at a time.

PyTorch's fused attention has no dropout on a CPU: `scaled_dot_product_attention` then computes the scores of
the whole batch in fp32, tens of megabytes that go to memory and back for every operation. Here the batch is
cut into pieces without padding whose scores stay in the processor's cache, and masks come from random bits
(see `dropout`). With P = softmax(scale Q K'), M the mask of kept values and D = P * M / (1 - p):

    O = D V        dV = D' dO        dP = (dO V') * M / (1 - p)        dS = P * (dP - sum(dP * P))
    dQ = scale dS K                  dK = scale dS' Q

Under autocast Q, K and V have its dtype, as in PyTorch. Scores and softmax are fp32; P has V's dtype.

`attention: sdpa` runs this as `hpo_sdpa` among transformers' attention functions. It calls PyTorch's own on a
GPU, without dropout, in compiled code, and with any mask but padding at the end of texts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

from hpo.models.dropout import DropoutMaskGenerator, is_fast_here, masked

NAME = "hpo_sdpa"
CASTS_INPUTS_UP = True
"""For `hpo.precision.effective`: products in fp32 here have inputs cast to it, as in PyTorch's attention."""

OTHER_ATTENTION = ("is_causal", "position_bias", "softcap", "s_aux")
"""Options of transformers' attention functions that change the result."""

PIECE_ELEMENTS = 2**20
"""Largest number of scores in a piece of several texts: 4 MiB."""

DROPOUT_KEYS = ("attention_probs_dropout_prob", "attention_dropout")
"""Names of the dropout of attention weights in configurations."""

FLASH = "flash_attention_2"
"""Name of `attention: flash` in transformers."""

_uses_training_attention = ContextVar("uses_training_attention", default=False)


@contextmanager
def use_training_attention() -> Iterator[None]:
    """Run the training kernel without dropout inside the block, for a check of the precision."""
    token = _uses_training_attention.set(True)
    try:
        yield
    finally:
        _uses_training_attention.reset(token)


@contextmanager
def sdpa_in_place_of_flash(encoder: Any) -> Iterator[None]:
    """Replace flash attention by sdpa inside the block: flash has no fp32 and runs on no CPU."""
    if getattr(encoder.config, "_attn_implementation", None) != FLASH:
        yield
        return
    encoder.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        encoder.set_attn_implementation(FLASH)


def attend_with_fast_dropout(encoder: Any) -> None:
    """Let an encoder with `sdpa` run `attention_forward`, if its layers can."""
    if encoder.config._attn_implementation == "sdpa" and encoder._supports_attention_backend:
        AttentionInterface.register(NAME, attention_forward)
        AttentionMaskInterface.register(NAME, attention_mask)
        encoder.set_attn_implementation(NAME)


def attention_mask(
    *,
    q_length: int,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """Return the mask for `attention_forward`, [B, 1, L, L], True at visible tokens.

    Padding alone is the same for all queries, and is repeated without a copy: stride 0 marks such a mask.
    """
    is_bidirectional = mask_function is bidirectional_mask_function
    if is_bidirectional and attention_mask is None and allow_is_bidirectional_skip:
        return None  # transformers makes a mask of ones where it is compiled or recorded as a CUDA graph
    on_cpu = attention_mask is None or attention_mask.device.type == "cpu"
    if (
        is_bidirectional
        and attention_mask is not None
        and attention_mask.ndim == 2
        and on_cpu
        and not torch.compiler.is_compiling()
    ):
        seen_BL = attention_mask.bool()
        if allow_is_bidirectional_skip and seen_BL.all():
            return None
        return seen_BL[:, None, None, :].expand(-1, 1, q_length, -1)
    mask: Tensor | None = sdpa_mask(
        q_length=q_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        # On a GPU, a search for padding would wait for the device.
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and on_cpu,
        **options,
    )
    return mask


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of [B, H, L, E] queries, keys and values: [B, L, H, E]."""
    config = getattr(module, "config", None)
    dropout = options.get("dropout", 0.0)
    # `is_fast_here` comes first: the compiler splits its graph at a ContextVar.
    is_ours = (
        is_fast_here(query, key, value)
        and (0 < dropout < 1 or (not dropout and _is_checked(config)))
        and not getattr(module, "is_causal", True)
        and all(options.get(name) is None for name in OTHER_ATTENTION)
        and query.shape == key.shape == value.shape
    )
    lengths = _text_lengths(query, attention_mask) if is_ours else None
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scaling = options.get("scaling")
    pieces = _Pieces(lengths, query.shape[-1] ** -0.5 if scaling is None else scaling, dropout)
    with torch.autocast("cpu", enabled=False):
        attended: Tensor = _DropoutAttention.apply(query, key, value, pieces)  # type: ignore[no-untyped-call]
    return attended, None


def _is_checked(config: Any) -> bool:
    """Return True in a check of the precision, for attention with dropout in training."""
    return _uses_training_attention.get() and any(getattr(config, key, None) for key in DROPOUT_KEYS)


def _text_lengths(query: Tensor, mask: Tensor | None) -> list[int] | None:
    """Return the number of tokens of each text. None: the mask is not just padding at the end."""
    num_texts, _, length, _ = query.shape
    if mask is None:
        return [length] * num_texts
    if mask.dtype != torch.bool or mask.shape[:2] != (num_texts, 1) or mask.stride(2) != 0:
        return None
    mask_BL = mask[:, 0, 0, :]
    lengths_B = mask_BL.sum(dim=1)
    is_at_end = torch.equal(mask_BL, torch.arange(length) < lengths_B[:, None])
    return lengths_B.tolist() if is_at_end else None


class _Pieces(NamedTuple):
    """Lengths of the texts and options of the attention."""

    lengths: Sequence[int]
    scale: float
    p: float
    """Probability of dropout."""

    def cut(self, num_heads: int) -> Iterator[tuple[slice, int]]:
        """Yield the texts of each piece, and the length of the longest."""
        start = longest = 0
        for end, length in enumerate(self.lengths):
            wider = max(longest, length)
            if end > start and (end + 1 - start) * num_heads * wider**2 > PIECE_ELEMENTS:
                yield slice(start, end), longest
                start, wider = end, length
            longest = wider
        yield slice(start, len(self.lengths)), longest


def _heads(texts: slice, length: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield tensors [texts * H, length, E] of [B, H, L, E] tensors."""
    return (tensor[texts, :, :length].flatten(0, 1) for tensor in tensors)


class _DropoutAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: _Pieces) -> Tensor:
        lengths, scale, p = pieces
        num_texts, num_heads, length, size = query.shape
        bits = DropoutMaskGenerator()
        output_BLHE = query.new_zeros(num_texts, length, num_heads, size)
        saved = []
        for texts, longest in pieces.cut(num_heads):
            q, k, v = _heads(texts, longest, query, key, value)
            q, k = q.float(), k.float()
            scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=scale)
            if min(lengths[texts]) < longest:
                padding = torch.arange(longest) >= torch.tensor(lengths[texts])[:, None]
                by_text = scores.unflatten(0, (-1, num_heads))
                by_text.masked_fill_(padding[:, None, None, :], torch.finfo(scores.dtype).min)
            weights = scores.softmax(dim=-1).to(v.dtype)
            mask = bits.keep_mask(weights.shape, p) if p else None
            attended = torch.bmm(masked(weights, mask), v).mul_(1 / (1 - p))
            output_BLHE[texts, :longest] = attended.unflatten(0, (-1, num_heads)).transpose(1, 2)
            saved += [weights, mask]
        ctx.save_for_backward(query, key, value, *saved)
        ctx.pieces = pieces
        return output_BLHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        (gradient_BLHE,) = gradients
        _, scale, p = ctx.pieces
        num_texts, num_heads, length, size = query.shape
        # Same layout as the outputs of the linear layers: query, key and value are transposed views of them.
        d_query, d_key, d_value = (
            query.new_zeros(num_texts, length, num_heads, size).transpose(1, 2) for _ in range(3)
        )
        cut = ctx.pieces.cut(num_heads)
        for (texts, longest), weights, mask in zip(cut, saved[::2], saved[1::2], strict=True):
            q, k, v, gradient = _heads(texts, longest, query, key, value, gradient_BLHE.transpose(1, 2))
            gradient = gradient * (1 / (1 - p))
            d_weights = masked(torch.bmm(gradient, v.transpose(1, 2)), mask)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            for whole, piece in (
                (d_value, torch.bmm(masked(weights, mask).transpose(1, 2), gradient)),
                (d_query, torch.bmm(d_scores, k).mul_(scale)),
                (d_key, torch.bmm(d_scores.transpose(1, 2), q).mul_(scale)),
            ):
                whole[texts, :, :longest] = piece.unflatten(0, (-1, num_heads))
        return d_query, d_key, d_value, None
