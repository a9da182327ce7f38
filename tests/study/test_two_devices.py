"""Workers of one study whose devices differ: each draws only the precisions that its own device runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from support.scripted_study import ScriptedStudy
from support.tiny import CPU
from support.worker_process import make_and_run, result, run_trials, study

from hpo.config.resolved_study import resolve_study
from hpo.config.search_space import suggest
from hpo.device import DeviceInfo
from hpo.errors import InputError
from hpo.precision.table import AmpConfig, left_out
from hpo.study.claims.ending import end_unfinished
from hpo.study.claims.leases import Lease, WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.running.open_study import check_precisions
from hpo.study.running.stopping import RunSummary
from hpo.study.running.worker import WorkerOptions, run_worker
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.store.lifecycle import set_state
from hpo.study.store.schema import workers
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.versions import install_hint

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


@pytest.fixture
def sqlite_url(storage: Storage) -> str:
    """A database that has its tables."""
    return storage.url


def worker_device(device: DeviceInfo) -> WorkerDevice:
    return WorkerDevice(device.device_id, left_out=left_out(CHOICES, device, AmpConfig()))


class Worker:
    """A worker on a device that is described, whose trials are not trained."""

    def __init__(self, config: Any, device: DeviceInfo, ends: Any = lambda *_: "complete") -> None:
        self.config = config
        self.device = device
        self.ends = ends
        """Of a worker's n-th trial, by number and parameters: the outcome."""
        self.before: Callable[[optuna.trial.Trial], None] = lambda _: None
        """Called with each trial before its parameters are suggested."""
        self.drawn: list[str] = []
        self.stop = threading.Event()

    def execute(self, trial: optuna.trial.Trial, lease: Lease) -> Any:
        self.before(trial)
        params = suggest(self.config.search_space, trial)
        lease.store_params()
        self.drawn.append(params["fp_precision"])
        outcome = self.ends(len(self.drawn), params)
        if outcome == "preempted":
            self.stop.set()
        return result(outcome, traceback="Traceback" if outcome == "failed" else None)

    def run(self, url: str) -> RunSummary:
        self.stop.clear()
        with open_storage(url) as storage:
            return make_and_run(
                self.config,
                storage,
                self.execute,
                WorkerOptions(poll_seconds=0.01),
                device=worker_device(self.device),
                stop=self.stop,
            )


def run_all(url: str, together: Sequence[Worker]) -> list[RunSummary]:
    """Run the workers at the same time, each with a connection of its own."""
    with open_storage(url) as storage:
        create_or_resume_study(storage, together[0].config)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda worker: worker.run(url), together))


@pytest.mark.parametrize(
    ("name", "space"),
    [("tpe", "finite"), ("gp", "ranges"), ("nsga2", "finite"), ("qmc", "finite")],
)
def test_two_devices_finish_a_study(sqlite_url: str, name: str, space: str) -> None:
    options = {"population_size": 4} if name == "nsga2" else {}
    config = study(16, sampler={"name": name, "seed": 1, **options}, search_space=SPACES[space])
    both = [Worker(config, AMX), Worker(config, VOLTA)]
    barrier = threading.Barrier(2)
    for worker in both:  # in their first trial they wait for each other
        worker.before = lambda _, worker=worker: worker.drawn or barrier.wait(60)
    summaries = run_all(sqlite_url, both)
    for worker in both:
        assert set(worker.drawn) <= RUNS[worker.device.name]
    assert {summary.ended for summary in summaries} <= {"finished", "elsewhere"}
    with open_storage(sqlite_url) as storage:
        assert storage.trial_counts("tiny") == {"open": 0, "running": 0, "done": 16}
        trials = storage.load_study("tiny").get_trials()
    everything = optuna.distributions.CategoricalDistribution(CHOICES)
    assert all(trial.distributions["fp_precision"] == everything for trial in trials)


