"""Worker processes for the tests: a study without training, and points where a worker can be killed."""

import itertools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import optuna
import sqlalchemy as sa

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome
from hpo.study.claims import lease as lease_module
from hpo.study.claims import leases
from hpo.study.claims.leases import Lease, WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.running.stopping import RunSummary
from hpo.study.running.worker import RunTrial, WorkerOptions, run_worker
from hpo.study.store.optuna_internals import OwnTrials
from hpo.study.store.schema import EvaluationRow, claims, workers
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study
from hpo.training.evaluate import Evaluation
from support.waiting import wait_for as wait_for

CONTEXT = multiprocessing.get_context("forkserver")  # forks from a process that has no threads
CONTEXT.set_forkserver_preload(["support.preloaded"])

SPACE: dict[str, Any] = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]},
    "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True},
    "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
}


def study(n_trials: int = 8, **changes: Any) -> StudyConfig:
    """A small study; `changes` are keys of the study file."""
    content = {
        "name": "tiny",
        "sampler": {"name": "random", "seed": 3},
        "n_trials": n_trials,
        "data": {"source": "synthetic"},
        "search_space": SPACE,
    }
    return StudyConfig.model_validate({**content, **changes})


def result(outcome: str, **changes: Any) -> Any:
    """A simulated TrialResult."""
    values = (0.5,) if outcome == "complete" else None
    fields = {"reason": "", "values": values, "headline": {}, "telemetry": {}, "traceback": None}
    fields["constraints"] = {}
    return SimpleNamespace(outcome=Outcome(outcome), **{**fields, **changes})


def outcome_of(params: dict[str, Any]) -> str:
    """Return the outcome: fp16 never works, and bf16 with the largest batch has a bug."""
    if params["fp_precision"] == "fp16":
        return "nonfinite"
    return "failed" if params["fp_precision"] == "bf16" and params["batch_size"] == 32 else "complete"


def value_of(params: dict[str, Any]) -> float:
    """Return the value of a complete trial with these parameters."""
    return (len(params["fp_precision"]) + params["batch_size"]) / 100


def note(log: Path, **what: Any) -> None:
    """Append a line in one write, so that lines of several processes stay whole."""
    with log.open("ab", buffering=0) as file:
        file.write(json.dumps(what).encode() + b"\n")


def ended_log(log: Path) -> Path:
    """Return the file with the ends of trials; `log` has their begins."""
    return log.with_name(f"{log.name}-ended")


