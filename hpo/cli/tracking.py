"""The command `track`: a study in MLflow, TensorBoard or W&B."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import answer, stop_signals, study_command
from hpo.config.trackers import TrackerName
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.api.study import Study


@study_command(runs_code=False)
def track(
    opened: Study,
    as_json: bool,
    to: Annotated[
        TrackerName,
        typer.Option(
            help="The tracker; its own variables, MLFLOW_TRACKING_URI and WANDB_..., say where it is."
        ),
    ],
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Keep up until the study ends or has had no worker for 10 minutes, and wait for a tracker "
            "that is away.",
        ),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Of files that tensorboard reads, and wandb before it sends them.",
            show_default="runs/STUDY/tensorboard, runs/STUDY",
        ),
    ] = None,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", hidden=True, help="End when the standard input does.")
    ] = False,
) -> None:
    """Show a study in a tracker: each trial as one run. Called again, it adds what is new."""
    from hpo.api.messages import progress_shown
    from hpo.api.opening import RUNS
    from hpo.study.reading.reader import read_study
    from hpo.study.running.stopping import stop_at_end_of_input
    from hpo.track.follow import IDLE_SECONDS, Follower, open_tracker

    if folder is not None and to == "mlflow":
        raise InputError("--folder must be left out with `--to mlflow`, which writes no files.")
    with (
        progress_shown(quiet=as_json),
        stop_signals() as stop,
        opened.opened() as (database, record),
    ):
        stop.can_checkpoint = True
        if with_parent:
            stop_at_end_of_input(stop, "the run that is followed has ended")
        token = database.study_token(record.name)
        default = RUNS / record.name / ("tensorboard" if to == "tensorboard" else "")
        tracker = open_tracker(to, record, token, folder or default)
        follower = Follower(lambda: read_study(database, record.name), token, tracker)
        try:
            idle_seconds = math.inf if with_parent else IDLE_SECONDS
            shown = follower.follow(stop, idle_seconds) if follow else follower.look()
        finally:
            tracker.close()
    told = f"{tracker.where}: trials of {record.name}: {shown.runs}, new or changed: {shown.changed}"
    facts = {"study": record.name, "to": to, "where": tracker.where, "trials": shown.runs}
    answer({**facts, "changed": shown.changed}, told, as_json=as_json)
    raise typer.Exit(130 if stop.signal is not None else 0)
