"""The commands to prepare a study and run its trials."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from hpo.api.managed import ManagedStudy


@study_command("n_trials", "hours", *WORK, *TRUST)
def run(study: hpo.Study, **options: Any) -> Any:
    """Create or resume a study and run its trials here until its budget is used up."""
    return study.run(**options)


@study_command(*TRUST)
def check(study: hpo.Study) -> Any:
    """Describe a study's data and their faults, before training."""
    return study.check()


@study_command(
    *TRUST,
    repeats=optional(int, "N", "Timed passes of each precision; their median counts.", min=1, default="3"),
)
def verify(study: hpo.Study, **options: Any) -> Answer:
    """Check each precision on this machine: support, errors, speed and memory against fp32."""
    from hpo.device import probe_device
    from hpo.report.trial_screens import verification
    from hpo.trial.verify import recommendation

    device = probe_device(study.config.device)
    checks = study.verify(**options)
    advice = recommendation(checks)
    rows = [asdict(one) for one in checks]
    content = {"device": asdict(device), "precisions": rows, "recommendation": advice}
    return Answer(content, verification(checks, device.describe(), advice))


@study_command(
    *("n_trials", "hours"),
    *TRUST,
    workers=optional(int, "W", "Number of workers.", min=1, default="the live ones, or one"),
)
def plan(study: hpo.Study, **options: Any) -> Any:
    """Estimate a study's cost: hours, starts, and the number of trials that reach the end.

    The estimate uses its complete trials. For a precision without one, some steps are trained here.
    """
    return study.plan(**options)


@command("params", study=StudyArgument)
def train(study: str, params: list[str], *, as_json: bool) -> Answer:
    """Run one trial without a database, and print its record."""
    from hpo.config.trial_config import parse_params
    from hpo.outcome import Outcome
    from hpo.report.trial_screens import evaluation, trial, trial_record

    opened = hpo.Study(study, quiet=as_json)
    metrics = [objective.metric for objective in opened.file.objective]
    given = parse_params(params)  # may name the study's own code
    show = partial(evaluation, metrics)
    result = opened.train(given, lambda scored: None if as_json else typer.echo(show(scored)))
    record = trial_record(metrics, given, result)
    if result.traceback and not as_json:
        typer.echo(result.traceback, err=True)
    codes = {Outcome.COMPLETE: 0, Outcome.PREEMPTED: 130}
    return Answer(record, trial(record), codes.get(result.outcome, 1))


@stored_study_command(
    "params", needs_models=False, whole=flag("--whole", "Run the trial to its end, without pruning.")
)
def enqueue(study: ManagedStudy, **options: Any) -> Any:
    """Queue a configuration; the sampler fills in the rest.

    It becomes one of the study's trials, after the configurations before it in the queue.
    """
    return study.enqueue(**options)
