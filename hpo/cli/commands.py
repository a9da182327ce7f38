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
    predicting,
    running,
    starting,
    studies,
    tracking,
    working,
)
from hpo.cli import database as databases  # noqa: F401  (its commands)
from hpo.cli import doctor as doctors  # noqa: F401  (its command)
from hpo.cli.options import HoursOption, NumTrialsOption, answer, app, print_json, study_command
from hpo.config.removed import removed_command
from hpo.errors import HpoError, InputError, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpo.api.study import Study
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


@study_command()
def verify(
    opened: Study,
    as_json: bool,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Timed passes of each precision; the fastest counts.")
    ] = 3,
) -> None:
    """Show what this machine does with each precision: support, errors, speed and memory against fp32."""
    from dataclasses import asdict

    from hpo.cli.display import print_verification
    from hpo.device import probe_device
    from hpo.trial.verify import recommendation

    checks = opened.verify(repeats)
    device, advice = probe_device(opened.config.device), recommendation(checks)
    if as_json:
        rows = [asdict(check) for check in checks]
        print_json({"device": asdict(device), "precisions": rows, "recommendation": advice})
    else:
        print_verification(checks, device.describe(), advice)


@study_command()
def plan(
    opened: Study,
    as_json: bool,
    n_trials: NumTrialsOption = None,
    hours: HoursOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="W", help="So many work; left out, those that do, or one.")
    ] = None,
) -> None:
    """Show what a study's trials or its budget come to: hours, starts, and how many go on to the end.

    By its complete trials; in a precision of which there is none, some steps are trained here.
    """
    from hpo.api.planning import plan_told

    result = opened.plan(n_trials=n_trials, hours=hours, workers=workers)
    answer(result.as_json(), "\n".join(plan_told(result)), as_json=as_json)


@study_command(runs_code=False)
def status(opened: Study, as_json: bool) -> None:
    """Show trials by outcome, the best so far, live workers, the rate and the estimated end."""
    from hpo.cli.display import print_status
    from hpo.report.status import study_status

    record = opened.outline
    summary = study_status(record)
    if as_json:
        print_json(summary)
    else:
        print_status(record, summary)


@study_command()
def best(
    opened: Study,
    as_json: bool,
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
    merge: Annotated[
        bool, typer.Option("--merge", help="Of --export: add an adapter to the weights of the encoder.")
    ] = False,
) -> None:
    """Show the best configuration and its scores; evaluate or export its model.

    With several objectives it shows the Pareto front, and evaluates or exports the best by the first of them.
    """
    from hpo.study.reading.study_record import choosable_trials

    if merge and export is None:
        raise InputError("--merge is how a model is exported: give --export DIR, too.")
    record, used = opened.use_best(split=evaluate, folder=export, merge=merge)
    if as_json:
        print_json(_described(record) | used)
    else:
        _print_best(record, evaluate, used)
    raise typer.Exit(0 if choosable_trials(record) else 1)


def _print_best(record: StudyRecord, evaluated: str | None, used: Mapping[str, Any]) -> None:
    """The best trials, the metrics of the first on validation and on `evaluated`, and where files are."""
    from hpo.cli.display import print_best, print_detailed, print_metrics, print_warning
    from hpo.report.detailed import evaluations_of
    from hpo.study.reading.study_record import best_trials

    print_best(record)
    trials = best_trials(record)
    if trials and "validation" not in trials[0].detailed:
        print_metrics(trials[0])
    if trials and (evaluations := evaluations_of(trials[0])):
        print_detailed(next((one for one in evaluations if one.split == evaluated), evaluations[0]))
    for text in _warnings(record):
        print_warning(text)
    if "export" in used:
        typer.echo(f"Trial {trials[0].number} is exported to {used['export']}.")


def _warnings(record: StudyRecord) -> list[str]:
    """What to know of the models of a study."""
    from hpo.report.limits import no_better_than_constant
    from hpo.report.verdicts import chosen_on_test
    from hpo.study.reading.study_record import lost_weights

    return [
        *no_better_than_constant(record),
        *chosen_on_test(record),
        *map(" ".join, lost_weights(record)),
    ]


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
                "baseline": trial.telemetry.get("baseline"),
                "detailed": trial.detailed,
            }
            for trial in best_trials(record)
        ],
        "limits": limit_counts(record),
        "comparisons": record.comparisons,
        "warnings": _warnings(record),
    }


@study_command()
def diagnose(
    opened: Study,
    as_json: bool,
    trial: Annotated[int, typer.Option("--trial", min=0, metavar="N", help="Its number.")],
) -> None:
    """Name the operator that broke a trial and what helps, by the batch after its checkpoint.

    Tries a lower loss scale, bf16 and fp32. Changes nothing in the study. Exit code 1: that batch is finite.
    """
    from dataclasses import asdict

    found = opened.diagnose(trial)
    broken = found.broken
    if as_json:
        print_json({"study": opened.name, **asdict(found)})
        raise typer.Exit(0 if broken else 1)
    weights = "the last checkpoint" if found.has_checkpoint else "the initial weights (it has no checkpoint)"
    result = f"{broken.what} not finite" if broken else "this batch is finite, run eagerly on one rank"
    typer.echo(f"Trial {found.trial} ({found.outcome}, {found.precision}), step {found.step}: {result}")
    typer.echo(f"Run with {weights}.")
    if broken and broken.operator:
        typer.echo(f"First: {broken.operator}")
    for remedy in found.remedies:
        settings = ", ".join(f"{name}: {value}" for name, value in remedy.settings.items())
        typer.echo(f"With {settings}: {remedy.result}")
    if broken is None:
        typer.echo(
            "The trial broke in a later step, in an evaluation, or only when compiled or on several ranks."
        )
    elif not any(remedy.heals for remedy in found.remedies):
        typer.echo(
            "The precision is not the cause. Lower `learning_rate` or `max_grad_norm`."
            if found.breaks_in_fp32
            else "It is not known whether the precision is the cause: the batch did not run in pure fp32."
        )
    raise typer.Exit(0 if broken else 1)


@study_command(runs_code=False)
def report(
    opened: Study,
    as_json: bool,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Folder.", show_default="runs/STUDY/report"),
    ] = None,
) -> None:
    """Write one self-contained HTML file and CSV tables."""
    path = str(opened.report(out))
    answer({"study": opened.name, "report": path}, path, as_json=as_json)


@study_command(runs_code=False)
def dashboard(
    opened: Study,
    as_json: bool,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="0 takes a free one.")] = 8080,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="0.0.0.0 in a container that publishes the port.")
    ] = "127.0.0.1",
) -> None:
    """Serve optuna-dashboard on 127.0.0.1 with our notes and plots in the study."""
    from hpo.report.dashboard import LOOPBACK, dashboard_server, publish
    from hpo.study.store.optuna_internals import study_id_of

    with opened.opened() as (database, record):
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
