from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_encoders import family_model
from torch import nn

from hpo.models.compact_embedding import CompactEmbedding, compact_vocabulary
from hpo.models.multitask import MultitaskModel
from hpo.tasks.kind import Task
from hpo.training.optim import build_optimizer, parameter_groups, schedule_factor, set_learning_rate

TASKS = (Task("tags", "multi_label", ("x", "y")),)
USED = np.array([7, 9, 30, 31, 90])
NUM_STEPS = 6


def model_of(family: str = "bert") -> Any:
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    return family_model(family, tasks=TASKS, max_length=8, **dropout)


def compacted(optimizer: str = "adamw", family: str = "bert") -> Any:
    model = model_of(family)
    compact_vocabulary(model, optimizer, USED)
    return model


def train(model: MultitaskModel, name: str) -> list[float]:
    """Train with clipping, a schedule and one step that the loss scaler skips."""
    rate = 0.05 if name == "sgd" else 0.01
    optimizer: Any = build_optimizer(name, parameter_groups(model, learning_rate=rate, weight_decay=0.1))
    scaler, generator = torch.amp.GradScaler("cpu", init_scale=4.0), torch.Generator().manual_seed(0)
    losses = []
    for step in range(NUM_STEPS):
        ids_BL = torch.from_numpy(USED)[torch.randint(len(USED), (4, 8), generator=generator)]
        set_learning_rate(optimizer, schedule_factor("linear", step / NUM_STEPS))
        optimizer.zero_grad()
        loss = model(ids_BL, torch.ones_like(ids_BL))["tags"].square().mean()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [("bert", "adamw"), ("bert", "lion"), ("bert", "sgd"), ("modernbert", "adamw"), ("deberta-v2", "adamw")],
)
def test_result_equals_training_of_the_whole_table(family: str, optimizer: str) -> None:
    whole, compact = model_of(family), compacted(optimizer, family)
    table = compact.encoder.get_input_embeddings()
    assert isinstance(table, CompactEmbedding)
    assert len(table.weight) < 10
    torch.testing.assert_close(train(compact, optimizer), train(whole, optimizer), rtol=1e-6, atol=0)
    ours, theirs = compact.state_dict(), whole.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    (embedding,) = (key for key in ours if key.endswith("word_embeddings.weight") or "tok_embeddings" in key)
    before = model_of(family).state_dict()[embedding]
    assert not torch.equal(ours[embedding][60], before[60]), "a row without gradient decays"
    restored = compacted(optimizer, family)
    restored.load_state_dict(ours)
    torch.testing.assert_close(restored.state_dict()[embedding], ours[embedding])


@pytest.mark.parametrize("change", ["adam", "adafactor", "frozen", "norm", "tied", "bf16"])
def test_table_with_another_result_is_left_alone(change: str) -> None:
    model = model_of()
    table = model.encoder.get_input_embeddings()
    if change == "frozen":
        table.requires_grad_(False)
    elif change == "norm":
        table.max_norm = 1.0
    elif change == "tied":
        model.extra = nn.Linear(1, 1)
        model.extra.weight = table.weight
    elif change == "bf16":
        model.bfloat16()
    compact_vocabulary(model, change if change.startswith("ada") else "adamw", USED)
    assert type(model.encoder.get_input_embeddings()) is nn.Embedding


class Foreign(nn.Module):
    """An encoder of code beside transformers, without `set_input_embeddings`."""

    def __init__(self, encoder: Any, reads_weight: bool) -> None:
        super().__init__()
        self.inner, self.config, self.reads_weight = encoder, encoder.config, reads_weight

    def get_input_embeddings(self) -> Any:
        return self.inner.embeddings.word_embeddings

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        table = self.get_input_embeddings()
        states = table.weight[input_ids] if self.reads_weight else table(input=input_ids)
        return self.inner(inputs_embeds=states, attention_mask=attention_mask)


@pytest.mark.parametrize("reads_weight", [False, True])
def test_foreign_encoder_trains_as_whole(reads_weight: bool) -> None:
    whole, compact = model_of(), model_of()
    for model in (whole, compact):
        model.encoder = Foreign(model.encoder, reads_weight)
    compact_vocabulary(compact, "adamw", USED)
    assert isinstance(compact.encoder.get_input_embeddings(), CompactEmbedding) != reads_weight
    torch.testing.assert_close(train(compact, "adamw"), train(whole, "adamw"), rtol=1e-6, atol=0)
    torch.testing.assert_close(compact.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-7)


def test_token_without_a_row() -> None:
    """A callback of the user may look up any token."""
    whole, compact = model_of(), compacted()
    for model in (whole, compact):
        train(model, "adamw")
    ids = torch.tensor([[7, 50, 90, 60]])
    ours, theirs = (one.encoder.get_input_embeddings() for one in (compact, whole))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids), rtol=1e-5, atol=1e-7)
    with pytest.raises(IndexError, match="Token 50 is in no text of the data"):
        ours(ids)
