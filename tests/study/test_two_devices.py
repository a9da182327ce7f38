"""Workers of one study on different devices: each draws only precisions of its device."""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optuna
import pytest
from support.scripted_study import ScriptedStudy
from support.worker_process import change_worker, make_and_run, result, study

from hpo.config.search_space import suggest
from hpo.device import DeviceInfo
from hpo.precision.table import AmpConfig, left_out
from hpo.study.claims.leases import Lease, WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import RunSummary
from hpo.study.running.worker import WorkerOptions
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

CHOICES = ("fp32", "bf16", "fp16")
PRECISION = {"fp_precision": {"type": "categorical", "choices": list(CHOICES)}}
RATES = {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True}}
STEPS = {"weight_decay": {"type": "float", "low": 0.0, "high": 0.3, "step": 0.1}}
SPACES: dict[str, dict[str, Any]] = {
    "finite": {
        **PRECISION,
        **STEPS,
        "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
        "init_scale": {"type": "categorical", "choices": [1024, 65536], "when": {"fp_precision": "fp16"}},
    },
    "ranges": {**PRECISION, **RATES, "dropout": {"type": "float", "low": 0.0, "high": 0.3}},
    "grid": {**PRECISION, **STEPS},
}
AMX = DeviceInfo(type="cpu", name="AMX", cpu_features=frozenset({"amx_bf16"}))
VOLTA = DeviceInfo(type="cuda", name="V100", compute_capability=(7, 0), cuda_bf16=False, uuid="GPU-0")
RUNS = {"AMX": {"fp32", "bf16"}, "V100": {"fp32", "fp16"}}


def worker_device(device: DeviceInfo) -> WorkerDevice:
    return WorkerDevice(device.device_id, left_out=left_out(CHOICES, device, AmpConfig()))


class Worker:
    """A worker on a described device, without training."""

    def __init__(self, config: Any, device: DeviceInfo, bf16: str = "complete") -> None:
        self.config, self.device = config, device
        self.bf16 = bf16  # outcome of trials in bf16; the worker stops after another one than `complete`
        self.drawn: list[str] = []
        self.barrier: threading.Barrier | None = None  # the first trial waits here for other workers

    def run(self, url: str) -> RunSummary:
        stop = threading.Event()

        def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
            if self.barrier and not self.drawn:
                self.barrier.wait(60)
            self.drawn.append(suggest(self.config.search_space, trial)["fp_precision"])
            lease.store_params()
            if self.drawn[-1] != "bf16" or self.bf16 == "complete":
                return result("complete")
            stop.set()
            if self.bf16 == "dead":
                raise KeyboardInterrupt
            return result(self.bf16, traceback="Traceback" if self.bf16 == "failed" else None)

        with open_storage(url) as storage:
            device, options = worker_device(self.device), WorkerOptions(poll_seconds=0.01)
            return make_and_run(self.config, storage, execute, options, device=device, stop=stop)


def run_all(storage: Storage, together: Sequence[Worker]) -> list[RunSummary]:
    """Run the workers in parallel, each with its own connection."""
    create_or_resume_study(storage, together[0].config)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda worker: worker.run(storage.url), together))


@pytest.mark.parametrize(("name", "space"), [("tpe", "finite"), ("gp", "ranges"), ("qmc", "finite")])
def test_two_devices_finish_a_study(storage: Storage, name: str, space: str) -> None:
    config = study(16, sampler={"name": name, "seed": 1}, search_space=SPACES[space])
    both = [Worker(config, AMX), Worker(config, VOLTA)]
    both[0].barrier = both[1].barrier = threading.Barrier(2)
    assert {summary.ended for summary in run_all(storage, both)} <= {"finished", "elsewhere"}
    for worker in both:
        assert set(worker.drawn) <= RUNS[worker.device.name]
    assert storage.trial_counts("tiny") == {"open": 0, "running": 0, "done": 16}
    trials = storage.load_study("tiny").get_trials()
    everything = optuna.distributions.CategoricalDistribution(CHOICES)
    assert all(trial.distributions["fp_precision"] == everything for trial in trials)


