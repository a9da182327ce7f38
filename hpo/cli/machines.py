"""The commands for workers, databases and the studies in them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import hpo
from hpo.cli.options import (
    TRUST,
    WORK,
    Answer,
    answer,
    app,
    argument,
    command,
    flag,
    folder,
    option,
    optional,
    stored_study_command,
    study_command,
)
from hpo.errors import InputError, RunError
from hpo.study.running.stopping import STOP_SIGNALS

if TYPE_CHECKING:
    from hpo.api.managed import ManagedStudy
    from hpo.cluster.postgres.postgres_server import PostgresServer

database = typer.Typer(help="Start and stop a private PostgreSQL.", no_args_is_help=True)
app.add_typer(database, name="database")


@study_command("n_trials", "hours")
def init(study: hpo.Study, **options: Any) -> Answer:
    """Check the study, and make the tables and the study, once, before workers start."""
    from hpo.report.status import study_status

    record = study.init(**options)
    text = f"The study {record.name} with {sum(record.counts.values())} trials is ready in {study.place}."
    return Answer(study_status(record), text)


@stored_study_command(*WORK, *TRUST)
def worker(study: hpo.Study, **options: Any) -> Any:
    """Join a study as one or more workers; leave when it is done."""
    return study.work(**options)


@command("storage")
def studies(storage: str | None = None) -> Answer:
    """List the studies of the database: state, progress, live workers, age."""
    from hpo.report.studies import overview
    from hpo.study.reading.overview import list_studies
    from hpo.study.store.storage import existing_database

    with existing_database(storage) as database:
        overviews = list_studies(database)
    return Answer([one.as_json() for one in overviews], overview(overviews))


@stored_study_command(needs_models=False)
def pause(study: ManagedStudy) -> Any:
    """Pause a study: its workers checkpoint their trials and leave."""
    return study.pause()


@stored_study_command(needs_models=False)
def resume(study: ManagedStudy) -> Any:
    """Open a paused or cancelled study again. Start its workers anew."""
    return study.resume()


@stored_study_command(needs_models=False)
def cancel(study: ManagedStudy) -> Any:
    """Pause a study and end its unfinished trials."""
    return study.cancel()


@stored_study_command(
    needs_models=False, to=option(str, "URL", "The other database, in the form of --storage.")
)
def copy(study: ManagedStudy, to: str) -> Any:
    """Copy a whole study to another database; the copy uses the same checkpoints."""
    return study.copy(to)


@stored_study_command(needs_models=False, yes=flag("--yes", "Do not ask."))
def delete(study: ManagedStudy, *, yes: bool, as_json: bool) -> Any:
    """Remove a study from the database, and its checkpoints from this machine."""

    def confirm(description: str) -> None:
        if as_json or not sys.stdin.isatty():
            raise InputError(f"To delete {description}, give --yes.")
        typer.confirm(f"Delete {description}? This cannot be undone.", abort=True)

    return study.delete() if yes else study.delete(confirm)


@command(
    "storage",
    study=argument(str | None, "STUDY", "Examine only this study; default: all of the database."),
    fix=flag("--fix", "Repair the faults where possible."),
)
def doctor(study: str | None = None, storage: str | None = None, *, fix: bool, as_json: bool) -> Answer:
    """Find faults of a database, its studies and checkpoints. Exit code 1: a fault remains."""
    from hpo.api.opening import RUNS, file_error_first, load_file
    from hpo.cluster.doctor.doctor import examine, summary
    from hpo.study.store.database import shown_url, storage_url

    url = storage_url(storage)
    config = load_file(study) if study else None
    findings = []
    with file_error_first(study or ""):
        for finding in examine(url, RUNS, study=config.name if config else study, fix=fix):
            findings.append(finding)
            if not as_json:
                typer.secho(f"warning ({finding.check})", fg="yellow", bold=True)
                typer.echo(finding.text())
    is_left = not all(finding.mended for finding in findings)
    content = {"ok": not is_left, "findings": [finding.as_json() for finding in findings]}
    return Answer(content, summary(findings, shown_url(url)), int(is_left))


_DEFAULT = Path("runs/postgres")
_FOLDER = folder("Folder of the database's files.", default=str(_DEFAULT))


def _server(folder: Path) -> PostgresServer:
    from hpo.cluster.postgres.postgres_server import PostgresServer

    return PostgresServer(folder.absolute())


@command(
    group=database,
    folder=_FOLDER,
    host=optional(str, "HOST", "Address to listen on; 0.0.0.0: all, with TLS.", "127.0.0.1"),
    port=optional(int, "PORT", "0 takes the last one, or a free one.", "0", min=0, max=65535),
    foreground=flag("--foreground", "Serve until a signal arrives, for a batch job."),
)
def start(
    folder: Path = _DEFAULT, host: str = "127.0.0.1", port: int = 0, *, foreground: bool, as_json: bool
) -> None:
    """Start a private PostgreSQL, and print how to use it. The first start creates it."""
    if foreground:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    server = _server(folder)
    running = server.start(host, port)
    runs = "runs" if running.is_new else "runs already,"
    answer(running.as_json(folder), running.text(folder, runs), as_json=as_json)
    if foreground and running.is_new:
        while server.running() is not None:
            if signal.sigtimedwait(STOP_SIGNALS, 0.5) is not None:
                server.stop()
                return
        raise RunError(f"The database has ended by itself. See {server.log}.")


@command(group=database, folder=_FOLDER)
def stop(folder: Path = _DEFAULT) -> Answer:
    """Stop the database of a folder. Its workers wait until it is back."""
    stopped = _server(folder).stop()
    text = f"The database in {folder} {'is stopped' if stopped else 'was not running'}."
    return Answer({"folder": str(folder), "stopped": stopped}, text)


@command(group=database, folder=_FOLDER)
def status(folder: Path = _DEFAULT) -> Answer:
    """Show whether the database of a folder answers, and its address. Exit code 1: it does not."""
    from hpo.cluster.postgres.postgres_server import connection_problem

    running = _server(folder).running()
    if running is not None and (not running.url or connection_problem(running.url)):
        raise RunError(f"A process of {running.host} has the database in {folder}: it does not answer here.")
    if running is None:
        return Answer({"running": False}, f"No database runs in {folder}.", 1)
    return Answer(running.as_json(folder), running.text(folder))
