"""Text, tables and warnings in a terminal or a log file.

A table is a DataFrame or a list of rows, so a command that shows a short one does without pandas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hpo.errors import printable
from hpo.outcome import Outcome

if TYPE_CHECKING:
    import pandas as pd

    Rows: TypeAlias = pd.DataFrame | Sequence[Mapping[str, Any]]
    Part: TypeAlias = str | Text | tuple[str, Rows]
    """A paragraph, or a table with its title. Leading spaces of a string indent the whole paragraph."""

OUTCOME_STYLES: dict[str, str] = {
    **{outcome: "magenta" for outcome in Outcome if outcome.infeasible},
    Outcome.COMPLETE: "green",
    Outcome.PAUSED: "cyan",
    Outcome.PRUNED: "yellow",
    Outcome.PREEMPTED: "yellow",
    Outcome.CRASHED: "bold red",
    Outcome.FAILED: "bold red",
}


def print_parts(parts: Iterable[Part]) -> None:
    """Print paragraphs and tables. A table without rows is left out."""
    console = Console(highlight=False)
    for part in parts:
        if not console.is_terminal and not isinstance(part, tuple):
            console.print(Text(part) if isinstance(part, str) else part, soft_wrap=True)
        elif not isinstance(part, tuple) or len(part[1]):
            console.print(_rendered(part))


def print_live(screens: Iterable[tuple[object, Iterable[Part]]]) -> None:
    """Show screens, each with the facts in it. On a terminal each replaces the one before.

    Elsewhere a screen is printed only if its facts have changed.
    """
    console, before = Console(highlight=False), None
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for facts, parts in screens:
            if live is not None:
                shown = (part for part in parts if not isinstance(part, tuple) or len(part[1]))
                live.update(Group(*map(_rendered, shown)), refresh=True)
            elif facts != before:
                print_parts(parts)
            before = facts


def _rendered(part: Part) -> RenderableType:
    if isinstance(part, tuple):
        return text_table(part[1], part[0])
    text = Text(part.lstrip(" ")) if isinstance(part, str) else part
    indent = len(part) - len(text)
    return Padding(text, (0, 0, 0, indent)) if indent else text


def warning(text: str) -> Text:
    """A sentence that a reader of the figures must know."""
    return Text.assemble(("Warning: ", "bold yellow"), one_line(text))


def one_line(text: str) -> str:
    """The text in one line, without characters that a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


def _table(*columns: str, title: str) -> Table:
    title_or_none = escape(title) or None
    return Table(
        *map(escape, columns),
        title=title_or_none,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def _columns(rows: Rows) -> dict[str, list[str]]:
    """The cells of each column as text. Columns whose cells are all empty are left out."""
    names = rows[0] if isinstance(rows, Sequence) else rows.columns
    of = {
        str(name): [row[name] for row in rows] if isinstance(rows, Sequence) else rows[name] for name in names
    }
    # Before a cell is measured: a control character has no width.
    cells = {name: [printable(str(cell)) for cell in column] for name, column in of.items()}
    return {name: column for name, column in cells.items() if any(column)}


def text_table(rows: Rows, title: str = "") -> Table:
    """A table of text cells.

    Where the words do not fit the terminal, each row is a list of its cells: no word or number is broken.
    """
    columns = _columns(rows)
    texts = [[name, *cells] for name, cells in columns.items()]
    words = [max(map(cell_len, " ".join(cells).split()), default=0) for cells in texts]
    spare = Console().width - sum(words) - 2 * len(words) - 1  # without the gaps and the edges
    if spare >= 0:
        table = _table(*columns, title=title)
        for column, longest, cells in zip(table.columns, words, texts, strict=True):
            wanted = max(map(cell_len, "\n".join(cells).splitlines()), default=0)
            column.width = min(wanted, longest + spare)
            spare -= column.width - longest
        for row in zip(*columns.values(), strict=True):
            table.add_row(*map(escape, row))
        return table
    table = _table("", "", title=title)
    table.show_header = False
    table.columns[0].max_width = max(12, Console().width - max(words) - 6)
    table.columns[1].overflow = "fold"  # a number that is cut is another number
    for row in zip(*columns.values(), strict=True):
        for name, cell in zip(columns, row, strict=True):
            if cell:
                table.add_row(escape(" ".join(name.split())), escape(cell))
        table.add_section()
    return table
