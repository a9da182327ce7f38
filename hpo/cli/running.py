"""The commands that train with a study file: `run`, `init` and `train`."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from hpo.cli.options import (
    WORK_OPTIONS,
    HoursOption,
    JsonOption,
    NumTrialsOption,
    ParamOption,
    StorageOption,
    StudyArgument,
    answer,
    app,
    ended_at_once,
    print_json,
    study_command,
)
from hpo.errors import RunError
from hpo.outcome import Outcome

if TYPE_CHECKING:
    from hpo.api.running import RunResult
    from hpo.api.study import Study
    from hpo.study.reading.study_record import StudyRecord
    from hpo.study.running.worker import RunSummary
    from hpo.trial.telemetry import ScoredEvaluation


@study_command(WORK_OPTIONS, runs_code=False)
def run(
    opened: Study,
    as_json: bool,
    n_trials: NumTrialsOption = None,
    hours: HoursOption = None,
    **options: Any,
) -> None:
    """Create or resume a study and run its trials here until its budget is used up."""
    from hpo.study.reading.study_record import complete_trials

    with ended_at_once():
        result = opened.run(n_trials=n_trials, hours=hours, **options)
    record = result.record
    if as_json:
        print_json(run_told(result))
    else:
        from hpo.cli.display import print_summary  # pandas: half a second that no trial should wait for

        print_summary(record)
        if result.ended != "finished":
            say_how_to_go_on(result)
    if result.ended == "finished" and not complete_trials(record):
        raise RunError(_why_no_result(record))
    end_with(result, record.name)


def end_with(summary: RunSummary, study: str) -> NoReturn:
    """End the command with the exit code of the run. Raises RunError where most trials failed."""
    if summary.exit_code == 1:
        total, why = sum(summary.outcomes.values()), f"`hpo report {study}` shows why."
        raise RunError(f"{summary.num_failed} of the {total} trials that ended here failed. {why}")
    raise typer.Exit(summary.exit_code)


def run_told(result: RunResult) -> dict[str, Any]:
    """What `--json` tells of a run."""
    from hpo.report.status import study_status

    return study_status(result.record) | {"ended": result.ended, "left_out": result.left_out}


@app.command()
def init(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    hours: HoursOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the study, and make the tables and the study, once, before workers start."""
    from hpo.api.study import Study
    from hpo.report.status import study_status
    from hpo.study.store.database import place, storage_url

    record = Study(study, storage=storage, quiet=as_json).init(n_trials=n_trials, hours=hours)
    total, where = sum(record.counts.values()), place(storage_url(storage))
    text = f"The study {record.name} with {total} trials is ready in {where}."
    answer(study_status(record), text, as_json=as_json)


@app.command()
def train(
    study: StudyArgument,
    param: ParamOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Run one trial without a database and print the record that a study would store."""
    from hpo.api.study import Study
    from hpo.config.trial_config import parse_params
    from hpo.study.claims.lease import trial_attributes

    opened = Study(study, quiet=as_json)
    metrics = [objective.metric for objective in opened.file.objective]
    params = parse_params(param)  # of what the study's own code brings too

    def show(scored: ScoredEvaluation) -> None:
        evaluation = scored.evaluation
        if not as_json:
            named = zip(metrics, scored.values, strict=True)
            values = "  ".join(f"{name} {value:.4g}" for name, value in named)
            used = f"{evaluation.budget_used:4.0%}  {evaluation.seconds:.1f} s"
            typer.echo(f"step {evaluation.step}  {used}  loss {evaluation.train_loss:.4g}  {values}")

    with ended_at_once():
        result = opened.train(params, show)
    record = {
        "params": params,
        "values": None if result.values is None else dict(zip(metrics, result.values, strict=True)),
        **trial_attributes(result),
    }
    if as_json:
        print_json(record)
    else:
        from hpo.cli.display import print_trial  # pandas, as in `run`

        print_trial(record)
        if result.traceback:
            typer.echo(result.traceback, err=True)
    raise typer.Exit({Outcome.COMPLETE: 0, Outcome.PREEMPTED: 130}.get(result.outcome, 1))


def say_how_to_go_on(result: RunResult) -> None:
    """Say why a run ended before its study, and by which command, as it was given, it goes on."""
    from hpo.report.formats import trials_done
    from hpo.study.store.database import redact

    record = result.record
    counts = trials_done(record.counts, has_budget=record.definition.get("budget") is not None)
    if result.ended == "closed":
        typer.echo(
            f"The study {record.name} is {record.state}: {counts}. To open it again: hpo resume {record.name}"
        )
        return
    why = {
        "stopped": "Stopped and checkpointed",
        "timeout": "Out of time",
        "elsewhere": f"What is left needs a device with {' or '.join(result.elsewhere)}",
    }[result.ended]
    where = " there" if result.ended == "elsewhere" else ""
    command = shlex.join(["hpo", *map(redact, sys.argv[1:])])
    typer.echo(f"{why}: {counts}. To go on{where}: {command}")


def _why_no_result(record: StudyRecord) -> str:
    last = next(trial for trial in reversed(record.trials) if trial.state != "WAITING")
    trace = last.attributes.get("traceback")
    return (
        f"the study has ended without a complete trial. The last one ended as {last.outcome}: "
        f"{last.reason}" + (f"\n{trace}" if trace else "")
    )
