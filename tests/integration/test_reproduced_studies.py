"""Best trials of whole studies, trained again."""

from __future__ import annotations

from pathlib import Path

from support.command_line import hpo_command, ok, stored
from support.tiny import write_study

from hpo.study.reading.study_record import best_trials


def test_a_winner_with_pauses_at_rungs_is_reproduced(tmp_path: Path) -> None:
    write_study(
        tmp_path,
        pruner={"name": "promote"},
        n_trials=6,
        training={"max_steps": 30, "batch_size": 8, "max_length": 64, "fp_precision": "fp32"},
        search_space={"learning_rate": {"type": "float", "low": 1e-4, "high": 1e-2, "log": True}},
    )
    ok(hpo_command(tmp_path, "run", "tiny.yaml"))
    (best,) = best_trials(stored(tmp_path))
    assert best.attributes["rungs"]
    found = ok(hpo_command(tmp_path, "best", "tiny.yaml", "--reproduce", "--json")).json
    assert (found["trial"], found["same"], found["weights"]) == (best.number, True, "same")
    assert found["num_evaluations"] == len(best.evaluations) > 1
    assert found["cautions"] == [f"The trial was resumed at step {best.telemetry['resumed_from_step']}."]
