"""What the roundings of bf16 weights cost, against bf16 autocast, and what numeric telemetry costs.

    python tests/benchmarks/weight_rounding.py [--rounds 9] [--only speed] [long] [short]

MiniLM and AdamW on the workloads of `workload.py`. In a round every contender takes the same steps, in turn;
times are ratios to bf16 autocast's of the same round: median (minimum to maximum). Memory is of weights,
gradients and the optimiser's state, exact, and the peak of a process of its own. bf16 autocast trains the
rows of the embedding table that the data use, bf16 weights the whole table (`compact_embedding`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from trial_parts import TrialParts, assemble, config_of, executor_of
from workload import WORKLOADS, Workload, write_workload

from hpo.data.batches import collate, training_batches
from hpo.device import probe_device
from hpo.memory import peak_memory_bytes, reset_peak_memory
from hpo.precision.table import support
from hpo.training.loop import TrainState, accumulate_gradients, apply_gradients
from hpo.training.numerics import StepProbe

SEED = 42
CONTENDERS = {
    "bf16 autocast": ("bf16", "nearest"),
    "bf16-true, nearest": ("bf16-true", "nearest"),
    "bf16-true, stochastic": ("bf16-true", "stochastic"),
    "bf16-true, compensated": ("bf16-true", "compensated"),
}
NUM_STEPS = {"long": 1, "short": 3}
MEBIBYTE = 2**20


def parts_of(workload: Workload, folder: Path, name: str) -> TrialParts:
    precision, rounding = CONTENDERS[name]
    work = folder / name.replace(" ", "-")
    work.mkdir(exist_ok=True)
    settings = {"weight_rounding": rounding} if rounding != "nearest" else {}
    executor = executor_of(folder, workload, precision, work=work, **settings)
    return assemble(executor, config_of(executor, SEED, precision))


def training_steps(parts: TrialParts) -> Iterator[tuple[float, float]]:
    """Train without end; after each step its seconds, and those of the telemetry that was measured in it."""
    state = TrainState(micro_batch_size=parts.config.batch_size)
    probe = StepProbe(parts.model, parts.optimizer, parts.mixed_precision)
    parts.model.train()
    for epoch in count():
        for windows in training_batches(parts.data.train.lengths_W, parts.config.batch_size, SEED, epoch):
            batch = collate(parts.data.train, windows, parts.loss_fn.tasks, parts.data.pad_id)
            began = time.perf_counter()
            loss = accumulate_gradients(parts.model, parts.loss_fn, batch, parts.mixed_precision, SEED, state)
            accumulated = time.perf_counter()
            probe.start()
            probed = time.perf_counter()
            apply_gradients(parts.model, parts.optimizer, loss, parts.mixed_precision, 1.0)
            applied = time.perf_counter()
            probe.result(state.step)
            measuring = probed - accumulated + time.perf_counter() - applied
            state.step += 1
            yield applied - began - (probed - accumulated), measuring


def held_bytes(parts: TrialParts) -> int:
    """Of weights, gradients and the optimiser's state, each storage once."""
    weights = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
    gradients = [weight.grad for weight in weights]
    state = tree_leaves(parts.optimizer.state_dict())
    held = {
        leaf.data_ptr(): leaf.nbytes for leaf in (*weights, *gradients, *state) if isinstance(leaf, Tensor)
    }
    return sum(held.values())


def bytes_of(workload: Workload, folder: Path, name: str, answers: Any) -> None:
    """What is held after two steps, and their peak over what the process held before them."""
    parts = parts_of(workload, folder, name)
    device = parts.mixed_precision.device
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    for _ in islice(training_steps(parts), 2):
        pass
    answers.put((held_bytes(parts), peak_memory_bytes(device) - before))


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def memory(workload: Workload, folder: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    print("| | weights, gradients, state | peak of steps |\n| --- | --- | --- |")
    for name in CONTENDERS:
        answers = spawn.Queue()
        process = spawn.Process(target=bytes_of, args=(workload, folder, name, answers))
        process.start()
        process.join()
        held, peak = answers.get(timeout=1)
        print(f"| {name} | {held / MEBIBYTE:.1f} MiB | {peak / MEBIBYTE:.0f} MiB |", flush=True)


def speed(workload: Workload, folder: Path, num_rounds: int) -> None:
    steps = {name: training_steps(parts_of(workload, folder, name)) for name in CONTENDERS}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    telemetry: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(num_rounds + 1):
        for name in CONTENDERS:
            found = list(islice(steps[name], NUM_STEPS[workload.name]))
            if number:  # the first round warms up
                seconds[name].append(sum(step for step, _ in found) / len(found))
                telemetry[name].append(sum(measured for _, measured in found) / len(found))
    base = seconds["bf16 autocast"]
    print("| | seconds a step | time against autocast | telemetry, of a step |\n| --- | --- | --- | --- |")
    for name, found in seconds.items():
        ratios = [one / other for one, other in zip(found, base, strict=True)]
        share = [100 * one / other for one, other in zip(telemetry[name], found, strict=True)]
        print(f"| {name} | {median(found):.3f} | {spread(ratios)} | {spread(share)} % |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("speed", "memory"), help="default: both")
    arguments = parser.parse_args()
    names = arguments.workloads or list(WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, but is {arguments.rounds}")
    device = probe_device("cpu")
    if support("bf16", device).level != "native":
        parser.error("bf16 must be native: its speed where it is emulated says nothing")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            origin = write_workload(WORKLOADS[name], Path(folder))
            print(f"\n{name} texts of {origin} on {device.describe()}")
            if arguments.only != "memory":
                speed(WORKLOADS[name], Path(folder), arguments.rounds)
            if arguments.only != "speed":
                memory(WORKLOADS[name], Path(folder))


if __name__ == "__main__":
    main()
