"""A check that a model computes each text of a batch by itself.

Some encoders mix positions without a mask (FNet, CANINE, ConvBERT) or change their algorithm with the padded
length (BigBird, Reformer). Then a text's prediction depends on the other texts of its batch, and scores on
the batch size.

The model runs on a text alone and with padding beside other texts. In fp32, rounding changes the states of
most encoders that mask padding by at most 4e-6 of the largest state (48 layers). Encoders that read padding
change them by 1e-3 or more (2 layers of fresh weights). So may rounding, if a layer carries numbers thousands
of times the others. It is rounding if other padding and another text beside it, at equal shapes, change
nothing, and nothing is left in fp64.
"""

import contextlib
import logging
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hpo.errors import ModelError
from hpo.models.attention import sdpa_in_place_of_flash
from hpo.models.own_encoder import OwnEncoder

TOLERANCE = 3e-5
"""Largest difference, as a share of the largest value."""
LARGE = 1e-2
"""Largest rounding of a model that cannot run in fp64."""
SHORT_LENGTH = 16
_logger = logging.getLogger(__name__)
_Batch = tuple[list[list[int]], list[list[int]] | None]
"""Tokens and mask of texts, [B, L]."""
_passed: set[tuple[object, ...]] = set()
"""Models that passed in this process, so that equal trials check once."""


def check_texts_are_independent(model: Any, max_length: int) -> None:
    """Raise ModelError if a text's logits depend on its padding, on another text, or on chance.

    `model` is a `MultitaskModel` in fp32, on its device. Its mode and torch's random state stay as they are.
    Short texts are enough for an encoder whose attention transformers masks. Any other also runs `max_length`
    tokens.
    """
    encoder = model.encoder
    key = (_inner_class(encoder), str(encoder.config), str(model.pool), str(model.heads), max_length)
    if key in _passed:
        return
    device = next(encoder.parameters()).device
    was_training = model.training
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            sdpa_in_place_of_flash(encoder),
        ):
            model.eval()
            if not model.makes_masks and max_length > SHORT_LENGTH:
                # First: at a short text, BigBird gives up its sparse attention for good.
                _compare(model, max_length, num_beside=0)
            _compare(model, min(max_length, SHORT_LENGTH), num_beside=2)
    finally:
        model.train(was_training)
    _passed.add(key)


def _inner_class(encoder: nn.Module) -> type[nn.Module]:
    return type(encoder.module if isinstance(encoder, OwnEncoder) else encoder)


