"""How many workers one PostgreSQL carries: trials a second, and what a trial costs it.

    python tests/benchmarks/scale.py rate [--workers 8] [--trials 400] [--rounds 3]
    python tests/benchmarks/scale.py grow [--workers 64] [--trials 20000] [--pause 0]

The objective is a formula, so that nothing but the search and its database is measured. `rate` runs ours and
plain `study.optimize` in turn, with the same space and TPE. `grow` draws at random, as TPE's own arithmetic
grows with the trials, and shows what a claim, an ask (trial made, parameters drawn and stored) and a record
(outcome, attributes, slot) cost as the study fills. Each trial takes `--pause` seconds; with none, workers
wait for each other most of the time. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna
import sqlalchemy as sa
from postgres import PostgresServer
from worker_process import CONTEXT, result, study

from hpo.config.search_space import suggest
from hpo.study.claims.leases import WorkerLease
from hpo.study.running.worker import run_worker
from hpo.study.store.database import parse_url
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

SPACE: dict[str, Any] = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]},
    "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True},
    "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
    "weight_decay": {"type": "float", "low": 0.0, "high": 0.1},
    "dropout": {"type": "float", "low": 0.0, "high": 0.5},
}
HEADLINE = {"fp_precision_effective": "fp32", "train_examples_per_second": 100.0, "peak_memory_bytes": 1}


def objective(params: dict[str, Any]) -> float:
    return -((math.log10(params["learning_rate"]) + 4) ** 2) - params["dropout"]


def config_of(sampler: str, num_trials: int) -> Any:
    return study(
        num_trials, sampler={"name": sampler, "seed": 1}, pruner={"name": "none"}, search_space=SPACE
    )


def ours(url: str, config: Any, log: Path, pause: float = 0.0) -> None:
    """Be a worker; the seconds of each call and the statements of all go to `log`."""
    calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    num_statements = 0

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def count(*_: object) -> None:
        nonlocal num_statements
        num_statements += 1

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                calls[name].append((time.time(), time.perf_counter() - began))

        return timing

    WorkerLease.claim = timed("claim", WorkerLease.claim)  # type: ignore[method-assign]
    WorkerLease.open_trial = timed("open", WorkerLease.open_trial)  # type: ignore[method-assign]
    WorkerLease.record_outcome = timed("record", WorkerLease.record_outcome)  # type: ignore[method-assign]

    def execute(trial: optuna.trial.Trial, lease: Any) -> Any:
        began = time.perf_counter()
        params = suggest(config.search_space, trial)
        lease.store_params()
        seconds = calls["open"][-1][1] + time.perf_counter() - began
        calls["ask"].append((time.time(), seconds))
        time.sleep(pause)
        return result("complete", values=(objective(params),), headline=HEADLINE)

    with open_storage(url) as storage:
        before = time.process_time()
        run_worker(config, storage, execute)
        cpu_seconds = time.process_time() - before
    log.write_text(json.dumps({"calls": calls, "num_statements": num_statements, "cpu": cpu_seconds}))


def plain(url: str, config: Any, num_trials: int) -> None:
    """Run trials by `study.optimize`."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    text = parse_url(url).render_as_string(hide_password=False)
    storage = optuna.storages.RDBStorage(text.replace("{", "{{").replace("}", "}}"))
    sampler = optuna.samplers.TPESampler(seed=os.getpid())
    opened = optuna.load_study(study_name="plain", storage=storage, sampler=sampler)
    opened.optimize(lambda trial: objective(suggest(config.search_space, trial)), n_trials=num_trials)


def run(processes: list[Any]) -> float:
    """Start the processes, wait for them, and return the seconds that it took."""
    began = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - began


def ended_cpu_seconds(server: PostgresServer) -> float:
    """CPU time of the server's processes that have ended: those of the connections that were closed."""
    assert server._process is not None
    fields = Path(f"/proc/{server._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def rate(server: PostgresServer, num_workers: int, num_trials: int, rounds: int) -> None:
    ratios = []
    for number in range(rounds + 1):
        rates = {}
        for name in ("plain", "ours"):
            config = config_of("tpe", num_trials)
            with server.database() as url, tempfile.TemporaryDirectory() as folder:
                with open_storage(url) as storage:
                    if name == "plain":
                        optuna.create_study(study_name="plain", storage=storage.optuna, direction="maximize")
                    else:
                        create_or_resume_study(storage, config)
                works = [
                    CONTEXT.Process(target=ours, args=(url, config, Path(folder) / str(index)))
                    if name == "ours"
                    else CONTEXT.Process(target=plain, args=(url, config, num_trials // num_workers))
                    for index in range(num_workers)
                ]
                run(works)
                rates[name] = num_trials / busy_seconds(server, url)
        print(f"round {number}: ours {rates['ours']:.1f}, plain {rates['plain']:.1f} trials/s", flush=True)
        if number:  # the first is a warm-up
            ratios.append(rates["ours"] / rates["plain"])
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{num_workers} workers, {num_trials} trials: {statistics.median(ratios):.2f}x {spread}")


def busy_seconds(server: PostgresServer, url: str) -> float:
    """Seconds from the begin of the first trial to the end of the last."""
    with server.connect(url.rsplit("/", 1)[1]) as connection:
        query = "SELECT extract(epoch FROM max(datetime_complete) - min(datetime_start))::float8 FROM trials"
        row = connection.execute(query).fetchone()
    assert row is not None
    return float(row[0])


def grow(server: PostgresServer, num_workers: int, num_trials: int, pause: float) -> None:
    config = config_of("random", num_trials)
    with server.database() as url, tempfile.TemporaryDirectory() as folder:
        with open_storage(url) as storage:
            create_or_resume_study(storage, config)
        logs = [Path(folder) / str(index) for index in range(num_workers)]
        before = ended_cpu_seconds(server)
        run([CONTEXT.Process(target=ours, args=(url, config, log, pause)) for log in logs])
        cpu = ended_cpu_seconds(server) - before
        seconds = busy_seconds(server, url)
        with open_storage(url) as storage:
            assert storage.slot_counts(config.name) == {"open": 0, "running": 0, "done": num_trials}
        found = [json.loads(log.read_text()) for log in logs]
    statements = sum(worker["num_statements"] for worker in found) / num_trials
    print(
        f"{num_workers} workers, {num_trials} trials: {num_trials / seconds:.1f} trials/s in {seconds:.0f} s"
    )
    client = sum(worker["cpu"] for worker in found)
    print(
        f"{statements:.1f} statements a trial; CPU {1e3 * cpu / num_trials:.1f} ms of the server and "
        f"{1e3 * client / num_trials:.1f} ms of the workers a trial"
    )
    for name in ("claim", "ask", "record"):
        calls = sorted(call for worker in found for call in worker["calls"][name])
        # Among the first and the last thousand, workers come and go.
        for label, part in (("first 1,000", calls[:1000]), ("last 1,000", calls[-1000:]), ("all", calls)):
            milliseconds = sorted(1e3 * seconds for _, seconds in part)
            p50, p99 = (milliseconds[int(share * (len(part) - 1))] for share in (0.5, 0.99))
            print(f"{name:7} {label:12} p50 {p50:7.1f} ms  p99 {p99:7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("rate", "grow"))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    server = PostgresServer()
    try:
        server.start()
        if args.command == "rate":
            rate(server, args.workers or 8, args.trials or 400, args.rounds)
        else:
            grow(server, args.workers or 64, args.trials or 20_000, args.pause)
    finally:
        server.remove()


if __name__ == "__main__":
    main()
