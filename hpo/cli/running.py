"""The commands that train with a study file: `run`, `init` and `train`."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from hpo.cli.options import (
    RUNS,
    WORK_OPTIONS,
    HoursOption,
    JsonOption,
    NumTrialsOption,
    ParamOption,
    StorageOption,
    StudyArgument,
    answer,
    app,
    check_work_options,
    load_to_run,
    make_runs_folder,
    print_json,
    progress_shown,
    stop_signals,
    trials_done,
    with_options,
    worker_processes,
)
from hpo.cli.planning import say_what_it_buys
from hpo.errors import RunError
from hpo.outcome import Outcome

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.study.reading.study_record import StudyRecord
    from hpo.study.running.run import OpenStudy
    from hpo.study.running.stopping import Stop
    from hpo.study.running.supervisor import WorkerProcesses
    from hpo.study.running.worker import RunSummary
    from hpo.trial.callbacks import Callbacks
    from hpo.trial.telemetry import ScoredEvaluation, TrialResult


@app.command()
@with_options(WORK_OPTIONS)
def run(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    hours: HoursOption = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Create or resume a study and run its trials here until its budget is used up."""
    from hpo.report.status import study_status
    from hpo.study.reading.study_record import complete_trials

    check_work_options(options)
    config = load_to_run(study, n_trials, hours)
    processes = worker_processes(config, storage, options)
    with (
        progress_shown(quiet=as_json),
        stop_signals(options["until"], options["timeout"]) as stop,
        ranks_of_torchrun(),
    ):
        record, summary, left_out = run_here(config, processes, stop, storage, quiet=as_json)
    if as_json:
        print_json(study_status(record) | {"ended": summary.ended, "left_out": left_out})
    else:
        from hpo.cli.display import print_summary  # pandas: half a second that no trial should wait for

        print_summary(record)
        if summary.ended != "finished":
            say_how_to_go_on(record, summary)
    if summary.ended == "finished" and not complete_trials(record):
        raise RunError(_why_no_result(record))
    raise typer.Exit(summary.exit_code)