@pytest.mark.parametrize(("space", "num_workers"), [(SPACES["grid"], 1), (PRECISION, 4)])
def test_points_for_another_device_are_left_and_not_waited_for(
    sqlite_url: str, space: dict[str, Any], num_workers: int
) -> None:
    config = study(12, sampler={"name": "grid", "seed": 1}, search_space=space)
    alike = [Worker(config, VOLTA) for _ in range(num_workers)]
    summaries = run_all(sqlite_url, alike)
    assert {(summary.ended, summary.elsewhere, summary.exit_code) for summary in summaries} == {
        ("elsewhere", ("bf16",), 0)
    }
    each = config.num_trials // 3
    assert Counter(name for worker in alike for name in worker.drawn) == {"fp32": each, "fp16": each}
    with open_storage(sqlite_url) as storage:
        assert storage.trial_counts("tiny") == {"open": each, "running": 0, "done": 2 * each}
    last = Worker(config, AMX)
    assert last.run(sqlite_url).ended == "finished"
    assert last.drawn == ["bf16"] * each


def die(worker: WorkerLease, storage: Storage) -> None:
    """Leave as a killed process does: the trial stays claimed, and the row names no live process."""
    worker._leaving.set()
    worker._thread.join()
    with storage.engine.begin() as connection:
        connection.execute(sa.update(workers).where(workers.c.id == worker.id).values(process_start="1"))


