"""The commands about the studies of a database: what it holds, and their life in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import RUNS, JsonOption, StorageOption, StoredStudyArgument, app, print_json
from hpo.errors import HpoError, InputError, RunError

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.study.lifecycle import StudyState
    from hpo.study.overview import StudyOverview
    from hpo.study.storage import Storage

WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Whether to return only when its workers have left.")
]
WaitSecondsOption = Annotated[
    float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait for them.")
]
WAIT_SECONDS = 180.0
"""A worker learns of it within 10 s, one that died counts for 60 s, and a step may take long."""


@app.command()
def studies(storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """List the studies of the database: state, progress, best value, live workers, age."""
    from hpo.study.database import storage_url
    from hpo.study.overview import list_studies
    from hpo.study.storage import open_storage

    with open_storage(storage_url(storage), create=False) as database:
        found = list_studies(database)
    if as_json:
        print_json([_described(study) for study in found])
    else:
        _print_studies(found)


@app.command()
def pause(
    study: StoredStudyArgument,
    storage: StorageOption = None,
    wait: WaitOption = True,
    timeout: WaitSecondsOption = WAIT_SECONDS,
    as_json: JsonOption = False,
) -> None:
    """Stop a study for now: its workers checkpoint their trials and leave."""
    _halt(study, "paused", storage, wait=wait, timeout=timeout, as_json=as_json)


@app.command()
def resume(study: StoredStudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """Open a study again that was paused or cancelled. Workers must be started anew."""
    from hpo.study.database import storage_url
    from hpo.study.lifecycle import set_state
    from hpo.study.storage import open_storage

    with open_storage(storage_url(storage), create=False) as database:
        before = set_state(database, study, "open")
        slots = database.slot_counts(study)
    if as_json:
        print_json({"study": study, "state": "open", "before": before, "trials": slots})
    else:
        again = "is open already" if before == "open" else f"was {before} and is open again"
        typer.echo(
            f"The study {study} {again}: {slots['done']} of {sum(slots.values())} trials done. "
            f"To go on: hpo worker {study}"
        )


@app.command()
def cancel(
    study: StoredStudyArgument,
    storage: StorageOption = None,
    wait: WaitOption = True,
    timeout: WaitSecondsOption = WAIT_SECONDS,
    jobs: Annotated[
        bool, typer.Option("--jobs", help="End its Slurm jobs too, also those that wait.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop a study for good: as pause, and its unfinished trials end."""
    _halt(study, "cancelled", storage, wait=wait, timeout=timeout, end_jobs=jobs, as_json=as_json)


@app.command()
def delete(
    study: StoredStudyArgument,
    storage: StorageOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also while workers are in it: they are stopped first.")
    ] = False,
    timeout: WaitSecondsOption = WAIT_SECONDS,
    as_json: JsonOption = False,
) -> None:
    """Remove a study from the database, and its checkpoints from where this machine finds them."""
    import sys

    from hpo.report.artifacts import files_folders, remove_files
    from hpo.study.checkpoint_folders import noted_database, remove_checkpoints
    from hpo.study.database import place, storage_url
    from hpo.study.lifecycle import checkpoints_folder, delete_study, set_state, wait_for_workers
    from hpo.study.storage import open_storage

    url = storage_url(storage)
    with open_storage(url, create=False) as database:
        folder = checkpoints_folder(database, study, RUNS)
        slots = database.slot_counts(study)
        left = wait_for_workers(database, study, 0)
        if left and not force:
            raise InputError(
                f"The study `{study}` must have no worker, but has {', '.join(left)}. `hpo cancel {study}` "
                "stops them; --force does so first."
            )
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise InputError(f"To delete the study `{study}` from {place(url)}, give --yes.")
            what = f"{study} with {slots['done']} finished trials from {place(url)}"
            typer.confirm(f"Delete the study {what}? It cannot be had back.", abort=True)
        if left:
            set_state(database, study, "cancelled")
            _wait(database, study, "cancelled", timeout)
        noted = noted_database(database)
        stored = _drop_artifacts(database, study, folder, noted)
        delete_study(database, study)
    for shown in files_folders(study, RUNS):
        remove_files(shown)
    there = folder.exists()
    here = remove_checkpoints(folder, noted)
    if as_json:
        removed = there and not folder.exists()
        print_json({"study": study, "deleted": True, "checkpoints": str(folder), "removed_here": removed})
    else:
        also = "other machines may have such a folder too"
        typer.echo(f"The study {study} is deleted.{stored} {here}; {also}.")


