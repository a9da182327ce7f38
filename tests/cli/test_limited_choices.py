import re
from pathlib import Path
from typing import Any

from support.command_line import hpo_command, ok, stored
from support.tiny import tiny_study
from support.worker_process import result

from hpo.api import deploying
from hpo.compare.planning import Request, plan_comparison
from hpo.config.limits import broken_limits, violations
from hpo.report.dashboard import study_note
from hpo.report.tables import StudyTables
from hpo.study.reading.watch import StudyWatch
from hpo.study.running.worker import run_worker
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

RATES = {"learning_rate": {"type": "categorical", "choices": [1.0, 2.0, 3.0, 4.0, 5.0]}}
"""The higher the rate, the better the score and the more memory, in GB. The fifth trial ends early."""
COUNTS = (
    "{met} of 4 complete trials within all limits. Ended early over a limit: 1 trial. "
    "Not within `peak_memory_bytes <= {limit}`: {broken} trials."
)


def run_limited(folder: Path, limit: float) -> Any:
    """Run the tiny study by a worker without training; return its configuration."""
    limits, grid = {"peak_memory_bytes": {"max": limit}}, {"name": "grid"}
    config = tiny_study(folder, n_trials=5, sampler=grid, search_space=RATES, constraints=limits)
    (folder / "runs").mkdir()

    def execute(trial: Any, lease: Any) -> Any:
        rate = trial.suggest_categorical("learning_rate", RATES["learning_rate"]["choices"])
        lease.store_params()
        known = {"peak_memory_bytes": rate * 1e9}
        precision = {"requested": "fp32", "effective": "fp32", "agrees": True, "support": "native"}
        return result(
            "pruned" if rate == 5.0 else "complete",
            values=None if rate == 5.0 else (rate / 10,),
            reason=broken_limits(config.constraints, known),
            headline={"fp_precision_effective": "fp32"},
            constraints=violations(config.constraints, known),
            telemetry={**known, "precision": precision, "device": {"type": "cpu", "name": "CPU"}},
        )

    with open_storage(f"sqlite:///{folder}/runs/hpo.db") as storage:
        create_or_resume_study(storage, config)
        run_worker(config, storage, execute)
        look = StudyWatch(storage, config).read()
        met = [trial.values[0] for trial in stored(folder).trials if trial.values and not trial.reason]
        assert (look.best and look.best[0]) == max(met, default=None)
    return config


def test_every_command_chooses_the_best_trial_within_the_limits(tmp_path: Path) -> None:
    config = run_limited(tmp_path, 2.5e9)
    counts = COUNTS.format(met=2, limit="2.5e+09", broken=3)
    for command in ("status", "best"):
        text = ok(hpo_command(tmp_path, command, "tiny.yaml", width=1000)).out
        assert re.search(r"^best trial \d: score 0\.2$", text, re.MULTILINE)
        assert counts in text
    best = ok(hpo_command(tmp_path, "best", "tiny.yaml", "--json")).json
    limits = {"complete": 4, "met": 2, "ended_early": 1, "broken": {"peak_memory_bytes": 3}}
    assert best["limits"] == limits
    assert ok(hpo_command(tmp_path, "status", "tiny.yaml", "--json")).json["limits"] == limits
    (trial,) = best["trials"]
    record = stored(tmp_path)
    assert record.trials[trial["number"]].params["learning_rate"] == 2.0
    assert deploying.best_model_of(record).number == trial["number"]
    plan = plan_comparison(record, config, Request("precisions", ("fp32", "bf16"), top=9), "token")
    assert [one.params["learning_rate"] for one in plan.configurations] == [2.0, 1.0]
    note = study_note(StudyTables(record))
    assert counts in note
    assert f"- best trial {trial['number']}: score 0.2" in note
    page = tmp_path / ok(hpo_command(tmp_path, "report", "tiny.yaml", "--json")).json["report"]
    assert re.sub("`(.+)`", r"<code>\1</code>", counts.replace("<", "&lt;")) in page.read_text()


def test_without_a_trial_within_the_limits_the_nearest_is_shown(tmp_path: Path) -> None:
    run_limited(tmp_path, 5e8)
    record = stored(tmp_path)
    (number,) = (trial.number for trial in record.trials if trial.params["learning_rate"] == 1.0)
    nearest = f"Trial {number} is the nearest: peak_memory_bytes must be <= 5e+08, but is 1e+09."
    finished = hpo_command(tmp_path, "best", "tiny.yaml", width=1000)
    assert finished.exit_code == 1
    assert f"nearest trial {number}: score 0.1" in finished.out
    assert f"{COUNTS.format(met=0, limit='5e+08', broken=5)}\nNo complete trial meets" in finished.out
    commands = (("best", "tiny.yaml", "--export", "model"), ("deploy", "tiny.yaml"), ("compare", "tiny.yaml"))
    for command, exit_code in zip(commands, (1, 1, 2), strict=True):
        refused = hpo_command(tmp_path, *command, width=1000)
        assert refused.exit_code == exit_code
        assert nearest in refused.err
    assert f"- nearest trial {number}: score 0.1" in study_note(StudyTables(record))
