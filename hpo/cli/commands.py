"""The command line: thin commands over the library, each imports what it needs when it runs.

Importing this module must stay cheap (`hpo --help` answers in under 0.5 s), so PyTorch, Optuna and the
rest are imported inside the commands.

Exit codes: 0 done; 1 the run failed; 2 the user's input is wrong; 130 interrupted, and checkpointed. An
exception that nobody meant to raise is a bug: it ends with its traceback and 1.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.errors import HpoError, InputError, RunError
from hpo.outcome import Outcome

if TYPE_CHECKING:
    import threading

    from hpo.config.study_config import StudyConfig
    from hpo.study.storage import Storage
    from hpo.study.study_record import StudyRecord
    from hpo.study.worker import RunSummary

app = typer.Typer(
    help="Hyperparameter search for multitask transformer encoders, with precision as a searched dimension.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _positive_seconds(value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"must be a number of seconds > 0, but got {value:g}.")
    return value


StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="A name in studies/, or a YAML file.")]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        envvar="HPO_STORAGE",
        help="Database of the study: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.",
        show_default="sqlite:///runs/hpo.db",
        show_envvar=True,
    ),
]
NumTrialsOption = Annotated[
    int | None,
    typer.Option(min=1, max=1_000_000, metavar="N", help="Total of the study, over all workers and runs."),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", callback=_positive_seconds, help="No further trial begins after so long."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RUNS = Path("runs")
TRAIN_PREFIX = "train-"
"""Of the folders of `hpo train` beside those of the study's trials."""


def main() -> None:
    """Run the command line; what is raised on purpose becomes one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no error
    try:
        app(prog_name="hpo")
    except HpoError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(error.exit_code)


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
    from hpo.config.study_config import load_study
    from hpo.report.status import study_status

    if workers is not None and workers_per_device is not None:
        raise InputError(
            f"--workers {workers} counts all processes of this machine and --workers-per-device "
            f"{workers_per_device} those of each device. Give one of them."
        )
    config = _with_options(load_study(study), n_trials, timeout)
    with _stop_signals() as stop, _storage(storage) as database:
        summary = _work(
            config,
            database,
            stop,
            quiet=as_json,
            workers=workers or 1,
            workers_per_device=workers_per_device,
        )
        record = database.read_study(config.name)
        if as_json:
            _print_json(study_status(record) | {"ended": summary.ended})
        else:
            from hpo.cli.display import print_summary  # pandas: half a second that no trial should wait for

            print_summary(record)
            _say_how_it_ended(record, summary, study, storage, n_trials)
    _exit(record, summary)


@app.command()
def worker(
    study: StudyArgument,
    storage: StorageOption = None,
    timeout: TimeoutOption = None,
    worker_number: Annotated[
        int,
        typer.Option(
            min=0, max=9999, metavar="NUMBER", help="Of this worker, so that each has a seed of its own."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Join a study as a worker and leave when it is done."""
    from hpo.config.study_config import load_study

    config = _with_options(load_study(study), None, timeout)
    with _stop_signals() as stop, _storage(storage) as database:
        summary = _work(config, database, stop, quiet=as_json, worker_number=worker_number, resize=False)
    if as_json:
        _print_json({"study": config.name, "ended": summary.ended, "outcomes": summary.outcomes})
    if summary.outcomes and summary.outcomes.keys() == {Outcome.FAILED}:
        raise RunError(f"every trial that this worker ran failed: {summary.outcomes['failed']}.")
    raise typer.Exit(summary.exit_code)


