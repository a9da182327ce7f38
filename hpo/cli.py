"""The command line: thin commands over the library, each imports what it needs when it runs.

Importing this module must stay cheap (`hpo --help` answers in under 0.5 s), so PyTorch, Optuna and the
rest are imported inside the commands.

Exit codes: 0 done; 1 the run failed; 2 the user's input is wrong; 130 interrupted, and checkpointed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.errors import HpoError

if TYPE_CHECKING:
    from hpo.storage import Storage
    from hpo.study_config import StudyConfig
    from hpo.study_record import StudyRecord

app = typer.Typer(
    help="Hyperparameter search for multitask transformer encoders, with precision as a searched dimension.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

StudyArgument = Annotated[str, typer.Argument(metavar="STUDY", help="A name in studies/, or a YAML file.")]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="HPO_STORAGE",
        help="Database of the study: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME.",
        show_default="sqlite:///runs/hpo.db",
        show_envvar=True,
    ),
]
NumTrialsOption = Annotated[
    int | None, typer.Option(min=1, help="Total of the study, over all workers and runs.")
]
TimeoutOption = Annotated[
    float | None, typer.Option(min=0, help="Seconds after which no further trial begins.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RUNS = Path("runs")


def main() -> None:
    """Run the command line; what is raised on purpose becomes one message and an exit code."""
    try:
        app()
    except HpoError as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: HpoError) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), str(error)))
    sys.exit(error.exit_code)


@app.command()
def run(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create or resume a study and run its trials here until its budget is used up."""
    from hpo.display import StudyDisplay, print_summary
    from hpo.study_config import load_study
    from hpo.worker import run_study

    config = _with_options(load_study(study), n_trials, timeout)
    with _storage(storage) as database:
        database.create_or_resume_study(config)
        done = database.slot_counts(config.name)["done"]
        if done == config.n_trials and not as_json:
            typer.echo(f"The study {config.name} is finished: {done} of {config.n_trials} trials are done.")
        with StudyDisplay(config, done, quiet=as_json) as display:
            summary = run_study(
                config,
                database,
                RUNS,
                workers=workers,
                study_name=str(config.path),
                on_event=display.update,
            )
        record = database.read_study(config.name)
    if as_json:
        _print_json(study_status(record))
    else:
        print_summary(record)
        if summary.ended == "stopped":
            typer.echo(f"Stopped and checkpointed. To go on: hpo run {study}")
    raise typer.Exit(summary.exit_code)


@app.command()
def worker(
    study: StudyArgument,
    storage: StorageOption = None,
    timeout: TimeoutOption = None,
    worker_number: Annotated[
        int, typer.Option(min=0, help="Number of this worker; it is added to the sampler's seed.")
    ] = 0,
) -> None:
    """Join a study as a worker and leave when it is done."""
    from hpo.display import StudyDisplay
    from hpo.study_config import load_study
    from hpo.worker import run_study

    config = _with_options(load_study(study), None, timeout)
    with _storage(storage) as database:
        database.create_or_resume_study(config, resize=False)
        counts = database.slot_counts(config.name)
        config = config.model_copy(update={"n_trials": sum(counts.values())})
        with StudyDisplay(config, counts["done"]) as display:
            summary = run_study(
                config, database, RUNS, worker_number=worker_number, resize=False, on_event=display.update
            )
    raise typer.Exit(summary.exit_code)


@app.command()
def init(study: StudyArgument, storage: StorageOption = None, n_trials: NumTrialsOption = None) -> None:
    """Make the tables and the study, once, before workers start."""
    from hpo.database import redact
    from hpo.study_config import load_study

    config = _with_options(load_study(study), n_trials, None)
    with _storage(storage) as database:
        database.create_or_resume_study(config)
        typer.echo(
            f"The study {config.name} with {config.n_trials} trials is ready in {redact(database.url)}."
        )


