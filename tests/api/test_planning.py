from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.study_records import record_of
from support.tiny import tiny_study

from hpo.api import planning
from hpo.api.planning import shares_of
from hpo.report.status import num_shares
from hpo.study.reading.study_record import StudyRecord, WorkerRecord

BUDGET: dict[str, Any] = {"hours": 2.0}


def worked_on(budget: Any, devices: str) -> StudyRecord:
    """The record of a study with a live worker on each of these devices, and a dead one."""
    seen = datetime.now(UTC)
    workers = [
        WorkerRecord(f"w{n}", "node1", n, seen, alive=name != "x", trial_number=None, device=name)
        for n, name in enumerate(devices + "x")
    ]
    return record_of([], workers=workers, definition={"budget": budget} if budget else {})


@pytest.mark.parametrize("budget", [None, BUDGET])
@pytest.mark.parametrize("devices", ["a", "aab"])
def test_plan_and_status_divide_the_time_by_live_workers(tmp_path: Path, budget: Any, devices: str) -> None:
    record = worked_on(budget, devices)
    config = tiny_study(tmp_path, **({"budget": budget} if budget else {}))
    assert shares_of(config, record, None) == num_shares(record) == len({*devices} if budget else devices)


@pytest.mark.parametrize(("gpus", "shares"), [(0, 1), (2, 2), (8, 3)])
def test_requested_workers_share_the_devices(
    tmp_path: Path, gpus: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "cuda_devices", lambda _: [f"GPU-{n}" for n in range(gpus)])
    assert shares_of(tiny_study(tmp_path, budget=BUDGET), None, 3) == shares
    assert shares_of(tiny_study(tmp_path), None, 3) == 3
    assert shares_of(tiny_study(tmp_path), None, None) == 1