def _compare(model: Any, length: int, num_beside: int) -> None:
    """Compare a text of less than half of `length` tokens with itself, padded to `length`.

    It is padded beside each of `num_beside` other texts in turn, or alone if there are none.
    """
    num_tokens = max(length // 2 - 1, 1)
    config = model.encoder.config
    pad_id = getattr(config, "pad_token_id", None) or 0
    vocab_size = getattr(config, "vocab_size", None) or 7
    known = [number for number in range(min(vocab_size, 7)) if number != pad_id]
    text, *beside = (list(islice(cycle(known[n:] + known[:n]), length)) for n in range(1 + num_beside))
    padding = length - num_tokens
    padded, mask = [*text[:num_tokens], *[pad_id] * padding], [1] * num_tokens + [0] * padding

    # The padded text goes first, for the reason above.
    batches: list[_Batch] = [([padded, other], [mask, [1] * length]) for other in beside]
    batches = batches or [([padded], [mask])]
    outputs = [_outputs(model, *batch) for batch in batches]
    single: _Batch = [text[:num_tokens]], None
    alone, again = (_outputs(model, *single) for _ in range(2))
    rounding: dict[str, float] = {}
    for part, values in alone.items():
        if not values.isfinite().all():
            continue  # the check of the study reports it
        if not (change := _share(again[part] - values, values)) <= TOLERANCE:
            raise _error(model, part, "at each call", change, "chance")
        for batch, others in zip(batches, outputs, strict=True):
            change = _share(others[part][:num_tokens] - values, values)
            if change <= TOLERANCE:
                continue
            other_texts = [[*text[:num_tokens], *reversed(text[num_tokens:])], text][: len(batch[0])]
            at_equal_shapes = _outputs(model, other_texts, batch[1])[part] - others[part]
            in_float64 = _share_in_float64(model, part, single, batch)
            left = max(_share(at_equal_shapes[:num_tokens], values), in_float64 or 0.0)
            if not left <= change / 1000 or (in_float64 is None and change > LARGE):
                raise _error(model, part, "alone and beside a longer one", change, "the batch")
            rounding[part] = max(change, rounding.get(part, 0.0))
    if rounding:
        part = max(rounding, key=lambda part: rounding[part])
        message = "%s: rounding in fp32 changes a text's values by %.1e of the largest from batch to batch."
        _logger.warning(message, part, rounding[part])


def _share(changes: Tensor, values: Tensor) -> float:
    """Return the largest change as a share of the largest value. NaN: not finite beside others."""
    return float(changes.abs().max() / values.abs().max().clamp(min=1e-30))


def _share_in_float64(model: Any, part: str, single: _Batch, batch: _Batch) -> float | None:
    """Return the change of a text's values between two batches; None: the model cannot run in fp64."""
    try:
        with _float64(model):
            values, others = (_outputs(model, *one)[part] for one in (single, batch))
    except (RuntimeError, TypeError, ValueError):  # kernels and tensors of the model that are fp32 alone
        return None
    return _share(others[: len(values)] - values, values)


@contextlib.contextmanager
def _float64(model: nn.Module) -> Iterator[None]:
    """Compute in fp64 in the block, also where the model casts to fp32. Its weights come back unchanged."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
    kept = [one.data for one in tensors]
    try:
        for one in tensors:
            one.data = one.data.double()
        with _Float64Casts():  # type: ignore[no-untyped-call]
            yield
    finally:
        for one, data in zip(tensors, kept, strict=True):
            one.data = data


class _Float64Casts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wider = tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs or {}))
        return func(*wider[0], **wider[1])


def _error(model: Any, part: str, when: str, change: float, cause: str) -> ModelError:
    is_known = part.startswith("encoder") and not isinstance(model.encoder, OwnEncoder)
    own_remedy = "Let its code mask the padding, and draw no random numbers in evaluation."
    remedy = "Use another encoder, such as bert or roberta." if is_known else own_remedy
    return ModelError(
        f"{part} must give a text the same values {when}, but they differ by {change:.1e} of the largest, so "
        f"its predictions would depend on {cause}. {remedy}"
    )


def _outputs(model: Any, ids: list[list[int]], mask: list[list[int]] | None) -> dict[str, Tensor]:
    """Return the output of each part of the model for the first text, by the part's setting."""
    device = next(model.encoder.parameters()).device
    ids_BL = torch.tensor(ids, device=device)
    mask_BL = None if mask is None else torch.tensor(mask, device=device)
    hidden_BLD = model.hidden_states(ids_BL, mask_BL)
    name = _inner_class(model.encoder).__name__
    shape = (*ids_BL.shape, model.encoder.config.hidden_size)
    if hidden_BLD.shape != shape:
        raise ModelError(
            f"encoder: {name} must give states {shape}, as the hidden_size of its configuration says, but "
            f"gives {tuple(hidden_BLD.shape)}. Use another encoder."
        )
    pooled_BD = model.pool(hidden_BLD, torch.ones_like(ids_BL) if mask_BL is None else mask_BL)
    settings = model.head_settings
    outputs = {f"encoder: {name}": hidden_BLD[0], f"pooling: `{settings.pooling}`": pooled_BD[:1]}
    for task, head in zip(model.tasks, model.heads, strict=True):
        logits = head(hidden_BLD)[0] if task.level == "token" else head(pooled_BD)[:1]
        outputs[f"head_type: `{settings.of(task)}` of the task `{task.name}`"] = logits
    return outputs
