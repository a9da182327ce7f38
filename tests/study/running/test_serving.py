"""A worker that no study is named to waits for work: a database, a study, the next look of a comparison."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planted_comparison import plan_of
from serving_process import GatedExecutor
from worker_process import run_trials, study, wait_for

from hpo.compare.companion import comparison_study, grown
from hpo.study.running import serving
from hpo.study.running.run import OpenOptions, OpenStudy
from hpo.study.running.serving import Server
from hpo.study.running.stopping import Stop
from hpo.study.running.worker import RunSummary
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

PLAN = plan_of(3, 5)


def test_a_database_that_is_made_later_is_served_and_a_comparison_look_by_look(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(opened: OpenStudy, *, stop: Stop, **_: Any) -> RunSummary:
        return run_trials(opened.storage, opened.config, stop=stop)

    monkeypatch.setattr(serving, "run_study", run)
    monkeypatch.setitem(sys.modules, "hpo.trial.executor", SimpleNamespace(Executor=GatedExecutor))
    companion = comparison_study(study(1, amp={"allow_emulated": True}), PLAN, has_test=False)
    more = PLAN.model_copy(update={"num_seeds": {"fp32": 5, "bf16": 5}})
    stop = Stop()
    how = OpenOptions(resize=False, stop=stop)
    worker = Server(sqlite_url, tmp_path, how, companion.name, idle_timeout=600, poll_seconds=0.05)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(worker.serve)
        try:
            with open_storage(sqlite_url) as storage:
                create_or_resume_study(storage, study(1).model_copy(update={"name": "another"}))
                for looked, num_trials in ((companion, 6), (grown(companion, more), 10)):
                    create_or_resume_study(storage, looked)
                    wait_for(lambda: storage.slot_counts(companion.name)["done"] == num_trials)  # noqa: B023
        finally:
            stop.set()
        assert ended.result() == "stopped"
    assert worker.outcomes == {companion.name: {"complete": 10}}
    assert not worker.left_out
