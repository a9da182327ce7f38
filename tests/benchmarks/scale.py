"""What the search itself costs at 100, 1,000 and 10,000 finished trials, beside plain Optuna.

    python tests/benchmarks/scale.py [--trials 100 1000 10000] [--runs 40] [--parts loop postgres commands]

`loop` prints the CPU time of a worker for each run of a trial in ms: one worker, SQLite. The worker is that
of `hpo run`; only the training is replaced, so a run suggests, reports and pauses as a real one, and old
checkpoints are removed. A trial that continues after a pause is another run. Plain Optuna has
`SuccessiveHalvingPruner`, the same parameters and the same evaluations. The first trials of a study are run.
The others are copies of their rows in the database, in every table.

`postgres` prints how many runs end in a second on PostgreSQL, from an empty study, with 1 and 8 workers.

`commands` prints the CPU time and the peak memory of commands that read the largest study, and of an
interpreter that only imports SQLAlchemy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import sqlalchemy as sa

sys.path.append(str(Path(__file__).parents[1]))

from support.postgres import PostgresServer

from hpo.cluster.postgres.postgres_server import find_programs
from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.device import probe_device
from hpo.errors import RunError, TrialEnd
from hpo.outcome import Outcome, TrialResult
from hpo.study.running.open_study import OpenStudy
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import run_study
from hpo.study.sampling.promotion import promotion_of
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study, read_stored
from hpo.training.evaluate import Evaluation

NAME, NUM_TRIALS = "scale", 100_000
PRUNERS = ("promote", "none", "plain")
SAMPLERS = ("random", "tpe")
NUM_EVALUATIONS = 5
WARM_UP = 5
"""Runs of a process that are not counted: the first reads the whole study."""
TASKS = {f"task{number}": {"kind": "regression"} for number in range(3)}
STUDY: dict[str, Any] = {
    "name": NAME,
    "objective": {"metric": "score", "direction": "maximize"},
    "n_trials": NUM_TRIALS,
    "data": {"source": "jsonl", "path": "x", "tasks": TASKS},
    "evaluation": {"per_trial": NUM_EVALUATIONS},
    "portfolio": False,
    "search_space": {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {"type": "float", "low": 1e-5, "high": 1e-3, "log": True},
        "weight_decay": {"type": "float", "low": 0.0, "high": 0.1},
        "warmup_ratio": {"type": "float", "low": 0.0, "high": 0.2},
        "dropout": {"type": "float", "low": 0.0, "high": 0.3},
        "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
        "max_grad_norm": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
        "freeze_layers": {"type": "int", "low": 0, "high": 6},
    },
}


def study_config(pruner: str, sampler: str) -> StudyConfig:
    content = {**STUDY, "pruner": {"name": pruner}, "sampler": {"name": sampler, "seed": 1}}
    return StudyConfig.model_validate(content)


def score(params: Mapping[str, Any], share: float) -> float:
    """A learning curve that depends on the parameters; evaluations of a run differ."""
    loss = (math.log10(params["learning_rate"]) + 4.0) ** 2 + params["dropout"] + params["weight_decay"]
    return 1.0 / (1.0 + loss) * (1.0 - math.exp(-5.0 * share))


class Executor:
    """In place of `hpo.trial.executor.Executor`: trials report and pause, and nothing is trained.

    `times` has the wall-clock and the CPU time at the start of each run. After `runs` of them, and a few
    more to warm up, it sets `stop`.
    """

    def __init__(self, config: StudyConfig, folder: Path, stop: Stop, runs: int) -> None:
        self.study, self.device = config, probe_device("cpu")
        self.amp = SimpleNamespace(memory_fraction=None)
        self.fingerprint = "made"
        self.times: list[tuple[float, float]] = []
        self._folder, self._stop, self._runs = folder, stop, runs
        self._shares = evaluation_shares(config)

    def trial_folder(self, token: str, number: int) -> Path:
        return self._folder / NAME / f"checkpoints-{token[:8]}" / f"trial-{number:05d}"

    def run(
        self, params: Mapping[str, Any], folder: Path, _key: str, callbacks: Any, *, mirror: Any, **_: Any
    ) -> Any:
        self.times.append((time.time(), time.process_time()))
        if len(self.times) > self._runs + WARM_UP:
            self._stop.set()
        note = folder / "step-00000001" / "state.pt"
        begin = float(note.read_text()) if note.is_file() else 0.0
        telemetry, values = record(params), (0.0,)
        try:
            for index, share in enumerate(self._shares, 1):
                if share > begin:
                    values = (score(params, share),)
                    callbacks.on_evaluation(self._evaluated(index, share, values[0]))
        except TrialEnd as end:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(str(self._shares[index - 1]))
            mirror.sync([note.parent], _key, is_last=True)
            return TrialResult(end.outcome, str(end), telemetry=telemetry)
        return TrialResult(Outcome.COMPLETE, values=values, telemetry=telemetry)

    def _evaluated(self, index: int, share: float, value: float) -> Any:
        metrics = {task: {"r2": value, "mae": 1 - value, "mse": (1 - value) ** 2} for task in TASKS}
        rates = {"train_examples_per_second": 100.0, "train_tokens_per_second": 9000.0}
        return Evaluation(
            step=round(1000 * share), epoch=share, budget_used=share, seconds=60 * share, metrics=metrics,
            decisions={}, examples_per_second=300.0, train_loss=1 - value, index=index, rates=rates,
            values=(value,),
        )  # fmt: skip


def evaluation_shares(config: StudyConfig) -> list[float]:
    promotion = promotion_of(config.pruner, config.directions, NUM_TRIALS)
    shares = {index / NUM_EVALUATIONS for index in range(1, NUM_EVALUATIONS + 1)}
    return sorted({*shares, *(promotion.rungs if promotion else ())})


def record(params: Mapping[str, Any]) -> dict[str, Any]:
    """Telemetry of about the size and the content of a real trial's."""
    precision = params["fp_precision"]
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    seen = {"observed": {"linear_products": {dtype: 38}, "tf32": False, "compiled": False}, "agrees": True}
    times = {f"{name}_seconds": 12.5 for name in ("train", "evaluation", "compat", "setup")}
    modules = {f"encoder.layer.{index}.attention.{part}": 1.5 for index in range(12) for part in "qkv"}
    return {
        "precision": {"requested": precision, "effective": precision, "support": "native", "reason": ""}
        | seen,
        "device": {"type": "cpu", "name": "Example CPU", "cpu_features": ["amx_bf16"], "host": "node1"}
        | {"torch": "2.13.0", "transformers": "5.23.0", "num_threads": 2, "shared": False},
        "compatibility": {
            "verdict": "ok",
            "reasons": [],
            "logits_relative_error": dict.fromkeys(TASKS, 0.01),
        },
        "metrics": {task: {"r2": 0.5, "mae": 0.5} for task in TASKS},
        "throughput": {"train_examples_per_second": 100.0, "evaluation_examples_per_second": 300.0},
        "scaler": {"skipped_steps": 0, "scale": None},
        "fp32_fallbacks": 0,
        "num_steps": 1000,
        "peak_memory_bytes": 900 * 2**20,
        "gradient_norms": modules,
        "config": {**params, "optimizer": "adamw", "schedule": "linear", "epochs": 1, "seed": 42},
        **times,
    }


