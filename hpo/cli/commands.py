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

from hpo import __version__
from hpo.cli import (  # noqa: F401  (their commands)
    checking,
    cluster,
    comparing,
    deploying,
    diagnosing,
    planning,
    predicting,
    running,
    starting,
    studies,
    tracking,
    working,
)
from hpo.cli import database as databases  # noqa: F401  (its commands)
from hpo.cli import doctor as doctors  # noqa: F401  (its command)
from hpo.cli.options import (
    JsonOption,
    StorageOption,
    StudyArgument,
    TrustCodeOption,
    TrustOption,
    answer,
    app,
    print_json,
)
from hpo.config.removed import removed_command
from hpo.errors import HpoError, InputError, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpo.study.reading.study_record import StudyRecord


def main() -> None:
    """Run the command line; what is raised on purpose becomes one message and an exit code."""
    from rich import text

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no error
    # What a database holds, such as the host of a worker, is shown without escape sequences.
    text.strip_control_codes = printable  # type: ignore[assignment,attr-defined]
    try:
        if removed := removed_command(sys.argv[1:]):
            raise InputError(removed)
        app(prog_name="hpo")
    except HpoError as error:
        from rich.console import Console
        from rich.text import Text

        message = Text.assemble(("Error: ", "bold red"), printable(str(error)))
        Console(stderr=True).print(message, soft_wrap=True)
        sys.exit(error.exit_code)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hpo {__version__}")
        raise typer.Exit


@app.callback()
def _options_of_hpo(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def verify(
    study: StudyArgument,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed passes of each precision; the fastest counts.")
    ] = 3,
    storage: StorageOption = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Show what this machine does with each precision: support, errors, speed and memory against fp32."""
    from dataclasses import asdict

    from hpo.api.study import Study
    from hpo.cli.display import print_verification
    from hpo.device import probe_device
    from hpo.trial.verify import recommendation

    opened = Study(study, storage=storage, trust_remote_code=trust_remote_code)
    checks = opened.verify(repeats)
    device, advice = probe_device(opened.config.device), recommendation(checks)
    if as_json:
        rows = [asdict(check) for check in checks]
        print_json({"device": asdict(device), "precisions": rows, "recommendation": advice})
    else:
        print_verification(checks, device.describe(), advice)


@app.command()
def status(study: StudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """Show trials by outcome, the best so far, live workers, the rate and the estimated end."""
    from hpo.api.study import Study
    from hpo.cli.display import print_status
    from hpo.report.status import study_status

    record = Study(study, storage=storage).record
    summary = study_status(record)
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
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write a model that transformers and hpo load."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Of --export: replace a model of another study.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of --export: add an adapter to the weights of the encoder.")
    ] = False,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Show the best configuration and its scores; evaluate or export its model.

    With several objectives it shows the Pareto front, and evaluates or exports the best by the first of them.
    """
    from hpo.api.study import Study
    from hpo.study.reading.study_record import choosable_trials

    if merge and export is None:
        raise InputError("--merge is how a model is exported: give --export DIR, too.")
    opened = Study(study, storage=storage, trust_remote_code=trust_remote_code, quiet=as_json)
    record, used = opened.use_best(split=evaluate, folder=export, merge=merge, overwrite=overwrite)
    if as_json:
        print_json(_described(record) | used)
    else:
        _print_best(record, evaluate, used)
    raise typer.Exit(0 if choosable_trials(record) else 1)


def _print_best(record: StudyRecord, evaluated: str | None, used: Mapping[str, Any]) -> None:
    """The best trials, the evaluation of `evaluated` or the first one, and where files are."""
    from hpo.cli.display import print_best, print_detailed, print_warning
    from hpo.report.detailed_tables import evaluations_of
    from hpo.study.reading.study_record import best_trials

    print_best(record)
    trials = best_trials(record)
    if trials and (evaluations := evaluations_of(trials[0])):
        print_detailed(next((one for one in evaluations if one.split == evaluated), evaluations[0]))
    for text in _warnings(record):
        print_warning(text)
    if "export" in used:
        typer.echo(f"Trial {trials[0].number} is exported to {used['export']}.")


def _warnings(record: StudyRecord) -> list[str]:
    """What to know of the models of a study."""
    from hpo.report.verdicts import chosen_on_test
    from hpo.study.reading.study_record import lost_weights

    return [*chosen_on_test(record), *map(" ".join, lost_weights(record))]


def _described(record: StudyRecord) -> dict[str, Any]:
    """What `best --json` tells of the best trials."""
    from hpo.study.reading.study_record import best_trials, limit_counts

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
        "limits": limit_counts(record),
        "comparisons": record.comparisons,
        "warnings": _warnings(record),
    }


@app.command()
def report(
    study: StudyArgument,
    others: Annotated[
        list[str] | None, typer.Argument(metavar="[STUDY]...", help="More, side by side with it on one page.")
    ] = None,
    storage: StorageOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Folder.", show_default="runs/STUDY/report"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML file and CSV tables; of several studies one page without tables."""
    from hpo.api.study import Study

    if others:
        _side_by_side([study, *others], storage, out, as_json=as_json)
        return
    opened = Study(study, storage=storage)
    path = str(opened.report(out))
    answer({"study": opened.name, "report": path}, path, as_json=as_json)


def _side_by_side(names: list[str], storage: str | None, out: Path | None, *, as_json: bool) -> None:
    from hpo.api.opening import RUNS
    from hpo.api.study import Study
    from hpo.report.side_by_side import write_side_by_side
    from hpo.study.store import schema

    records, data = [], {}
    for study in names:
        with Study(study, storage=storage).opened() as (database, record):
            records.append(record)
            data[record.name] = database.stored(record.name, schema.studies.c.data)
    path = write_side_by_side(records, data, out or RUNS / records[0].name / "side-by-side")
    answer({"studies": [record.name for record in records], "report": str(path)}, str(path), as_json=as_json)


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
    from hpo.api.study import Study
    from hpo.report.dashboard import LOOPBACK, dashboard_server, publish
    from hpo.study.store.optuna_internals import study_id_of

    with Study(study, storage=storage).opened() as (database, record):
        optuna_study = database.load_study(record.name)
        publish(optuna_study, record)
        with dashboard_server(database.url, port, host) as server:
            if host != LOOPBACK:
                typer.echo(
                    f"Warning: whoever reaches {host}:{server.server_port} can delete studies.", err=True
                )
            shown = LOOPBACK if host == "0.0.0.0" else host
            address = f"http://{shown}:{server.server_port}/dashboard/studies/{study_id_of(optuna_study)}"
            told = {"study": record.name, "url": address}
            answer(told, f"{address} (Ctrl-C ends it)", as_json=as_json)
            with suppress(KeyboardInterrupt):
                server.serve_forever()
