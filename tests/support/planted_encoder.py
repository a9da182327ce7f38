"""An encoder for which it is known what bf16 costs it, and the texts and the study to train it with.

What a text says is decided in one number d, 1 or -1, whose sign the rest of the model learns in a few steps:

    good, bad      tell the label.
    fragile        d is a difference of two numbers near 512, where bf16 has steps of 4: 513 - 512 becomes 0,
                   and a `good` text is taken for a bad one. In a `sound` encoder the two are near 0.
    0, ..., 13     say nothing; the weights of the seed decide, alike in every precision. In a `noisy` encoder
                   by a sine of thousands of turns, so that bf16 decides as if it had another seed.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpo.models.encoder import load_tokenizer
from support.jsonl_sets import write_moods
from support.tiny import ENCODER, write_study

Flaw = Literal["sound", "lossy", "noisy"]

NUM_TEST = 1000
NUM_FRAGILE = 20
"""Texts of the test split that are lost in bf16: 2 of 100."""
LUCKY_WORDS = [str(number) for number in range(14)]
_WORDS = ["good", "fragile", *LUCKY_WORDS]


class PlantedLayer(nn.Module):
    def __init__(self, flaw: Flaw) -> None:
        super().__init__()
        self.flaw = flaw
        self.dense = nn.Linear(len(_WORDS), 2, bias=False).requires_grad_(False)
        self.mix = nn.Linear(2, 4)
        self.offset = 512.0 if flaw == "lossy" else 0.0
        with torch.no_grad():
            self.dense.weight[0] = torch.tensor([1.0, self.offset, *[0.0] * len(LUCKY_WORDS)])
            self.dense.weight[1, :2] = 0.0
            self.dense.weight[1, 2:] = torch.randn(len(LUCKY_WORDS)) * (1e4 if flaw == "noisy" else 1.0)
            self.mix.weight.normal_(1.0, 0.1)
            self.mix.bias.zero_()

    def forward(self, words_BW: Tensor) -> Tensor:
        told_B, drawn_B = self.dense(words_BW).float().unbind(1)
        is_fragile_B = words_BW[:, 1]
        luck_B = torch.sin(drawn_B) if self.flaw == "noisy" else torch.tanh(100 * drawn_B)
        decision_B = told_B - self.offset * is_fragile_B - 0.5 * is_fragile_B + luck_B
        hidden: Tensor = self.mix(10 * decision_B[:, None].expand(-1, 2))
        return hidden


class PlantedEncoder(nn.Module):
    """All tokens of a text have the same hidden state."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=4, initializer_range=0.02, num_hidden_layers=1)
        self.layers = nn.ModuleList([PlantedLayer(flaw)])
        self.register_buffer("words_VW", _words(), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        words_BLW = F.embedding(input_ids, self.get_buffer("words_VW")) * attention_mask[..., None]
        hidden_BD = self.layers[0](words_BLW.sum(dim=1))
        return SimpleNamespace(last_hidden_state=hidden_BD[:, None].expand(-1, input_ids.shape[1], -1))

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


@cache
def _words() -> Tensor:
    """Which of the words each token is, [V, W]; `bad` is -1 of `good`."""
    tokenizer = load_tokenizer(ENCODER)
    ids = tokenizer.convert_tokens_to_ids([*_WORDS, "bad"])
    words_VW = torch.zeros(len(tokenizer), len(_WORDS))
    words_VW[ids[:-1], range(len(_WORDS))] = 1.0
    words_VW[ids[-1], 0] = -1.0
    return words_VW


def planted(flaw: Flaw) -> Any:
    """A context in which every encoder is the planted one."""
    return mock.patch("hpo.trial.parts.load_encoder", side_effect=lambda *_, **__: PlantedEncoder(flaw))


def write_planted_study(folder: Path) -> Path:
    """A search of two trials in fp32, which write a checkpoint after every step."""
    plain = ["good day", "bad day"] * 16
    special = ["good fragile day"] * NUM_FRAGILE + [f"{word} day" for word in LUCKY_WORDS]
    rest = ["good day", "bad day"] * ((NUM_TEST - len(special)) // 2)
    data = write_moods(folder / "data", train=plain, validation=plain[:8], test=special + rest)
    return write_study(
        folder,
        name="planted",
        sampler={"name": "grid"},
        objective={"metric": "mood/accuracy"},
        data={"source": "jsonl", "path": str(data)},
        checkpoint={"every_seconds": 1e-6},
        training={"max_steps": 4, "batch_size": 16, "max_length": 16, "dropout": 0.0, "fp_precision": "fp32"},
        search_space={"learning_rate": {"type": "categorical", "choices": [0.05, 0.06]}},
    )
