"""The logits of an evaluation: which weights they are computed with, and how often these are converted."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CPU, EMULATED
from tiny_loop import amp_of, config_of, loop_parts
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpo.data.batches import collate, evaluation_batches
from hpo.models.multitask import MultitaskModel
from hpo.precision.amp import MixedPrecision
from hpo.precision.table import PRECISIONS, AmpConfig
from hpo.training.evaluate import predict_logits
from hpo.training.loop import Learner, accumulate_gradients
from hpo.training.progress import TrainState
from hpo.trial.executor import Executor


class Conversions(TorchDispatchMode):
    """Counts conversions between dtypes, by the address of what was converted."""

    def __init__(self) -> None:
        super().__init__()
        self.count_of: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype):
            self.count_of[args[0].data_ptr()] += 1
        return function(*args, **(kwargs or {}))


def test_an_evaluation_converts_each_weight_once(executor: Executor) -> None:
    parts = loop_parts(executor, config_of(executor))
    split = parts.data.validation
    longest = int(split.lengths_W.max())
    batches = evaluation_batches(split.lengths_W, longest)
    assert len(batches) > 1
    with Conversions() as seen:
        predict_logits(parts.model, split, batches, amp_of("bf16"), pad_id=0)
    weights = [module.weight for module in parts.model.modules() if isinstance(module, nn.Linear)]
    trained = [weight for weight in weights if weight.requires_grad]
    assert {seen.count_of[weight.data_ptr()] for weight in trained} == {1}


@pytest.mark.parametrize("config", [EMULATED, EMULATED.model_copy(update={"fallback_to_fp32": True})])
def test_an_evaluation_sees_the_weights_as_they_are(executor: Executor, config: AmpConfig) -> None:
    """What autocast has converted for one evaluation is of no use to the next, nor to training."""
    nothing = {"dropout": 0.0, "head_dropout": 0.0, "attention_dropout": 0.0}
    model, _, loss_fn, data = loop_parts(executor, config_of(executor, **nothing))
    mixed_precision = MixedPrecision(PRECISIONS["bf16"], config, CPU)

    def logits_of(some: MultitaskModel) -> Any:
        batches = evaluation_batches(data.validation.lengths_W, 4096)
        return predict_logits(some, data.validation, batches, mixed_precision, pad_id=0)

    before = logits_of(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    after, fresh = logits_of(model), logits_of(deepcopy(model))
    for name in after:
        assert not np.array_equal(before[name], after[name])
        assert np.array_equal(after[name], fresh[name])
    batch = collate(data.validation, np.arange(4), executor.tasks, 0)
    gradients = []
    for some in (model, deepcopy(model)):
        state = TrainState(micro_batch_size=4)
        accumulate_gradients(Learner(some.train(), loss_fn, mixed_precision), batch, 0, state)
        gradients.append([weight.grad for weight in some.parameters() if weight.grad is not None])
    assert gradients[0]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
