"""What `tests/training/test_distributed.py` looks at, computed in two processes that train together.

    tests/rank_checks.py FOLDER     with the variables that torchrun sets

Each writes what it found to FOLDER/rank-<rank>.json; what one process finds alone stands beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import rank_faults
import torch
from tiny import EMULATED, tiny_executor
from tiny_loop import Trained, amp_of, config_of, loop_parts, train_steps

from hpo.data.batches import Batch
from hpo.device import probe_device
from hpo.errors import Nonfinite, Pruned
from hpo.training import loop
from hpo.training.distributed import ONE_RANK, ConnectedRanks, connected_ranks
from hpo.training.evaluate import predict_logits
from hpo.trial.executor import Executor, follow
from hpo.trial.trial_run import TrialRun

CPU = probe_device("cpu")
NO_DROPOUT = {"dropout": 0.0, "head_dropout": 0.0, "attention_dropout": 0.0}
collate = loop.collate


def losses(trained: Trained) -> dict[str, Any]:
    return {
        "losses": trained.losses,
        "metrics": trained.evaluation.metrics,
        "numerics": trained.evaluation.numerics,
        "skipped": trained.mixed_precision.statistics().skipped_steps,
        "fallbacks": trained.mixed_precision.statistics().fp32_fallbacks,
        "micro_batch_size": trained.state.micro_batch_size,
        "num_tokens": trained.state.num_tokens,
        "train_seconds": trained.state.train_seconds,
        "weights": sum(float(weight.double().sum()) for weight in trained.model.state_dict().values()),
    }


def both(executor: Executor, ranks: ConnectedRanks, steps: int = 6, **params: Any) -> dict[str, Any]:
    """The same training by both ranks together, and by each alone."""
    found = {}
    for name, those in {"together": ranks, "alone": ONE_RANK}.items():
        executor.ranks = those
        found[name] = losses(train_steps(executor, steps, **NO_DROPOUT | params))
    return found


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


def in_one_rank(rank: int, ranks: ConnectedRanks, what: Callable[[Batch, Any], Any]) -> Any:
    """A loss whose value `what` replaces in one of the ranks."""
    compute = loop.MultitaskLoss.__call__

    def called(self: Any, forward: Any, batch: Batch, items: Any, global_items: Any) -> Any:
        value = compute(self, forward, batch, items, global_items)
        return what(batch, value) if ranks.rank == rank else value

    return called


def out_of_memory_with_three_rows(batch: Batch, value: Any) -> Any:
    if len(batch.windows_B) > 2:
        raise torch.OutOfMemoryError("no memory is left")
    return value


def overflow_in_third_step() -> Callable[[Batch, Any], Any]:
    """The loss is finite, and its scaled gradients are not."""
    num_calls = 0

    def overflow(_: Batch, value: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return value * 1e36 if num_calls == 3 else value

    return overflow


def infinite_under_autocast(batch: Batch, value: Any) -> Any:
    return value * torch.inf if torch.is_autocast_enabled("cpu") and 0 in batch.windows_B else value


def check_losses(ranks: ConnectedRanks, folder: Path) -> dict[str, Any]:
    executor = tiny_executor(folder, CPU)
    compare = partial(both, executor, ranks)
    found = {
        "plain": compare(),
        "micro-batches": compare(micro_batch_size=3),
        "unequal": compare(batch_size=7, micro_batch_size=2),
        "uncertainty": compare(loss_weighting="uncertainty", pooling="attention"),
        "bf16-true": compare(fp_precision="bf16-true"),
        "bf16-true, stochastic": compare(fp_precision="bf16-true", weight_rounding="stochastic"),
        "fp16 with skipped steps": compare(fp_precision="fp16", init_scale=2.0**18, micro_batch_size=4),
    }
    executor.ranks = ranks
    config = config_of(executor, **NO_DROPOUT)
    model, optimizer, loss_fn, data = loop_parts(executor, config)
    args = replace(executor.training_args(config), budget=loop.Budget(max_seconds=0.5), num_evaluations=3)
    clock = loop.TrainingClock(loop.TrainState(), loop.ThroughputMeter(executor.device))
    list(loop.train(model, optimizer, loss_fn, amp_of("fp32"), data, args, clock))
    found["seconds"] = {"state": clock.state.state_dict(), "lr": optimizer.param_groups[0]["lr"]}

    loop.collate = with_few_labels
    found["few labels"] = compare(class_weighting="balanced")
    loop.collate = collate
    short = tiny_executor(
        folder,
        CPU,
        data={"source": "synthetic", "synthetic": {"num_train": 9, "num_validation": 5, "num_test": 1}},
    )
    found["a last batch of one row"] = both(short, ranks)
    executor.ranks = ranks
    dropout = {"dropout": 0.1, "head_dropout": 0.1, "attention_dropout": 0.1}
    found["dropout"] = {"together": [losses(train_steps(executor, 3, **dropout)) for _ in range(2)]}

    compute = loop.MultitaskLoss.__call__
    loop.MultitaskLoss.__call__ = in_one_rank(1, ranks, out_of_memory_with_three_rows)  # type: ignore
    found["memory"] = {"together": losses(train_steps(executor, 6, **NO_DROPOUT))}
    for rank in (0, 1):
        loop.MultitaskLoss.__call__ = in_one_rank(rank, ranks, infinite_under_autocast)  # type: ignore
        amp = EMULATED.model_copy(update={"fallback_to_fp32": True})
        bf16 = NO_DROPOUT | {"fp_precision": "bf16"}
        found[f"fallback in {rank}"] = {"together": losses(train_steps(executor, 6, amp, **bf16))}
        try:
            with ranks.together():
                train_steps(executor, 6, amp.model_copy(update={"max_fp32_fallbacks": 0}), **bf16)
        except Nonfinite as error:
            found[f"fallback in {rank}"]["too many"] = str(error)
    for rank in (0, 1):
        for name, those in {"together": ranks, "alone": ONE_RANK}.items():
            executor.ranks = those
            overflow = overflow_in_third_step()
            loop.MultitaskLoss.__call__ = compute  # type: ignore[method-assign]
            # Alone, this process is each rank.
            in_rank = ranks.rank if name == "alone" else rank
            loop.MultitaskLoss.__call__ = in_one_rank(in_rank, ranks, overflow)  # type: ignore
            amp = EMULATED.model_copy(update={"init_scale": 1024.0})
            trained = train_steps(executor, 6, amp, **NO_DROPOUT | {"fp_precision": "fp16"})
            scale = trained.mixed_precision.scaler.get_scale()
            found.setdefault(f"overflow in {rank}", {})[name] = losses(trained) | {"scale": scale}
    loop.MultitaskLoss.__call__ = compute  # type: ignore[method-assign]
    return found


def check_evaluation(ranks: ConnectedRanks, folder: Path) -> bool:
    executor = tiny_executor(folder, CPU)
    parts = loop_parts(executor, config_of(executor))
    split = parts.data.validation
    where = parts.model, split, executor.tasks, amp_of("bf16"), 3 * int(split.lengths_W.max()), 0
    together, alone = predict_logits(*where, ranks), predict_logits(*where)
    return all(together[name].tobytes() == alone[name].tobytes() for name in alone)


TRIALS = [
    "",
    "raises/1",
    "raises/0",
    "nan/1",
    "nan/0",
    "memory/1",
    "memory/0",
    "memory in the update/1",
    "memory in the update/0",
    "raises in the sum/1",
    "memory in the sum/1",
    "memory in the sum/0",
    "raises in an evaluation/0",
    "raises in the retry/1",
    "pruned/0",
    "preempted/1",
    "preempted/0",
    "goes on",
]
"""Trials of one after another, and the rank that ends them."""


def check_trials(ranks: ConnectedRanks, folder: Path) -> list[Any] | None:
    """Trials that end in every way, each after the other: a failure leaves nothing behind."""
    case = rank = ""
    num_asked = 0
    run = TrialRun.run

    def begin(trial: TrialRun, *args: Any) -> Any:
        nonlocal case, rank, num_asked
        case, _, rank = TRIALS[args[0]["seed"]].partition("/")
        num_asked = 0
        return run(trial, *args)

    def stop() -> bool:
        """Asked between two micro-batches and after a step, so in the second step, or after it."""
        nonlocal num_asked
        num_asked += 1
        return case == "preempted" and int(rank) == ranks.rank and num_asked == (3 if ranks.rank else 4)

    TrialRun.run = begin  # type: ignore[method-assign]
    rank_faults.install(lambda: case if rank == str(ranks.rank) else "")
    if not ranks.is_main:
        follow(ranks, folder / "runs", stop)
        return None

    def prune(_: Any) -> None:
        if case == "pruned":
            raise Pruned("the pruner stopped it.")

    executor = tiny_executor(folder, CPU, training={"max_steps": 8, "batch_size": 8, "max_length": 64})
    executor.ranks = ranks
    found = []
    for seed, name in enumerate(TRIALS):
        params = {"seed": seed, "learning_rate": 1e-3, "fp_precision": "fp32", "micro_batch_size": 3}
        place = folder / ("preempted/0" if name == "goes on" else name or "whole")
        result = executor.run(params, place, "key", prune, stop)
        telemetry = {
            key: result.telemetry.get(key) for key in ("num_steps", "num_ranks", "resumed_from_step")
        }
        found.append([name, result.outcome, result.reason, result.traceback, telemetry])
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with connected_ranks() as ranks:
        own = folder / f"folder-{ranks.rank}"
        own.mkdir()
        found = {
            "losses": check_losses(ranks, own),
            "evaluation": check_evaluation(ranks, own),
            "trials": check_trials(ranks, own),
        }
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
