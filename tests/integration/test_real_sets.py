"""Real, openly licensed sets: every task kind but regression trains without NaN in every precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny import CPU_PRECISIONS, tiny_executor


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snips", "nlupp", "sgd", "goemotions", "squad2"])
def test_real_set_trains_in_every_precision(
    name: str, real_set: Callable[[str], Path], tmp_path: Path
) -> None:
    data = {
        "source": "jsonl",
        "path": str(real_set(name)),
        "limits": {"train": 64, "validation": 24, "test": 24},
    }
    if name == "squad2":
        data |= {"long_text": "window", "stride": 16, "pair_segments": ["question", "context"]}
    executor = tiny_executor(tmp_path, data=data)
    tasks = {task.name for task in executor.tasks}
    for precision in CPU_PRECISIONS:
        result = executor.run({"fp_precision": precision}, tmp_path / precision, precision)
        assert (result.outcome, result.reason) == ("complete", "")
        assert set(result.telemetry["metrics"]) == tasks
        assert all(result.telemetry["metrics"].values())
        assert result.telemetry["precision"]["agrees"]
        assert result.telemetry["compatibility"]["verdict"] == "ok"