@pytest.mark.parametrize(
    ("name", "end"), [("tpe", "dead"), ("tpe", "preempted"), ("grid", "dead"), ("grid", "failed")]
)
def test_a_trial_in_a_precision_that_a_device_lacks_goes_on_with_another(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    space = SPACES["grid" if name == "grid" else "finite"]
    config = study(12, sampler={"name": name, "seed": 1}, search_space=space)

    def first_bf16(_number: int, params: dict[str, Any]) -> str:
        if params["fp_precision"] != "bf16":
            return "complete"
        first.stop.set()
        if end == "dead":
            monkeypatch.setattr(WorkerLease, "__exit__", lambda worker, *_: die(worker, worker._storage))
            raise KeyboardInterrupt
        return end

    first = Worker(config, AMX, first_bf16)
    if end == "dead":
        with pytest.raises(KeyboardInterrupt):
            first.run(sqlite_url)
        monkeypatch.undo()
    else:
        assert first.run(sqlite_url).ended == "stopped"
    other = Worker(config, VOLTA)
    left = other.run(sqlite_url)
    assert (left.ended, left.elsewhere) == ("elsewhere", ("bf16",))
    assert "bf16" not in other.drawn
    again = Worker(config, AMX)
    assert again.run(sqlite_url).ended == "finished"
    assert again.drawn[0] == "bf16"
    with open_storage(sqlite_url) as storage:
        outcomes = Counter(trial.outcome for trial in read_study(storage, "tiny").trials)
    assert outcomes == {"complete": 12} | ({"failed": 1} if end == "failed" else {})


def point_of(trial: optuna.trial.Trial) -> dict[str, Any]:
    return trial.storage.get_trial(trial._trial_id).system_attrs["fixed_params"]


def test_a_point_that_its_worker_drew_and_did_not_suggest_is_run_once(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(trial: optuna.trial.Trial) -> None:
        assert point_of(trial) == {"fp_precision": "bf16"}
        monkeypatch.setattr(WorkerLease, "__exit__", lambda worker, *_: die(worker, worker._storage))
        raise KeyboardInterrupt

    config = study(3, sampler={"name": "grid", "seed": 1}, search_space=PRECISION)
    first, other, again = Worker(config, AMX), Worker(config, VOLTA), Worker(config, AMX)
    assert other.run(sqlite_url).elsewhere == ("bf16",)
    first.before = killed
    with pytest.raises(KeyboardInterrupt):
        first.run(sqlite_url)
    monkeypatch.undo()
    assert other.run(sqlite_url).elsewhere == ("bf16",)
    assert again.run(sqlite_url).ended == "finished"
    assert (sorted(other.drawn), again.drawn) == (["fp16", "fp32"], ["bf16"])


@pytest.mark.parametrize("suggested", [0, 1])
def test_a_trial_that_fails_before_it_has_all_parameters_is_retried_at_its_point(
    sqlite_url: str, suggested: int
) -> None:
    points = []

    def fails_once(trial: optuna.trial.Trial) -> None:
        points.append(point_of(trial))
        if len(points) == 1:
            for name in list(config.search_space)[:suggested]:
                config.search_space[name].suggest(name, trial)
            raise RuntimeError

    config = study(12, sampler={"name": "grid", "seed": 1}, search_space=SPACES["grid"])
    worker = Worker(config, AMX)
    worker.before = fails_once
    assert worker.run(sqlite_url).outcomes == {"failed": 1, "complete": 8}
    assert points[0] == points[1]
    assert len({str(point) for point in points}) == 8


def test_enqueued_points_of_a_grid_are_run_first(sqlite_url: str) -> None:
    """Also those that are tried again; a precision that is left open is one that the device runs."""
    config = study(12, sampler={"name": "grid", "seed": 1}, search_space=SPACES["grid"])
    asked: list[dict[str, Any]] = [
        {"fp_precision": "fp16", "weight_decay": 0.2},
        {"fp_precision": "fp16", "weight_decay": 0.2},
        *[{"weight_decay": 0.1}] * 3,
    ]
    with open_storage(sqlite_url) as storage:
        opened = create_or_resume_study(storage, config)
        for params in asked:
            opened.enqueue_trial(params)
    worker = Worker(config, VOLTA)
    assert worker.run(sqlite_url).elsewhere == ("bf16",)
    assert set(worker.drawn) == RUNS["V100"]
    with open_storage(sqlite_url) as storage:
        ran = [trial.params for trial in read_study(storage, "tiny").trials]
    assert all(params.items() <= trial.items() for params, trial in zip(asked, ran, strict=False))
    assert len({str(sorted(params.items())) for params in ran}) == len(ran) - 2


def test_a_point_whose_trial_was_given_up_is_tried_again(sqlite_url: str) -> None:
    """A cancelled study gives up a trial without a worker."""
    sampler, amp = {"name": "grid", "seed": 1}, {"on_unsupported": "prune"}
    config = study(3, sampler=sampler, search_space=PRECISION, amp=amp)
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, config)
        run = Worker(config, AMX, lambda number, _: "preempted" if number == 3 else "complete")
        assert run.run(sqlite_url).ended == "stopped"
        set_state(storage, "tiny", "cancelled")
        assert end_unfinished(storage, "tiny") == 1
        set_state(storage, "tiny", "open")
        assert storage.trial_counts("tiny") == {"open": 1, "running": 0, "done": 2}
        storage.stop.clear()
        again = Worker(config, AMX)
        assert again.run(sqlite_url).outcomes == {"complete": 1}
        assert again.drawn == [run.drawn[2]]
        assert storage.trial_counts("tiny") == {"open": 0, "running": 0, "done": 3}


@pytest.mark.parametrize("name", ["tpe", "gp", "random", "grid"])
def test_a_device_that_can_run_nothing_of_a_study_leaves_it(sqlite_url: str, name: str) -> None:
    space = {"fp_precision": {"type": "categorical", "choices": ["bf16", "tf32"]}, **STEPS}
    config = study(4, sampler={"name": name, "seed": 1}, search_space=space)
    old = DeviceInfo(type="cpu", name="old")
    device = WorkerDevice("cpu", left_out=left_out(config.precisions, old, config.amp))
    with open_storage(sqlite_url) as storage:
        create_or_resume_study(storage, config)
        summary = run_worker(config, storage, Worker(config, old).execute, device=device)
        assert (summary.ended, summary.elsewhere) == ("elsewhere", ("bf16", "tf32"))
        assert storage.trial_counts("tiny") == {"open": 4, "running": 0, "done": 0}
        assert not read_study(storage, "tiny").trials


@pytest.mark.parametrize("mode", ["prune", "fallback", "fail"])
def test_other_modes_draw_every_precision(sqlite_url: str, mode: str) -> None:
    config = study(12, sampler={"name": "grid"}, search_space=SPACES["grid"], amp={"on_unsupported": mode})
    worker = Worker(config, VOLTA)
    assert worker.run(sqlite_url).ended == "finished"
    assert set(worker.drawn) == set(CHOICES)


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_a_sampler_learns_among_the_precisions_of_its_device(name: str) -> None:
    """bf16 is the best by far, elsewhere; here fp16 is."""
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


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2"])
@pytest.mark.parametrize("runs_fp16", [True, False])
def test_what_one_device_lacks_is_not_avoided_on_another(name: str, runs_fp16: bool) -> None:
    """Trials that were asked for by hand ended as `unsupported` elsewhere."""
    config = study(30, sampler={"name": name, "seed": 3}, search_space=SPACES["ranges"])
    device = WorkerDevice(left_out={} if runs_fp16 else {"fp16": "It lacks it."})
    current = ScriptedStudy(config, lambda _: "unsupported", device=device)
    for _ in range(4):
        current.run(fp_precision="fp16")
    current.script = lambda params: params["dropout"]
    assert ("fp16" in {params["fp_precision"] for params in current.run(12)}) == runs_fp16


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2"])
@pytest.mark.parametrize("checked_on", ["AMX, torch 2", "V100, torch 2"])
def test_what_the_check_ends_on_one_kind_is_not_avoided_on_another(name: str, checked_on: str) -> None:
    """fp16 is incompatible here, or on another kind of device, whose trials do not count here."""
    config = study(30, sampler={"name": name, "seed": 3}, search_space=SPACES["ranges"])
    storage = optuna.storages.InMemoryStorage()
    there = ScriptedStudy(config, storage=storage)
    for rate in (1e-5, 3e-5, 1e-4, 3e-4):
        there.study.enqueue_trial({"fp_precision": "fp16", "learning_rate": rate})
        checked = {"compatibility": {"verdict": "incompatible", "checked_on": checked_on}}
        there.end(there.ask()[0], "incompatible", telemetry=checked)
    here = ScriptedStudy(
        config,
        lambda params: params["dropout"],
        storage=storage,
        device=WorkerDevice(checked_on="V100, torch 2"),
    )
    assert ("fp16" in {params["fp_precision"] for params in here.run(12)}) == (checked_on[:3] == "AMX")


# Base precisions, which need packages

WITHOUT = replace(CPU, has_bitsandbytes=False)
BASE_SPACE: dict[str, Any] = {
    "adapter": {"type": "categorical", "choices": ["none", "lora"]},
    "base_precision": {"type": "categorical", "choices": ["int8", "nf4"], "when": {"adapter": "lora"}},
}


def test_a_missing_package_is_the_reason() -> None:
    config = study(4, search_space=BASE_SPACE)
    assert check_precisions(resolve_study(config, CPU)) == {}
    assert check_precisions(resolve_study(config, WITHOUT)) == {
        "base_precision=nf4": "`base_precision: nf4` needs the package bitsandbytes. "
        f"{install_hint('adapters')}"
    }
    fixed = study(4, training={"adapter": "lora", "base_precision": "nf4"}, search_space=RATES)
    with pytest.raises(InputError, match="nf4` needs the package bitsandbytes"):
        check_precisions(resolve_study(fixed, WITHOUT))


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2", "random", "qmc"])
def test_a_missing_base_precision_is_not_drawn(name: str) -> None:
    config = study(30, sampler={"name": name, "seed": 1}, search_space=BASE_SPACE | RATES)
    left_out = check_precisions(resolve_study(config, WITHOUT))
    here = ScriptedStudy(config, device=WorkerDevice(left_out=left_out), skipped=left_out)
    drawn = [params.get("base_precision") for params in here.run(24)]
    assert set(drawn) == {None, "int8"}
    assert {trial.params.get("base_precision") for trial in here.trials} == {None, "int8"}
    every = optuna.distributions.CategoricalDistribution(("int8", "nf4"))
    assert {t.distributions.get("base_precision", every) for t in here.trials} == {every}, (
        "as the study has it"
    )


@pytest.mark.parametrize("name", ["tpe", "gp", "nsga2", "random", "qmc"])
def test_without_any_base_precision_trials_have_no_adapter(name: str) -> None:
    nf4 = {"type": "categorical", "choices": ["nf4"], "when": {"adapter": ["lora"]}}
    space = BASE_SPACE | RATES | {"base_precision": nf4}
    config = study(30, sampler={"name": name, "seed": 1}, search_space=space)
    left_out = check_precisions(resolve_study(config, WITHOUT))
    here = ScriptedStudy(config, device=WorkerDevice(left_out=left_out), skipped=left_out)
    there = ScriptedStudy(config, device=WorkerDevice(left_out={}), storage=here.study._storage)
    drawn = [one.run()[0]["adapter"] for _ in range(12) for one in (here, there)]
    assert set(drawn[::2]) == {"none"}
    assert set(drawn[1::2]) == {"none", "lora"}
    always = study(4, search_space=space | {"adapter": {"type": "categorical", "choices": ["lora"]}})
    with pytest.raises(InputError, match="nf4` needs the package"):
        check_precisions(resolve_study(always, WITHOUT))


@pytest.mark.parametrize("lacks", ["base_precision", "fp_precision"])
def test_the_unsupported_choice_is_blamed(lacks: str) -> None:
    """Where all are drawn, as under `on_unsupported: prune`, the other is not avoided for it."""
    precision = {"fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]}}
    bases = {name: one | {"when": {}} for name, one in BASE_SPACE.items()}
    bases["adapter"] = {"type": "categorical", "choices": ["lora", "dora"]}
    config = study(30, sampler={"name": "tpe", "seed": 1}, search_space=precision | bases | RATES)
    here = ScriptedStudy(config, lambda _: "unsupported")
    facts = {"base_precision": {"requested": "nf4", "effective": None}} if lacks == "base_precision" else {}
    here.study.enqueue_trial({"fp_precision": "bf16", "base_precision": "nf4", "learning_rate": 1e-4})
    trial, _ = here.ask()
    here.end(trial, "unsupported", telemetry=facts)
    here.script = lambda params: params["learning_rate"]
    avoided = {"base_precision": "nf4", "fp_precision": "bf16"}
    drawn = here.run(12)
    assert avoided[lacks] not in {params[lacks] for params in drawn}
    (other,) = avoided.keys() - {lacks}
    assert avoided[other] in {params[other] for params in drawn}


def test_a_grid_leaves_the_points_of_a_missing_base_precision_to_others(storage: Storage) -> None:
    space = {"base_precision": BASE_SPACE["base_precision"] | {"when": {}}, **STEPS}
    config = study(8, sampler={"name": "grid"}, training={"adapter": "lora"}, search_space=space)
    create_or_resume_study(storage, config)
    for info, ended, base in ((WITHOUT, "elsewhere", "int8"), (CPU, "finished", "nf4")):
        drawn: list[Any] = []

        def during(trial: optuna.trial.Trial, drawn: list[Any] = drawn) -> None:
            drawn.append(trial.params["base_precision"])

        device = WorkerDevice("cpu", left_out=check_precisions(resolve_study(config, info)))
        assert run_trials(storage, config, during, device=device).ended == ended
        assert drawn == [base] * 4
