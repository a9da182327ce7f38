"""When a trial pauses, by what it has evaluated so far."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worker_process import result, study

from hpo.errors import Paused
from hpo.study.running.stopping import Stop
from hpo.study.running.trial_runner import TrialRunner
from hpo.study.running.worker import run_worker
from hpo.study.sampling.promotion import PAUSED_ATTR
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study


@pytest.mark.parametrize(
    ("values", "broken", "paused_at"),
    [
        ([0.5, 0.6, 0.7], "", 0.2),
        ([0.5, None, 0.7], "", 0.2),
        ([0.5, float("nan"), float("inf")], "", None),
        ([0.5, 0.6], "a limit", None),  # which ends it at the second
    ],
)
def test_a_trial_pauses_where_it_has_a_value_to_be_ranked_by(
    storage: Storage, tmp_path: Path, values: list[float | None], broken: str, paused_at: int | None
) -> None:
    config = study(3, pruner={"name": "promote", "starts": 0.2})

    def run(_params: Any, _folder: Path, _key: str, callbacks: Any, **_: Any) -> Any:
        for index, value in enumerate(values, 1):
            shares = {"budget_used": index / 10, "seconds": 1.0, "epoch": 1.0}
            one = SimpleNamespace(step=index, index=index, metrics={}, rates={}, numerics=None, **shares)
            try:
                callbacks.on_evaluation(SimpleNamespace(evaluation=one, values=(value,), broken=broken))
            except Paused:
                return result("pruned", telemetry={"device": {}})
        return result("pruned" if broken else "complete", telemetry={"device": {}})

    executor: Any = SimpleNamespace(
        study=config,
        device=SimpleNamespace(device_id="cpu"),
        trial_folder=lambda _token, number: tmp_path / str(number),
        run=run,
    )
    create_or_resume_study(storage, config)
    stop = Stop()
    first: list[Any] = []

    def run_first(trial: Any, lease: Any) -> Any:
        first.append(TrialRunner(executor, storage, stop)(trial, lease))
        stop.set("enough")
        return first[-1]

    run_worker(config, storage, run_first, stop=stop)
    [trial] = storage.load_study(config.name).trials
    assert trial.user_attrs.get(PAUSED_ATTR) == paused_at
    assert storage.slot_counts(config.name).get("paused", 0) == (paused_at is not None)