def _work(
    config: StudyConfig,
    database: Storage,
    stop: threading.Event,
    *,
    quiet: bool,
    resize: bool = True,
    workers: int = 1,
    workers_per_device: int | None = None,
    worker_number: int = 0,
) -> RunSummary:
    """Create or resume the study and work on it, with its progress on the screen."""
    from hpo.cli.progress import StudyDisplay
    from hpo.cli.temporary_folder import remove_abandoned_folders
    from hpo.study.run import run_study

    remove_abandoned_folders(_make_runs_folder(config.name), TRAIN_PREFIX)
    is_new = not database.has_study(config.name)
    database.create_or_resume_study(config, resize=resize)
    before = database.read_study(config.name)
    config = config.model_copy(update={"n_trials": sum(before.slots.values())})
    if not quiet:
        _announce(before, database)

    def num_done() -> int:
        return database.slot_counts(config.name)["done"]

    try:
        with StudyDisplay(config, before, num_done, stop=stop, quiet=quiet) as display:
            return run_study(
                config,
                database,
                RUNS,
                workers=workers,
                workers_per_device=workers_per_device,
                worker_number=worker_number,
                resize=False,
                study_name=str(config.path),
                on_event=display.update,
                stop=stop,
            )
    except InputError:
        if is_new:  # so that the corrected study file is not another definition of a stored study
            database.discard_untried_study(config.name)
        raise


