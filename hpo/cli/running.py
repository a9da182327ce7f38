"""The commands that train: `run`, `worker`, `init` and `train`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import (
    RUNS,
    JsonOption,
    NumTrialsOption,
    StorageOption,
    StudyArgument,
    TimeoutOption,
    app,
    make_runs_folder,
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
    from hpo.study.study_record import StudyRecord
    from hpo.study.worker import RunSummary


@app.command()
def run(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            metavar="W",
            help="Processes on this machine, spread over its GPUs.",
            show_default="1",
        ),
    ] = None,
    workers_per_device: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            metavar="K",
            help="Processes for each GPU of this machine, or on its CPU; not with --workers.",
        ),
    ] = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create or resume a study and run its trials here until its budget is used up."""
    from hpo.report.status import study_status
    from hpo.study.database import redact, storage_url
    from hpo.study.run import open_study, plan_workers, run_study

    if workers is not None and workers_per_device is not None:
        raise InputError(
            f"--workers {workers} counts all processes of this machine and --workers-per-device "
            f"{workers_per_device} those of each device. Give one of them."
        )
    config = _load(study, n_trials, timeout)
    url, places = storage_url(storage), plan_workers(config, workers or 1, workers_per_device)
    with (
        progress_shown(quiet=as_json),
        stop_signals() as stop,
        open_study(config, url, RUNS, trains_here=len(places) == 1) as opened,
    ):
        with _shown(opened, stop, quiet=as_json):
            summary = run_study(opened, places, stop=stop)
        record = opened.storage.read_study(config.name)
    if as_json:
        print_json(study_status(record) | {"ended": summary.ended, "left_out": opened.left_out})
    else:
        from hpo.cli.display import print_summary  # pandas: half a second that no trial should wait for

        print_summary(record)
        options = {
            "--storage": redact(url) if url != storage_url() else None,
            "--n-trials": n_trials,
            "--workers": workers,
            "--workers-per-device": workers_per_device,
            "--timeout": None if timeout is None else f"{timeout:g}",
        }
        given = [part for key, value in options.items() if value is not None for part in (key, str(value))]
        _say_how_it_ended(record.slots, summary, ["hpo", "run", study, *given])
    _exit(record, summary)


