"""The commands about the studies of a database: what it holds, and their life in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.api.opening import RUNS, existing_database
from hpo.cli.options import (
    JsonOption,
    ParamOption,
    StorageOption,
    StoredStudyArgument,
    answer,
    app,
    print_json,
)
from hpo.errors import InputError, RunError

if TYPE_CHECKING:
    from hpo.study.reading.overview import StudyOverview
    from hpo.study.store.lifecycle import StudyState
    from hpo.study.store.storage import Storage

WAIT_SECONDS = 180.0
"""For workers to leave: one learns of it within 10 s, one that died counts for 60 s, a step may take long."""


@app.command()
def studies(storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """List the studies of the database: state, progress, live workers, age."""
    from hpo.study.reading.overview import list_studies

    with existing_database(storage) as database:
        overviews = list_studies(database)
    if as_json:
        print_json([_described(study) for study in overviews])
    else:
        _print_studies(overviews)


@app.command()
def pause(study: StoredStudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """Stop a study for now: its workers checkpoint their trials and leave."""
    _close(study, "paused", storage, as_json=as_json)


@app.command()
def resume(study: StoredStudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """Open a study again that was paused or cancelled. Workers must be started anew."""
    from hpo.report.formats import trials_done
    from hpo.study.store.lifecycle import set_state

    with existing_database(storage) as database:
        before = set_state(database, study, "open")
        slots = database.trial_counts(study)
    again = "is open already" if before == "open" else f"was {before} and is open again"
    answer(
        {"study": study, "state": "open", "before": before, "trials": slots},
        f"The study {study} {again}: {trials_done(slots)}. To go on: hpo worker {study}",
        as_json=as_json,
    )


@app.command()
def cancel(study: StoredStudyArgument, storage: StorageOption = None, as_json: JsonOption = False) -> None:
    """Stop a study for good: as pause, and its unfinished trials end."""
    _close(study, "cancelled", storage, as_json=as_json)


@app.command()
def enqueue(
    study: StoredStudyArgument,
    param: ParamOption,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a trial of a study try a configuration; what is left out the sampler draws.

    It takes one of the trials that the study has left to begin, after those that were enqueued before.
    """
    from hpo.code import names_of
    from hpo.config.known import fixed_problems
    from hpo.config.search_space import encode
    from hpo.config.study_config import stored_study
    from hpo.config.trial_config import parse_params
    from hpo.study.store.lifecycle import enqueued

    with existing_database(storage) as database:
        config = stored_study(study, database.read_definition(study))
        with names_of(config.code):
            params = {name: encode(value) for name, value in parse_params(param).items()}
        if config.comparison is not None:
            raise InputError(f"`{study}` is a comparison, which has planned trials alone.")
        if problems := [f"--param {problem}" for problem in fixed_problems(config.search_space, params)]:
            raise InputError("\n".join(problems))
        ahead, to_begin = database.read(lambda connection: enqueued(connection, study))
        if ahead >= to_begin:
            raise InputError(
                f"The study `{study}` must have a trial left to begin, but has {to_begin}, and {ahead} are "
                "enqueued. Raise --n-trials of `hpo run`."
            )
        database.persist(lambda: database.load_study(study).enqueue_trial(params, {"source": "hpo enqueue"}))
    told = f"A trial of {study} will have {', '.join(param)}; {ahead} are enqueued before it."
    answer({"study": study, "enqueued": params, "ahead": ahead}, told, as_json=as_json)


@app.command()
def delete(
    study: StoredStudyArgument,
    storage: StorageOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a study from the database, and its checkpoints from where this machine finds them."""
    import sys

    from hpo.study.checkpoints.checkpoint_folders import noted_database, remove_checkpoints
    from hpo.study.checkpoints.remote_store import remove_uploads
    from hpo.study.store import lifecycle
    from hpo.study.store.database import place
    from hpo.study.store.schema import workers

    with existing_database(storage) as database:
        folder = lifecycle.checkpoints_folder(database, study, RUNS)
        config = lifecycle.checkpoint_config(study, database.read_definition(study))
        done = database.trial_counts(study)["done"]
        if left := lifecycle.processes(database.watch_workers(workers.c.study == study)):
            raise InputError(
                f"The study `{study}` must have no worker, but has {', '.join(left)}. `hpo cancel {study}` "
                "stops them."
            )
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise InputError(f"To delete the study `{study}` from {place(database.url)}, give --yes.")
            what = f"{study} with {done} finished trials from {place(database.url)}"
            typer.confirm(f"Delete the study {what}? It cannot be had back.", abort=True)
        noted = noted_database(database)
        lifecycle.delete_study(database, study)  # raises where a worker has joined: nothing is removed then
    said = [f"The study {study} is deleted.", remove_uploads(config, folder, noted)]
    there = folder.exists()
    said.append(f"{remove_checkpoints(folder, noted)}; other machines may have such a folder too.")
    removed = {"checkpoints": str(folder), "removed_here": there and not folder.exists()}
    answer({"study": study, "deleted": True, **removed}, " ".join(filter(None, said)), as_json=as_json)


def _close(study: str, state: StudyState, storage: str | None, *, as_json: bool) -> None:
    from hpo.report.formats import trials_done
    from hpo.study.store.lifecycle import end_unfinished, set_state

    with existing_database(storage) as database:
        before = set_state(database, study, state)
        _wait(database, study, state)
        ended = end_unfinished(database, study) if state == "cancelled" else 0
        slots = database.trial_counts(study)
    ends = f", {ended} unfinished ended" if ended else ""
    answer(
        {"study": study, "state": state, "before": before, "trials": slots, "ended": ended},
        f"The study {study} is {state}: {trials_done(slots)}{ends}. To open it again: hpo resume {study}",
        as_json=as_json,
    )


def _wait(database: Storage, study: str, state: str) -> None:
    """Wait until no worker is in the study. Raises RunError where some stay."""
    from hpo.study.store.lifecycle import wait_for_workers

    if not (left := wait_for_workers(database, study, 0)):
        return
    typer.echo(f"Waiting for {', '.join(left)} to checkpoint and leave.", err=True)
    if left := wait_for_workers(database, study, WAIT_SECONDS):
        raise RunError(
            f"The study `{study}` is {state}, but after {WAIT_SECONDS:g} s it has {', '.join(left)}. They "
            "leave at their next step; one killed on another machine counts for 60 s. Try again."
        )


def _described(study: StudyOverview) -> dict[str, Any]:
    from datetime import UTC, datetime

    created = datetime.fromtimestamp(study.created, UTC).isoformat(timespec="seconds")
    return {key: value for key, value in asdict(study).items() if key != "now"} | {"created": created}


def _print_studies(overviews: list[StudyOverview]) -> None:
    import pandas as pd
    from rich.console import Console

    from hpo.cli.display import dataframe_table
    from hpo.report.formats import format_seconds

    if not overviews:
        typer.echo("The database holds no study.")
        return
    rows = [
        {
            "study": study.name,
            "state": study.state,
            "done": f"{study.trials['done']}/{study.trials['total']}",
            "workers": study.workers,
            "age": format_seconds(study.now - study.created),
        }
        for study in overviews
    ]
    Console().print(dataframe_table(pd.DataFrame(rows)))
