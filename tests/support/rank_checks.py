"""What `tests/training/test_distributed.py` looks at: computed by two processes together, and by one.

    tests/support/rank_checks.py FOLDER     with the variables that torchrun sets, or without them

Each writes what it saw to FOLDER/rank-<rank>.json, one that trains alone to FOLDER/alone.json.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hpo.data.batches import Batch, evaluation_batches
from hpo.device import probe_device
from hpo.errors import Nonfinite, Pruned
from hpo.training import loop
from hpo.training.budget import Budget
from hpo.training.distributed import GradientSum, connected_ranks, merge, rank, world_size
from hpo.training.evaluate import predict_logits
from hpo.training.losses import MultitaskLoss
from hpo.trial.executor import Executor, follow
from hpo.trial.telemetry import Callbacks
from support.tiny import CPU, EMULATED, amp_of, tiny_executor
from support.tiny_loop import config_of, loop_parts, train_for

NO_DROPOUT = {"dropout": 0.0, "head_dropout": 0.0, "attention_dropout": 0.0}
collate, compute = loop.collate, MultitaskLoss.__call__


def trained(executor: Executor, amp: Any = EMULATED, **params: Any) -> dict[str, Any]:
    found = train_for(executor, Budget(max_steps=4), amp=amp, **NO_DROPOUT | params)
    (evaluation,) = found.evaluations
    statistics = found.mixed_precision.statistics()
    return {
        "losses": found.losses,
        "metrics": evaluation.metrics,
        "skipped": statistics.skipped_steps,
        "fallbacks": statistics.fp32_fallbacks,
        "scale": found.mixed_precision.scaler.get_scale(),
        "num_tokens": found.state.num_tokens,
        "weights": [float(weight.detach().double().sum()) for weight in found.model.parameters()],
    }


def with_few_labels(split: Any, windows: Any, tasks: Any, pad_id: int) -> Batch:
    """Only the last row has labels of the first task, and no row of the second."""
    batch = collate(split, windows, tasks, pad_id)
    for task, labelled in zip(tasks, ([-1], []), strict=False):
        target = batch.targets[task.name]
        missing = torch.nan if task.kind == "regression" else -1 if target.is_floating_point() else -100
        kept = target[labelled].clone()
        target[:] = missing
        target[labelled] = kept
    return batch


@contextmanager
def changed_loss(what: Callable[[Batch, Tensor], Tensor]) -> Iterator[None]:
    def changed(loss_fn: Any, logits: Any, batch: Batch, *args: Any) -> Tensor:
        return what(batch, compute(loss_fn, logits, batch, *args))

    with mock.patch.object(MultitaskLoss, "__call__", changed):
        yield


steps = itertools.count(1)


def has_last_row(batch: Batch) -> bool:
    """Return true if this micro-batch of rank 1 ends the global batch."""
    return int(batch.windows_B[-1]) == current[-1]


def huge_in_third_step(batch: Batch, loss: Tensor) -> Tensor:
    return loss * 1e36 if has_last_row(batch) and next(steps) == 3 else loss


def infinite_under_autocast(batch: Batch, loss: Tensor) -> Tensor:
    is_reduced = torch.is_autocast_enabled("cpu") and has_last_row(batch)
    return loss * torch.inf if is_reduced else loss


current: list[int] = []
"""The windows of the global batch."""


def remember(split: Any, windows: Any, tasks: Any, pad_id: int) -> Batch:
    current[:] = windows.tolist()
    return collate(split, windows, tasks, pad_id)


def check_losses(folder: Path) -> dict[str, Any]:
    executor = tiny_executor(folder, CPU)
    few = {"source": "synthetic", "synthetic": {"num_train": 9, "num_validation": 5, "num_test": 1}}
    of_few = tiny_executor(folder / "few", CPU, data=few)
    uncertain = {"freeze_layers": 1, "gradient_checkpointing": True, "loss_weighting": "uncertainty"}
    found = {
        "unequal micro-batches": trained(executor, batch_size=7, micro_batch_size=2),
        "frozen, checkpointed and uncertain": trained(executor, **uncertain),
        "a last batch of one row": trained(of_few),
        "a first batch of one row": trained(of_few, batch_size=1, fp_precision="fp16"),
        "bf16-true": trained(executor, fp_precision="bf16-true"),
    }
    loop.collate = with_few_labels
    found["few labels"] = trained(executor, class_weighting="balanced")
    loop.collate = remember
    with changed_loss(huge_in_third_step):
        low = EMULATED.model_copy(update={"init_scale": 1024.0})
        found["overflow"] = trained(executor, low, fp_precision="fp16")
    with changed_loss(infinite_under_autocast):
        amp = EMULATED.model_copy(update={"fallback_to_fp32": True, "max_fp32_fallbacks": 9})
        found["fallback"] = trained(executor, amp, fp_precision="bf16")
        try:
            trained(executor, amp.model_copy(update={"max_fp32_fallbacks": 0}), fp_precision="bf16")
        except Nonfinite as error:
            found["too many fallbacks"] = {"error": str(error)}
    loop.collate = collate
    return found


def check_gradients() -> list[float | None]:
    """The sums of gradients of 1 + rank: of a weight that each rank has one of, rank 1 alone, and none."""
    model = nn.ParameterList([torch.zeros(1), torch.zeros(1), torch.zeros(1)])
    for weight in [model[0], model[1]] if rank() else [model[0]]:
        weight.grad = torch.full((1,), 1.0 + rank())
    GradientSum(model)()
    return [None if weight.grad is None else weight.grad.item() for weight in model]


def check_seconds(folder: Path) -> dict[str, Any]:
    found = train_for(tiny_executor(folder, CPU), Budget(max_seconds=0.3), 2, **NO_DROPOUT)
    rate = found.optimizer.param_groups[0]["lr"]
    return {"steps": found.state.step, "seconds": found.state.train_seconds, "lr": rate}


def check_evaluation(folder: Path) -> bool:
    executor = tiny_executor(folder, CPU)
    model, _, _, data = loop_parts(executor, config_of(executor))
    split = data.validation
    batches = evaluation_batches(split.lengths_W, 3 * int(split.lengths_W.max()))
    together, alone = (
        predict_logits(model, split, some, amp_of("bf16"), pad_id=0)
        for some in (batches[rank() :: world_size()], batches)
    )
    merge(together)
    return all(together[name].tobytes() == alone[name].tobytes() for name in alone)


def out_of_memory(_: Batch, loss: Tensor) -> Tensor:
    """In rank 1, in all trials but the first three."""
    if rank() == 1 and len(weights) > 3 * STEPS:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return loss


STEPS = 6
weights: list[float] = []
"""After each step of the trials of this rank."""


def note_weights(parameters: Any, *args: Any) -> None:
    parameters = [*parameters]
    apply_gradients(parameters, *args)
    weights.append(sum(float(weight.detach().double().sum()) for weight in parameters))


apply_gradients = loop.apply_gradients


def check_trials(folder: Path) -> dict[str, Any]:
    """A whole trial, one that is stopped and goes on, one that is pruned, one that runs out of memory."""
    loop.apply_gradients = note_weights
    asked = itertools.count(1)

    def prune(_: Any) -> None:
        raise Pruned("the pruner stopped it.")

    results: list[Any] = []
    with changed_loss(out_of_memory):
        if rank():
            follow(folder / "runs")
        else:
            training = {"max_steps": STEPS, "batch_size": 8, "max_length": 64, "micro_batch_size": 3}
            executor = tiny_executor(folder, probe_device("cpu"), training=training)
            for name, callbacks in (
                ("whole", Callbacks()),
                ("cut", Callbacks(should_stop=lambda: next(asked) == 3)),
                ("cut", Callbacks()),
                ("pruned", Callbacks(on_evaluation=prune)),
                ("memory", Callbacks()),
            ):
                params = {"learning_rate": 1e-3, "fp_precision": "fp32"}
                result = executor.run(params, folder / name, "key", callbacks)
                telemetry = {key: result.telemetry.get(key) for key in ("num_ranks", "resumed_from_step")}
                results.append([result.outcome, result.reason, result.values, telemetry])
    return {"results": results, "weights": weights}


def check(folder: Path, name: str) -> None:
    own = folder / f"folder-{name}"
    (own / "few").mkdir(parents=True)
    found = {"losses": check_losses(own), "evaluation": check_evaluation(own)}
    if name != "alone":
        found |= {"gradients": check_gradients(), "seconds": check_seconds(own), "trials": check_trials(own)}
    (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        check(Path(sys.argv[1]), "alone")
    else:
        with connected_ranks():
            check(Path(sys.argv[1]), f"rank-{rank()}")
