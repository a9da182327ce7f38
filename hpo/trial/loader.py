"""What the trials of a study are made of: rows and tokens, which are kept for all of them, and models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpo.config.study_config import StudyConfig
from hpo.config.trial_config import TrialConfig
from hpo.data.dataset import load_data
from hpo.data.token_cache import load_tokenized
from hpo.data.tokenized_split import LENGTH_MULTIPLE, TokenizedSplit, Windowing
from hpo.device import DeviceInfo
from hpo.models.encoder import load_encoder, load_tokenizer
from hpo.models.multitask import HeadSettings, MultitaskModel, build_model
from hpo.training.compilation import apply_compile


class TrialLoader:
    """Loads the data of a study at once, tokenizers and tokens when they are asked for, and keeps them.

    Raises DataError when the study's data cannot be used.
    """

    apply_compile: Callable[..., object] = staticmethod(apply_compile)
    """Compiles a model in place."""

    def __init__(self, study: StudyConfig, device: DeviceInfo, runs_dir: Path) -> None:
        self.study = study
        self.device = device
        self.cache_dir = runs_dir / "cache" / "tokens"
        self.dataset = load_data(study.data)
        self.tasks = self.dataset.tasks
        self._tokenizers: dict[str, Any] = {}
        self._tokens: dict[tuple[str, str, int], TokenizedSplit] = {}

    def tokenizer(self, config: TrialConfig) -> Any:
        """The tokenizer of the trial's encoder."""
        key = json.dumps(config.encoder, sort_keys=True)
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(
                config.encoder,
                revision=self.study.model.revision,
                trust_remote_code=self.study.model.trust_remote_code,
            )
        return self._tokenizers[key]

    def pad_id(self, config: TrialConfig) -> int:
        """The token that pads batches; 0 where the tokenizer has none, behind the attention mask."""
        return self.tokenizer(config).pad_token_id or 0

    def windowing(self, config: TrialConfig) -> Windowing:
        """How the trial's texts are cut."""
        data = self.study.data
        stride = data.stride_of(config.max_length)
        return Windowing(config.max_length, data.long_text, stride, data.pair_segments)

    def tokens(self, split: str, config: TrialConfig) -> TokenizedSplit:
        """The split, tokenized for the trial's encoder and length; workers share it on disk."""
        key = (split, json.dumps(config.encoder, sort_keys=True), config.max_length)
        if key not in self._tokens:
            tokenizer, windowing = self.tokenizer(config), self.windowing(config)
            self._tokens[key] = load_tokenized(self.dataset, split, tokenizer, windowing, self.cache_dir)
        few_shapes = self.device.type == "cuda" or config.compile != "none"
        return replace(self._tokens[key], length_multiple=LENGTH_MULTIPLE if few_shapes else 1)

    def used_ids(self, config: TrialConfig) -> NDArray[Any]:
        """The tokens of training and validation, and padding: sorted, each once."""
        splits = (self.tokens(name, config) for name in ("train", "validation"))
        return np.unique(np.concatenate([[self.pad_id(config)], *(split.used_ids for split in splits)]))

    def build_model(self, config: TrialConfig) -> MultitaskModel:
        """A new model in fp32 weights, on the device."""
        encoder = load_encoder(
            config.encoder,
            attention=config.attention,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            revision=self.study.model.revision,
            trust_remote_code=self.study.model.trust_remote_code,
        )
        model = build_model(
            encoder,
            self.tasks,
            HeadSettings(**{field.name: getattr(config, field.name) for field in fields(HeadSettings)}),
            max_length=config.max_length,
            freeze_layers=config.freeze_layers,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        return model.to(self.device.torch_device)