def work(url: str, pruner: str, sampler: str, runs: int) -> list[tuple[float, float]]:
    """Run trials of the study in this process, which may be one of several."""
    if pruner == "plain":
        return work_plainly(url, sampler, runs)
    config, stop = study_config(pruner, sampler), Stop()
    with open_storage(url) as storage:
        create_or_resume_study(storage, config, resize=False)
        stored = read_stored(storage, NAME)
        assert stored is not None
        executor = Executor(config, Path("runs"), stop, runs)
        summary = run_study(OpenStudy(config, storage, Path("runs"), stored, {}, executor), stop=stop)  # type: ignore[arg-type]
    if summary.num_failed:
        raise RuntimeError(f"no trial may fail, but {summary.num_failed} of {len(executor.times)} did")
    return executor.times


def work_plainly(url: str, sampler: str, runs: int) -> list[tuple[float, float]]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    study = optuna.create_study(
        storage=url.replace("postgresql://", "postgresql+psycopg://"),
        study_name=NAME,
        direction="maximize",
        load_if_exists=True,
        sampler=samplers[sampler](seed=os.getpid()),
        pruner=optuna.pruners.SuccessiveHalvingPruner(),
    )
    config, times = study_config("promote", sampler), []
    shares = evaluation_shares(config)

    def objective(trial: optuna.Trial) -> float:
        times.append((time.time(), time.process_time()))
        params = suggest(config.search_space, trial)
        for index, share in enumerate(shares, 1):
            value = score(params, share)
            trial.report(value, index)
            if index < len(shares) and trial.should_prune():
                raise optuna.TrialPruned
        return value

    study.optimize(objective, n_trials=runs + WARM_UP + 1)
    return times


def copy_trials(url: str, total: int) -> None:
    """Copy the ended trials of the study until it has `total`: the rows of every table, with new numbers."""
    engine, metadata = sa.create_engine(url), sa.MetaData()
    metadata.reflect(engine)
    trials = metadata.tables["trials"]
    # The numbers of the trials have no gaps, also where the trials to copy have some.
    place = sa.func.row_number().over(order_by=trials.c.number).label("place")
    last = sa.select(sa.func.max(trials.c.trial_id), sa.func.count(trials.c.trial_id))
    with engine.begin() as connection:
        last_id, count = connection.execute(last).one()
        ended = sa.select(trials.c.trial_id, trials.c.number, place).where(
            trials.c.state.not_in(("RUNNING", "WAITING")), trials.c.number < count
        )
        size = len(connection.execute(ended).all())
        for turn, first in enumerate(range(count, total, size), 1):
            chosen = ended.order_by(trials.c.number).limit(total - first).subquery()
            new = {"trial_id": chosen.c.trial_id + turn * last_id}
            new |= dict.fromkeys(("number", "trial_number"), chosen.c.place - 1 + first)
            for table in metadata.sorted_tables:
                for key, number in (("trial_id", chosen.c.trial_id), ("trial_number", chosen.c.number)):
                    if key not in table.c:
                        continue
                    # The database counts the rows of Optuna's tables itself.
                    counted = {*table.primary_key} - {table.c[key]} if len(table.primary_key) == 1 else set()
                    copied = {one.name: one for one in table.c if one not in counted}
                    values = [new.get(name, one) for name, one in copied.items()]
                    rows = sa.select(*values).join_from(table, chosen, table.c[key] == number)
                    connection.execute(sa.insert(table).from_select([*copied], rows))
    engine.dispose()


