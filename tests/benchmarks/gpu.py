"""What a GPU makes of each precision and `compile` mode, and of several trials at once, as Markdown tables.

    python tests/benchmarks/gpu.py [--budget SECONDS] [--device cpu --quick]

1. Training, eager: MiniLM and a fresh encoder of BERT-base's shape, in every precision, through the trial
   executor, and after each the Hugging Face Trainer on the same rows where it has the precision.
2. Completed trials per hour of a study with 1, 2, 4 and 8 workers on the device.
3. Training, compiled: the same in every mode of `compile`.

A row is printed when it is measured, so what a limit of time cuts off is the end alone; a failure is a row
with its reason. The measurements run one after the other in one process, in a fresh one after a crash and
after one that took too long. Rates are real tokens (no padding) per second after the first steps, utilisation
is of the data sheet's peak (`hpo.training.throughput.peak_flops`; empty where that is not known), memory is
the peak of the allocator (of the process, on a CPU), compile is all seconds of the compiler. Steps in which
something compiled count in neither side's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from executors import config_of, executor_of
from workload import Workload, study_content, write_workload

from hpo.data.tokenized_split import TokenizedSplit
from hpo.device import cuda_devices, probe_device
from hpo.memory import peak_memory_bytes, release_free_memory, reset_peak_memory
from hpo.precision.table import PRECISIONS
from hpo.study.reading.reader import read_study
from hpo.study.store.storage import open_storage
from hpo.training.throughput import peak_flops, training_flops
from hpo.trial.executor import Executor

ROOT = Path(__file__).parents[2]
SEED = 42
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
TRAINER_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
TRAINER_COMPILE_MODES = ("none", "default")
BERT_BASE = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
TINY = BERT_BASE | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VOCABULARY = {"vocab_size": 30522}  # of MiniLM's tokenizer, for the peer's model

WORKLOADS = {
    "MiniLM": Workload("minilm", "", (), 320, (10, 34), 4800, 320, batch_size=32),
    "BERT-base": Workload("bert-base", "", (), 320, (10, 34), 3200, 320, batch_size=32, encoder=BERT_BASE),
}
QUICK = {"tiny": Workload("tiny", "", (), 64, (2, 6), 48, 16, batch_size=8, encoder=TINY)}


@dataclass(frozen=True)
class Cell:
    """One measurement of training."""

    contender: str
    """`hpo` or `Trainer`."""
    encoder: str
    precision: str
    compile: str


def cells(encoders: Sequence[str], precisions: Sequence[str], modes: Sequence[str]) -> list[Cell]:
    """In the order in which they are measured: the peer follows ours."""
    found = []
    for mode in modes:
        for encoder in encoders:
            for precision in precisions:
                found.append(Cell("hpo", encoder, precision, mode))
                if precision in TRAINER_PRECISIONS and mode in TRAINER_COMPILE_MODES:
                    found.append(Cell("Trainer", encoder, precision, mode))
    return found


# In the process that measures


def measure(folder: Path, device: str, wanted: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """What each gave: tokens_per_second, utilization, peak_memory_bytes, compile_seconds; or `failed`."""
    for cell in wanted:
        try:
            yield (_measure_hpo if cell.contender == "hpo" else _measure_trainer)(folder, device, cell)
        except Exception as error:  # its row says so, and the next cell may work
            yield {"failed": f"{type(error).__name__}: {error}"}


def _measure_hpo(folder: Path, device: str, cell: Cell) -> dict[str, Any]:
    executor = _executor(folder, device, cell.encoder, cell.precision, cell.compile)
    name = f"{cell.encoder}-{cell.precision}-{cell.compile}"
    result = executor.run({}, folder / "trials" / name, name)
    if result.outcome != "complete":
        return {"failed": f"{result.outcome}: {result.reason}"}
    rate = result.telemetry["throughput"]["train_tokens_per_second"]
    return {
        "tokens_per_second": rate,
        "utilization": _utilization(folder, device, cell, rate),
        "peak_memory_bytes": result.telemetry["peak_memory_bytes"],
        "compile_seconds": result.telemetry.get("compile_seconds"),
    }


def _measure_trainer(folder: Path, device: str, cell: Cell) -> dict[str, Any]:
    from peers import run_trainer

    torch.compiler.reset()  # graphs of what was measured before would count towards its limit
    probed = probe_device(device)
    split = _train_split(folder, device, cell.encoder)
    release_free_memory(probed)
    reset_peak_memory(probed)
    workload = _workload(cell.encoder)
    if not isinstance(workload.encoder, str):
        workload = replace(workload, encoder=workload.encoder | VOCABULARY)
    data = folder / cell.encoder
    measured = run_trainer(data, workload, cell.precision, device=device, compile_mode=cell.compile)
    rate = measured["train"] * split.num_tokens / split.num_windows
    return {
        "tokens_per_second": rate,
        "utilization": _utilization(folder, device, cell, rate),
        "peak_memory_bytes": peak_memory_bytes(probed),
        "compile_seconds": None,
    }


def _workload(encoder: str) -> Workload:
    return (WORKLOADS | QUICK)[encoder]


def _executor(
    folder: Path, device: str, encoder: str, precision: str = "fp32", mode: str = "none"
) -> Executor:
    data, workload = folder / encoder, _workload(encoder)
    return executor_of(data, workload, precision, work=folder, device=device, compile=mode)


def _train_split(folder: Path, device: str, encoder: str) -> TokenizedSplit:
    executor = _executor(folder, device, encoder)
    return executor.loader.tokens("train", config_of(executor, SEED))


@cache
def _flops_per_token(folder: Path, device: str, encoder: str) -> float:
    executor, split = _executor(folder, device, encoder), _train_split(folder, device, encoder)
    model = executor.loader.build_model(config_of(executor, SEED))
    flops = training_flops(model, split.num_tokens, split.num_windows)
    assert flops is not None
    return flops / split.num_tokens


def _utilization(folder: Path, device: str, cell: Cell, tokens_per_second: float) -> float | None:
    precision = PRECISIONS[cell.precision]
    peak = peak_flops(probe_device(device), precision.products)
    return None if peak is None else _flops_per_token(folder, device, cell.encoder) * tokens_per_second / peak


def serve(folder: Path, device: str, wanted: Sequence[Cell]) -> None:
    """Be the process that measures: one line of JSON for each cell, on what was standard output."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no result
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    for measured in measure(folder, device, wanted):
        print(json.dumps(measured), file=results, flush=True)


