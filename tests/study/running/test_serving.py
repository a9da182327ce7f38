"""A worker that no study is named to is there for each look of a comparison."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving_process import GatedExecutor
from worker_process import result, study, wait_for

from hpo.compare.companion import comparison_study, grown
from hpo.config.comparison import ComparedConfiguration, ComparisonConfig
from hpo.config.search_space import suggest
from hpo.study.running import serving
from hpo.study.running.run import OpenOptions, OpenStudy
from hpo.study.running.serving import Server
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import RunSummary, run_worker
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

PLAN = ComparisonConfig(
    study="tiny",
    study_token="token",
    precisions=("fp32", "bf16"),
    configurations=(ComparedConfiguration(trial=0, params={}, precisions=("fp32", "bf16")),),
    top=1,
    first_seed=100,
    seeds=3,
    num_seeds={"fp32": 3, "bf16": 3},
    max_seeds=5,
    margin=0.5,
)


def test_a_comparison_is_served_look_by_look(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(opened: OpenStudy, *, stop: Stop, **_: Any) -> RunSummary:
        def execute(trial: Any, _: Any) -> Any:
            suggest(opened.config.search_space, trial)
            return result("complete")

        return run_worker(opened.config, opened.storage, execute, stop=stop)

    monkeypatch.setattr(serving, "run_study", run)
    monkeypatch.setitem(sys.modules, "hpo.trial.executor", SimpleNamespace(Executor=GatedExecutor))
    companion = comparison_study(study(1, amp={"allow_emulated": True}), PLAN, has_test=False)
    create_or_resume_study(storage, companion)
    stop = Stop()
    how = OpenOptions(resize=False, stop=stop)
    worker = Server(storage.url, tmp_path, how, idle_timeout=600, poll_seconds=0.05)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        wait_for(lambda: storage.slot_counts(companion.name)["done"] == 6)
        more = PLAN.model_copy(update={"num_seeds": {"fp32": 5, "bf16": 5}})
        create_or_resume_study(storage, grown(companion, more))
        wait_for(lambda: storage.slot_counts(companion.name)["done"] == 10)
    finally:
        stop.set()
        thread.join()
    assert worker.outcomes == {companion.name: {"complete": 10}}
    assert not worker.left_out
