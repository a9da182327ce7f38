"""Training on one GPU: hpo, Hugging Face Trainer and a plain loop, in turn: `make bench BENCH=gpu`.

By hand, also without a network: `python3 tests/benchmarks/gpu.py`. Each trains a fresh BERT-base on generated
texts, with the same batch size and optimiser. The parts run in this order, and no part begins when the time
is over. The last lines say what failed and what was left out.

rounds      bf16: all contenders in turn, after one round that is not counted
workers     trials in an hour of a study, with 1 and with 4 workers on the device
variants    long texts: hpo without CUDA graphs, and with `compile: default` of each layer
products    the rate of a layer's matrix products alone, and the share of it that training reaches
profile     where a step spends its time, of texts with which hpo is slower than wanted; all with --profile
precisions  fp16, tf32 and fp32: hpo alone
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes that make batches are forked
sys.path.append(str(Path(__file__).parents[1]))

import ours
import peers
import torch
import transformers
from step_profile import describe_profile, profile_steps
from support.gpu_studies import fresh_encoder
from workload import Workload, spread, study_content, write_workload

from hpo.device import DeviceInfo, probe_device
from hpo.errors import InputError
from hpo.outcome import TrialResult
from hpo.precision.table import support
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks

PARTS = ("rounds", "workers", "variants", "products", "profile", "precisions")
PEERS: dict[str, Callable[..., dict[str, Any]]] = {
    "trainer": peers.run_tuned_trainer,
    "plain": peers.run_plain,
}
OURS: dict[str, dict[str, Any]] = {
    "hpo": {},
    "hpo-eager": {"cuda_graphs": False},
    "hpo-compiled": {"compile": "default", "compile_scope": "layers"},
}
WANTED = {"long": 1.5, "short": 2.0}
"""How many times as fast as Trainer hpo is to train in bf16, by workload."""
OTHER_PRECISIONS = ("fp16", "tf32", "fp32")
UNITS = {
    "train": "examples/s of steady steps, without warm-up and recordings",
    "whole": "examples/s of all steps, without compilation",
    "evaluate": "examples/s",
    "padding": "of the places",
    "joules": "J for an example",
    "setup": "s before the first step",
    "outside": "s of a trial outside training and evaluation",
}
RESERVED_SECONDS, TRIAL_SECONDS, STUDY_SECONDS = 45.0, 12.0, 25.0
"""Time that rounds leave to the other parts, and that one trial and one study of `workers` may take."""


class Report:
    """Prints figures as they are measured, and knows how much time is left."""

    def __init__(self, seconds: float, results: Path | None) -> None:
        self._end = time.monotonic() + seconds
        self._results = results
        self.left_out: list[str] = []
        self.failed: list[str] = []

    def figure(self, name: str, values: Sequence[float], unit: str) -> None:
        print(f"{name:36} {spread(values)} {unit}", flush=True)
        self.record({"figure": name, "values": list(values), "unit": unit})

    def record(self, facts: dict[str, Any]) -> None:
        if self._results:
            with self._results.open("a") as lines:
                print(json.dumps(facts), file=lines)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Show and note a failure of the block. Other figures may still be measured."""
        try:
            yield
        except Exception as error:
            print(f"  {name} FAILED: {str(error).strip().splitlines()[0]}", flush=True)
            traceback.print_exc()
            self.failed.append(name)

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """Whether there is time for something that takes `seconds`. If not, it is noted as left out."""
        if time.monotonic() + seconds < self._end:
            return True
        self.left_out.append(name)
        return False


def make_workloads(folder: Path, device: str, *, tiny: bool) -> dict[str, Workload]:
    """The long and the short texts, written into `folder`."""
    encoder = fresh_encoder("tiny" if tiny else "base")
    long = Workload("long", "", (), 320, (8, 27), 96 * 64, 512, 64, encoder, device=device)
    short = Workload("short", "", (), 64, (1, 2), 40 * 256, 2048, 256, encoder, (4, 18), device)
    if tiny:
        small = {"num_validation": 16, "batch_size": 4}
        long = replace(long, synthetic_sentences=(1, 3), num_train=4 * 15, **small)
        short = replace(short, num_train=4 * 15, **small)
    for workload in (long, short):
        write_workload(workload, folder / workload.name)
    return {"long": long, "short": short}