def notes(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def evaluate(
    storage: Storage,
    trial: optuna.trial.Trial,
    index: int = 1,
    value: float = 0.5,
    step: int | None = None,
    **changes: Any,
) -> bool:
    """Report an evaluation of a trial at `step` (None: `index`); return true if the pruner stops the trial.

    `changes` are fields of the evaluation's row.
    """
    fields = {"epoch": 1.0, "seconds": 1.0, "metrics": {"score": value}, **changes}
    row = EvaluationRow(step or index, **fields)
    return lease_of(storage, trial).report(row, index, value)


def scored(index: int, step: int, budget_used: float, values: tuple[Any, ...], broken: str = "") -> Any:
    """An evaluation of the training loop; `broken` is the limit that ends the trial."""
    rest: dict[str, Any] = {"epoch": 1.0, "seconds": 1.0, "metrics": {}, "decisions": {}, "rates": {}}
    rest |= {"examples_per_second": None, "train_loss": 0.5, "ends_trial": broken}
    return Evaluation(index=index, step=step, budget_used=budget_used, values=values, **rest)


def worker_on(storage: Storage, config: StudyConfig, **options: Any) -> WorkerLease:
    """A worker of the study, created if it does not exist. `options` are fields of `WorkerLease`."""
    return WorkerLease(storage, create_or_resume_study(storage, config), **{"max_retries": 0, **options})


def begin(worker: WorkerLease) -> tuple[Lease, Any]:
    """Claim a trial."""
    lease = worker.claim()
    assert lease is not None
    return lease, lease.trial


def lease_of(storage: Storage, trial: optuna.trial.Trial) -> Lease:
    """Return the lease of a trial's last worker."""
    name = trial.study.study_name
    of_trial = (claims.c.study == name, claims.c.trial_number == trial.number)
    with storage.engine.connect() as connection:
        row = connection.execute(sa.select(claims).where(*of_trial)).one()
    return Lease(storage, name, storage.study_token(name), row.owner, trial, row)


def change_worker(storage: Storage, worker: WorkerLease, **values: Any) -> None:
    """Change a worker's row. `process_start="1"` makes it dead."""
    with storage.engine.begin() as connection:
        connection.execute(sa.update(workers).where(workers.c.id == worker.id).values(**values))


def work(
    url: str,
    config: StudyConfig,
    log: Path,
    *,
    kill: str = "",
    kill_at: int = 3,
    crash: int = 0,
    trial_seconds: float = 0.0,
) -> RunSummary:
    """Be a worker until the study is done, and die at the `kill_at`-th `kill`.

    With `crash`, each trial in fp16 sends this signal to its own process.
    """
    die = die_at(kill, kill_at)
    with open_storage(url) as storage:
        storage.lease_seconds = 3.0

        def execute(trial: optuna.trial.Trial, lease: Lease) -> Any:
            params = suggest(config.search_space, trial)
            lease.store_params()
            note(log, number=trial.number, params=params, pid=os.getpid())
            evaluate(storage, trial, step=10, value=0.25)
            if crash and params["fp_precision"] == "fp16":
                os.kill(os.getpid(), crash)
            deadline = time.monotonic() + trial_seconds
            while time.monotonic() < deadline:
                lease.check()
                time.sleep(0.01)
            if kill == "training":
                die()
            outcome = outcome_of(params)
            note(ended_log(log), number=trial.number, pid=os.getpid())
            values = (value_of(params),) if outcome == "complete" else None
            bug = "Traceback" if outcome == "failed" else None
            return result(outcome, values=values, telemetry={"pid": os.getpid()}, traceback=bug)

        return make_and_run(config, storage, execute, WorkerOptions(poll_seconds=0.05))


def make_and_run(
    config: StudyConfig, storage: Storage, run_trial: RunTrial, *args: Any, **options: Any
) -> RunSummary:
    """Create the study if necessary, and be a worker of it (`run_worker`)."""
    create_or_resume_study(storage, config, resize=False)
    return run_worker(config, storage, run_trial, *args, **options)


def run_trials(
    storage: Storage,
    config: StudyConfig,
    during: Callable[[optuna.trial.Trial], Any] = lambda _: None,
    **options: Any,
) -> RunSummary:
    """Be a worker whose trials are complete at once, unless `during` returns another result.

    `during` gets each trial after its suggestions. `options` are arguments of `run_worker`.
    """

    def execute(trial: optuna.trial.Trial, _: Lease) -> Any:
        suggest(config.search_space, trial)
        return during(trial) or result("complete")

    return make_and_run(config, storage, execute, **options)


def start_process(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a process, forked from a process with `preloaded`."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        ensure_running()
    process = CONTEXT.Process(target=target, args=args, kwargs=kwargs, daemon=True)
    process.start()
    return process


def run_until_killed(target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a process that kills itself."""
    process = start_process(target, *args, **kwargs)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def start(*args: Any, **kwargs: Any) -> Any:
    """Start a process that runs `work`."""
    return start_process(work, *args, **kwargs)


def finish(*processes: Any, seconds: float = 120) -> None:
    """Wait for the processes, and check that all succeed."""
    for process in processes:
        process.join(seconds)
    assert [process.exitcode for process in processes] == [0] * len(processes)


_KILL_POINTS: dict[str, tuple[Any, ...]] = {
    "trial made": (leases, "make_trial"),
    "claimed": (WorkerLease, "_claim"),
    "handed out": (WorkerLease, "_lease_of"),
    "half suggested": (OwnTrials, "set_trial_param", lambda *args: args[2] == "learning_rate"),
    "suggested": (Lease, "store_params"),
    "training": (),
    "evaluation reported": (Lease, "report"),
    "half of the report": (lease_module, "set_intermediate_value"),
    "pause noted": (Lease, "pause"),
    "half of the outcome": (lease_module, "end_trial"),
    "retry made": (lease_module, "make_trial"),
    "trial ended": (Lease, "end"),
    "outcome stored": (WorkerLease, "record_outcome"),
}
"""Methods after whose calls a worker can be killed, with a condition on their arguments."""
KILL_POINTS = tuple(place for place in _KILL_POINTS if place not in ("pause noted", "retry made"))
"""Points in the trials of every study."""


def killer(at: int) -> Callable[[], None]:
    """Return a function whose call number `at` kills this process."""
    calls = itertools.count(1)

    def die() -> None:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def die_at(place: str, time: int) -> Callable[[], None]:
    """Kill this process at the `time`-th passage of a point; for `training`, at calls of the result.

    Without a point it lives.
    """
    die = killer(time)
    if place not in ("", "training"):
        owner, name, *condition = _KILL_POINTS[place]
        method = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            returned = method(*args, **kwargs)
            if all(holds(*args, **kwargs) for holds in condition):
                die()
            return returned

        setattr(owner, name, called)
    return die


def check_done(storage: Storage, config: StudyConfig, log: Path, crashed: Collection[int] = ()) -> None:
    """Check that every trial ended once, with its first parameters. `crashed` are numbers of trials."""
    record = read_study(storage, config.name)
    assert record.counts == {"open": 0, "running": 0, "done": config.n_trials}
    retried = {trial.attributes["retry_of"] for trial in record.trials if "retry_of" in trial.attributes}
    last = [trial for trial in record.trials if trial.number not in retried]
    assert len(last) == config.n_trials
    assert {trial.state for trial in record.trials} <= {"COMPLETE", "PRUNED", "FAIL"}
    by_number = {trial.number: trial for trial in record.trials}
    assert sorted(by_number) == list(range(len(record.trials)))
    for line in notes(log):
        trial = by_number[line["number"]]
        assert trial.params == line["params"], "a continued trial had other parameters"
    for trial in record.trials:
        assert trial.outcome == ("crashed" if trial.number in crashed else outcome_of(trial.params))
        assert trial.number in crashed or "pid" in trial.telemetry, "a finished trial must have everything"
        if "retry_of" in trial.attributes:
            assert trial.params == by_number[trial.attributes["retry_of"]].params
