"""The command `check`: what can be known of a study's data without training."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import RUNS, JsonOption, StudyArgument, app, load_to_run, print_json, progress_shown
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.report.data_check import DataCheck

MAX_CLASSES = 12
"""A terminal shows the classes of a task with at most so many; the page has them all."""


@app.command()
def check(
    study: StudyArgument,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, help="The page.", show_default="runs/STUDY/report/data.html"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a study's data hold and what to change, before anything is trained."""
    config = load_to_run(study)
    path = html or RUNS / config.name / "report" / "data.html"
    _make_folder(path.parent)
    with progress_shown(quiet=as_json):
        from hpo.report.data_check import check_data
        from hpo.report.data_page import write_data_page

        found = check_data(config, RUNS)
        write_data_page(found, path)
    if as_json:
        print_json(found.as_json() | {"page": str(path)})
    else:
        _print(found)
        typer.echo(str(path))


def _make_folder(folder: Path) -> None:
    """Before the data are read. Raises InputError where the page could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
    except OSError as error:
        raise InputError(
            f"--html must be a file in a folder that may be written, but {folder}: {error.strerror}."
        ) from None


def _print(found: DataCheck) -> None:
    from rich.console import Console
    from rich.text import Text

    from hpo.cli.display import dataframe_table
    from hpo.report.data_check import balance_table, cuts_table, leaks_table, rows_table, tasks_table

    console = Console(highlight=False)
    tables = {
        f"{found.study}: splits": rows_table(found),
        "texts in two splits": leaks_table(found).drop(columns="such as", errors="ignore"),
        "labels": tasks_table(found).drop(columns="kind"),
    }
    for task in found.facts.tasks:
        if len(task.labels) <= MAX_CLASSES:
            tables[task.name] = balance_table(task)
    tables[f"length in tokens of {found.encoder}, long_text {found.long_text}"] = cuts_table(found)
    for title, table in tables.items():
        if not table.empty:
            narrow = table.rename(columns=lambda name: name.replace(" ", "\n").replace("`", ""))
            console.print(dataframe_table(narrow, title))
    for one in found.advice:
        style = "bold yellow" if one.is_grave else ""
        line = Text.assemble(("- ", style), (one.text.replace("`", ""), style), (f"  [{one.key}]", "dim"))
        console.print(line, soft_wrap=not console.is_terminal)
    if not found.advice:
        console.print("Nothing was found that speaks against training on these data.")