class Benchmark:
    """The parts, and what they have measured so far."""

    def __init__(self, report: Report, folder: Path, device: DeviceInfo, arguments: Any) -> None:
        self.report, self.folder, self.device, self.arguments = report, folder, device, arguments
        self.workloads = make_workloads(folder, device.type, tiny=arguments.tiny)
        self.measured: dict[tuple[str, str, str], dict[str, list[float]]] = {}
        """By workload, precision and contender: {measure: one value for each counted round}."""
        self._costs: dict[str, ours.TrainingCost] = {}
        self._executors: dict[tuple[str, str], Executor] = {}

    def study(self, workload: str, precision: str) -> dict[str, Any]:
        content = study_content(self.workloads[workload], self.folder / workload, precision)
        if self.arguments.compile:
            content["training"]["compile"] = self.arguments.compile
        if self.arguments.no_graphs:
            content["training"]["cuda_graphs"] = False
        return content | {"compat": {}, "amp": {"allow_emulated": self.arguments.tiny}}

    def run_hpo(
        self, workload: str, precision: str, callbacks: Callbacks = ours.NO_CALLBACKS, **params: Any
    ) -> dict[str, float]:
        """One trial. Its executor keeps data and tokens for the next one, as in a study."""
        key = (workload, precision)
        if key not in self._executors:
            work = self.folder / f"{workload}-{precision}"
            work.mkdir()
            self._executors[key] = ours.build_executor(self.study(*key), work, ours.MeasuredOnce())
        started = time.perf_counter()
        result = ours.run_trial(self._executors[key], callbacks, params)
        wall = time.perf_counter() - started
        if workload not in self._costs:
            throughput = result.telemetry["throughput"]
            self._costs[workload] = ours.training_cost(self._executors[key], throughput)
        return measures(result, wall)

    def try_contender(self, workload: str, precision: str, name: str, number: int) -> None:
        with self.report.attempt(f"round {number}, {workload} {precision} {name}"):
            self.run_contender(workload, precision, name, number)

    def run_contender(self, workload: str, precision: str, name: str, number: int) -> None:
        """Measure a contender in a round. Round 0 is shown and not counted."""
        with redirect_stdout(sys.stderr):  # Trainer prints
            if name in OURS:
                measured = self.run_hpo(workload, precision, **OURS[name])
            else:
                measured = PEERS[name](self.folder / workload, self.workloads[workload], precision)
        facts = ", ".join(f"{measure} {value:.4g}" for measure, value in measured.items())
        print(f"  round {number}, {workload} {precision} {name}: {facts}", flush=True)
        work = {"round": number, "workload": workload, "precision": precision, "contender": name}
        self.report.record(work | measured)
        if number:
            values = self.measured.setdefault((workload, precision, name), defaultdict(list))
            for measure, value in measured.items():
                values[measure].append(value)

    def show(self, workload: str, precision: str, name: str) -> None:
        for measure, values in self.measured.get((workload, precision, name), {}).items():
            self.report.figure(f"{workload} {precision} {name}: {measure}", values, UNITS[measure])

    def ratios(self, workload: str, peer: str, measure: str = "train") -> list[float]:
        """How many times as fast as a peer hpo is, by rounds; empty if one of them failed."""
        sides = [self.measured.get((workload, "bf16", name), {}).get(measure, []) for name in ("hpo", peer)]
        if len(sides[0]) != len(sides[1]):
            return []
        return [one / other for one, other in zip(*sides, strict=True)]

    def rounds(self) -> None:
        names, needed = ("hpo", *PEERS), 0.0
        for number in range(self.arguments.rounds + 1):
            if number > 1 and not self.report.allows(f"round {number}", needed):
                break
            started = time.monotonic()
            for workload in self.workloads:
                for name in names:
                    self.try_contender(workload, "bf16", name, number)
            needed = time.monotonic() - started + self.arguments.scale * RESERVED_SECONDS
        for workload, wanted in WANTED.items():
            for name in names:
                self.show(workload, "bf16", name)
            for peer, measure in product(PEERS, ("evaluate", "train", "whole")):
                if not (ratios := self.ratios(workload, peer, measure)):
                    continue
                verdict = ""
                if peer == "trainer" and measure != "evaluate":
                    reached = "reached" if statistics.median(ratios) >= wanted else "NOT reached"
                    verdict = f"; wanted at least {wanted:g}x: {reached}"
                self.report.figure(f"{workload} bf16 hpo over {peer}: {measure}", ratios, f"x{verdict}")

    def variants(self) -> None:
        if self.device.type == "cpu":
            print("variants: left out. A CPU has no CUDA graphs, and takes minutes to compile.")
            return
        for name in ("hpo-eager", "hpo-compiled"):
            self.try_contender("long", "bf16", name, 1)
            self.show("long", "bf16", name)

    def products(self) -> None:
        for workload in self.workloads:
            self.show_share(workload, "bf16")

    def show_share(self, workload: str, precision: str) -> None:
        """The rate of the matrix products, and the share of it that training in that precision reached."""
        if (workload, precision, "hpo") not in self.measured:
            self.run_contender(workload, precision, "hpo", 1)
        cost, batch_size = self._costs[workload], self.workloads[workload].batch_size
        rate = ours.product_rate(cost, batch_size, precision, self.device.type, 0.5 * self.arguments.scale)
        self.report.figure(f"{workload} {precision}: products", [rate / 1e12], "TFLOP/s")
        values = self.measured[workload, precision, "hpo"]["train"]
        shares = [value * cost.flops / rate for value in values]
        self.report.figure(f"{workload} {precision} hpo: share of products", shares, "")

    def profile(self) -> None:
        for workload, wanted in WANTED.items():
            ratios = self.ratios(workload, "trainer")
            is_fast = bool(ratios) and statistics.median(ratios) >= wanted
            if (is_fast and not self.arguments.profile) or not self.report.allows(f"profile of {workload}"):
                continue
            texts = self.workloads[workload]
            run = partial(self.run_hpo, workload, "bf16")
            events, profiled = profile_steps(run, texts.num_train // texts.batch_size, self.device)
            unprofiled = None
            if known := self.measured.get((workload, "bf16", "hpo")):
                unprofiled = texts.batch_size / statistics.median(known["train"])
            lines = describe_profile(events, profiled, unprofiled)
            print(f"{workload} bf16 hpo:", *lines, sep="\n", flush=True)

    def precisions(self) -> None:
        for workload in self.workloads:
            for precision in OTHER_PRECISIONS:
                name, answer = f"{workload} {precision}", support(precision, self.device)
                if answer.level == "unsupported" or (answer.level == "emulated" and not self.arguments.tiny):
                    print(f"{name}: left out. {answer.reason}")
                elif self.report.allows(name, self.arguments.scale * TRIAL_SECONDS):
                    self.try_contender(workload, precision, "hpo", 1)
                    self.show(workload, precision, "hpo")
                    self.show_share(workload, precision)

    def workers(self) -> None:
        for count in self.arguments.workers:
            name = f"short bf16: trials, {count} at a time"
            if self.report.allows(name, self.arguments.scale * STUDY_SECONDS):
                num_rows = 16 if self.arguments.tiny else 2048
                rate = ours.trials_per_hour(self.study("short", "bf16"), count, num_rows)
                self.report.figure(name, [rate], "in an hour")


def measures(result: TrialResult, wall: float) -> dict[str, float]:
    """What the record of a trial tells, and the seconds that were neither training nor evaluation."""
    telemetry = result.telemetry
    joules = telemetry["throughput"].get("train_joules_per_example")
    return {
        **ours.rates(telemetry["throughput"]),
        "whole": telemetry["num_examples"] / telemetry["train_seconds"],
        **({} if joules is None else {"joules": joules}),
        "setup": telemetry["setup_seconds"],
        "outside": wall - telemetry["train_seconds"] - telemetry["evaluation_seconds"],
    }


def driver() -> str:
    """The version of NVIDIA's driver, as the kernel tells it."""
    told = Path("/proc/driver/nvidia/version")
    found = re.findall(r"\b\d{3,}\.[.\d]+", told.read_text() if told.exists() else "")
    return found[0] if found else "unknown"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try it")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted, at most")
    parser.add_argument("--seconds", type=float, default=145.0, help="when to end")
    parser.add_argument("--results", type=Path, help="a file to which figures are added as lines of JSON")
    parser.add_argument("--profile", action="store_true", help="profile all texts in any case")
    parser.add_argument("--compile", help="the mode of `compile` for hpo; to compile takes minutes")
    parser.add_argument("--no-graphs", action="store_true", help="hpo without CUDA graphs")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="how many on the device")
    parser.add_argument("--tiny", action="store_true", help="a tiny encoder and few texts, to try it")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"a part must be one of {', '.join(PARTS)}, but got {', '.join(sorted(unknown))}")
    given.scale = 0.02 if given.tiny else 1.0  # of the times that are taken or expected
    report = Report(given.seconds, given.results)
    try:
        device = probe_device(given.device)
    except InputError as error:
        parser.error(str(error))
    header = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {device.describe()}, driver {driver()}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}, "
        f"hpo with compile: {given.compile or 'none'}, cuda_graphs: {not given.no_graphs}"
    )
    print(f"{header}; median (minimum to maximum)", flush=True)
    report.record({"header": header})
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(report, Path(folder), device, given)
        for part in PARTS:
            if (not given.parts or part in given.parts) and report.allows(part):
                with report.attempt(part):
                    getattr(benchmark, part)()
    print(f"failed: {', '.join(report.failed) or 'nothing'}")
    print(f"left out for lack of time: {', '.join(report.left_out) or 'nothing'}")
    if report.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
