from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.study_records import record_of
from support.tiny import tiny_study

from hpo.api import planning
from hpo.api.planning import shares_of
from hpo.report.status import num_shares
from hpo.study.reading.study_record import WorkerRecord

BUDGET: dict[str, Any] = {"hours": 2.0}


@pytest.mark.parametrize("given", [{}, {"budget": BUDGET}])
@pytest.mark.parametrize("devices", ["a", "aab"])
def test_plan_and_status_divide_the_time_by_live_workers(tmp_path: Path, given: Any, devices: str) -> None:
    """A letter is the device of a live worker, and the worker of x is dead."""
    workers = [
        WorkerRecord(
            f"w{n}", "node1", n, *[datetime.now(UTC)] * 2, alive=name != "x", trial_number=None, device=name
        )
        for n, name in enumerate(devices + "x")
    ]
    record, config = record_of([], workers=workers, definition=given), tiny_study(tmp_path, **given)
    assert shares_of(config, record, None) == num_shares(record) == len({*devices} if given else devices)


@pytest.mark.parametrize(("gpus", "shares"), [(0, 1), (2, 2), (8, 3)])
def test_requested_workers_share_the_devices(
    tmp_path: Path, gpus: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "cuda_devices", lambda _: [f"GPU-{n}" for n in range(gpus)])
    assert shares_of(tiny_study(tmp_path, budget=BUDGET), None, 3) == shares
    assert shares_of(tiny_study(tmp_path), None, 3) == 3
    assert shares_of(tiny_study(tmp_path), None, None) == 1
