"""Training on one GPU: hpo, Hugging Face Trainer and a plain loop, in turn: `make bench BENCH=gpu`.

By hand, also without a network: `python3 tests/benchmarks/gpu.py`. Each trains a fresh BERT-base on generated
texts, with the same batch size and optimiser. Figures are printed at once. The parts run in this order:

rounds      bf16: all contenders in turn, after one round that is not counted
variants    long texts: hpo without CUDA graphs, and with `compile: default` of each layer
workers     trials in an hour of a study, with 1 and with 4 workers on the device
profile     where a step spends its time, of texts with which hpo is slower than wanted; all with --profile
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
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
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks

PARTS = ("rounds", "variants", "workers", "profile")
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
UNITS = {
    "train": "examples/s",
    "evaluate": "examples/s",
    "padding": "of the places",
    "joules": "J for an example",
    "setup": "s before the first step",
    "outside": "s of a trial outside training and evaluation",
}


class Report:
    """Prints figures as they are measured, and adds them to a file."""

    def __init__(self, results: Path | None) -> None:
        self._results = results

    def figure(self, name: str, values: Sequence[float], unit: str) -> None:
        print(f"{name:36} {spread(values)} {unit}", flush=True)
        self.record({"figure": name, "values": list(values), "unit": unit})

    def record(self, facts: dict[str, Any]) -> None:
        if self._results:
            with self._results.open("a") as lines:
                print(json.dumps(facts), file=lines)


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
        self.measured: dict[tuple[str, str], dict[str, list[float]]] = {}
        """By workload and contender: {measure: one value for each counted round}."""
        self._executors: dict[str, Executor] = {}

    def study(self, workload: str) -> dict[str, Any]:
        content = study_content(self.workloads[workload], self.folder / workload, "bf16")
        return content | {"compat": {}, "amp": {"allow_emulated": self.arguments.tiny}}

    def run_hpo(
        self, workload: str, callbacks: Callbacks = ours.NO_CALLBACKS, **params: Any
    ) -> dict[str, float]:
        """One trial. Its executor keeps data and tokens for the next one, as in a study."""
        if workload not in self._executors:
            work = self.folder / f"{workload}-hpo"
            work.mkdir()
            self._executors[workload] = ours.build_executor(self.study(workload), work, ours.MeasuredOnce())
        started = time.perf_counter()
        result = ours.run_trial(self._executors[workload], callbacks, params)
        return measures(result, time.perf_counter() - started)

    def run_contender(self, workload: str, name: str, number: int) -> None:
        """Measure a contender in a round. Round 0 is shown and not counted."""
        with redirect_stdout(sys.stderr):  # Trainer prints
            if name in OURS:
                measured = self.run_hpo(workload, **OURS[name])
            else:
                measured = PEERS[name](self.folder / workload, self.workloads[workload], "bf16")
        facts = ", ".join(f"{measure} {value:.4g}" for measure, value in measured.items())
        print(f"  round {number}, {workload} bf16 {name}: {facts}", flush=True)
        self.report.record({"round": number, "workload": workload, "contender": name} | measured)
        if number:
            values = self.measured.setdefault((workload, name), defaultdict(list))
            for measure, value in measured.items():
                values[measure].append(value)

    def show(self, workload: str, name: str) -> None:
        for measure, values in self.measured[workload, name].items():
            self.report.figure(f"{workload} bf16 {name}: {measure}", values, UNITS[measure])

    def ratios(self, workload: str, peer: str, measure: str = "train") -> list[float]:
        """How many times as fast as a peer hpo is, by rounds."""
        of_hpo, of_peer = (self.measured[workload, name][measure] for name in ("hpo", peer))
        return [one / other for one, other in zip(of_hpo, of_peer, strict=True)]

    def rounds(self) -> None:
        names = ("hpo", *PEERS)
        for number in range(self.arguments.rounds + 1):
            for workload in self.workloads:
                for name in names:
                    self.run_contender(workload, name, number)
        for workload, wanted in WANTED.items():
            for name in names:
                self.show(workload, name)
            for peer in PEERS:
                ratios = self.ratios(workload, peer, "evaluate")
                self.report.figure(f"{workload} bf16 hpo over {peer}: evaluate", ratios, "x")
                ratios = self.ratios(workload, peer)
                reached = "reached" if statistics.median(ratios) >= wanted else "NOT reached"
                verdict = f"; wanted at least {wanted:g}x: {reached}" if peer == "trainer" else ""
                self.report.figure(f"{workload} bf16 hpo over {peer}: train", ratios, f"x{verdict}")

    def variants(self) -> None:
        if self.device.type == "cpu":
            print("variants: left out. A CPU has no CUDA graphs, and takes minutes to compile.")
            return
        for name in ("hpo-eager", "hpo-compiled"):
            self.run_contender("long", name, 1)
            self.show("long", name)

    def profile(self) -> None:
        for workload, wanted in WANTED.items():
            has_peer = (workload, "trainer") in self.measured
            is_fast = has_peer and statistics.median(self.ratios(workload, "trainer")) >= wanted
            if is_fast and not self.arguments.profile:
                continue
            events, profiled = profile_steps(partial(self.run_hpo, workload), self.device)
            unprofiled = None
            if known := self.measured.get((workload, "hpo")):
                unprofiled = self.workloads[workload].batch_size / statistics.median(known["train"])
            lines = describe_profile(events, profiled, unprofiled)
            print(f"{workload} bf16 hpo:", *lines, sep="\n", flush=True)

    def workers(self) -> None:
        for count in self.arguments.workers:
            num_rows = 16 if self.arguments.tiny else 2048
            rate = ours.trials_per_hour(self.study("short"), count, num_rows)
            self.report.figure(f"short bf16: trials, {count} at a time", [rate], "in an hour")


def measures(result: TrialResult, wall: float) -> dict[str, float]:
    """What the record of a trial tells, and the seconds that were neither training nor evaluation."""
    telemetry = result.telemetry
    joules = telemetry["throughput"].get("train_joules_per_example")
    return {
        **ours.rates(telemetry["throughput"]),
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
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted")
    parser.add_argument("--results", type=Path, help="a file to which figures are added as lines of JSON")
    parser.add_argument("--profile", action="store_true", help="profile all texts in any case")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="how many on the device")
    parser.add_argument("--tiny", action="store_true", help="a tiny encoder and few texts, to try it")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"a part must be one of {', '.join(PARTS)}, but got {', '.join(sorted(unknown))}")
    report = Report(given.results)
    try:
        device = probe_device(given.device)
    except InputError as error:
        parser.error(str(error))
    header = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {device.describe()}, driver {driver()}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"
    )
    print(f"{header}; median (minimum to maximum)", flush=True)
    report.record({"header": header})
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(report, Path(folder), device, given)
        for part in PARTS:
            if not given.parts or part in given.parts:
                getattr(benchmark, part)()


if __name__ == "__main__":
    main()
