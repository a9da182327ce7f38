"""The commands about databases: a private PostgreSQL, backups, and a study's way from one to another."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import RUNS, JsonOption, StorageOption, app, print_json

if TYPE_CHECKING:
    from hpo.cluster.postgres_server import Running
    from hpo.study.storage import Storage

database = typer.Typer(
    help="Start and stop a private PostgreSQL; back a database up and restore it.", no_args_is_help=True
)
app.add_typer(database, name="database")

FolderOption = Annotated[
    Path, typer.Option(metavar="DIR", file_okay=False, help="Where the database has its files.")
]
_FOLDER = RUNS / "postgres"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What people and schedulers end a job with, or warn it with."""


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
    from hpo.cluster.postgres_server import PostgresServer

    if foreground:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    server = PostgresServer(folder.absolute())
    running = server.start(host, port)
    if as_json:
        print_json(_described(server.url_file, running))
    elif running.programs is None:
        typer.echo(f"The database in {folder} runs already, on {running.host}.")
    else:
        typer.echo(f"{running.programs} serves {folder}.")
    if not as_json:
        _say_how_to_use(folder / "url", running)
    if foreground and running.process is not None:
        server.serve(running, _STOP_SIGNALS)


@database.command()
def stop(folder: FolderOption = _FOLDER, as_json: JsonOption = False) -> None:
    """Stop the database of a folder. Workers that use it wait until it is back."""
    from hpo.cluster.postgres_server import PostgresServer

    stopped = PostgresServer(folder.absolute()).stop()
    if as_json:
        print_json({"folder": str(folder), "stopped": stopped})
    else:
        typer.echo(f"The database in {folder} {'is stopped' if stopped else 'was not running'}.")


@database.command()
def status(folder: FolderOption = _FOLDER, as_json: JsonOption = False) -> None:
    """Say whether the database of a folder runs, and where. Exit code 1: it does not."""
    from hpo.cluster.postgres_server import PostgresServer

    server = PostgresServer(folder.absolute())
    running = server.running()
    if as_json:
        print_json(_described(server.url_file, running))
    elif running is None:
        typer.echo(f"No database of {folder} runs.")
    else:
        typer.echo(f"The database in {folder} runs on {running.host}.")
        _say_how_to_use(folder / "url", running)
    raise typer.Exit(1 if running is None else 0)


@database.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="Replaced if it is there.")],
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a database to one file, also while workers run."""
    from hpo.cluster import backup as backups
    from hpo.study.database import place, storage_url

    url = storage_url(storage)
    _say_studies(f"{file} is a backup of {place(url)}", backups.backup(url, file), as_json)


@database.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="Of `hpo database backup`.")],
    storage: StorageOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the studies that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fill an empty database from a backup."""
    from hpo.cluster import backup as backups
    from hpo.study.database import place, storage_url

    url = storage_url(storage)
    _say_studies(f"{place(url)} is restored from {file}", backups.restore(file, url, force=force), as_json)


@app.command()
def copy(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A name in the database.")],
    to: Annotated[
        str, typer.Option(metavar="URL", help="Where it goes: as --storage, which is where it comes from.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NEW", help="What it is called there.", show_default="STUDY")
    ] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a whole study to another database, where it goes on with the same checkpoints."""
    from hpo.cli.options import load_file
    from hpo.study.copy import copy_study
    from hpo.study.database import place, storage_url
    from hpo.study.lifecycle import checkpoints_folder
    from hpo.study.storage import open_storage

    config = load_file(study)
    old = config.name if config else study
    with (
        open_storage(storage_url(storage), create=False) as source,
        open_storage(storage_url(to)) as target,
    ):
        before = checkpoints_folder(source, old, RUNS)
        copied = copy_study(source, target, old, name)
        where = place(target.url)
        linked = _hand_over(before, checkpoints_folder(target, copied.name, RUNS), target)
    if as_json:
        print_json({"study": copied.name, "trials": copied.num_trials, "slots": copied.slots})
        return
    done, total = copied.slots["done"], sum(copied.slots.values())
    typer.echo(f"{copied.name} is in {where}: {copied.num_trials} trials, {done} of {total} done.")
    if linked:
        typer.echo(f"Its checkpoints stay where they are; {linked} leads to them.")
    if done < total:
        typer.echo("Go on with it there alone: both studies would write to the same checkpoints.")


def _hand_over(before: Path, now: Path, target: Storage) -> Path | None:
    """Note whose the checkpoints of a copied study are now, and make them be found by its new name.

    Returns the link to them, if one was made.
    """
    from hpo.study.checkpoint_folders import note_database

    if not before.is_dir():
        return None
    note_database(before, target)
    if now.exists():
        return None
    now.parent.mkdir(parents=True, exist_ok=True)
    now.symlink_to(Path("..", before.parent.name, before.name), target_is_directory=True)
    return now


def _described(url_file: Path, running: Running | None) -> dict[str, Any]:
    from hpo.study.database import redact

    if running is None:
        return {"running": False}
    return {"running": True, "url": redact(running.url), "host": running.host, "url_file": str(url_file)}


def _say_how_to_use(url_file: Path, running: Running) -> None:
    from hpo.study.database import redact

    typer.echo(f"{redact(running.url)}, with the password in {url_file}. To use it:")
    typer.echo(f"  export HPO_STORAGE=@{url_file.absolute()}")


def _say_studies(what: str, studies: dict[str, int], as_json: bool) -> None:
    if as_json:
        print_json({"studies": studies})
        return
    found = ", ".join(f"{name} ({count} trials)" for name, count in studies.items())
    typer.echo(f"{what}, with {found or 'no study'}.")
