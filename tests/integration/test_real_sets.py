"""Real, openly licensed sets: every task kind but regression trains without NaN in every precision."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny import CPU_PRECISIONS, tiny_executor

DATA = Path(os.environ.get("HPO_DATA_DIR", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snips", "nlupp", "sgd", "goemotions", "squad2"])
def test_a_real_set_trains_in_every_precision(name: str, tmp_path: Path) -> None:
    folder = DATA / name
    if not (folder / "tasks.json").exists():
        pytest.skip(f"the set {name} is not in {DATA}; set HPO_DATA_DIR to where it is")
    data = {
        "source": "jsonl",
        "path": str(folder),
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
