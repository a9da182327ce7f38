"""The command that finds, and mends, what is wrong with a database, its studies and their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.api.opening import RUNS, load_file
from hpo.cli.options import JsonOption, StorageOption, app, print_json
from hpo.errors import printable

if TYPE_CHECKING:
    from hpo.cluster.doctor.doctor import Finding


@app.command()
def doctor(
    study: Annotated[
        str | None,
        typer.Argument(metavar="[STUDY]", help="This study alone; else all of the database."),
    ] = None,
    storage: StorageOption = None,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong with a database, its studies and checkpoints. Exit code 1: something is left."""
    from hpo.cluster.doctor.doctor import examine
    from hpo.study.store.database import place, storage_url

    url = storage_url(storage)
    config = load_file(study) if study else None
    findings = []
    for finding in examine(url, RUNS, study=config.name if config else study, fix=fix):
        findings.append(finding)
        if not as_json:
            _print(finding)
    left = [finding for finding in findings if not finding.mended]
    if as_json:
        print_json({"ok": not left, "findings": [_as_json(finding) for finding in findings]})
    else:
        can = sum(finding.mend is not None for finding in left)
        hint = f" `hpo doctor --fix` mends {can}." if can else ""
        mended = len(findings) - len(left)
        to_mend = f"{mended} mended, {len(left) or 'nothing'} left" if mended else f"{len(left) or 'nothing'}"
        typer.echo(f"{place(url)}: {to_mend} to mend.{hint}")
    raise typer.Exit(1 if left else 0)


def _print(finding: Finding) -> None:
    typer.secho(f"warning ({finding.check})", fg="yellow", bold=True)
    typer.echo(printable(f"  {finding.problem}"))
    if finding.remedy:
        how = "Mended. " if finding.mended else "--fix: " if finding.mend else ""
        typer.echo(printable(f"  {how}{finding.remedy}"))


def _as_json(finding: Finding) -> dict[str, Any]:
    names = ("check", "problem", "remedy", "mended")
    return {name: getattr(finding, name) for name in names} | {"can_fix": finding.mend is not None}