# In the process that prints


def one_device(kind: str) -> dict[str, str]:
    """The environment of a process that sees one GPU, or none: Trainer takes all that it sees at once."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": next(iter(cuda_devices(kind)), "")}


class Clock:
    """What is left of the budget in seconds."""

    def __init__(self, budget: float) -> None:
        self.end = time.monotonic() + budget

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def measure_apart(
    folder: Path, device: str, wanted: Sequence[Cell], clock: Clock, cell_seconds: float
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """`measure` in a process of its own, in a new one after a crash and after a cell over its time."""
    remaining = list(wanted)
    while remaining and clock.left > 0:
        log = folder / "measure.log"
        arguments = ["--serve", json.dumps([asdict(cell) for cell in remaining]), "--folder", str(folder)]
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                [sys.executable, __file__, "--device", device, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=one_device(device) | {"PYTHONPATH": str(ROOT)},
                text=True,
            ) as process,
        ):
            lines: queue.Queue[str] = queue.Queue()
            reader = threading.Thread(target=_forward, args=(process.stdout, lines))
            reader.start()
            try:
                while remaining:
                    seconds = max(0.0, min(cell_seconds, clock.left))
                    line = lines.get(timeout=seconds)
                    if not line:
                        end = log.read_text(errors="replace").strip().splitlines()[-1:]
                        reason = f"its process ended with exit code {process.wait()}: {''.join(end)}"
                        yield remaining.pop(0), {"failed": reason}
                        break
                    yield remaining.pop(0), json.loads(line)
            except queue.Empty:
                yield remaining.pop(0), {"failed": f"not done in {seconds:.0f} s"}
            finally:
                process.kill()
                reader.join()
    for cell in remaining:
        yield cell, {"failed": "out of time"}


def _forward(stream: Any, lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


TRAINING_HEAD = (
    "| by | encoder | precision | compile | tokens/s | model FLOPs utilisation | peak memory | compile |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def training_row(cell: Cell, measured: dict[str, Any]) -> str:
    """One row of the tables of training."""
    head = f"| {cell.contender} | {cell.encoder} | {cell.precision} | {cell.compile} |"
    if "failed" in measured:
        return f"{head} {_cell(measured['failed'])} | | | |"
    share, seconds = measured["utilization"], measured["compile_seconds"]
    return (
        f"{head} {measured['tokens_per_second']:,.0f} | {'' if share is None else f'{share:.1%}'} | "
        f"{measured['peak_memory_bytes'] / 2**30:.2f} GiB | {'' if seconds is None else f'{seconds:.0f} s'} |"
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


SHARING_HEAD = (
    "| workers on the device | trials | trials per hour | against one | peak memory of a trial |",
    "| --- | --- | --- | --- | --- |",
)


def trials_per_hour(
    folder: Path, device: str, workload: Workload, num_workers: int, num_trials: int, seconds: float
) -> dict[str, Any]:
    """A study with `hpo run --workers-per-device`, from its first trial's start to its last one's end."""
    work = folder / f"workers-{num_workers}"
    work.mkdir()
    precision = "bf16" if device == "cuda" else "fp32"
    content = study_content(workload, folder / "sharing", precision, device=device)
    rate = content["training"].pop("learning_rate")
    content["search_space"] = {
        "learning_rate": {"type": "float", "low": rate / 10, "high": rate, "log": True},
    }
    content |= {"sampler": {"name": "random", "seed": 1}, "n_trials": num_trials}
    (work / "study.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "hpo", "run", "study.yaml", "--json"]
    try:
        done = subprocess.run(
            [*command, "--workers-per-device", str(num_workers)],
            cwd=work,
            env=one_device(device) | {"PYTHONPATH": str(ROOT), "HPO_STORAGE": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {seconds:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    status = json.loads(done.stdout)
    if status["outcomes"] != {"complete": num_trials}:
        return {"failed": f"the trials ended as {status['outcomes']}"}
    with open_storage(f"sqlite:///{work}/runs/hpo.db", create=False) as storage:
        trials = read_study(storage, workload.name).trials
    if any(trial.telemetry["device"]["shared"] != (num_workers > 1) for trial in trials):
        return {"failed": "other work was on the device, or the workers were not"}
    memory = max(trial.telemetry["peak_memory_bytes"] for trial in trials)
    return {"per_hour": status["trials_per_hour"], "peak_memory_bytes": memory}


def sharing_row(num_workers: int, num_trials: int, measured: dict[str, Any], alone: float | None) -> str:
    """One row of the table of several trials on one device."""
    if "failed" in measured:
        return f"| {num_workers} | {num_trials} | {_cell(measured['failed'])} | | |"
    ratio = f"{measured['per_hour'] / alone:.2f}x" if alone else ""
    memory = f"{measured['peak_memory_bytes'] / 2**30:.2f} GiB"
    return f"| {num_workers} | {num_trials} | {measured['per_hour']:,.0f} | {ratio} | {memory} |"


def show(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def print_training(
    folder: Path, arguments: argparse.Namespace, clock: Clock, encoders: Sequence[str], modes: Sequence[str]
) -> None:
    show("", *TRAINING_HEAD)
    wanted = cells(encoders, ("fp32",) if arguments.quick else tuple(PRECISIONS), modes)
    for cell, measured in measure_apart(folder, arguments.device, wanted, clock, arguments.cell_seconds):
        show(training_row(cell, measured))


def print_sharing(folder: Path, arguments: argparse.Namespace, clock: Clock, workload: Workload) -> None:
    show("", *SHARING_HEAD)
    alone = None
    for number in (1, 2) if arguments.quick else (1, 2, 4, 8):
        num_trials = 2 if arguments.quick else max(6, 3 * number)
        measured = {"failed": "out of time"}
        if clock.left > 0:
            measured = trials_per_hour(folder, arguments.device, workload, number, num_trials, clock.left)
        alone = measured.get("per_hour") if number == 1 else alone
        show(sharing_row(number, num_trials, measured, alone))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1500.0, metavar="SECONDS", help="for all of it")
    parser.add_argument("--cell-seconds", type=float, default=240.0, help="for one measurement of training")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, eager, a few steps: does it run?")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.folder, arguments.device, [Cell(**cell) for cell in json.loads(arguments.serve)])
        return
    clock = Clock(arguments.budget)
    device = probe_device(arguments.device)
    cuda = f", CUDA {device.cuda_version}" if device.cuda_version else ""
    command = " ".join(["python", "tests/benchmarks/gpu.py", *sys.argv[1:]])
    show(
        f"{device.describe()}; torch {device.torch_version}{cuda}; {datetime.now(UTC):%Y-%m-%d}; `{command}`"
    )
    encoders = QUICK if arguments.quick else WORKLOADS
    shared = next(iter(encoders.values()))
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for name, workload in (*encoders.items(), ("sharing", shared)):
            write_workload(workload, folder / name)
        print_training(folder, arguments, clock, list(encoders), ("none",))
        print_sharing(folder, arguments, clock, shared)
        if not arguments.quick:
            print_training(folder, arguments, clock, list(encoders), COMPILE_MODES)


if __name__ == "__main__":
    main()