@app.command()
def worker(
    study: StudyArgument,
    storage: StorageOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join a study as a worker and leave when it is done."""
    from hpo.study.database import storage_url
    from hpo.study.run import open_study, run_study

    config = _load(study, None, timeout)
    with (
        progress_shown(quiet=as_json),
        stop_signals() as stop,
        open_study(config, storage_url(storage), RUNS, resize=False) as opened,
        _shown(opened, stop, quiet=as_json, own=True),
    ):
        summary = run_study(opened, stop=stop)
        slots = opened.storage.slot_counts(config.name)
    if as_json:
        found = {"study": config.name, "ended": summary.ended, "outcomes": summary.outcomes}
        print_json(found | {"left_out": opened.left_out})
    elif summary.ended == "elsewhere":
        _say_how_it_ended(slots, summary, ["hpo", "worker", study])
    if summary.outcomes and summary.outcomes.keys() == {Outcome.FAILED}:
        raise RunError(f"every trial that this worker ran failed: {summary.outcomes['failed']}.")
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

    config = _load(study, n_trials, None)
    with (
        progress_shown(quiet=as_json),
        open_study(config, storage_url(storage), RUNS, trains_here=False) as opened,
    ):
        total, ready_in = opened.config.n_trials, place(opened.storage.url)
    if as_json:
        print_json(study_status(opened.record))
    else:
        typer.echo(f"The study {config.name} with {total} trials is ready in {ready_in}.")


@app.command()
def train(
    study: StudyArgument,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="NAME=VALUE", help="A setting of the trial. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run one trial without a database and print the record that a study would store."""
    import uuid

    from hpo.config.study_config import load_study
    from hpo.config.trial_config import parse_params
    from hpo.device import probe_device
    from hpo.study.leases import trial_attributes
    from hpo.trial.executor import Executor
    from hpo.trial.telemetry import ScoredEvaluation

    params = parse_params(param or [])
    config = load_study(study)
    make_runs_folder(config.name)
    metrics = [objective.metric for objective in config.objective]

    def show(scored: ScoredEvaluation) -> None:
        evaluation = scored.evaluation
        if not as_json:
            values = "  ".join(
                f"{name} {value:.4g}" for name, value in zip(metrics, scored.values, strict=True)
            )
            used = f"{evaluation.budget_used:4.0%}  {evaluation.seconds:.1f} s"
            typer.echo(f"step {evaluation.step}  {used}  loss {evaluation.train_loss:.4g}  {values}")

    with progress_shown(quiet=as_json), stop_signals() as stop:
        executor = Executor(config, probe_device(config.device), RUNS)
        result = executor.run(params, None, uuid.uuid4().hex, show, stop.is_set)
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


def _load(study: str, n_trials: int | None, timeout: float | None) -> StudyConfig:
    """The study's file, with options in place of its keys; its folder under `runs/` can be written."""
    from hpo.config.study_config import load_study

    config = load_study(study)
    make_runs_folder(config.name)
    changes = {"n_trials": n_trials, "timeout": timeout}
    return config.with_values(**{key: value for key, value in changes.items() if value is not None})


@contextmanager
def _shown(opened: OpenStudy, stop: threading.Event, *, quiet: bool, own: bool = False) -> Iterator[None]:
    """Say which study is run and what of it is not, and show its progress during the block.

    `own`: of the trials of this process alone, and less often, as there may be a hundred such workers.
    """
    if quiet:
        yield
        return
    from hpo.cli.progress import StudyDisplay
    from hpo.study.database import place
    from hpo.study.watch import watching

    record, storage = opened.record, opened.storage
    done, total = record.slots["done"], sum(record.slots.values())
    state = "finished" if done == total else "resumed" if record.trials else "new"
    used = (record.definition[key]["name"] for key in ("sampler", "pruner"))
    typer.echo(
        f"Study {record.name} ({state}): {done} of {total} trials done, in {place(storage.url)}. "
        "Sampler {}, pruner {}.".format(*used)
    )
    if opened.left_out:
        reasons = " ".join(dict.fromkeys(opened.left_out.values()))
        typer.echo(
            f"Not run here: {', '.join(opened.left_out)}. {reasons} Workers on other devices may run them; "
            "`amp.on_unsupported` and `amp.allow_emulated` change that."
        )
    display = StudyDisplay(opened.config, record, lambda: storage.slot_counts(record.name)["done"], stop=stop)
    seconds = 2.0 if own else 0.5
    with display, watching(storage, record.name, display.update, own=own, seconds=seconds):
        yield


def _say_how_it_ended(slots: Mapping[str, int], summary: RunSummary, command: Sequence[str]) -> None:
    needed = " or ".join(summary.elsewhere)
    how = {
        "stopped": "Stopped and checkpointed",
        "timeout": "Out of time",
        "elsewhere": f"What is left needs a device with {needed}",
    }
    if summary.ended != "finished":
        where = " there" if summary.ended == "elsewhere" else ""
        done = f"{slots['done']} of {sum(slots.values())} trials done"
        typer.echo(f"{how[summary.ended]}: {done}. To go on{where}: {shlex.join(command)}")


def _exit(record: StudyRecord, summary: RunSummary) -> None:
    """End with the run's exit code. Raises RunError when the study has ended without any result."""
    from hpo.study.study_record import complete_trials

    if summary.ended == "finished" and not complete_trials(record):
        last = record.trials[-1]
        trace = last.attributes.get("traceback")
        raise RunError(
            f"the study has ended without a complete trial. The last one ended as {last.outcome}: "
            f"{last.reason}" + (f"\n{trace}" if trace else "")
        )
    raise typer.Exit(summary.exit_code)
