"""Builds the model of a trial from an encoder, and refuses settings that the encoder cannot do."""

from collections.abc import Sequence
from typing import Any

from hpo.errors import ModelError
from hpo.models.batch_independence import check_texts_are_independent
from hpo.models.dropout import use_bit_dropout
from hpo.models.encoder import encoder_layers, is_causal, max_positions
from hpo.models.multitask import HeadSettings, MultitaskModel, parameter_depths
from hpo.tasks.kind import Task


def build_model(
    encoder: Any,
    tasks: Sequence[Task],
    heads: HeadSettings,
    *,
    max_length: int,
    freeze_layers: int = 0,
    gradient_checkpointing: bool = False,
) -> MultitaskModel:
    """Return the model of one trial over an encoder of `load_encoder`, in training mode.

    The weights of the heads come from torch's global generator: call `torch.manual_seed` before. `max_length`
    is the longest window in tokens. `freeze_layers=n` freezes the embeddings and the lowest n layers; 0
    trains everything.

    Raises ModelError if the encoder cannot do a setting, or if a text's logits depend on its batch.
    """
    name = type(encoder).__name__
    positions = max_positions(encoder)
    if positions is not None and max_length > positions:
        raise ModelError(
            f"max_length must be at most the {positions} positions of this {name}, but it is {max_length}. "
            f"Shorten it and set `data.long_text: window` to lose no text, or use a longer encoder."
        )
    if heads.pooling == "cls" and is_causal(encoder):
        raise ModelError(
            f"pooling: `cls` is the state of the first token, which in this {name} sees nothing of the text. "
            "Use last or mean."
        )
    if gradient_checkpointing:
        if not getattr(encoder, "supports_gradient_checkpointing", False):
            raise ModelError(
                f"gradient_checkpointing: {name} does not support it. Set it to false; a smaller "
                f"micro_batch_size saves memory too."
            )
        # transformers renamed it between 5.17 and 5.23, and the old name warns.
        enable = getattr(encoder, "activation_checkpointing_enable", None)
        (enable or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
    model = MultitaskModel(encoder, tasks, heads)
    check_texts_are_independent(model, max_length)
    if freeze_layers:
        _freeze(model, freeze_layers)
    use_bit_dropout(model)
    return model.train()


def _freeze(model: MultitaskModel, freeze_layers: int) -> None:
    """Stop gradients at the embeddings and the lowest layers; dropout in them stays on."""
    num_layers = len(encoder_layers(model.encoder))
    if freeze_layers > num_layers:
        raise ModelError(
            f"freeze_layers must be between 0 and the encoder's {num_layers} layers, but it is "
            f"{freeze_layers}."
        )
    depths = parameter_depths(model)
    for name, parameter in model.named_parameters():
        if depths[name] <= freeze_layers:
            parameter.requires_grad_(False)
