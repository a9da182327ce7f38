"""Where the time of a training step and of an evaluation goes, and what would be left at the least.

    python tests/benchmarks/where_time_goes.py [--precision bf16] [long] [short]

Wall-clock seconds are measured without the profiler, shares by operator with it. The floor keeps what this
step computes and no peer computes without: matrix products, attention and the optimiser's own pass; copies,
conversions between dtypes, dropout, norms and Python would then cost nothing. What is reported as the
rate at the floor is thus beyond what PyTorch's operators can reach.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from torch.profiler import ProfilerActivity, profile
from trial_parts import TrialParts, assemble, config_of, executor_of
from workload import WORKLOADS, write_workload

from hpo.data.batches import collate, training_batches
from hpo.device import probe_device
from hpo.precision.table import PRECISION_NAMES, support
from hpo.training.evaluate import predict_logits
from hpo.training.loop import TrainState, accumulate_gradients, apply_gradients

SEED = 42
NUM_WARMUP_STEPS = 3
NUM_STEPS = 30

OPERATORS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "mkldnn_linear", "_mkl_linear"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_softmax",
        "_softmax_backward_data",
        "_DropoutAttention",
        "_DropoutAttentionBackward",
    ),
    "optimiser": ("_fused_adamw_",),
    "copies and conversions": ("copy_",),
    "norm of the gradients": ("dot",),
    "dropout": ("lt", "neg_", "bitwise_and", "mul_", "_MaskAndScale", "_MaskAndScaleBackward"),
    "GELU": ("gelu", "gelu_backward"),
    "layer norm": ("native_layer_norm", "native_layer_norm_backward"),
}
AT_LEAST = ("matrix products", "attention", "optimiser")
OTHER, OUTSIDE = "other operators, autograd", "Python"


def training_steps(parts: TrialParts) -> Iterator[int]:
    """Train without end; after each step the number of its examples."""
    state = TrainState(micro_batch_size=parts.config.batch_size)
    lengths_W = parts.data.train.lengths_W
    parts.model.train()
    for epoch in range(10**6):
        for windows in training_batches(lengths_W, parts.config.batch_size, SEED, epoch):
            batch = collate(parts.data.train, windows, parts.loss_fn.tasks, parts.data.pad_id)
            loss = accumulate_gradients(parts.model, parts.loss_fn, batch, parts.mixed_precision, SEED, state)
            apply_gradients(
                parts.model, parts.optimizer, loss, parts.mixed_precision, parts.config.max_grad_norm or 0.0
            )
            state.step += 1
            yield len(windows)


def evaluate_once(parts: TrialParts, max_tokens: int) -> int:
    """Predict the validation split; its number of texts."""
    split, tasks = parts.data.validation, parts.loss_fn.tasks
    predict_logits(parts.model, split, tasks, parts.mixed_precision, max_tokens, parts.data.pad_id)
    return split.num_windows


def report(title: str, work: Callable[[], int]) -> None:
    """Run `work`, which returns its number of examples, twice; print rate, shares and floor."""
    started = time.perf_counter()
    num_examples = work()
    seconds = time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        work()
        profiled_seconds = time.perf_counter() - started
    share = dict.fromkeys([*OPERATORS, OTHER, OUTSIDE], 0.0)
    group_of = {name: group for group, names in OPERATORS.items() for name in names}
    for row in profiler.key_averages():
        share[group_of.get(row.key.removeprefix("aten::"), OTHER)] += (
            row.self_cpu_time_total / 1e6 / profiled_seconds
        )
    share[OUTSIDE] = 1 - sum(share.values())
    print(f"\n{title}: {num_examples / seconds:.4g} examples/s")
    for group, value in sorted(share.items(), key=lambda item: -item[1]):
        print(f"  {group:28} {value:6.1%}  {1000 * value * seconds / num_examples:8.3g} ms an example")
    at_least = sum(share[group] for group in AT_LEAST)
    print(
        f"  with {', '.join(AT_LEAST)} alone: {num_examples / seconds / at_least:.4g} examples/s, "
        f"{1 / at_least:.3g} times as fast"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument(
        "--precision", choices=PRECISION_NAMES, help="default: bf16, or fp32 where not native"
    )
    arguments = parser.parse_args()
    names = arguments.workloads or list(WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    is_native = support("bf16", probe_device("cpu")).level == "native"
    precision = arguments.precision or ("bf16" if is_native else "fp32")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            origin = write_workload(WORKLOADS[name], Path(folder))
            executor = executor_of(Path(folder), WORKLOADS[name], precision)
            level = support(precision, executor.device).level
            machine = executor.device.describe()
            print(f"\n{name} texts of {origin}, {precision} ({level}) on {machine}")
            config = config_of(executor, SEED, precision)
            parts = assemble(executor, config)
            steps = training_steps(parts)
            sum(islice(steps, NUM_WARMUP_STEPS))
            report("training", lambda steps=steps: sum(islice(steps, NUM_STEPS)))
            max_tokens = executor.training_args(config).evaluation_tokens
            report("evaluation", lambda parts=parts, size=max_tokens: evaluate_once(parts, size))


if __name__ == "__main__":
    main()