@app.command()
def init(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the tables and the study, once, before workers start."""
    from hpo.config.study_config import load_study
    from hpo.report.status import study_status
    from hpo.study.database import redact

    config = _with_options(load_study(study), n_trials, None)
    with _storage(storage) as database:
        database.create_or_resume_study(config)
        if as_json:
            _print_json(study_status(database.read_study(config.name)))
        else:
            place = redact(database.url)
            typer.echo(f"The study {config.name} with {config.n_trials} trials is ready in {place}.")


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

    from hpo.cli.temporary_folder import remove_abandoned_folders, temporary_folder
    from hpo.config.study_config import load_study
    from hpo.config.trial_config import parse_params
    from hpo.device import probe_device
    from hpo.study.leases import trial_attributes
    from hpo.trial.executor import Executor
    from hpo.trial.telemetry import ScoredEvaluation

    params = parse_params(param or [])
    config = load_study(study)
    folder = _make_runs_folder(config.name)
    remove_abandoned_folders(folder, TRAIN_PREFIX)
    metrics = [objective.metric for objective in config.objective]

    def show(scored: ScoredEvaluation) -> None:
        evaluation = scored.evaluation
        if not as_json:
            values = "  ".join(
                f"{name} {value:.4g}" for name, value in zip(metrics, scored.values, strict=True)
            )
            loss = "–" if evaluation.train_loss is None else f"{evaluation.train_loss:.4g}"
            used = f"{evaluation.budget_used:4.0%}  {evaluation.seconds:.1f} s"
            typer.echo(f"step {evaluation.step}  {used}  loss {loss}  {values}")

    with _stop_signals() as stop, temporary_folder(folder, TRAIN_PREFIX) as checkpoints:
        executor = Executor(config, probe_device(config.device), RUNS)
        result = executor.run(params, checkpoints, uuid.uuid4().hex, show, stop.is_set)
    record = {
        "params": params,
        "values": None if result.values is None else dict(zip(metrics, result.values, strict=True)),
        **trial_attributes(result),
    }
    if as_json:
        _print_json(record)
    else:
        from hpo.cli.display import print_trial  # pandas, as in `run`

        print_trial(record)
        if result.traceback:
            typer.echo(result.traceback, err=True)
    raise typer.Exit({Outcome.COMPLETE: 0, Outcome.PREEMPTED: 130}.get(result.outcome, 1))


@app.command()
def verify(
    study: StudyArgument,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed passes of each precision; the fastest counts.")
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine does with each precision: support, errors, speed and memory against fp32."""
    from dataclasses import asdict

    from hpo.cli.display import print_verification
    from hpo.config.study_config import load_study
    from hpo.device import probe_device
    from hpo.trial.executor import Executor
    from hpo.trial.verify import recommendation
    from hpo.trial.verify import verify as verify_precisions

    config = load_study(study)
    _make_runs_folder(config.name)
    device = probe_device(config.device)
    executor = Executor(config, device, RUNS)

    def announce(name: str) -> None:
        typer.echo(f"checking {name} ...", err=True)

    checks = verify_precisions(executor, repeats=repeats, on_start=announce)
    if as_json:
        rows = [asdict(check) for check in checks]
        _print_json({"device": asdict(device), "precisions": rows, "recommendation": recommendation(checks)})
    else:
        print_verification(checks, device.describe(), recommendation(checks))


@app.command()
def status(study: StudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """Show trials by state and outcome, the best so far, live workers, the rate and the estimated end."""
    from hpo.cli.display import print_status
    from hpo.report.status import study_status

    with _storage(storage, create=False) as database:
        record = database.read_study(_study_name(study))
    summary = study_status(record)
    if as_json:
        _print_json(summary)
    else:
        print_status(record, summary)


@app.command()
def best(
    study: StudyArgument,
    storage: StorageOption = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            metavar="SPLIT", help="Score the best trial's checkpoint on a split: validation or test."
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Write the best model to a folder that transformers and hpo load.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the best configuration; score or export the model that it gave.

    With several objectives it shows the Pareto front, and scores or exports the best by the first of them.
    """
    from hpo.cli.display import print_best, print_metrics
    from hpo.study.study_record import by_first_objective

    with _storage(storage, create=False) as database:
        record = database.read_study(_study_name(study))
        token = database.study_token(record.name)
    trials = by_first_objective(record)
    found: dict[str, Any] = {
        "study": record.name,
        "trials": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
                "precision": trial.telemetry.get("precision"),
                "metrics": trial.telemetry.get("metrics"),
            }
            for trial in trials
        ],
    }
    if not as_json:
        print_best(record)
    if trials and (evaluate or export):
        from hpo.device import probe_device
        from hpo.trial.best_model import export_checkpoint, score_checkpoint
        from hpo.trial.executor import Executor

        config = _config_of(study, record)
        _make_runs_folder(config.name)
        executor = Executor(config, probe_device(config.device), RUNS)
        with _storage(storage, create=False) as database:
            database.check_data(config.name, executor.dataset.fingerprint)
        folder = executor.trial_folder(token, trials[0].number)
        if evaluate:
            metrics = score_checkpoint(executor, folder, evaluate)
            found["evaluation"] = {"trial": trials[0].number, "split": evaluate, "metrics": metrics}
            if not as_json:
                print_metrics(metrics, f"Trial {trials[0].number} on {evaluate}")
        if export:
            found["export"] = str(export_checkpoint(executor, folder, export))
            if not as_json:
                typer.echo(f"Trial {trials[0].number} is exported to {export}.")
    if as_json:
        _print_json(found)
    raise typer.Exit(0 if trials else 1)


@app.command()
def report(
    study: StudyArgument,
    storage: StorageOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Folder.", show_default="runs/STUDY/report"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML file, PNG plots and CSV tables."""
    from hpo.report.report import write_report

    with _storage(storage, create=False) as database:
        record = database.read_study(_study_name(study))
    path = write_report(record, out or RUNS / record.name / "report")
    if as_json:
        _print_json({"study": record.name, "report": str(path)})
    else:
        typer.echo(str(path))


@app.command()
def dashboard(
    study: StudyArgument,
    storage: StorageOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="0 takes a free one.")] = 8080,
    as_json: JsonOption = False,
) -> None:
    """Serve optuna-dashboard on 127.0.0.1 with our notes and plots in the study."""
    from hpo.report.dashboard import dashboard_server, publish

    host = "127.0.0.1"
    with _storage(storage, create=False) as database:
        record = database.read_study(_study_name(study))
        optuna_study = database.load_study(record.name)
        publish(optuna_study, record)
        with dashboard_server(database.url, host, port, artifact_dir=None) as server:
            address = f"http://{host}:{server.server_port}/dashboard/studies/{optuna_study._study_id}"
            if as_json:
                _print_json({"study": record.name, "url": address})
            else:
                typer.echo(f"{address} (Ctrl-C ends it)")
            with suppress(KeyboardInterrupt):
                server.serve_forever()


def _announce(record: StudyRecord, database: Storage) -> None:
    from hpo.study.database import redact

    done, total = record.slots["done"], sum(record.slots.values())
    state = "finished" if done == total else "resumed" if record.trials else "new"
    place = redact(database.url)
    used = (record.definition[key]["name"] for key in ("sampler", "pruner"))
    typer.echo(
        f"Study {record.name} ({state}): {done} of {total} trials done, in {place}. "
        "Sampler {}, pruner {}.".format(*used)
    )


def _say_how_it_ended(
    record: StudyRecord, summary: RunSummary, study: str, storage: str | None, n_trials: int | None
) -> None:
    if summary.ended == "finished":
        return
    command = ["hpo", "run", study]
    if storage and storage != os.environ.get("HPO_STORAGE"):
        from hpo.study.database import redact

        command += ["--storage", redact(storage)]
    if n_trials:
        command += ["--n-trials", str(n_trials)]
    how = {"stopped": "Stopped and checkpointed", "timeout": "Out of time"}[summary.ended]
    done, total = record.slots["done"], sum(record.slots.values())
    typer.echo(f"{how}: {done} of {total} trials done. To go on: {' '.join(command)}")


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


def _with_options(config: StudyConfig, n_trials: int | None, timeout: float | None) -> StudyConfig:
    from hpo.config.study_config import grid_size

    if n_trials and config.sampler.name == "grid" and n_trials > (size := grid_size(config.search_space)):
        raise InputError(
            f"--n-trials must be at most {size}, the combinations of the grid, but got {n_trials}."
        )
    changes = {"n_trials": n_trials, "timeout": timeout}
    return config.with_values(**{key: value for key, value in changes.items() if value is not None})


def _make_runs_folder(study_name: str) -> Path:
    """The folder of a study for what a run makes. Raises InputError where it cannot be written."""
    folder = RUNS / study_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(
            f"hpo writes to {RUNS}/ in the working folder, so {folder.absolute()} must be a folder that may "
            f"be written, but: {error.strerror}. Run hpo in another folder."
        ) from None
    return folder


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """`stop_on_signals`; a second signal ends the command at once, with a word on what that means."""
    from hpo.study.processes import stop_on_signals

    try:
        with stop_on_signals() as stop:
            yield stop
    except KeyboardInterrupt:
        typer.echo("Ended at once. A study goes on from the last checkpoint when it is run again.", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _storage(given: str | None, *, create: bool = True) -> Iterator[Storage]:
    from hpo.study.database import DEFAULT_URL, storage_url
    from hpo.study.storage import open_storage

    url = storage_url(given)
    if create and url == DEFAULT_URL:
        _make_runs_folder("")
    with open_storage(url, create=create) as database:
        yield database


def _study_name(study: str) -> str:
    """The name under which the database knows STUDY: of its file, or as given where there is none."""
    from hpo.config.study_config import load_study
    from hpo.errors import StudyFileError

    try:
        return load_study(study).name
    except StudyFileError:
        if _is_path(study):
            raise
        return study


def _config_of(study: str, record: StudyRecord) -> StudyConfig:
    """The study as in its file, or where there is none as it is stored.

    Raises StudyChangedError when the file says something else than the study was made with.
    """
    from hpo.config.study_config import StudyConfig, load_study
    from hpo.errors import StudyFileError

    try:
        config = load_study(study)
    except StudyFileError:
        if _is_path(study):
            raise
        return StudyConfig.model_validate(record.definition)
    return config.completed(record.definition)


def _is_path(study: str) -> bool:
    return Path(study).suffix in (".yaml", ".yml") or "/" in study


def _print_json(value: Any) -> None:
    from hpo.json_safe import json_safe

    typer.echo(json.dumps(json_safe(value), indent=2, default=str))