def _drop_artifacts(database: Storage, study: str, folder: Path, noted: str) -> str:
    """Remove the checkpoints of a study from its artifact store; say which stay there, and why."""
    from hpo.study.artifact_store import open_artifact_store
    from hpo.study.checkpoint_artifacts import drop_artifacts, num_artifacts
    from hpo.study.checkpoint_folders import is_of
    from hpo.study.lifecycle import checkpoint_config

    if not (count := num_artifacts(database, study)):
        return ""
    config = checkpoint_config(study, database.read_definition(study))
    reason = "nothing on this machine says that no other database has this study with them"
    if is_of(folder, noted):
        try:
            store = open_artifact_store(config)
        except InputError as error:
            reason = str(error).rstrip(".")
        else:
            numbers = range(len(database.load_study(study).get_trials(deepcopy=False)))
            if store is not None:
                drop_artifacts(store, database, study, numbers)
            if not (left := num_artifacts(database, study)):
                return f" {count} checkpoints are removed from {config.location}."
            count, reason = left, "it did not let them be removed"
    return f" {count} checkpoints stay in {config.location}: {reason}."


def _halt(
    study: str,
    state: StudyState,
    storage: str | None,
    *,
    wait: bool,
    timeout: float,
    as_json: bool,
    end_jobs: bool = False,
) -> None:
    from hpo.cluster.jobs import read_jobs
    from hpo.cluster.slurm import cancel_jobs
    from hpo.study.database import storage_url
    from hpo.study.lifecycle import end_unfinished, set_state
    from hpo.study.storage import open_storage

    with open_storage(storage_url(storage), create=False) as database:
        before = set_state(database, study, state)
        own = [job.id for job in read_jobs(database, study)] if end_jobs else []
        cancelled, failure = [], None
        try:
            cancelled = cancel_jobs(own, study)
        except HpoError as error:  # no Slurm here, say: what concerns the study comes first
            failure = error
        if wait:
            _wait(database, study, state, timeout)
        ended = end_unfinished(database, study) if state == "cancelled" else 0
        slots = database.slot_counts(study)
    if failure is not None:
        raise type(failure)(f"The study `{study}` is {state}, but its jobs are not ended: {failure}")
    if as_json:
        print_json(
            {
                "study": study,
                "state": state,
                "before": before,
                "trials": slots,
                "ended": ended,
                "jobs": cancelled,
            }
        )
        return
    if cancelled:
        typer.echo(f"Jobs that are ended: {', '.join(cancelled)}.")
    ends = f", {ended} unfinished ended" if ended else ""
    typer.echo(
        f"The study {study} is {state}: {slots['done']} of {sum(slots.values())} trials done{ends}. "
        f"To open it again: hpo resume {study}"
    )


def _wait(database: Storage, study: str, state: str, timeout: float) -> None:
    """Wait until no worker is in the study. Raises RunError where some stay."""
    from hpo.study.lifecycle import wait_for_workers

    if not (left := wait_for_workers(database, study, 0)):
        return
    typer.echo(f"Waiting for {', '.join(left)} to checkpoint and leave.", err=True)
    if left := wait_for_workers(database, study, timeout):
        raise RunError(
            f"The study `{study}` is {state}, but after {timeout:g} s it has {', '.join(left)}. They leave "
            "at their next step; one killed on another machine counts for 60 s. Try again."
        )


def _described(study: StudyOverview) -> dict[str, Any]:
    from datetime import UTC, datetime

    def time(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

    times = {"created": time(study.created), "last_activity": time(study.last_activity)}
    return {key: value for key, value in asdict(study).items() if key != "now"} | times


def _print_studies(found: list[StudyOverview]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hpo.report.formats import format_metric, format_seconds

    if not found:
        typer.echo("The database holds no study.")
        return
    columns = ("study", "state", "priority", "done", "best", "workers", "age", "last activity")
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    styles = {"paused": "yellow", "cancelled": "red", "done": "green"}
    for study in found:
        best = "" if study.best is None else f"{study.metric} {format_metric(study.metric, study.best)}"
        table.add_row(
            Text(study.name),
            Text(study.state, styles.get(study.state, "")),
            str(study.priority),
            f"{study.trials['done']}/{study.trials['total']}",
            Text(best),
            str(study.workers),
            format_seconds(study.now - study.created),
            f"{format_seconds(max(0.0, study.now - study.last_activity))} ago",
        )
    Console().print(table)
