"""The command line: thin commands over the library, each imports what it needs when it runs.

Importing this module must stay cheap (`hpo --help` answers in under 0.5 s), so PyTorch, Optuna and the
rest are imported inside the commands.

Exit codes: 0 done; 1 the run failed; 2 the user's input is wrong; 130 interrupted, and checkpointed. An
exception that nobody meant to raise is a bug: it ends with its traceback and 1.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.cli import (  # noqa: F401  (their commands)
    checking,
    cluster,
    comparing,
    deploying,
    diagnosing,
    predicting,
    running,
    studies,
    working,
)
from hpo.cli import database as databases  # noqa: F401  (its commands)
from hpo.cli import doctor as doctors  # noqa: F401  (its command)
from hpo.cli.options import (
    RUNS,
    JsonOption,
    StorageOption,
    StudyArgument,
    TrustOption,
    app,
    checkpoint_of,
    config_of,
    existing_study,
    load_file,
    load_to_run,
    print_json,
    progress_shown,
)
from hpo.errors import HpoError, InputError, RunError, Unsupported

if TYPE_CHECKING:
    from hpo.precision.table import Support
    from hpo.study.storage import Storage
    from hpo.study.study_record import StudyRecord, TrialRecord
    from hpo.trial.compat import Compatibility
    from hpo.trial.executor import Executor


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
def verify(
    study: StudyArgument,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed passes of each precision; the fastest counts.")
    ] = 3,
    parts: Annotated[
        bool,
        typer.Option(
            "--parts", help="For a precision that is not ok: the fewest parts in fp32 that make it so."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine does with each precision: support, errors, speed and memory against fp32."""
    from dataclasses import asdict

    from hpo.cli.display import print_verification
    from hpo.device import probe_device
    from hpo.trial.executor import Executor
    from hpo.trial.verify import check_precision, propose_parts, recommendation
    from hpo.trial.verify import verify as verify_precisions

    config = load_to_run(study)
    device = probe_device(config.device)

    def check(name: str, support: Support) -> Compatibility:
        def estimate(seconds: float) -> None:
            how_long = f": about {seconds:.0f} s" if seconds >= 1 else ""
            typer.echo(f"  timing fp32 and {name} in turn, {repeats} times{how_long}", err=True)

        slow = " (emulated here, so slow)" if support.level == "emulated" else ""
        typer.echo(f"checking {name} ...{slow} one training pass in fp32 and in {name}", err=True)
        return check_precision(executor, name, repeats, estimate)

    with progress_shown(quiet=as_json):
        executor = Executor(config, device, RUNS)
        checks = verify_precisions(device, check)
        if parts:
            checks = propose_parts(executor, checks, repeats, lambda what: typer.echo(what, err=True))
    advice = recommendation(checks)
    if as_json:
        rows = [asdict(check) for check in checks]
        print_json({"device": asdict(device), "precisions": rows, "recommendation": advice})
    else:
        print_verification(checks, device.describe(), advice)


