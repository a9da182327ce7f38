from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.command_line import hpo_command, ok, stored
from support.tiny import tiny_study
from support.worker_process import result

from hpo.api import deploying
from hpo.compare.comparison_study import comparison_study
from hpo.compare.planning import Request, plan_comparison
from hpo.config.limits import broken_limits, violations
from hpo.report.dashboard import study_note
from hpo.report.tables import StudyTables
from hpo.study.reading.watch import StudyWatch
from hpo.study.running.worker import run_worker
from hpo.study.store.storage import open_storage
from hpo.study.store.studies import create_or_resume_study

RATES = {"learning_rate": {"type": "categorical", "choices": [1.0, 2.0, 3.0, 4.0, 5.0]}}
"""The higher, the better the score, and the more memory it takes: so many GB. The fifth ends early."""
SAID = (
    "{met} of 4 complete trials within all limits. Ended early over a limit: 1 trial. "
    "Not within `peak_memory_bytes <= {limit}`: {broken} trials."
)
NEAREST = (
    "No complete trial meets the limits of the study. Trial {number} is the nearest: peak_memory_bytes must "
    "be <= 5e+08, but is 1e+09."
)


def planted(folder: Path, **limit: float) -> None:
    """The tiny study, run by a worker that trains nothing."""
    config = tiny_study(
        folder,
        n_trials=5,
        sampler={"name": "grid"},
        search_space=RATES,
        constraints={"peak_memory_bytes": limit},
    )
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
        look = StudyWatch(storage, config).look()
        met = [trial.values[0] for trial in stored(folder).trials if trial.values and not trial.reason]
        assert (look.best and look.best[0]) == max(met, default=None)


def rate_of(folder: Path, number: int) -> float:
    return float(stored(folder).trials[number].params["learning_rate"])


def test_every_command_takes_the_best_that_meets_the_limits(tmp_path: Path) -> None:
    planted(tmp_path, max=2.5e9)
    said = SAID.format(met=2, limit="2.5e+09", broken=3)
    for command in ("status", "best"):
        text = ok(hpo_command(tmp_path, command, "tiny.yaml", width=1000)).out
        assert re.search(r"^best trial \d: score 0\.2$", text, re.MULTILINE)
        assert said in text
    best = ok(hpo_command(tmp_path, "best", "tiny.yaml", "--json")).json
    counts = {"complete": 4, "met": 2, "ended_early": 1, "broken": {"peak_memory_bytes": 3}}
    assert (
        best["limits"] == counts == ok(hpo_command(tmp_path, "status", "tiny.yaml", "--json")).json["limits"]
    )
    (trial,) = best["trials"]
    assert rate_of(tmp_path, trial["number"]) == 2.0
    record = stored(tmp_path)
    assert deploying.best_model_of(record).number == trial["number"]
    config = tiny_study(
        tmp_path, n_trials=5, search_space=RATES, constraints={"peak_memory_bytes": {"max": 2.5e9}}
    )
    plan = plan_comparison(record, config, Request("precisions", ("fp32", "bf16"), top=9), "token")
    assert [one.params["learning_rate"] for one in plan.configurations] == [2.0, 1.0]
    assert comparison_study(config, plan, has_test=True).constraints == {}
    note = study_note(StudyTables(record))
    assert said in note
    assert f"- best trial {trial['number']}: score 0.2" in note
    page = Path(ok(hpo_command(tmp_path, "report", "tiny.yaml", "--json")).json["report"])
    assert re.sub("`(.+)`", r"<code>\1</code>", said.replace("<", "&lt;")) in (tmp_path / page).read_text()


def test_where_none_meets_them_the_nearest_is_shown_and_nothing_chosen(tmp_path: Path) -> None:
    planted(tmp_path, max=5e8)
    record = stored(tmp_path)
    (number,) = (trial.number for trial in record.trials if trial.params["learning_rate"] == 1.0)
    nearest, said = NEAREST.format(number=number), SAID.format(met=0, limit="5e+08", broken=5)
    ok(hpo_command(tmp_path, "status", "tiny.yaml"))
    finished = hpo_command(tmp_path, "best", "tiny.yaml", width=1000)
    assert finished.exit_code == 1
    assert f"nearest trial {number}: score 0.1" in finished.out
    assert f"{said}\n{nearest}" in finished.out
    exported = hpo_command(tmp_path, "best", "tiny.yaml", "--export", "model", width=1000)
    deployed = hpo_command(tmp_path, "deploy", "tiny.yaml", width=1000)
    compared = hpo_command(tmp_path, "compare", "tiny.yaml", width=1000)
    assert [one.exit_code for one in (exported, deployed, compared)] == [1, 1, 2]
    for refused in (exported, deployed, compared):
        assert nearest in refused.err
    assert f"- nearest trial {number}: score 0.1" in study_note(StudyTables(record))
    page = tmp_path / ok(hpo_command(tmp_path, "report", "tiny.yaml", "--json")).json["report"]
    assert "not met: it is the nearest" in page.read_text()
