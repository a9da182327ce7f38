"""The check's batch: legal, mostly padding, down to a single token; and what only such a batch finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_compat import parts_of
from tiny import CPU, tiny_executor
from torch import Tensor, nn

from hpo.config.study_config import CompatConfig
from hpo.data.tasks import IGNORE_INDEX
from hpo.precision.table import Resolution
from hpo.trial.adverse import adverse_batch, with_extreme_class_weights
from hpo.trial.compat import judge, measure_parts
from hpo.trial.executor import Executor


def test_it_is_legal_and_mostly_padding(tmp_path: Path) -> None:
    parts = parts_of(tiny_executor(tmp_path))
    batch = adverse_batch(parts)
    longest = int(parts.train_split.lengths_W.max())
    assert batch.lengths_B.tolist()[::2] == [longest, 1]
    assert 1 <= batch.lengths_B[1] <= longest // 8
    mask_BL = batch.attention_mask_BL
    assert mask_BL.sum(dim=1).tolist() == batch.lengths_B.tolist()
    assert float(mask_BL.float().mean()) < 0.5
    assert (batch.input_ids_BL[mask_BL == 0] == parts.pad_id).all()
    for task in parts.loss_fn.tasks:
        target = batch.targets[task.name]
        if task.level == "token" and task.kind != "span_extraction":
            behind = target[mask_BL == 0]
            assert (behind == (-1 if target.is_floating_point() else IGNORE_INDEX)).all()
    items = parts.loss_fn.count(batch)
    loss = parts.loss_fn(parts.model, batch, items, items)
    assert torch.isfinite(loss)


def answers(folder: Path) -> Executor:
    """A study of answers at the end of texts, which a shorter text does not have."""
    rows: list[dict[str, Any]] = []
    for number in range(12):
        text = "word " * (4 * number + 8) + "end"
        rows.append(
            {"id": str(number), "text": text, "labels": {}, "spans": {"answer": [[len(text) - 3, len(text)]]}}
        )
    for split, some in (("train", rows[1:]), ("validation", rows[:1])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "tasks.json").write_text(
        json.dumps({"answer": {"kind": "span_extraction", "span_names": ["answer"]}})
    )
    return tiny_executor(folder, data={"source": "jsonl", "path": str(folder)})


def test_an_answer_behind_the_end_of_a_shorter_text_is_no_target(tmp_path: Path) -> None:
    parts = parts_of(answers(tmp_path))
    batch = adverse_batch(parts)
    found = batch.targets["answer"]
    assert (found[0] >= batch.lengths_B[0] - 2).all()
    assert (found[1:] == IGNORE_INDEX).all()
    items = parts.loss_fn.count(batch)
    assert items == {"answer": 1}
    assert torch.isfinite(parts.loss_fn(parts.model, batch, items, items))


class Masked(nn.Module):
    """NaN in fp16 where a text has a single token, as where all that it attends to is masked."""

    def __init__(self, encoder: Any, at_most: int) -> None:
        super().__init__()
        self.inner = encoder
        self.config = encoder.config
        self.at_most = at_most

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        hidden = output.last_hidden_state
        is_short_B = attention_mask.sum(dim=1) <= self.at_most
        if torch.is_autocast_enabled("cpu") and hidden.requires_grad:
            hidden = hidden.masked_fill(is_short_B[:, None, None], torch.nan)
        output.last_hidden_state = hidden
        return output


def check(executor: Executor, name: str, change: Any = None) -> Any:
    from hpo.config.trial_config import build_trial_config

    config = build_trial_config(executor.study, {}, name, executor.amp)
    parts = executor.parts(config, Resolution(name, name, "native"))
    if change:
        parts.model.encoder = change(parts.model.encoder)
        parts.model.passes_type_ids = False
    return judge(measure_parts(parts, CPU), CompatConfig())


@pytest.mark.parametrize(("at_most", "verdict"), [(0, "ok"), (1, "incompatible"), (5, "incompatible")])
def test_what_breaks_on_short_texts_is_found(tmp_path: Path, at_most: int, verdict: str) -> None:
    found = check(tiny_executor(tmp_path), "fp16", lambda encoder: Masked(encoder, at_most))
    assert found.verdict == verdict
    if at_most:
        assert (
            "logits not finite under fp16; the first module that made them so is encoder" in found.reasons[0]
        )


def test_class_weights_are_tried_at_their_bounds(tmp_path: Path) -> None:
    training = {"max_steps": 1, "batch_size": 8, "max_length": 32, "class_weighting": "balanced"}
    executor = tiny_executor(tmp_path, training=training)
    parts = parts_of(executor)
    extreme = with_extreme_class_weights(parts.loss_fn)
    assert extreme is not None
    weights = [own for own in extreme.class_weight.values() if own is not None]
    assert {round(float(value), 6) for own in weights for value in own} == {0.1, 10.0}
    assert check(executor, "bf16").verdict == "ok"
    assert with_extreme_class_weights(parts_of(tiny_executor(tmp_path)).loss_fn) is None


class Delicate(nn.Module):
    """Right in the forward pass; a gradient beyond its bound is infinite in reduced precision."""

    def __init__(self, encoder: Any, bound: float) -> None:
        super().__init__()
        self.inner = encoder
        self.config = encoder.config
        self.bound = bound
        self.largest = 0.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        hidden = output.last_hidden_state * 1.0
        if hidden.requires_grad and torch.is_autocast_enabled("cpu"):
            hidden.register_hook(self.gradient)
        output.last_hidden_state = hidden
        return output

    def gradient(self, gradient: Tensor) -> Tensor:
        self.largest = max(self.largest, float(gradient.abs().max()))
        return gradient.masked_fill(gradient.abs() > self.bound, torch.inf)


def test_what_breaks_under_extreme_class_weights_alone_is_found(tmp_path: Path) -> None:
    training = {"max_steps": 1, "batch_size": 8, "max_length": 32, "class_weighting": "balanced"}
    executor = tiny_executor(tmp_path, training=training)
    reach: list[Delicate] = []

    def delicate(bound: float) -> Any:
        def change(encoder: Any) -> nn.Module:
            reach.append(Delicate(encoder, bound))
            return reach[-1]

        return change

    plain = tiny_executor(tmp_path, training=training | {"class_weighting": "none"})
    assert check(executor, "bf16", delicate(torch.inf)).verdict == "ok"
    assert check(plain, "bf16", delicate(torch.inf)).verdict == "ok"
    extreme, without = (each.largest for each in reach)
    assert extreme > without
    found = check(executor, "bf16", delicate(extreme * 0.99))
    assert found.verdict == "incompatible"
    assert "gradients with class weights at their bounds not finite under bf16" in found.reasons[0]