@app.command()
def train(
    study: StudyArgument,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="A setting of the trial: name=value. Repeatable."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run one trial without a database and print the record that a study would store."""
    import shutil
    import uuid
    from dataclasses import asdict

    from hpo.device import probe_device
    from hpo.display import print_metrics
    from hpo.executor import Executor, ScoredEvaluation
    from hpo.study_config import load_study
    from hpo.trial_config import parse_params

    params = parse_params(param or [])
    config = load_study(study)
    executor = Executor(config, probe_device(config.device), RUNS)
    folder = RUNS / config.name / "train"
    shutil.rmtree(folder, ignore_errors=True)

    def show(scored: ScoredEvaluation) -> None:
        evaluation = scored.evaluation
        if not as_json:
            values = ", ".join(f"{value:.4f}" for value in scored.values)
            typer.echo(
                f"step {evaluation.step}  {evaluation.budget_used:4.0%}  {evaluation.seconds:.1f} s  "
                f"loss {evaluation.train_loss or 0.0:.4f}  {config.objective[0].metric} {values}"
            )

    result = executor.run(params, folder, uuid.uuid4().hex, show)
    if as_json:
        _print_json(asdict(result))
    else:
        print_metrics(result.telemetry.get("metrics", {}), "Best evaluation")
        typer.echo(f"{result.outcome} {result.reason}".strip())
        for key, value in result.headline.items():
            typer.echo(f"{key}: {value}")
        typer.echo(f"checkpoints: {folder}")
        if result.traceback:
            typer.echo(result.traceback, err=True)
    raise typer.Exit(0 if result.outcome == "complete" else 1)


@app.command()
def verify(
    study: StudyArgument,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed passes of each precision; the fastest counts.")
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine does with each precision: support, errors, speed and memory against fp32."""
    from dataclasses import asdict

    from hpo.device import probe_device
    from hpo.display import print_verification
    from hpo.executor import Executor
    from hpo.study_config import load_study
    from hpo.verify import recommendation
    from hpo.verify import verify as verify_precisions

    config = load_study(study)
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
    from hpo.display import print_status

    record = _record(study, storage)
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
        str | None, typer.Option(help="Score the best trial's checkpoint on a split: validation or test.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the best model to a folder that transformers and hpo load.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the best configuration; score or export the model that it gave."""
    from hpo.display import print_best, print_metrics
    from hpo.tables import best_trials

    record = _record(study, storage)
    trials = best_trials(record)
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
        from hpo.executor import Executor
        from hpo.study_config import load_study

        config = load_study(study)
        executor = Executor(config, probe_device(config.device), RUNS)
        folder = executor.trial_folder(trials[0].number)
        if evaluate:
            found["evaluation"] = {
                "split": evaluate,
                "metrics": executor.evaluate_checkpoint(folder, evaluate),
            }
            if not as_json:
                print_metrics(found["evaluation"]["metrics"], f"Trial {trials[0].number} on {evaluate}")
        if export:
            found["export"] = str(executor.export_checkpoint(folder, export))
            if not as_json:
                typer.echo(f"Exported to {export}.")
    if as_json:
        _print_json(found)
    raise typer.Exit(0 if trials else 1)


@app.command()
def report(
    study: StudyArgument,
    storage: StorageOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder.", show_default="runs/<study>/report")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML file, PNG plots and CSV tables."""
    from hpo.report import write_report

    record = _record(study, storage)
    path = write_report(record, out or RUNS / record.name / "report")
    if as_json:
        _print_json({"study": record.name, "report": str(path)})
    else:
        typer.echo(str(path))


@app.command()
def dashboard(
    study: StudyArgument,
    storage: StorageOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
) -> None:
    """Serve optuna-dashboard on 127.0.0.1 with our notes and plots in the study."""
    from hpo.dashboard import publish, serve_dashboard
    from hpo.database import storage_url

    url = storage_url(storage)
    with _storage(storage, create=False) as database:
        name = _study_name(study)
        publish(database.load_study(name), database.read_study(name))
    serve_dashboard(url, port=port)


def study_status(record: StudyRecord) -> dict[str, Any]:
    """A study's state in numbers: what `hpo status --json` prints. Times are UTC."""
    from collections import Counter
    from datetime import timedelta

    from hpo.tables import best_trials, trial_outcome

    ended = [trial for trial in record.trials if trial.started and trial.ended]
    remaining = record.slots["open"] + record.slots["running"]
    rate = end = None
    if ended:
        first = min(trial.started for trial in ended if trial.started)
        last = max(trial.ended for trial in ended if trial.ended)
        hours = (last - first).total_seconds() / 3600
        rate = len(ended) / hours if hours else None
        if rate and remaining and any(worker.alive for worker in record.workers):
            end = (last + timedelta(hours=remaining / rate)).isoformat(timespec="seconds")
    return {
        "study": record.name,
        "n_trials": sum(record.slots.values()),
        "trials": dict(record.slots),
        "states": dict(Counter(trial.state for trial in record.trials)),
        "outcomes": dict(Counter(trial_outcome(trial) for trial in record.trials)),
        "best": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
            }
            for trial in best_trials(record)
        ],
        "workers": [
            {
                "id": worker.id,
                "host": worker.host,
                "trial": worker.trial_number,
                "last_seen": worker.last_seen.isoformat(timespec="seconds"),
            }
            for worker in record.workers
            if worker.alive
        ],
        "trials_per_hour": rate,
        "estimated_end": end,
    }


def _with_options(config: StudyConfig, n_trials: int | None, timeout: float | None) -> StudyConfig:
    changes = {"n_trials": n_trials, "timeout": timeout}
    return config.model_copy(update={key: value for key, value in changes.items() if value is not None})


@contextmanager
def _storage(given: str | None, *, create: bool = True) -> Iterator[Storage]:
    from hpo.storage import open_storage, storage_url

    with open_storage(storage_url(given), create=create) as database:
        yield database


def _study_name(study: str) -> str:
    """The name under which the database knows STUDY: of its file, or as given where there is none."""
    from hpo.errors import StudyFileError
    from hpo.study_config import load_study

    try:
        return load_study(study).name
    except StudyFileError:
        if Path(study).suffix in (".yaml", ".yml") or "/" in study:
            raise
        return study


def _record(study: str, storage: str | None) -> StudyRecord:
    with _storage(storage, create=False) as database:
        return database.read_study(_study_name(study))


def _print_json(value: Any) -> None:
    from hpo.storage import plain

    typer.echo(json.dumps(plain(value), indent=2, default=str))
