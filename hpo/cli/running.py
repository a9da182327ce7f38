"""The commands that train with a study file: `run`, `init` and `train`."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import (
    MAX_RESTARTS,
    RUNS,
    JsonOption,
    MaxRestartsOption,
    NumTrialsOption,
    StorageOption,
    StudyArgument,
    TimeoutOption,
    UntilOption,
    WorkersOption,
    WorkersPerDeviceOption,
    app,
    file_given,
    load_to_run,
    print_json,
    progress_shown,
    stop_signals,
)
from hpo.errors import InputError, RunError
from hpo.outcome import Outcome

if TYPE_CHECKING:
    import threading

    from hpo.config.study_config import StudyConfig
    from hpo.study.run import OpenStudy
    from hpo.study.stopping import Stop
    from hpo.study.study_record import StudyRecord
    from hpo.study.supervisor import WorkerPlace
    from hpo.study.worker import RunSummary
    from hpo.training.distributed import Ranks
    from hpo.trial.telemetry import ScoredEvaluation


@app.command()
def run(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    workers: WorkersOption = None,
    workers_per_device: WorkersPerDeviceOption = None,
    max_restarts: MaxRestartsOption = MAX_RESTARTS,
    timeout: TimeoutOption = None,
    until: UntilOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create or resume a study and run its trials here until its budget is used up."""
    from hpo.report.status import study_status
    from hpo.study.run import plan_workers
    from hpo.study.stopping import end_of_job
    from hpo.study.study_record import complete_trials

    end = end_of_job(until)
    check_one_of(workers, workers_per_device)
    config = load_to_run(study, n_trials=n_trials, timeout=timeout)
    if "TORCHELASTIC_RUN_ID" in os.environ and (workers or workers_per_device):
        raise InputError(
            "the processes of torchrun are one worker: --workers and --workers-per-device must be left out."
        )
    places = plan_workers(config, workers or 1, workers_per_device)
    with (
        progress_shown(quiet=as_json),
        stop_signals(end) as stop,
        ranks_of_torchrun(stop) as ranks,
    ):
        record, summary, left_out = run_here(
            config, places, stop, storage, quiet=as_json, max_restarts=max_restarts, ranks=ranks
        )
    if as_json:
        print_json(study_status(record) | {"ended": summary.ended, "left_out": left_out})
    else:
        from hpo.cli.display import print_summary  # pandas: half a second that no trial should wait for

        print_summary(record)
        if summary.ended != "finished":
            say_how_to_go_on(record, summary)
    if summary.ended == "finished" and not complete_trials(record):
        raise RunError(_why_nothing_came_out(record))
    raise typer.Exit(summary.exit_code)


