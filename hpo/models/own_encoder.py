"""Encoders of a study's own code: any module from token ids to hidden states.

Its inside is unknown, so settings of the inside (`REFUSED`) are refused: they may be its own options.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from hpo.errors import ModelError
from hpo.extensions import ENCODERS, options_of

REFUSED = (
    *("attention", "dropout", "attention_dropout", "adapter", "freeze_layers", "layerwise_lr_decay"),
    "gradient_checkpointing",
)
"""Settings of the inside of an encoder."""
_NAME, _OPTIONS = "hpo_encoder", "hpo_options"
"""Keys of an export's config.json."""


class OwnEncoder(nn.Module):
    """Wrapper with the interface of transformers: a `config`, and a `last_hidden_state`.

    Raises ModelError if the study's encoder `name` is no module, or its states have another shape.
    """

    def __init__(self, name: str, option: Mapping[str, Any]) -> None:
        super().__init__()
        options = options_of(name, option)
        self.module = ENCODERS[name].make(options)
        if not isinstance(self.module, nn.Module):
            raise ModelError(
                f"the encoder `{name}` must be a module, but it is a {type(self.module).__name__}."
            )
        content: Any = {_NAME: name, _OPTIONS: options.model_dump(mode="json")}
        content["hidden_size"] = self._hidden_size(name)
        self.config = PreTrainedConfig(**content)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=_states(self.module(input_ids, attention_mask)))

    def _hidden_size(self, name: str) -> int:
        ids_BL = torch.ones(2, 3, dtype=torch.long)
        with torch.no_grad():
            states = _states(self.module.eval()(ids_BL, torch.ones_like(ids_BL)))
        if not isinstance(states, Tensor) or states.ndim != 3 or states.shape[:2] != ids_BL.shape:
            shape = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise ModelError(
                f"the encoder `{name}` must give states (2, 3, D) of ids (2, 3), but gives {shape}."
            )
        return int(states.shape[2])

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError

    def save_pretrained(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        save_model(self, str(folder / "model.safetensors"))


def _states(output: Any) -> Any:
    return getattr(output, "last_hidden_state", output)


def load_own_encoder(folder: Path) -> OwnEncoder | None:
    """Load the encoder of an export. None: it is no encoder of a study's own code.

    Raises ValueError, LookupError or OSError for a damaged folder.
    """
    config = json.loads((folder / "config.json").read_bytes())
    if not isinstance(config, dict) or _NAME not in config:
        return None
    name = config[_NAME]
    encoder = OwnEncoder(name, {f"{name}.{key}": value for key, value in config[_OPTIONS].items()})
    load_model(encoder, folder / "model.safetensors")
    return encoder