@pytest.mark.parametrize(("space", "num_workers"), [(SPACES["grid"], 1), (PRECISION, 4)])
def test_grid_points_for_another_device_are_left(
    storage: Storage, space: dict[str, Any], num_workers: int
) -> None:
    config = study(12, sampler={"name": "grid", "seed": 1}, search_space=space)
    alike = [Worker(config, VOLTA) for _ in range(num_workers)]
    for summary in run_all(storage, alike):
        assert (summary.ended, summary.elsewhere, summary.exit_code) == ("elsewhere", ("bf16",), 0)
    each = config.num_trials // 3
    assert Counter(name for worker in alike for name in worker.drawn) == {"fp32": each, "fp16": each}
    last = Worker(config, AMX)
    assert last.run(storage.url).ended == "finished"
    assert last.drawn == ["bf16"] * each


@pytest.mark.parametrize(("name", "end"), [("tpe", "dead"), ("tpe", "preempted"), ("grid", "failed")])
def test_a_trial_continues_only_on_a_device_with_its_precision(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    space = SPACES["grid" if name == "grid" else "finite"]
    config = study(12, sampler={"name": name, "seed": 1}, search_space=space)

    def die(worker: WorkerLease, *_: Any) -> None:
        """Leave like a killed process: the trial stays claimed, and the row names no live process."""
        worker._leaving.set()
        worker._thread.join()
        change_worker(worker._storage, worker, process_start="1")

    first = Worker(config, AMX, end)
    if end == "dead":
        monkeypatch.setattr(WorkerLease, "__exit__", die)
        with pytest.raises(KeyboardInterrupt):
            first.run(storage.url)
        monkeypatch.undo()
    else:
        assert first.run(storage.url).ended == "stopped"
    other, again = Worker(config, VOLTA), Worker(config, AMX)
    left = other.run(storage.url)
    assert (left.ended, left.elsewhere) == ("elsewhere", ("bf16",))
    assert "bf16" not in other.drawn
    assert again.run(storage.url).ended == "finished"
    assert again.drawn[0] == "bf16"
    outcomes = Counter(trial.outcome for trial in read_study(storage, "tiny").trials)
    assert outcomes == {"complete": 12} | ({"failed": 1} if end == "failed" else {})


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_a_sampler_learns_among_the_precisions_of_its_device(name: str) -> None:
    """bf16 is by far the best elsewhere; here it is fp16."""
    config = study(40, sampler={"name": name, "seed": 3}, search_space=SPACES["ranges"])
    values = {"fp32": 0.0, "bf16": 1.0, "fp16": 0.7}
    storage, device = optuna.storages.InMemoryStorage(), worker_device(VOLTA)
    elsewhere = ScriptedStudy(config, lambda params: values[params["fp_precision"]], storage=storage)
    elsewhere.study.sampler = optuna.samplers.RandomSampler(seed=0)
    for precision in CHOICES * 12:
        elsewhere.run(fp_precision=precision)
    here = ScriptedStudy(config, storage=storage, device=device, skipped=device.left_out)
    drawn = Counter(here.ask()[1]["fp_precision"] for _ in range(12))
    assert set(drawn) <= RUNS["V100"]
    assert drawn["fp16"] >= 10


@pytest.mark.parametrize("checked_on", ["AMX, torch 2", "V100, torch 2"])
def test_an_incompatible_precision_is_not_avoided_on_another_kind(checked_on: str) -> None:
    config = study(30, sampler={"name": "tpe", "seed": 3}, search_space=SPACES["ranges"])
    storage, device = optuna.storages.InMemoryStorage(), WorkerDevice(checked_on="V100, torch 2")
    there = ScriptedStudy(config, storage=storage)
    for rate in (1e-5, 3e-5, 1e-4, 3e-4):
        there.study.enqueue_trial({"fp_precision": "fp16", "learning_rate": rate})
        checked = {"compatibility": {"verdict": "incompatible", "checked_on": checked_on}}
        there.end(there.ask()[0], "incompatible", telemetry=checked)
    here = ScriptedStudy(config, lambda params: params["dropout"], storage=storage, device=device)
    assert ("fp16" in {params["fp_precision"] for params in here.run(12)}) == (checked_on[:3] == "AMX")
