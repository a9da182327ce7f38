"""Several studies in one database: each has workers of its own."""

from __future__ import annotations

import signal
from pathlib import Path

from worker_process import check_done, finish, notes, start, study

from hpo.study.reading.overview import list_studies
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study


def test_workers_of_two_studies_keep_to_their_own_also_after_kills(storage_url: str, tmp_path: Path) -> None:
    configs = [study(6, name=name, pruner={"name": "none"}) for name in ("first", "second")]
    logs = {config.name: tmp_path / config.name for config in configs}
    with open_storage(storage_url) as storage:
        for config in configs:
            create_or_resume_study(storage, config)
        killed = [
            start(storage_url, config, logs[config.name], kill="training", kill_at=2) for config in configs
        ]
        for process in killed:
            process.join(120)
        assert [process.exitcode for process in killed] == [-signal.SIGKILL] * 2
        others = {
            config.name: [start(storage_url, config, logs[config.name]) for _ in range(2)]
            for config in configs
        }
        finish(*(process for processes in others.values() for process in processes))
        for config, dead in zip(configs, killed, strict=True):
            check_done(storage, config, logs[config.name])
            own = {dead.pid, *(process.pid for process in others[config.name])}
            assert {line["pid"] for line in notes(logs[config.name])} <= own
        assert [(found.name, found.state, found.workers) for found in list_studies(storage)] == [
            ("first", "done", 0),
            ("second", "done", 0),
        ]
