"""A study for trackers, whose trials end without training."""

from pathlib import Path
from typing import Any

from hpo.config.search_space import suggest
from hpo.study.claims.leases import WorkerLease
from hpo.study.reading.reader import read_study
from hpo.study.reading.study_record import StudyRecord
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study
from support.command_line import Finished, hpo_command, ok
from support.worker_process import begin, change_worker, evaluate, result, study

PRECISION = {"requested": "bf16", "effective": "fp32", "support": "emulated", "reason": "no AMX"}
OBSERVED = {"linear_products": {"bfloat16": 3}, "tf32": False, "compiled": False}
DEVICE = {"type": "cpu", "name": "Example CPU", "host": "node1", "torch": "2.13.0", "transformers": "5.23.0"}
TELEMETRY = {"precision": PRECISION | {"observed": OBSERVED, "agrees": False}, "device": DEVICE}
TELEMETRY |= {"peak_memory_bytes": 2**30, "throughput": {"train_examples_per_second": 12.5}}


class TrackedStudy:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        (folder / "runs").mkdir()
        self.storage = open_storage(f"sqlite:///{folder}/runs/hpo.db")
        self.config = study(9, name=name)
        self.study = create_or_resume_study(self.storage, self.config)

    @property
    def record(self) -> StudyRecord:
        return read_study(self.storage, self.name)

    def change(self, **values: Any) -> None:
        self.config = self.config.with_values(**values)
        create_or_resume_study(self.storage, self.config)

    def begin(self, worker: WorkerLease) -> tuple[Any, Any]:
        lease, trial = begin(worker)
        suggest(self.config.search_space, trial)
        return lease, trial

    def evaluate(self, trial: Any, *indices: int, **metrics: Any) -> None:
        for index in indices:
            scores = {"score": index / 100, "criteria": {"f1_macro": index / 10}} | metrics
            rates = {"train_examples_per_second": 10.0 + index, "train_tokens_per_second": 100.0}
            row = {"metrics": scores, "seconds": float(index), "epoch": index / 2}
            evaluate(self.storage, trial, index, index / 100, step=10 * index, **row, **rates)

    def run(self, *outcomes: str, evaluations: int = 3, **changes: Any) -> None:
        """Run a trial for each outcome."""
        with WorkerLease(self.storage, self.study, max_retries=1) as worker:
            for outcome in outcomes:
                lease, trial = self.begin(worker)
                self.evaluate(trial, *range(1, evaluations + 1))
                bug = "Traceback" if outcome == "failed" else None
                record = {"reason": f"it was {outcome}", "telemetry": TELEMETRY, "traceback": bug} | changes
                worker.record_outcome(lease, result(outcome, **record))

    def leave_running(self, *, alive: bool = False) -> Any:
        """Begin and return a trial; after an evaluation its worker dies, or stays `alive`."""
        worker = WorkerLease(self.storage, self.study, max_retries=1)
        worker.__enter__()
        _, trial = self.begin(worker)
        self.evaluate(trial, 1)
        if not alive:
            change_worker(self.storage, worker, process_start="1")
        return trial

    def track(self, to: str, *options: str) -> Finished:
        return hpo_command(self.folder, "track", self.name, "--to", to, *options)

    def tracked(self, to: str, *options: str) -> Any:
        return ok(self.track(to, "--json", *options)).json