@app.command()
def init(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the study, and make the tables and the study, once, before workers start."""
    from hpo.report.status import study_status
    from hpo.study.database import place, storage_url
    from hpo.study.run import open_study

    config, url = load_to_run(study, n_trials=n_trials), storage_url(storage)
    with (
        progress_shown(quiet=as_json),
        open_study(
            config, url, RUNS, trials_run="elsewhere", trust_remote_code=config.model.trust_remote_code
        ) as opened,
    ):
        total, record = opened.config.n_trials, opened.record
    if as_json:
        print_json(study_status(record))
    else:
        typer.echo(f"The study {config.name} with {total} trials is ready in {place(url)}.")


@app.command()
def train(
    study: StudyArgument,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="NAME=VALUE", help="A setting of the trial. Repeatable."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write a model that transformers and hpo load."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run one trial without a database and print the record that a study would store."""
    from hpo.config.study_config import of_deployed
    from hpo.config.trial_config import parse_params
    from hpo.device import probe_device
    from hpo.study.leases import trial_attributes
    from hpo.trial.best_model import export_checkpoint
    from hpo.trial.executor import Executor
    from hpo.trial.objectives import values_while_training
    from hpo.trial.provenance import TrialSource

    params = parse_params(param or [])
    if export is not None:
        from hpo.models.export import check_export_folder

        check_export_folder(export)
    config = load_to_run(study)
    metrics = [objective.metric for objective in config.objective]
    exported = None

    def show(scored: ScoredEvaluation) -> None:
        evaluation = scored.evaluation
        if not as_json:
            named = values_while_training(metrics, scored.values)
            values = "  ".join(f"{name} {value:.4g}" for name, value in named.items())
            used = f"{evaluation.budget_used:4.0%}  {evaluation.seconds:.1f} s"
            typer.echo(f"step {evaluation.step}  {used}  loss {evaluation.train_loss:.4g}  {values}")

    with (
        progress_shown(quiet=as_json),
        stop_signals() as stop,
        ranks_of_torchrun(stop) as ranks,
        tempfile.TemporaryDirectory(prefix="hpo-train-") as temporary,
    ):
        executor = Executor(config, probe_device(config.device), RUNS)
        executor.ranks = ranks or executor.ranks
        is_deployed = of_deployed(config.objective)
        folder = Path(temporary, "trial") if export is not None or is_deployed else None
        result = executor.run(params, folder, uuid.uuid4().hex, show, stop.is_set)
        if folder is not None and is_deployed:
            from hpo.deploy.objective import with_deployed_values

            result = with_deployed_values(executor, folder, result)
        if folder is not None and export is not None and result.outcome == Outcome.COMPLETE:
            source = TrialSource(None, params, result.telemetry)
            exported = str(export_checkpoint(executor, folder, export, source))
    record = {
        "params": params,
        "values": None if result.values is None else dict(zip(metrics, result.values, strict=True)),
        **trial_attributes(result),
    }
    if exported is not None:
        record["export"] = exported
    if as_json:
        print_json(record)
    else:
        from hpo.cli.display import print_trial  # pandas, as in `run`

        print_trial(record)
        if result.traceback:
            typer.echo(result.traceback, err=True)
        if exported is not None:
            typer.echo(f"The model is exported to {exported}.")
    raise typer.Exit({Outcome.COMPLETE: 0, Outcome.PREEMPTED: 130}.get(result.outcome, 1))


def check_one_of(workers: int | None, per_device: int | None) -> None:
    if workers is not None and per_device is not None:
        raise InputError(
            f"--workers {workers} counts all processes of this machine and --workers-per-device "
            f"{per_device} those of each device. Give one of them."
        )


@contextmanager
def ranks_of_torchrun(stop: threading.Event) -> Iterator[Ranks | None]:
    """The processes of torchrun, which train each trial together; None: it did not start this one.

    The first of them runs the block. The others follow it until it leaves, and end their command then.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    from hpo.training.distributed import connected_ranks
    from hpo.trial.executor import follow

    with connected_ranks() as ranks:
        if not ranks.is_main:
            logging.getLogger("hpo").setLevel(logging.ERROR)  # the first one says it
            follow(ranks, RUNS, stop.is_set)
            raise typer.Exit
        yield ranks


def run_here(
    config: StudyConfig,
    places: Sequence[WorkerPlace],
    stop: Stop,
    storage: str | None,
    *,
    quiet: bool,
    max_restarts: int = MAX_RESTARTS,
    ranks: Ranks | None = None,
) -> tuple[StudyRecord, RunSummary, Mapping[str, str]]:
    """Make or resume a study of the user's own and run its trials on this machine, as `run_study` does.

    Args:
        places: of `plan_workers`.
        storage: the option.
        quiet: show no progress.

    Returns the study as it is then, how the run ended, and the precisions that were left out, with reasons.
    """
    from hpo.study.database import storage_url
    from hpo.study.run import open_study, run_study

    with open_study(
        config,
        storage_url(storage),
        RUNS,
        trials_run="in workers" if places else "in this process",
        trust_remote_code=config.model.trust_remote_code,
        ranks=ranks,
    ) as opened:
        with shown(opened, stop, quiet=quiet):
            summary = run_study(
                opened,
                places,
                stop=stop,
                max_restarts=max_restarts,
                storage_as_given=file_given(storage),
            )
        return opened.storage.read_study(config.name), summary, opened.left_out


@contextmanager
def shown(opened: OpenStudy, stop: threading.Event, *, quiet: bool, own: bool = False) -> Iterator[None]:
    """Say which study is run and what of it is not, and show its progress during the block.

    `own`: of the trials of this process alone, and less often, as there may be a hundred such workers.
    """
    if quiet:
        yield
        return
    from hpo.cli.progress import StudyDisplay
    from hpo.study.database import place
    from hpo.study.watch import watching

    record, storage, config = opened.record, opened.storage, opened.config
    done, total = record.slots["done"], config.n_trials
    state = "finished" if done == total else "resumed" if record.trials else "new"
    typer.echo(
        f"Study {record.name} ({state}): {done} of {total} trials done, in {place(storage.url)}. "
        f"Sampler {config.sampler.name}, pruner {config.pruner.name}."
    )
    if opened.left_out:
        reasons = " ".join(dict.fromkeys(opened.left_out.values()))
        typer.echo(
            f"Not run here: {', '.join(opened.left_out)}. {reasons} Workers on other devices may run them; "
            "`amp.on_unsupported` and `amp.allow_emulated` change that."
        )
    for line in opened.data_advice:
        typer.echo(f"Data: {line}")
    if opened.data_advice:
        typer.echo(f"More of the data: hpo check {config.path}")
    display = StudyDisplay(config, record, lambda: storage.slot_counts(record.name)["done"], stop=stop)
    with display, watching(storage, config, display.update, own=own, seconds=2.0 if own else 0.5):
        yield


def say_how_to_go_on(record: StudyRecord, summary: RunSummary) -> None:
    """Say why a run ended before its study, and by which command, as it was given, it goes on."""
    from hpo.study.database import redact

    slots = record.slots
    if summary.ended == "halted":
        typer.echo(
            f"The study {record.name} is {record.state}: {slots['done']} of {sum(slots.values())} trials "
            f"done. To open it again: hpo resume {record.name}"
        )
        return
    why = {
        "stopped": "Stopped and checkpointed",
        "timeout": "Out of time",
        "elsewhere": f"What is left needs a device with {' or '.join(summary.elsewhere)}",
    }[summary.ended]
    where = " there" if summary.ended == "elsewhere" else ""
    command = shlex.join(["hpo", *map(redact, sys.argv[1:])])
    done = f"{slots['done']} of {sum(slots.values())} trials done"
    typer.echo(f"{why}: {done}. To go on{where}: {command}")


def _why_nothing_came_out(record: StudyRecord) -> str:
    last = next(trial for trial in reversed(record.trials) if trial.state != "WAITING")
    trace = last.attributes.get("traceback")
    return (
        f"the study has ended without a complete trial. The last one ended as {last.outcome}: "
        f"{last.reason}" + (f"\n{trace}" if trace else "")
    )
