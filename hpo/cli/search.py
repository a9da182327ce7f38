"""The commands that prepare a study and run its trials."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer

import hpo
from hpo.cli.options import (
    TRUST,
    WORK,
    Answer,
    StudyArgument,
    command,
    flag,
    optional,
    stored_study_command,
    study_command,
)


@study_command("n_trials", "hours", *WORK)
def run(study: hpo.Study, **options: Any) -> Any:
    """Create or resume a study and run its trials here until its budget is used up."""
    return study.run(**options)


@study_command(*TRUST)
def check(study: hpo.Study) -> Any:
    """Show what a study's data hold and what to change, before anything is trained."""
    return study.check()


@study_command(
    *TRUST,
    repeats=optional(int, "N", "Timed passes of each precision; the fastest counts.", min=1, default="3"),
)
def verify(study: hpo.Study, **options: Any) -> Answer:
    """Show what this machine does with each precision: support, errors, speed and memory against fp32."""
    from dataclasses import asdict

    from hpo.device import probe_device
    from hpo.report.trial_screens import verification
    from hpo.trial.verify import recommendation

    checks = study.verify(**options)
    device, advice = probe_device(study.config.device), recommendation(checks)
    rows = [asdict(one) for one in checks]
    content = {"device": asdict(device), "precisions": rows, "recommendation": advice}
    return Answer(content, verification(checks, device.describe(), advice))


@study_command(
    *("n_trials", "hours"),
    *TRUST,
    workers=optional(int, "W", "So many work.", min=1, default="those that do, or one"),
)
def plan(study: hpo.Study, **options: Any) -> Any:
    """Show what a study's trials or its budget come to: hours, starts, and how many go on to the end.

    By its complete trials; in a precision of which there is none, some steps are trained here.
    """
    return study.plan(**options)


@command("params", study=StudyArgument)
def train(study: str, params: list[str], *, as_json: bool) -> Answer:
    """Run one trial without a database and print the record that a study would store."""
    from hpo.config.trial_config import parse_params
    from hpo.outcome import Outcome
    from hpo.report.trial_screens import evaluation, trial, trial_record

    opened = hpo.Study(study, quiet=as_json)
    metrics = [objective.metric for objective in opened.file.objective]
    given = parse_params(params)  # also of what the study's own code brings
    show = partial(evaluation, metrics)
    result = opened.train(given, lambda scored: None if as_json else typer.echo(show(scored)))
    record = trial_record(metrics, given, result)
    if result.traceback and not as_json:
        typer.echo(result.traceback, err=True)
    codes = {Outcome.COMPLETE: 0, Outcome.PREEMPTED: 130}
    return Answer(record, trial(record), codes.get(result.outcome, 1))


@stored_study_command("params", whole=flag("--whole", "Run the trial to its end: no pruner stops it."))
def enqueue(study: hpo.Study, **options: Any) -> Any:
    """Have a trial of a study try a configuration; what is left out the sampler draws.

    It takes one of the trials that the study has left to begin, after those that were enqueued before.
    """
    return study.enqueue(**options)
