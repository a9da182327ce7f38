"""The command line: thin commands over the library, each imports its needs when it runs.

Importing this module must stay cheap (`hpo --help` answers in under 0.5 s), so PyTorch, Optuna and the
rest are imported inside the commands.

Exit codes: 0 done; 1 the run failed; 2 the user's input is wrong; 130 interrupted, and checkpointed. An
exception that nobody meant to raise is a bug: it ends with its traceback and 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from hpo import __version__
from hpo.cli import cluster, machines, models, results, search, starting  # noqa: F401  (their commands)
from hpo.cli.options import app
from hpo.config.removed import removed_command
from hpo.errors import HpoError, InputError, printable

PANELS: Mapping[str, str] = {
    "Search": "run check verify plan train enqueue new",
    "Results": "status best compare diagnose report dashboard track",
    "Models": "deploy predict",
    "Machines": "init worker submit studies pause resume cancel copy delete doctor database",
}
"""The commands by their panel in `hpo --help`, in the order in which it shows them."""


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
