"""The command `check`: what can be known of a study's data without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpo.cli.options import print_json, study_command

if TYPE_CHECKING:
    from hpo.api.study import Study
    from hpo.report.data_check import DataCheck

MAX_CLASSES = 12
"""A terminal shows the classes of a task with at most so many; `--json` has them all."""


@study_command()
def check(opened: Study, as_json: bool) -> None:
    """Show what a study's data hold and what to change, before anything is trained."""
    result = opened.check()
    if as_json:
        print_json(result.as_json())
    else:
        _print(result)


def _print(result: DataCheck) -> None:
    from rich.console import Console
    from rich.text import Text

    from hpo.cli.display import dataframe_table
    from hpo.report.data_check import balance_table, cuts_table, leaks_table, rows_table, tasks_table

    console = Console(highlight=False)
    tables = {
        f"{result.study}: splits": rows_table(result),
        "texts in two splits": leaks_table(result),
        "labels": tasks_table(result),
    }
    for task in result.facts.tasks:
        if len(task.labels) <= MAX_CLASSES:
            tables[task.name] = balance_table(task)
    tables[f"length in tokens of {result.encoder}, long_text {result.long_text}"] = cuts_table(result)
    for title, table in tables.items():
        if not table.empty:
            console.print(dataframe_table(table.rename(columns=lambda name: name.replace("`", "")), title))
    for one in result.advice:
        console.print(Text("- " + one.replace("`", "")), soft_wrap=not console.is_terminal)
    if not result.advice:
        console.print("Nothing was found that speaks against training on these data.")