def measured(*work_of: Any, workers: int = 1) -> list[list[tuple[float, float]]]:
    """What `work` returns in so many processes that run at the same time."""
    command = [sys.executable, __file__, "--work", *map(str, work_of)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(workers)]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{command} ended with {[process.returncode for process in processes]}")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def loop(arguments: argparse.Namespace) -> str:
    """Print a row for each sampler and pruner; return the URL of a study with the most trials."""
    print("CPU of a worker in ms for each run of a trial (the quarters of the runs: min to max), SQLite")
    print("".join(f"{text:>26}" for text in ("", *(f"{trials:,} trials" for trials in arguments.trials))))
    for sampler in SAMPLERS:
        for pruner in PRUNERS:
            url, cells = f"sqlite:///{sampler}-{pruner}.db", []
            for trials in arguments.trials:
                if not cells:
                    make_study(url, pruner, sampler)
                    measured(url, pruner, sampler, trials)
                copy_trials(url, trials)
                (times,) = measured(url, pruner, sampler, arguments.runs)
                cpu = [1000 * (later[1] - earlier[1]) for earlier, later in pairwise(times)]
                cells.append(_cell(cpu[WARM_UP:]))
            print(f"{pruner + ', ' + sampler:>26}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
    return "sqlite:///tpe-promote.db"


def make_study(url: str, pruner: str, sampler: str) -> None:
    if pruner == "plain":
        work_plainly(url, sampler, -WARM_UP - 1)
        return
    with open_storage(url) as storage:
        create_or_resume_study(storage, study_config(pruner, sampler))


def _cell(values: Sequence[float]) -> str:
    quarter = math.ceil(len(values) / 4)
    parts = [statistics.mean(values[first : first + quarter]) for first in range(0, len(values), quarter)]
    return f"{statistics.mean(values):.0f} ({min(parts):.0f} to {max(parts):.0f})"


def postgres(arguments: argparse.Namespace) -> None:
    """Print runs in a second from an empty study on PostgreSQL."""
    try:
        find_programs()
    except RunError as error:
        print(f"PostgreSQL is left out: {error}")
        return
    server = PostgresServer()
    server.start()
    try:
        print("Runs of trials that end in a second, PostgreSQL, from an empty study, TPE")
        for workers in (1, 8):
            for pruner in ("promote", "asha", "plain"):
                rates = [_rate(server, pruner, workers, arguments.runs) for _ in range(arguments.repeats)]
                shown = f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"
                print(f"{pruner:>12}, {workers} workers: {shown}", flush=True)
    finally:
        server.remove()


def _rate(server: PostgresServer, pruner: str, workers: int, runs: int) -> float:
    with server.database() as url:
        make_study(url, pruner, "tpe")
        times = [[at for at, _ in of] for of in measured(url, pruner, "tpe", runs, workers=workers)]
    begin, end = max(of[WARM_UP] for of in times), min(of[-1] for of in times)  # all of them work
    return sum(begin < at <= end for of in times for at in of) / (end - begin)


def commands(url: str) -> None:
    """Print seconds of CPU and peak memory of the commands that read a study."""
    environment = {**os.environ, "HPO_STORAGE": url}
    programs = {name: ["-m", "hpo", name, NAME] for name in ("status", "best", "doctor", "report")}
    for name, program in {"import sqlalchemy": ["-c", "import sqlalchemy"], **programs}.items():
        process = subprocess.Popen([sys.executable, *program], stdout=subprocess.DEVNULL, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = used.ru_utime + used.ru_stime
        used_up = f"{seconds:.1f} s of CPU, {used.ru_maxrss / 1024:.0f} MiB"
        print(f"{name:>26}: {used_up}, exit code {process.returncode}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--runs", type=int, default=40, help="of each process")
    parser.add_argument("--repeats", type=int, default=3, help="of each rate on PostgreSQL")
    parts = ("loop", "postgres", "commands")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        url, pruner, sampler, runs = arguments.work
        print(json.dumps(work(url, pruner, sampler, int(runs))))
        return
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        if {"loop", "commands"} & {*arguments.parts}:
            url = loop(arguments)
        if "commands" in arguments.parts:
            commands(url)
        if "postgres" in arguments.parts:
            postgres(arguments)


if __name__ == "__main__":
    main()
