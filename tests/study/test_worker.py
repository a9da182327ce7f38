from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
import worker_process
from tiny import CPU
from worker_process import check_done, notes, result, study

from hpo.config.sampler_config import PrunerConfig
from hpo.config.search_space import suggest
from hpo.device import DeviceInfo
from hpo.errors import DataError, InputError, RunError
from hpo.outcome import Outcome
from hpo.study import processes
from hpo.study import run as run_module
from hpo.study import worker as worker_module
from hpo.study.leases import Lease, WorkerLease
from hpo.study.process import process_start, this_machine
from hpo.study.processes import (
    WorkerPlace,
    check_memory_fraction,
    place_workers,
    run_workers,
    stop_on_signals,
)
from hpo.study.run import run_study, share_memory
from hpo.study.schema import worker_devices, workers
from hpo.study.storage import Storage, open_storage
from hpo.study.study_record import EvaluationRow
from hpo.study.worker import TrialEvent, keep_best_checkpoints, run_worker, trial_runner
from hpo.trial.telemetry import TrialResult


@pytest.fixture
def storage(storage_url: str) -> Any:
    with open_storage(storage_url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _package_for_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(worker_module.__file__).parents[2]))


def complete(trial: optuna.trial.Trial, _lease: Lease) -> Any:
    suggest(study().search_space, trial)
    return result("complete")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_runs_exactly_n_trials_and_a_finished_study_not_again(storage: Storage) -> None:
    first = run_worker(study(3), storage, complete)
    assert (first.ended, first.outcomes, first.exit_code) == ("finished", {"complete": 3}, 0)
    again = run_worker(study(3), storage, complete)
    assert (again.ended, again.outcomes) == ("finished", {})
    assert len(storage.read_study("tiny").trials) == 3


