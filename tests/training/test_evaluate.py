"""The weights of an evaluation under autocast."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import amp_of
from support.tiny_loop import config_of, loop_parts
from torch import Tensor

from hpo.data.batches import collate, evaluation_batches
from hpo.models.multitask import MultitaskModel
from hpo.training.budget import TrainState
from hpo.training.evaluate import predict_logits
from hpo.training.loop import Learner, accumulate_gradients
from hpo.trial.executor import Executor


@pytest.mark.parametrize("falls_back", [False, True])
def test_evaluation_uses_current_weights(executor: Executor, falls_back: bool) -> None:
    nothing = {"dropout": 0.0, "head_dropout": 0.0, "attention_dropout": 0.0}
    model, _, loss_fn, data = loop_parts(executor, config_of(executor, **nothing))
    amp = amp_of("bf16", fallback_to_fp32=falls_back)

    def logits_of(some: MultitaskModel) -> Any:
        batches = evaluation_batches(data.validation.lengths_W, 4096)
        return predict_logits(some, data.validation, batches, amp, pad_id=0)

    def gradients_of(some: MultitaskModel) -> list[Tensor]:
        learner, state = Learner(some.train(), loss_fn, amp), TrainState(micro_batch_size=4)
        accumulate_gradients(learner, collate(data.validation, np.arange(4), executor.tasks, 0), 0, state)
        return [weight.grad for weight in some.parameters() if weight.grad is not None]

    before = logits_of(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    after, fresh = logits_of(model), logits_of(deepcopy(model))
    for name in after:
        assert not np.array_equal(before[name], after[name])
        assert np.array_equal(after[name], fresh[name])
    other = gradients_of(deepcopy(model))
    assert all(map(torch.equal, gradients_of(model), other))
