"""The commands about databases: a private PostgreSQL, and a study's way from one database to another."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.api.opening import RUNS, existing_database, load_file
from hpo.cli.options import JsonOption, StorageOption, StoredStudyArgument, answer, app
from hpo.errors import RunError
from hpo.study.running.stopping import STOP_SIGNALS

if TYPE_CHECKING:
    from hpo.cluster.postgres.postgres_server import Running

database = typer.Typer(help="Start and stop a private PostgreSQL.", no_args_is_help=True)
app.add_typer(database, name="database")

FolderOption = Annotated[
    Path, typer.Option(metavar="DIR", file_okay=False, help="Where the database has its files.")
]
_FOLDER = RUNS / "postgres"


@database.command()
def start(
    folder: FolderOption = _FOLDER,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Listens there; 0.0.0.0: on all addresses. With TLS but on loopback."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="0 takes that of last time, or a free one.")
    ] = 0,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Serve until a signal comes, as a batch job does.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a private PostgreSQL, made at the first time, and say how to use it."""
    from hpo.cluster.postgres.postgres_server import PostgresServer

    if foreground:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    server = PostgresServer(folder.absolute())
    running = server.start(host, port)
    _say(folder, running, "runs" if running.is_new else "runs already,", as_json=as_json)
    if foreground and running.is_new:
        while server.running() is not None:
            if signal.sigtimedwait(STOP_SIGNALS, 0.5) is not None:
                server.stop()
                return
        raise RunError(f"The database has ended by itself. See {server.log}.")


@database.command()
def stop(folder: FolderOption = _FOLDER, as_json: JsonOption = False) -> None:
    """Stop the database of a folder. Workers that use it wait until it is back."""
    from hpo.cluster.postgres.postgres_server import PostgresServer

    stopped = PostgresServer(folder.absolute()).stop()
    text = f"The database in {folder} {'is stopped' if stopped else 'was not running'}."
    answer({"folder": str(folder), "stopped": stopped}, text, as_json=as_json)


@database.command()
def status(folder: FolderOption = _FOLDER, as_json: JsonOption = False) -> None:
    """Say whether the database of a folder answers, and where it runs. Exit code 1: it does not."""
    from hpo.cluster.postgres.postgres_server import PostgresServer, connection_problem

    running = PostgresServer(folder.absolute()).running()
    if running is not None and (not running.url or connection_problem(running.url)):
        raise RunError(f"A process of {running.host} has the database in {folder}: it does not answer here.")
    _say(folder, running, "runs", as_json=as_json)
    raise typer.Exit(1 if running is None else 0)


@app.command()
def copy(
    study: StoredStudyArgument,
    to: Annotated[
        str, typer.Option(metavar="URL", help="Where it goes: as --storage, which is where it comes from.")
    ],
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a whole study to another database, where it goes on with the same checkpoints."""
    from hpo.study.checkpoints.checkpoint_folders import note_database
    from hpo.study.store.copy import copy_study
    from hpo.study.store.database import place, storage_url
    from hpo.study.store.lifecycle import checkpoints_folder
    from hpo.study.store.storage import open_storage

    config = load_file(study)
    name = config.name if config else study
    with (
        existing_database(storage) as source,
        open_storage(storage_url(to)) as target,
    ):
        checkpoints = checkpoints_folder(source, name, RUNS)
        num_trials = copy_study(source, target, name)
        if checkpoints.is_dir():  # they stay, and belong to the copy
            note_database(checkpoints, target)
        slots = target.trial_counts(name)
    done, total = slots["done"], sum(slots.values())
    lines = [f"{name} is in {place(target.url)}: {num_trials} trials, {done} of {total} done."]
    if done < total:
        lines.append("Go on with it there alone: both studies would write to the same checkpoints.")
    answer({"study": name, "trials": num_trials, "slots": slots}, "\n".join(lines), as_json=as_json)


def _say(folder: Path, running: Running | None, runs: str, *, as_json: bool) -> None:
    """Where the database of a folder runs, and how it is used."""
    from hpo.study.store.database import redact

    if running is None:
        answer({"running": False}, f"No database of {folder} runs.", as_json=as_json)
        return
    url, file = redact(running.url), (folder / "url").absolute()
    answer(
        {"running": True, "url": url, "host": running.host, "url_file": str(file)},
        f"The database in {folder} {runs} on {running.host}.\n"
        f"{url}, with the password in {file}. To use it:\n  export HPO_STORAGE=@{file}",
        as_json=as_json,
    )
