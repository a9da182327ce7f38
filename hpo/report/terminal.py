"""Text, tables and warnings in a terminal or a log file."""

import html
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

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

Rows: TypeAlias = Sequence[Mapping[str, str]]  # A table of text; all rows have the same columns
Part: TypeAlias = str | Text | tuple[str, Rows]
"""A paragraph, or a table with its title. Leading spaces of a string indent the whole paragraph."""


class Shown:
    """A result that a notebook shows by its `text`, like a terminal."""

    def _repr_html_(self) -> str:
        return as_html(self.text())  # type: ignore[attr-defined]


class _Content(Shown):
    """The content of `--json`, with its text for a person."""

    def __init__(self, content: Any, text: Callable[[], Iterable[Part]]) -> None:
        super().__init__(content)  # type: ignore[call-arg]
        self.text = text


class ShownDict(_Content, dict[str, Any]):
    as_json = dict.copy


class ShownList(_Content, list[Any]):
    pass


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
    """Print paragraphs and tables, without empty tables."""
    console = Console(highlight=False)
    for part in parts:
        if not console.is_terminal and not isinstance(part, tuple):
            console.print(Text(part) if isinstance(part, str) else part, soft_wrap=True)
        elif not isinstance(part, tuple) or part[1]:
            console.print(_rendered(part))


def as_html(parts: str | Iterable[Part]) -> str:
    """Return paragraphs and tables as HTML, without empty tables, in the colours of the page around it."""
    shown = []
    for part in [parts] if isinstance(parts, str) else parts:
        if not isinstance(part, tuple):
            tag = "b" if isinstance(part, Text) and "bold" in str(part.style) else "span"
            shown.append(f'<p style="white-space: pre-wrap"><{tag}>{html.escape(str(part))}</{tag}></p>')
        elif part[1]:
            names = [name for name in part[1][0] if any(row[name] for row in part[1])]
            shown.append(f'<div style="overflow-x: auto">{html.escape(part[0])}<table>')
            for tag, *cells in ["th", *names], *(["td", *(row[name] for name in names)] for row in part[1]):
                opened = f'<{tag} style="text-align: left; padding-right: 1em">'
                shown.append(f"<tr>{''.join(f'{opened}{html.escape(cell)}</{tag}>' for cell in cells)}</tr>")
            shown.append("</table></div>")
    return "".join(shown)


def print_live(screens: Iterable[tuple[object, Iterable[Part]]]) -> None:
    """Show screens in place of each other. A log file gets a screen if its facts have changed."""
    console, before = Console(highlight=False), None
    with live_on(console) as live:
        for facts, parts in screens:
            if live is not None:
                shown = (part for part in parts if not isinstance(part, tuple) or part[1])
                live.update(Group(*map(_rendered, shown)), refresh=True)
            elif facts != before:
                print_parts(parts)
            before = facts


def live_on(console: Console, *, transient: bool = False) -> Live | nullcontext[None]:
    """Return a display that changes in place, below other output; nothing for a log, CI or dumb terminal."""
    if not console.is_interactive or os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return nullcontext()
    return Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty(), transient=transient)


def _rendered(part: Part) -> RenderableType:
    if isinstance(part, tuple):
        return text_table(part[1], part[0])
    text = Text(part.lstrip(" ")) if isinstance(part, str) else part
    indent = len(part) - len(text)
    return Padding(text, (0, 0, 0, indent)) if indent else text


def warning(text: str) -> Text:
    return Text.assemble(("Warning: ", "bold yellow"), one_line(text))


def one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def text_table(rows: Rows, title: str = "") -> Table:
    """Make a table, without columns of empty cells.

    If the words do not fit the terminal, each row becomes a list of its cells: no word or number is broken.
    """
    # A control character has no width, so it is replaced before a cell is measured.
    cells = {name: [printable(str(row[name])) for row in rows] for name in rows[0]}
    columns = {name: column for name, column in cells.items() if any(column)}
    texts = [[name, *column] for name, column in columns.items()]
    words = [max(map(cell_len, " ".join(column).split()), default=0) for column in texts]
    spare = Console().width - sum(words) - 2 * len(words) - 1  # without the gaps and the edges
    names = columns if spare >= 0 else ("", "")
    table = Table(
        *map(escape, names),
        title=escape(title) or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    if spare >= 0:
        for column, longest, texts_of_column in zip(table.columns, words, texts, strict=True):
            wanted = max(map(cell_len, "\n".join(texts_of_column).splitlines()), default=0)
            column.width = min(wanted, longest + spare)
            spare -= column.width - longest
        for row in zip(*columns.values(), strict=True):
            table.add_row(*map(escape, row))
        return table
    table.show_header = False
    table.columns[0].max_width = max(12, Console().width - max(words) - 6)
    table.columns[1].overflow = "fold"  # a truncated number would be another number
    for row in zip(*columns.values(), strict=True):
        for name, cell in zip(columns, row, strict=True):
            if cell:
                table.add_row(escape(" ".join(name.split())), escape(cell))
        table.add_section()
    return table
