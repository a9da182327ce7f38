"""How much a search spends on a precision that always breaks, early or late in its trials.

    python tests/benchmarks/late_failures.py [--seeds 5] [--samplers tpe gp nsga2] [--breaks 0.04 0.12 0.36 1]

Each study has 100 trials of four precisions, a learning rate and a batch size. In one of the precisions,
every trial becomes NaN when it has used a given share of its budget. Worker, claims, promotion, samplers and
database are the real ones. Only the training is made up: the score depends on the learning rate and the batch
size, and its noise shrinks as a trial trains. The precision has no effect on it.

The table shows the mean and the maximum over the seeds: the broken precision's share of the starts, its share
of the compute, and its compute in whole trials. A whole trial counts 1.
"""

import argparse
import itertools
import math
import random
import statistics
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import optuna

from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.outcome import Outcome, TrialResult
from hpo.study.claims.lease import Lease
from hpo.study.reading.study_record import EvaluationRow
from hpo.study.running.worker import WorkerOptions, run_worker
from hpo.study.sampling.promotion import RESUMED_ATTR, promotion_of
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

BROKEN = "fp16"
SAMPLERS = ("tpe", "gp", "nsga2")
PRUNERS = ("promote", "none")
BREAKS = (0.04, 0.12, 0.36, 1.0)
MOST = 0.15
"""Wanted: at most this share of the starts, and of the compute unless `MOST_TRIALS` whole trials are more."""
MOST_TRIALS = 3.0


@dataclass(frozen=True)
class Case:
    """One study."""

    sampler: str
    pruner: str
    breaks_at: float
    """Share of the budget at which the broken precision becomes NaN."""
    seed: int = 0
    num_trials: int = 100

    def config(self) -> StudyConfig:
        content = {
            "name": "late",
            "objective": {"metric": "score"},
            "n_trials": self.num_trials,
            "sampler": {"name": self.sampler, "seed": 1000 * self.seed},
            "pruner": {"name": self.pruner},
            "portfolio": False,
            "data": {"source": "synthetic"},
            "search_space": {
                "fp_precision": {"type": "categorical", "choices": ["fp32", "tf32", "bf16", BROKEN]},
                "learning_rate": {"type": "float", "low": 1e-6, "high": 1e-2, "log": True},
                "batch_size": {"type": "categorical", "choices": [8, 16, 32]},
            },
        }
        return StudyConfig.model_validate(content)


class Spent(NamedTuple):
    """Costs of the broken precision in a study."""

    starts: float
    """Share of the trials that began."""
    compute: float
    """Share of the compute."""
    whole_trials: float

    @property
    def is_wanted(self) -> bool:
        return self.starts <= MOST and (self.compute <= MOST or self.whole_trials <= MOST_TRIALS)


class Trainer:
    """Runs the trials of a study as a worker does, without training."""

    def __init__(self, case: Case, config: StudyConfig) -> None:
        self.case, self.config = case, config
        self.promotion = promotion_of(config.pruner, config.directions, config.num_trials)
        rungs = () if self.promotion is None else self.promotion.rungs
        self.evaluate_at = (*rungs, 1.0)
        self.starts: Counter[str] = Counter()
        self.compute: Counter[str] = Counter()

    def __call__(self, trial: optuna.trial.Trial, lease: Lease) -> TrialResult:
        params = suggest(self.config.search_space, trial)
        lease.store_params()
        precision = params["fp_precision"]
        begin = trial.user_attrs.get(RESUMED_ATTR, 0.0)
        self.starts[precision] += not begin
        for index, share in enumerate(self.evaluate_at, 1):
            if share <= begin:
                continue
            if precision == BROKEN and share >= self.case.breaks_at:
                self.compute[precision] += self.case.breaks_at - begin
                return self._result(params, Outcome.NONFINITE)
            score = self._score(params, share)
            row = EvaluationRow(index, epoch=share, seconds=share, metrics={"score": score})
            lease.report(row, index, score)
            rung = self.promotion and self.promotion.pauses_at(share, begin)
            if rung:
                self.compute[precision] += share - begin
                lease.pause(rung, [score])
                return self._result(params, Outcome.PAUSED)
        self.compute[precision] += 1.0 - begin
        return self._result(params, Outcome.COMPLETE, score)

    def _score(self, params: dict[str, Any], share: float) -> float:
        best = -4.0 + 0.2 * math.log2(params["batch_size"] / 8)
        noise = random.Random(f"{params} {share}").gauss(0.0, 0.02 / math.sqrt(share))
        return 0.9 - 0.2 * (math.log10(params["learning_rate"]) - best) ** 2 - 0.1 * (1 - share) + noise

    def _result(self, params: dict[str, Any], outcome: Outcome, score: float | None = None) -> TrialResult:
        telemetry: dict[str, Any] = {
            "precision": {"requested": params["fp_precision"], "effective": params["fp_precision"]},
            "compatibility": {"verdict": "ok"},
        }
        if outcome == Outcome.NONFINITE:
            telemetry["finite_in_fp32"] = True
        values = None if score is None else (score,)
        return TrialResult(outcome, "", values=values, telemetry=telemetry)


def run(case: Case) -> Spent:
    """What the broken precision takes of one study."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    config = case.config()
    trainer = Trainer(case, config)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_storage(f"sqlite:///{Path(folder, 'hpo.db')}") as storage,
    ):
        create_or_resume_study(storage, config)
        ended = run_worker(config, storage, trainer, WorkerOptions(poll_seconds=0.01)).ended
    if ended != "finished":
        raise RuntimeError(f"{case} must finish, but it ended as {ended}.")
    starts, compute = trainer.starts, trainer.compute
    return Spent(starts[BROKEN] / starts.total(), compute[BROKEN] / compute.total(), compute[BROKEN])


def line(sampler: str, pruner: str, breaks_at: float, found: list[Spent]) -> str:
    """One line of the table."""

    def cell(values: Sequence[float], form: str) -> str:
        return f"{statistics.mean(values):{form}} ({max(values):{form}})"

    starts, compute, trials = zip(*found, strict=True)
    cells = (
        f"starts {cell(starts, '3.0%')}, compute {cell(compute, '3.0%')}, whole trials {cell(trials, '4.1f')}"
    )
    told = "" if all(one.is_wanted for one in found) else "  NOT as wanted"
    return f"{sampler:6} {pruner:8} breaks at {breaks_at:4.0%}: {cells}{told}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=SAMPLERS)
    parser.add_argument("--pruners", nargs="+", choices=PRUNERS, default=PRUNERS)
    parser.add_argument("--breaks", nargs="+", type=float, default=BREAKS)
    parser.add_argument("--processes", type=int, help="default: one for each core")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes) as pool:
        for one in itertools.product(arguments.samplers, arguments.pruners, arguments.breaks):
            cases = [Case(*one, seed=seed) for seed in range(arguments.seeds)]
            print(line(*one, list(pool.map(run, cases))), flush=True)


if __name__ == "__main__":
    main()
