"""The command line: thin commands over the library.

PyTorch, Optuna and the rest are imported inside the commands, so that `hpo --help` answers in under 0.4 s.

Exit codes: 0 done; 1 the run failed; 2 the user's input is wrong; 130 interrupted, and checkpointed. Any
other exception is a bug: it ends with its traceback and 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from rich import text as rich_text
from rich.console import Console

from hpo import __version__
from hpo.cli import cluster, machines, models, results, search, starting  # noqa: F401  (their commands)
from hpo.cli.options import app
from hpo.errors import HpoError, printable

PANELS: Mapping[str, str] = {
    "Search": "run check verify plan train enqueue new",
    "Results": "status best compare diagnose report dashboard track",
    "Models": "deploy predict",
    "Machines": "init worker submit studies pause resume cancel copy delete doctor database",
}
"""The commands of each panel in `hpo --help`, in their order there."""


def _arrange() -> None:
    """Show each command in its panel. A command without one is a KeyError."""
    panels = {name: panel for panel, names in PANELS.items() for name in names.split()}
    for info in app.registered_commands:
        info.name = str(info.name or getattr(info.callback, "__name__", ""))
        info.rich_help_panel = panels[info.name]
    for group in app.registered_groups:
        group.rich_help_panel = panels[str(group.name)]
    app.registered_commands.sort(key=lambda info: [*panels].index(str(info.name)))


_arrange()


def main() -> None:
    """Run the command line. An error of the user or of the run becomes one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for a terminal that cannot show a character
    # Text of a database, such as the host of a worker, is shown without escape sequences.
    rich_text.strip_control_codes = printable  # type: ignore[assignment,attr-defined]
    try:
        app(prog_name="hpo")
    except HpoError as error:
        message = rich_text.Text.assemble(("Error: ", "bold red"), printable(str(error)))
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
