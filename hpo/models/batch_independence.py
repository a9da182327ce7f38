"""A check that a model computes each text of a batch by itself.

Some encoders mix positions without a mask (FNet, CANINE, ConvBERT) or change their algorithm with the padded
length (BigBird, Reformer). Then a text's prediction depends on the other texts of its batch, and scores on
the batch size.

The model runs on a text alone and with padding beside other texts. In fp32, rounding changes the states of
encoders that mask padding by at most 4e-6 of the largest state (48 layers). Encoders that read padding change
them by 1e-3 or more (2 layers of fresh weights).
"""

from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from hpo.errors import ModelError
from hpo.models.attention import sdpa_in_place_of_flash
from hpo.models.own_encoder import OwnEncoder

TOLERANCE = 3e-5
"""Largest difference, as a share of the largest value."""
SHORT_LENGTH = 16
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
    batches = [_outputs(model, [padded, other], [mask, [1] * length]) for other in beside]
    batches = batches or [_outputs(model, [padded], [mask])]
    alone, again = (_outputs(model, [text[:num_tokens]], None) for _ in range(2))
    cases = [("at each call", "chance", again)]
    cases += [("alone and beside a longer one", "the batch", batch) for batch in batches]
    for part, values in alone.items():
        if not values.isfinite().all():
            continue  # the check of the study reports it
        for when, cause, others in cases:
            change = (others[part][:num_tokens] - values).abs().max()
            difference = float(change / values.abs().max().clamp(min=1e-30))
            if not difference <= TOLERANCE:  # NaN: not finite beside others
                is_known = part.startswith("encoder") and not isinstance(model.encoder, OwnEncoder)
                own_remedy = "Let its code mask the padding, and draw no random numbers in evaluation."
                remedy = "Use another encoder, such as bert or roberta." if is_known else own_remedy
                raise ModelError(
                    f"{part} must give a text the same values {when}, but they differ by {difference:.1e} of "
                    f"the largest, so its predictions would depend on {cause}. {remedy}"
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