@app.command()
def status(study: StudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """Show trials by outcome, the best so far, batch jobs, live workers, the rate and the estimated end."""
    from hpo.cli.display import print_status
    from hpo.cluster.jobs import read_jobs
    from hpo.report.status import job_status, study_status

    with progress_shown(quiet=as_json), existing_study(study, storage) as (database, record):
        summary = study_status(record) | {"jobs": job_status(read_jobs(database, record.name))}
    if as_json:
        print_json(summary)
    else:
        print_status(record, summary)


@app.command()
def best(
    study: StudyArgument,
    storage: StorageOption = None,
    evaluate: Annotated[
        Literal["train", "validation", "test"] | None,
        typer.Option(
            metavar="SPLIT",
            help="Evaluate its checkpoint in detail on a split: train, validation or test; it is stored.",
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of --evaluate: predictions and truth of each row, .jsonl, .csv or .parquet."
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write a model that transformers and hpo load."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            help="Put that model on the Hugging Face hub, as OWNER/NAME; a new repository is private.",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the best configuration and what its model gets wrong; evaluate or export that model.

    With several objectives it shows the Pareto front, and evaluates or exports the best by the first of them.
    """
    from hpo.cli.detailed_display import print_detailed, print_warning
    from hpo.cli.display import print_best
    from hpo.report.detailed_tables import evaluations_of
    from hpo.study.study_record import best_trials, with_evaluation

    if predictions is not None:
        from hpo.inference.rows import check_output

        if evaluate is None:
            raise InputError(
                f"--predictions {predictions} needs a split whose rows are predicted. Give --evaluate SPLIT."
            )
        check_output(predictions)
    if export is not None:
        from hpo.models.export import check_export_folder  # imports PyTorch

        check_export_folder(export)
    if push is not None:
        from hpo.models.hub import check_push

        check_push(push)
    used: dict[str, Any] = {}
    with existing_study(study, storage) as (database, record):
        trials = best_trials(record)
        if trials and (evaluate or export or push):
            with progress_shown(quiet=as_json):
                config = config_of(study, record, trust_remote_code)
                executor, folder = checkpoint_of(config, database, trials[0].number)
                if evaluate:
                    used = _evaluate_checkpoint(database, executor, folder, trials[0], evaluate, predictions)
                    record = with_evaluation(record, trials[0].number, used["evaluation"]["detailed"])
                    trials = best_trials(record)
                if (export or push) and "test" in set(executor.dataset.splits) - trials[0].detailed.keys():
                    with suppress(Unsupported):
                        on_test = _evaluate_checkpoint(database, executor, folder, trials[0], "test", None)
                        record = with_evaluation(record, trials[0].number, on_test["evaluation"]["detailed"])
                        trials = best_trials(record)
                used |= _export_checkpoint(executor, folder, trials[0], export, push)
    if as_json:
        print_json(_described(record) | used)
    else:
        print_best(record)
        if trials and (found := evaluations_of(trials[0])):
            print_detailed(next((one for one in found if one.split == evaluate), found[0]))
        for text in _warnings(record):
            print_warning(text)
        if predictions and trials:
            typer.echo(f"The predictions of trial {trials[0].number} on {evaluate} are in {predictions}.")
        if export and trials:
            typer.echo(f"Trial {trials[0].number} is exported to {export}.")
        if push and trials:
            typer.echo(f"Trial {trials[0].number} is at {used['pushed']}.")
    raise typer.Exit(0 if trials else 1)


def _warnings(record: StudyRecord) -> list[str]:
    """What to know of the detailed evaluations of a study."""
    from hpo.report.search_caution import search_warnings
    from hpo.study.study_record import evaluations_left_out

    return [*search_warnings(record), *map(" ".join, evaluations_left_out(record))]


def _described(record: StudyRecord) -> dict[str, Any]:
    """What `best --json` tells of the best trials."""
    from hpo.study.study_record import best_trials

    return {
        "study": record.name,
        "trials": [
            {
                "number": trial.number,
                "values": dict(zip(record.metric_names, trial.values or (), strict=True)),
                "params": trial.params,
                "precision": trial.telemetry.get("precision"),
                "metrics": trial.telemetry.get("metrics"),
                "detailed": trial.detailed,
            }
            for trial in best_trials(record)
        ],
        "comparisons": record.comparisons,
        "warnings": _warnings(record),
    }


def _evaluate_checkpoint(
    database: Storage,
    executor: Executor,
    folder: Path,
    trial: TrialRecord,
    split: str,
    predictions: Path | None,
) -> dict[str, Any]:
    """Evaluate the checkpoint of a trial in detail, store that, and write its predictions."""
    from hpo.inference.rows import predictions_file
    from hpo.study.detailed_evaluations import NOT_STORED, store_detailed_evaluation
    from hpo.trial.best_model import split_logits

    name = executor.study.name
    token = database.study_token(name)
    predicted = split_logits(executor, folder, split)
    metrics, document = predicted.metrics(), predicted.detailed().as_json()
    evaluation = {"trial": trial.number, "split": split, "metrics": metrics, "detailed": document}
    found: dict[str, Any] = {"evaluation": evaluation}
    try:
        if not store_detailed_evaluation(database, name, token, trial.number, document):
            raise RunError(NOT_STORED)
    except HpoError as error:  # also of a user who may only read
        typer.echo(f"The evaluation is not stored: {error}", err=True)
    if predictions is not None:
        pair = executor.study.data.pair_segments or ()
        with predictions_file(predictions, executor.tasks, pair, with_truth=True) as write:
            write(predicted.predicted_rows())
        found["predictions"] = str(predictions)
    return found


def _export_checkpoint(
    executor: Executor, folder: Path, trial: TrialRecord, export: Path | None, push: str | None
) -> dict[str, Any]:
    """Export and push the checkpoint of a trial."""
    import tempfile

    from hpo.models.hub import push_folder
    from hpo.trial.best_model import export_checkpoint
    from hpo.trial.provenance import TrialSource

    found: dict[str, Any] = {}
    if not (export or push):
        return found
    source = TrialSource(trial.number, trial.params, trial.telemetry, trial.detailed)
    with tempfile.TemporaryDirectory(prefix="hpo-export-") as temporary:
        exported = export_checkpoint(
            executor, folder, export or Path(temporary, "model"), source, score_test=False
        )
        if export:
            found["export"] = str(export)
        if push:
            found["pushed"] = push_folder(exported, push)
    return found


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

    with existing_study(study, storage) as (_, record):
        study_file = study if load_file(study) else None
        path = write_report(record, out or RUNS / record.name / "report", study_file)
    if as_json:
        print_json({"study": record.name, "report": str(path)})
    else:
        typer.echo(str(path))


@app.command()
def dashboard(
    study: StudyArgument,
    storage: StorageOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="0 takes a free one.")] = 8080,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="0.0.0.0 in a container that publishes the port.")
    ] = "127.0.0.1",
    as_json: JsonOption = False,
) -> None:
    """Serve optuna-dashboard on 127.0.0.1 with our notes and plots in the study."""
    from hpo.report.artifacts import publish_artifacts
    from hpo.report.dashboard import LOOPBACK, dashboard_server, publish

    with existing_study(study, storage) as (database, record):
        optuna_study = database.load_study(record.name)
        publish(optuna_study, record, publish_artifacts(database, record, RUNS))
        with dashboard_server(database.url, port, host, RUNS) as server:
            if host != LOOPBACK:
                typer.echo(
                    f"Warning: whoever reaches {host}:{server.server_port} can delete studies.", err=True
                )
            shown = LOOPBACK if host == "0.0.0.0" else host
            address = f"http://{shown}:{server.server_port}/dashboard/studies/{optuna_study._study_id}"
            if as_json:
                print_json({"study": record.name, "url": address})
            else:
                typer.echo(f"{address} (Ctrl-C ends it)")
            with suppress(KeyboardInterrupt):
                server.serve_forever()