def test_finished_study_loads_neither_data_nor_model(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_worker(study(2), storage, complete)
    monkeypatch.setitem(sys.modules, "hpo.trial.executor", None)  # importing it is an error
    assert run_study(study(2), storage, tmp_path).outcomes == {}


def test_several_workers_end_at_exactly_n_trials(storage_url: str, tmp_path: Path) -> None:
    config, log = study(20, sampler={"name": "tpe", "seed": 1}), tmp_path / "log"
    processes = [worker_process.start(storage_url, config, log, number=number) for number in range(4)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    with open_storage(storage_url) as storage:
        check_done(storage, config, log)
        trials = storage.read_study(config.name).trials
        first = [trial.params for trial in trials if "retry_of" not in trial.attributes][:4]
        assert len({str(params) for params in first}) == 4, "workers have seeds of their own"


@pytest.mark.parametrize("resize", [True, False])
def test_pruner_of_a_resumed_study_is_the_stored_one_where_the_file_names_none(
    storage: Storage, resize: bool
) -> None:
    """The default of today is for new studies."""

    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        pruners.append(type(trial.study.pruner))
        return complete(trial, lease)

    pruners: list[type] = []
    today = study(1)
    made = today.model_copy(update={"pruner": PrunerConfig(name="percentile")})
    assert today.pruner.name != "percentile"
    storage.create_or_resume_study(made)
    storage.create_or_resume_study(today, resize=resize)
    run_worker(today, storage, execute)
    assert storage.read_study("tiny").definition["pruner"]["name"] == "percentile"
    storage.create_or_resume_study(study(2, pruner={"name": "median"}))
    run_worker(study(2, pruner={"name": "median"}), storage, execute)
    assert pruners == [optuna.pruners.PercentilePruner, optuna.pruners.MedianPruner]
    assert storage.read_study("tiny").definition["pruner"] == {"name": "median"}


def test_resumed_study_does_not_repeat_what_it_tried(storage: Storage) -> None:
    sizes = (2, 4, 6)
    for n_trials in sizes:
        storage.create_or_resume_study(study(n_trials))
        run_worker(study(n_trials), storage, complete)
    trials = storage.read_study("tiny").trials
    assert len({str(trial.params) for trial in trials}) == sizes[-1]


@pytest.mark.parametrize("directions", [["maximize"], ["minimize"], ["maximize", "minimize"]])
@pytest.mark.parametrize("top_k", [0, 2, 9])
def test_only_the_best_trials_keep_their_checkpoints(
    tmp_path: Path, directions: list[str], top_k: int
) -> None:
    trial_study = optuna.create_study(directions=directions)
    values = [(0.5, 9.0), (0.9, 9.0), (0.7, 8.0), (0.1, 1.0), (0.2, 9.0)]
    for value in values:
        trial_study.tell(trial_study.ask(), value[: len(directions)])
    trial_study.tell(trial_study.ask(), state=optuna.trial.TrialState.PRUNED)
    trial_study.tell(trial_study.ask(), state=optuna.trial.TrialState.FAIL)
    unfinished = trial_study.ask().number
    for number in range(unfinished + 1):
        (tmp_path / str(number) / "best-00000001").mkdir(parents=True)

    keep_best_checkpoints(trial_study, lambda number: tmp_path / str(number), top_k)

    best_first = {
        ("maximize",): [1, 2, 0, 4, 3],
        ("minimize",): [3, 4, 0, 2, 1],
        ("maximize", "minimize"): [1, 2, 3, 0, 4],  # 3 is on the Pareto front, though 0 has a better value
    }[tuple(directions)]
    kept = {int(path.name) for path in tmp_path.iterdir()}
    assert kept == {*best_first[:top_k], unfinished}


def test_events(storage: Storage) -> None:
    events: list[TrialEvent] = []

    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        suggest(study().search_space, trial)
        return result("oom", reason="too long")

    run_worker(study(1), storage, execute, on_event=events.append)
    assert [(event.kind, event.number, event.outcome, event.reason) for event in events] == [
        ("finished", 0, "oom", "too long")
    ]
    assert set(events[0].params) == {"fp_precision", "learning_rate", "batch_size"}


def test_bug_in_a_trial_fails_it_alone(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        if trial.number == 0:
            raise ZeroDivisionError("not now")
        return complete(trial, _lease)

    assert run_worker(study(2), storage, execute).outcomes == {"failed": 1, "complete": 2}
    failed, retried, _ = storage.read_study("tiny").trials
    assert (failed.outcome, failed.reason) == ("failed", "ZeroDivisionError: not now")
    assert "ZeroDivisionError" in failed.attributes["traceback"]
    assert retried.attributes["retry_of"] == 0


def test_what_concerns_the_whole_study_is_raised(storage: Storage) -> None:
    def execute(_trial: optuna.trial.Trial, _lease: Lease) -> Any:
        raise DataError("the data is gone")

    with pytest.raises(DataError, match="the data is gone"):
        run_worker(study(2), storage, execute)
    assert storage.slot_counts("tiny") == {"open": 2, "running": 0, "done": 0}
    assert run_worker(study(2), storage, complete).outcomes == {"complete": 2}
    assert len(storage.read_study("tiny").trials) == 2


def test_stop_ends_after_the_trial_in_hand(storage: Storage) -> None:
    stop = threading.Event()

    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        suggest(study().search_space, trial)
        stop.set()
        return result("preempted")

    summary = run_worker(study(3), storage, execute, stop=stop)
    assert (summary.ended, summary.exit_code) == ("stopped", 130)
    params = storage.read_study("tiny").trials[0].params
    assert run_worker(study(3), storage, complete).outcomes == {"complete": 3}
    record = storage.read_study("tiny")
    assert len(record.trials) == 3
    assert record.trials[0].params == params


def test_timeout_starts_no_further_trial(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: clock[0])

    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        clock[0] += 40.0
        return complete(trial, lease)

    summary = run_worker(study(9, timeout=100.0), storage, execute)
    assert (summary.ended, summary.outcomes, summary.exit_code) == ("timeout", {"complete": 3}, 0)


def test_lost_lease_stores_nothing_and_goes_on_with_the_next(storage: Storage) -> None:
    def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
        if trial.number == 0 and not lost:
            lost.append(trial.number)
            lease._lost.set()  # what the heartbeat does
            lease.check()
        return complete(trial, lease)

    lost: list[int] = []
    assert run_worker(study(2), storage, execute).outcomes == {"complete": 2}
    assert lost == [0]


@pytest.mark.parametrize(
    ("start", "end", "shared"),
    [
        ("alone", "alone", False),
        ("live", "live", True),
        ("alone", "live", True),
        ("live", "dead", True),
        ("dead", "dead", False),
        ("elsewhere", "elsewhere", False),
        ("same device", "same device", True),
        ("alone", "same device", True),
        ("other device", "other device", False),
    ],
)
def test_trial_knows_of_other_workers_on_its_machine(
    storage: Storage, start: str, end: str, shared: bool
) -> None:
    def others(kind: str) -> None:
        row = {
            "id": "other",
            "study": "another",
            "host": "here",
            "machine": "elsewhere" if kind == "elsewhere" else this_machine(),
            "pid": peer.pid,
            "process_start": "1" if kind == "dead" else process_start(peer.pid),
            "started": storage.now,
            "last_seen": storage.now,
            "state": "live",
        }
        with storage.engine.begin() as connection:
            connection.execute(sa.delete(workers).where(workers.c.id == "other"))
            connection.execute(sa.delete(worker_devices).where(worker_devices.c.worker == "other"))
            if kind != "alone":
                connection.execute(sa.insert(workers).values(row))
            if kind.endswith("device"):
                device = {"worker": "other", "device": "cpu" if kind == "same device" else "GPU-1"}
                connection.execute(sa.insert(worker_devices).values(device))

    def run(*_: Any) -> TrialResult:
        told = executor.shared_device
        others(end)
        return TrialResult(
            Outcome.COMPLETE, values=(0.5,), telemetry={"device": {"name": "x", "shared": told}}
        )

    config = study(1)
    executor: Any = SimpleNamespace(
        study=config, shared_device=False, device=CPU, trial_folder=lambda *_: Path(), run=run
    )
    storage.create_or_resume_study(config)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        others(start)
        run_worker(config, storage, trial_runner(executor, storage, threading.Event()))
        peer.kill()
    assert storage.read_study("tiny").trials[0].telemetry["device"] == {"name": "x", "shared": shared}


@pytest.mark.parametrize(("gets_on", "runs"), [(False, 4), (True, 6)])
def test_trial_that_kills_its_workers_fails_in_the_end(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, gets_on: bool, runs: int
) -> None:
    """With one retry four deaths end it; an evaluation that is farther than all before starts a new count."""
    ran: list[int] = []

    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        suggest(study().search_space, trial)
        ran.append(trial.number)
        if trial.number == 0:
            step = len(ran) if gets_on and len(ran) <= 3 else 1
            storage.report_evaluation(trial, step, 0.5, EvaluationRow(step, 1.0, 1.0, {}))
            raise KeyboardInterrupt  # ends the worker
        return result("complete")

    config = study(2, max_retries=1)
    leave = WorkerLease.__exit__

    def die(worker: WorkerLease, *_: object) -> None:
        """Leave as a killed process does: the slot stays claimed, and the row names no live process."""
        worker._leaving.set()
        worker._thread.join()
        with storage.engine.begin() as connection:
            connection.execute(sa.update(workers).where(workers.c.id == worker.id).values(process_start="1"))

    for _ in range(runs):
        monkeypatch.setattr(WorkerLease, "__exit__", die)
        with pytest.raises(KeyboardInterrupt):
            run_worker(config, storage, execute)
    monkeypatch.setattr(WorkerLease, "__exit__", leave)
    assert run_worker(config, storage, execute).outcomes == {"failed": 1, "complete": 1}
    assert ran == [0] * runs + [1]
    first, _ = storage.read_study("tiny").trials
    assert (first.state, first.outcome, first.reason) == ("FAIL", "failed", "its worker died 4 times in it")


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def program(url: str, log: Path, n_trials: int, trial_seconds: float) -> subprocess.Popen[bytes]:
    arguments = [str(log), str(n_trials), str(trial_seconds)]
    environment = {**os.environ, "HPO_STORAGE": url}
    return subprocess.Popen([sys.executable, worker_process.__file__, *arguments], env=environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_process_leaves_its_trial_to_the_next(
    sqlite_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    process = program(sqlite_url, log, 2, 600)
    wait_for(lambda: bool(notes(log)))
    process.send_signal(number)
    assert process.wait(60) == 130
    with open_storage(sqlite_url) as storage:
        assert storage.slot_counts("tiny") == {"open": 2, "running": 0, "done": 0}
        assert storage.read_study("tiny").trials[0].outcome == "preempted"
        worker_process.work(sqlite_url, study(2), log)
        check_done(storage, study(2), log)


# Several processes

TWO = place_workers(2, ())
GPU = DeviceInfo(type="cuda", name="Example GPU", total_memory_bytes=80 * 2**30, uuid="GPU-0")


@pytest.mark.parametrize(
    ("num_workers", "devices", "expected"),
    [
        (1, (), [(1, None)]),
        (3, (), [(3, None)] * 3),
        (2, ("0",), [(2, None)] * 2),  # the one GPU that there is needs no name
        (2, ("0", "1"), [(1, "0"), (1, "1")]),
        (3, ("GPU-a", "GPU-b"), [(2, "GPU-a"), (1, "GPU-b"), (2, "GPU-a")]),
        (4, ("MIG-a", "MIG-b"), [(2, "MIG-a"), (2, "MIG-b")] * 2),
        (1, ("0", "1"), [(1, "0")]),
    ],
)
def test_workers_get_the_devices_in_turn_and_know_with_how_many_they_share(
    num_workers: int, devices: tuple[str, ...], expected: list[tuple[int, str | None]]
) -> None:
    places = place_workers(num_workers, devices)
    assert places == [WorkerPlace(mates, gpu) for mates, gpu in expected]


def test_place_as_environment() -> None:
    assert WorkerPlace(2).environment == {"HPO_WORKERS_ON_DEVICE": "2"}
    assert WorkerPlace(1, "MIG-a").environment == {
        "HPO_WORKERS_ON_DEVICE": "1",
        "CUDA_VISIBLE_DEVICES": "MIG-a",
    }


@pytest.mark.parametrize(
    ("device", "num_workers", "given", "expected"),
    [
        (GPU, 4, None, (80 - 4) / 4 / 80),
        (GPU, 1, None, None),
        (GPU, 4, 0.2, 0.2),
        (CPU, 4, None, None),
    ],
)
def test_workers_of_one_gpu_share_its_memory(
    device: DeviceInfo, num_workers: int, given: float | None, expected: float | None
) -> None:
    config = study(amp={} if given is None else {"memory_fraction": given})
    found = share_memory(config, device, num_workers)
    assert found.amp.memory_fraction == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("total_gib", "num_workers", "given", "most"),
    [(80, 2, 0.49, "0.4875"), (80, 4, 0.25, "0.2375"), (24, 7, 0.14, "0.1011")],
)
def test_the_contexts_of_workers_need_room_too(
    total_gib: int, num_workers: int, given: float, most: str
) -> None:
    """All of it is given away: nothing is left for the CUDA contexts."""
    gpu = replace(GPU, total_memory_bytes=total_gib * 2**30)
    with pytest.raises(InputError, match=rf"must be <= {most} for {num_workers} workers .* got {given:g}\."):
        share_memory(study(amp={"memory_fraction": given}), gpu, num_workers)
    fits = study(amp={"memory_fraction": float(most)})
    assert share_memory(fits, gpu, num_workers) is fits
    assert share_memory(study(amp={"memory_fraction": 1.0}), gpu, 1).amp.memory_fraction == 1.0


def test_more_memory_than_a_gpu_has_is_refused() -> None:
    check_memory_fraction(0.5, place_workers(4, ("0", "1")))
    check_memory_fraction(None, place_workers(9, ("0",)))
    with pytest.raises(InputError, match=r"must be <= 1, but got 0\.5 times 3"):
        check_memory_fraction(0.5, place_workers(5, ("0", "1")))


@pytest.mark.parametrize(
    ("given", "devices", "places"),
    [
        ({"workers_per_device": 2}, ("0", "1", "2"), [(2, "012"[number % 3]) for number in range(6)]),
        ({"workers_per_device": 1}, ("0", "1"), [(1, "0"), (1, "1")]),
        ({"workers_per_device": 3}, (), [(3, None)] * 3),
        ({"workers": 2}, ("0", "1"), [(1, "0"), (1, "1")]),
    ],
)
def test_workers_of_a_run(
    storage: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, int],
    devices: tuple[str, ...],
    places: list[tuple[int, str | None]],
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(run_module, "cuda_devices", lambda _: devices)
    monkeypatch.setattr(run_module, "run_workers", lambda *args, **_: started.append(args[3]))
    run_study(study(2), storage, tmp_path, **given)  # type: ignore[arg-type]
    (found,) = started
    assert found == [WorkerPlace(mates, gpu) for mates, gpu in places]


def test_memory_that_workers_may_not_take_together_is_refused_before_any_starts(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(run_module, "run_workers", lambda *args, **_: started.append(args[3]))
    config = study(2, amp={"memory_fraction": 0.6})
    monkeypatch.setattr(run_module, "cuda_devices", lambda _: ("0",))
    with pytest.raises(InputError, match=r"amp\.memory_fraction"):
        run_study(config, storage, tmp_path, workers_per_device=2)
    assert not started
    monkeypatch.setattr(run_module, "cuda_devices", lambda _: ())  # on a CPU it says nothing
    run_study(config, storage, tmp_path, workers_per_device=2)
    assert len(started) == 1


@pytest.mark.parametrize(("num_workers", "gib"), [("4", 19), ("1", 80)])
def test_sampler_knows_the_memory_of_its_worker(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: str, gib: int
) -> None:
    def executor(config: Any, device: DeviceInfo, *_: Any, shared_device: bool) -> Any:
        dataset = SimpleNamespace(fingerprint="x")
        return SimpleNamespace(
            study=config,
            amp=config.amp,
            device=device,
            dataset=dataset,
            shared_device=shared_device,
            trial_folder=lambda *_: tmp_path,
        )

    given: dict[str, Any] = {}
    monkeypatch.setenv("HPO_WORKERS_ON_DEVICE", num_workers)
    monkeypatch.setitem(sys.modules, "hpo.trial.executor", SimpleNamespace(Executor=executor))
    monkeypatch.setattr(run_module, "probe_device", lambda _: GPU)
    monkeypatch.setattr(run_module, "run_worker", lambda *_, **options: given.update(options))
    run_study(study(1), storage, tmp_path, stop=threading.Event())
    assert given["memory_bytes"] == gib * 2**30


def test_trial_that_ran_out_of_memory_is_tried_again_by_a_worker_with_more(storage: Storage) -> None:
    space = {"batch_size": {"type": "categorical", "choices": [8, 16]}}
    config = study(3, sampler={"name": "tpe", "seed": 1}, search_space=space)
    sizes = []

    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        sizes.append(suggest(config.search_space, trial)["batch_size"])
        if len(sizes) == 1:
            return result("oom", telemetry={"device": {"memory_limit_bytes": 20 * 2**30}})
        if len(sizes) == 2:
            stop.set()
        return result("complete")

    storage.create_or_resume_study(config)
    stop = threading.Event()
    run_worker(config, storage, execute, memory_bytes=20 * 2**30, stop=stop)
    run_worker(config, storage, execute, memory_bytes=80 * 2**30)
    first, second, third = sizes
    assert first == third != second


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, float], None]:
    """Let `run_workers` start the test's program instead of `hpo worker`."""

    def install(n_trials: int, trial_seconds: float) -> None:
        arguments = [str(tmp_path / "log"), str(n_trials), str(trial_seconds)]
        command = [sys.executable, worker_process.__file__, *arguments]
        monkeypatch.setattr(processes, "worker_command", lambda *_: command)

    return install


def test_worker_command_does_not_show_the_url() -> None:
    command = processes.worker_command("multitask", 3, 60.0)
    assert command[1:] == ["-m", "hpo", "worker", "multitask", "--worker-number", "3", "--timeout", "60.0"]


def test_run_workers(storage: Storage, tmp_path: Path, commands: Callable[[int, float], None]) -> None:
    config, events = study(8), []
    commands(8, 0.0)
    storage.create_or_resume_study(config)
    summary = run_workers(config, storage, tmp_path / "runs", TWO, study_name="tiny", on_event=events.append)
    check_done(storage, config, tmp_path / "log")
    record = storage.read_study("tiny")
    assert summary.ended == "finished"
    assert sum(summary.outcomes.values()) == len(record.trials)
    assert sorted(event.number for event in events if event.kind == "finished") == [
        trial.number for trial in record.trials
    ]
    assert {event.values for event in events if event.kind == "evaluated"} == {(0.25,)}
    assert {line["pid"] for line in notes(tmp_path / "log")} != {os.getpid()}
    assert sorted(path.name for path in (tmp_path / "runs" / "tiny").iterdir()) == [
        "worker-0.log",
        "worker-1.log",
    ]


def test_stop_reaches_all_workers(
    storage: Storage, tmp_path: Path, commands: Callable[[int, float], None]
) -> None:
    config, stop, log = study(8), threading.Event(), tmp_path / "log"
    commands(8, 600.0)
    storage.create_or_resume_study(config)

    def stop_when_both_run() -> None:
        wait_for(lambda: len({line["pid"] for line in notes(log)}) == 2)
        stop.set()

    watcher = threading.Thread(target=stop_when_both_run)
    watcher.start()
    summary = run_workers(config, storage, tmp_path, TWO, study_name="tiny", stop=stop)
    watcher.join()
    assert (summary.ended, summary.exit_code) == ("stopped", 130)
    assert storage.slot_counts("tiny") == {"open": 8, "running": 0, "done": 0}
    assert [trial.outcome for trial in storage.read_study("tiny").trials] == ["preempted"] * 2


def test_workers_stop_when_their_parent_is_killed(sqlite_url: str, tmp_path: Path) -> None:
    """A parent that is killed must not leave workers behind that nobody sees."""
    log = tmp_path / "log"
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(worker_process.__file__).parent)!r})
import worker_process
from hpo.outcome import Outcome
from hpo.study import processes
from hpo.study.storage import open_storage
processes.worker_command = lambda *_: [sys.executable, worker_process.__file__, {str(log)!r}, "4", "600"]
storage = open_storage({sqlite_url!r})
storage.create_or_resume_study(worker_process.study(4))
places = processes.place_workers(2, ())
processes.run_workers(worker_process.study(4), storage, Path({str(tmp_path)!r}), places, study_name="tiny")
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: len({line["pid"] for line in notes(log)}) == 2)
    parent.kill()
    parent.wait()
    with open_storage(sqlite_url) as storage:
        wait_for(lambda: storage.slot_counts("tiny") == {"open": 4, "running": 0, "done": 0})


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (1, RunError)])
def test_failure_of_all_workers_is_reported_with_the_log(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[Exception],
) -> None:
    fails = [sys.executable, "-c", f"print('Error: no such column'); raise SystemExit({code})"]
    monkeypatch.setattr(processes, "worker_command", lambda *_: fails)
    with open_storage(sqlite_url) as storage:
        storage.create_or_resume_study(study(2))
        with pytest.raises(kind, match=rf"ended with exit code {code} before the study was done") as raised:
            run_workers(study(2), storage, tmp_path, TWO, study_name="tiny")
    assert "Error: no such column" in str(raised.value)
    assert type(raised.value) is kind


def test_evaluations_of_other_processes_become_events_once(storage: Storage) -> None:
    config, events = study(1), []
    opened = storage.create_or_resume_study(config)
    watch = processes._Watch(opened, events.append)

    def execute(trial: optuna.trial.Trial, _lease: Lease) -> Any:
        watch.look()
        suggest(config.search_space, trial)
        for index in (1, 2):
            storage.report_evaluation(trial, index, index / 4, EvaluationRow(index, 1.0, 1.0, {}))
            watch.look()
            watch.look()
        return result("complete")

    run_worker(config, storage, execute)
    watch.look()
    watch.look()
    assert [(event.kind, event.values) for event in events] == [
        ("started", None),
        ("evaluated", (0.25,)),
        ("evaluated", (0.5,)),
        ("finished", (0.5,)),
    ]
    assert watch.outcomes == {"complete": 1}