@app.command()
def init(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    hours: HoursOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the study, and make the tables and the study, once, before workers start."""
    from hpo.report.status import study_status
    from hpo.study.reading.reader import read_study
    from hpo.study.running.run import OpenOptions, open_study
    from hpo.study.store.database import place, storage_url

    config, url = load_to_run(study, n_trials, hours), storage_url(storage)
    options = OpenOptions(trials_run="elsewhere", is_file=True)
    with progress_shown(quiet=as_json), open_study(config, url, RUNS, options) as opened:
        total, record = opened.config.n_trials, read_study(opened.storage, config.name)
    text = f"The study {config.name} with {total} trials is ready in {place(url)}."
    answer(study_status(record), text, as_json=as_json)


@app.command()
def train(
    study: StudyArgument,
    param: ParamOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Run one trial without a database and print the record that a study would store."""
    from hpo.config.study_config import load_study
    from hpo.config.trial_config import parse_params
    from hpo.study.claims.lease import trial_attributes
    from hpo.trial.callbacks import Callbacks

    config = load_study(study)
    params = parse_params(param)  # of what the study's own code brings too
    make_runs_folder(config.name)
    metrics = [objective.metric for objective in config.objective]

    def show(scored: ScoredEvaluation) -> None:
        evaluation = scored.evaluation
        if not as_json:
            named = zip(metrics, scored.values, strict=True)
            values = "  ".join(f"{name} {value:.4g}" for name, value in named)
            used = f"{evaluation.budget_used:4.0%}  {evaluation.seconds:.1f} s"
            typer.echo(f"step {evaluation.step}  {used}  loss {evaluation.train_loss:.4g}  {values}")

    with progress_shown(quiet=as_json), stop_signals() as stop, ranks_of_torchrun():
        result = _train(config, params, Callbacks(show, stop.is_set), stop)
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


def _train(config: StudyConfig, params: Mapping[str, Any], callbacks: Callbacks, stop: Stop) -> TrialResult:
    """Run one trial with `params`, which leaves no checkpoint."""
    from hpo.device import probe_device
    from hpo.trial.executor import Executor

    executor = Executor(config, probe_device(config.device), RUNS)
    stop.can_checkpoint = True
    return executor.run(params, None, uuid.uuid4().hex, callbacks)


@contextmanager
def ranks_of_torchrun() -> Iterator[None]:
    """Connect the processes of torchrun, which train each trial together, if it started this one.

    The first of them runs the block. The others follow it until it leaves, and end their command then.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    from hpo.training.distributed import connected_ranks, rank
    from hpo.trial.executor import follow

    with connected_ranks():
        if rank():
            logging.getLogger("hpo").setLevel(logging.ERROR)  # the first one says it
            follow(RUNS)
            raise typer.Exit
        yield


def run_here(
    config: StudyConfig,
    processes: WorkerProcesses,
    stop: Stop,
    storage: str | None,
    *,
    quiet: bool,
) -> tuple[StudyRecord, RunSummary, Mapping[str, str]]:
    """Make or resume a study of a study file and run its trials on this machine, as `run_study` does.

    Args:
        processes: in which its trials run; without shares, in this one.
        storage: the option.
        quiet: show no progress.

    Returns the study as it is then, how the run ended, and the precisions that were left out, with reasons.
    """
    from hpo.study.reading.reader import read_study
    from hpo.study.running.run import OpenOptions, open_study, run_study
    from hpo.study.store.database import storage_url
    from hpo.track.beside import tracked

    options = OpenOptions(
        trials_run="in workers" if processes.shares else "in this process",
        is_file=True,
    )
    with open_study(config, storage_url(storage), RUNS, options) as opened:
        is_new = opened.stored.state == "open" and not opened.stored.has_trained
        if config.budget is not None and is_new and not quiet and "TORCHELASTIC_RUN_ID" not in os.environ:
            say_what_it_buys(opened.config, max(1, len(processes.shares)), stop.is_set)
        url = processes.storage_as_given or opened.storage.url
        with tracked(config.name, config.tracker, url, RUNS), shown(opened, quiet=quiet):
            summary = run_study(opened, processes, stop=stop)
        return read_study(opened.storage, config.name), summary, opened.left_out


@contextmanager
def shown(opened: OpenStudy, *, quiet: bool, own: bool = False) -> Iterator[None]:
    """Say which study is run and what of it is not, and show its progress during the block.

    `own`: of the trials of this process alone, and less often, as there may be a hundred such workers.
    """
    if quiet:
        yield
        return
    from hpo.cli.progress import StudyDisplay
    from hpo.study.reading.watch import StudyWatch, watching
    from hpo.study.store.database import place

    stored, storage, config = opened.stored, opened.storage, opened.config
    done = stored.slots["done"]
    state = "finished" if done == config.n_trials else "resumed" if done or stored.has_trained else "new"
    counts = trials_done(stored.slots, has_budget=config.budget is not None)
    typer.echo(
        f"Study {config.name} ({state}): {counts}, in {place(storage.url)}. "
        f"Sampler {config.sampler.name}, pruner {config.pruner.name}."
    )
    if opened.left_out:
        reasons = " ".join(dict.fromkeys(opened.left_out.values()))
        typer.echo(
            f"Not run here: {', '.join(opened.left_out)}. {reasons} Workers on other devices may run them; "
            "`amp.on_unsupported` and `amp.allow_emulated` change that."
        )
    display = StudyDisplay(config, done)
    seconds = 2.0 if own else 0.5
    with display, watching(StudyWatch(storage, config, own=own), display.show, seconds):
        yield


def say_how_to_go_on(record: StudyRecord, summary: RunSummary) -> None:
    """Say why a run ended before its study, and by which command, as it was given, it goes on."""
    from hpo.study.store.database import redact

    counts = trials_done(record.slots, has_budget=record.definition.get("budget") is not None)
    if summary.ended == "closed":
        typer.echo(
            f"The study {record.name} is {record.state}: {counts}. To open it again: hpo resume {record.name}"
        )
        return
    why = {
        "stopped": "Stopped and checkpointed",
        "timeout": "Out of time",
        "elsewhere": f"What is left needs a device with {' or '.join(summary.elsewhere)}",
    }[summary.ended]
    where = " there" if summary.ended == "elsewhere" else ""
    command = shlex.join(["hpo", *map(redact, sys.argv[1:])])
    typer.echo(f"{why}: {counts}. To go on{where}: {command}")


def _why_no_result(record: StudyRecord) -> str:
    last = next(trial for trial in reversed(record.trials) if trial.state != "WAITING")
    trace = last.attributes.get("traceback")
    return (
        f"the study has ended without a complete trial. The last one ended as {last.outcome}: "
        f"{last.reason}" + (f"\n{trace}" if trace else "")
    )
