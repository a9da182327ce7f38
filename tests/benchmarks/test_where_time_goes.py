"""The profile adds up, and tells training from evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import where_time_goes
from gpu import QUICK
from trial_parts import assemble, config_of, executor_of
from workload import write_workload


def test_the_shares_are_those_of_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_workload(QUICK["tiny"], tmp_path)
    executor = executor_of(tmp_path, QUICK["tiny"])
    parts = assemble(executor, config_of(executor, seed=1))
    steps = where_time_goes.training_steps(parts)
    where_time_goes.report("training", lambda: next(steps) + next(steps))
    where_time_goes.report("evaluation", lambda: where_time_goes.evaluate_once(parts, 512))
    printed = capsys.readouterr().out.strip()
    training, evaluation = (text.splitlines() for text in printed.split("\n\n"))
    for title, *lines, floor in (training, evaluation):
        assert "examples/s" in title
        shares = {line[2:30].strip(): float(line[30:37].strip("% ")) for line in lines}
        assert sum(shares.values()) == pytest.approx(100, abs=1)
        assert shares["matrix products"] > 0
        assert floor.startswith("  with matrix products, attention, optimiser alone:")
    for group in ("optimiser", "norm of the gradients", "dropout"):
        assert any(line.startswith(f"  {group}") and " 0.0%" not in line for line in training)
        assert any(line.startswith(f"  {group}") and " 0.0%" in line for line in evaluation)
