"""How the trials of a worker run for real: suggest, train, report each evaluation, measure what is left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import optuna

from hpo.config.limits import ENERGY
from hpo.config.search_space import suggest
from hpo.errors import Paused, Pruned
from hpo.json_safe import is_number
from hpo.lost_device import lost_device_raised
from hpo.outcome import Outcome
from hpo.study.checkpoints.checkpoint_folders import FolderCheckpoints
from hpo.study.checkpoints.remote_store import RemoteCheckpoints, RemoteStore
from hpo.study.claims.lease import Lease
from hpo.study.running.pace import Pace
from hpo.study.running.stopping import Stop
from hpo.study.sampling.promotion import BUDGET_SPENT, RESUMED_ATTR, WHOLE_ATTR
from hpo.study.store.schema import EvaluationRow
from hpo.study.store.storage import Storage
from hpo.trial.callbacks import Callbacks

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.trial.executor import Executor
    from hpo.trial.telemetry import Progress, ScoredEvaluation, TrialResult


class TrialRunner:
    """Runs trials with `executor` in this process.

    A trial waits in each report until the database answers, so what was evaluated is stored before the
    checkpoint from which the trial may go on.

    Args:
        remote: where checkpoints are uploaded to; None: they stay in their folder.
        shared_device: whether workers were started together on the device; others are looked for.
    """

    def __init__(
        self,
        executor: Executor,
        storage: Storage,
        stop: Stop,
        *,
        remote: RemoteStore | None = None,
        shared_device: bool = False,
    ) -> None:
        self.pace = Pace(stop, executor.study.stall_seconds, lambda: storage.availability.is_away)
        self._executor = executor
        self._storage = storage
        self._stop = stop
        self._remote = remote
        self._shared_device = shared_device
        self._checkpoint_seconds = 0.0
        self._metrics = [objective.metric for objective in executor.study.objective]
        self._token = storage.study_token(executor.study.name)

    def __call__(self, trial: optuna.trial.Trial, lease: Lease) -> TrialResult:
        """Run a claimed trial to its outcome.

        Errors that concern more than this trial are raised: a lost lease, device or database, wrong input.
        """
        executor, storage = self._executor, self._storage
        params = storage.persist(lambda: suggest(executor.study.search_space, trial))
        lease.store_params()
        folder = executor.trial_folder(self._token, trial.number)
        device = executor.device.device_id
        shared = self._shared_device or storage.has_other_workers_on(device)
        with self.pace.trial():
            result = executor.run(
                params,
                folder,
                f"{self._token}/{trial.number}",
                Callbacks(
                    partial(self._report, lease, trial.user_attrs),
                    partial(self._should_stop, lease),
                    partial(self._note_progress, lease),
                ),
                shared_device=shared,
                mirror=FolderCheckpoints(lease)
                if self._remote is None
                else RemoteCheckpoints(self._remote, lease, folder, self._stop),
            )
        with lost_device_raised(executor.device):
            result = self._measured(trial, lease, folder, result)
        if result.outcome == Outcome.PREEMPTED and not lease.study_closed.is_set():
            self._stop.set()  # where another rank was told
        if not shared and storage.has_other_workers_on(device):  # it joined during the trial
            result = shared_from_within(result, executor.study.named_metrics)
        return result

    def _report(self, lease: Lease, attributes: Mapping[str, Any], scored: ScoredEvaluation) -> None:
        """Store an evaluation. Raises Pruned if the pruner stops the trial, Paused if it pauses."""
        evaluation = scored.evaluation
        row = EvaluationRow(
            step=evaluation.step,
            epoch=evaluation.epoch,
            seconds=evaluation.seconds,
            metrics={**dict(zip(self._metrics, scored.values, strict=True)), **evaluation.metrics},
            train_examples_per_second=evaluation.rates.get("train_examples_per_second"),
            train_tokens_per_second=evaluation.rates.get("train_tokens_per_second"),
        )
        lease.check()
        with self.pace.reporting():
            is_pruned = lease.report(row, evaluation.index, scored.values[0])
        if scored.is_last:
            return
        whole = attributes.get(WHOLE_ATTR, False)
        if is_pruned and not whole:
            raise Pruned(f"the pruner stopped it after evaluation {evaluation.index}.")
        if lease.promotion is not None and not whole and all(map(is_number, scored.values)):
            rung = lease.promotion.pauses_at(evaluation.budget_used, attributes.get(RESUMED_ATTR, 0.0))
            if rung is not None:
                # Before the checkpoint, so that whoever continues from that knows.
                lease.pause(rung, scored.values)
                raise Paused(f"paused at {evaluation.budget_used:.0%} of its training.")
        if lease.is_budget_spent():
            raise Paused(BUDGET_SPENT)

    def _should_stop(self, lease: Lease) -> bool:
        lease.check()
        self.pace.note_step(self._checkpoint_seconds)
        return self._stop.is_set() or lease.study_closed.is_set()

    def _note_progress(self, lease: Lease, progress: Progress) -> None:
        self._checkpoint_seconds = progress.checkpoint_seconds
        lease.progress = progress

    def _measured(
        self, trial: optuna.trial.Trial, lease: Lease, folder: Path, result: TrialResult
    ) -> TrialResult:
        """Add the scores on test to the result; store the row statistics of a comparison."""
        study = self._executor.study
        if study.evaluation.test or study.comparison:
            from hpo.study.reading.row_statistics import store_row_statistics
            from hpo.trial.best_model import with_scores  # PyTorch, as in `_report`

            split = "test" if study.evaluation.test else "validation"
            result, statistics = with_scores(self._executor, folder, trial.params, result, split)
            if study.comparison and statistics:
                store_row_statistics(self._storage, lease, (study.name, trial.number), statistics)
        return result


def shared_from_within(result: TrialResult, named_metrics: Collection[str]) -> TrialResult:
    """Record that another worker joined the device during the trial, whose energy is then not known.

    A trial with energy as an objective or a limit ends as failed. It is not tried again: it would share its
    device again.
    """
    telemetry = {**result.telemetry, "device": {**result.telemetry["device"], "shared": True}}
    measured = telemetry.get("throughput", {})
    if measured.get(ENERGY) is None:
        return replace(result, telemetry=telemetry)
    missing = "another worker joined this GPU during the trial."
    telemetry |= {"throughput": {**measured, ENERGY: None}, "energy_missing": missing}
    headline = {name: value for name, value in result.headline.items() if name != ENERGY}
    result = replace(result, telemetry=telemetry, headline=headline)
    if ENERGY not in named_metrics:
        return result
    reason = f"{ENERGY} is not known: {missing} Run one worker on each GPU."
    return replace(result, outcome=Outcome.FAILED, reason=reason, values=None, constraints={})
