"""The command `diagnose`: where a trial stopped being finite, and what heals it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import (
    JsonOption,
    StorageOption,
    StudyArgument,
    TrustCodeOption,
    TrustOption,
    app,
    print_json,
)

if TYPE_CHECKING:
    from hpo.trial.diagnosis import Diagnosis


@app.command()
def diagnose(
    study: StudyArgument,
    trial: Annotated[int, typer.Option("--trial", min=0, metavar="N", help="Its number.")],
    storage: StorageOption = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Name the operator that broke a trial and the settings that heal it; changes nothing in the study.

    Exit code 1: nothing broke this time.
    """
    from dataclasses import asdict

    from hpo.api.study import Study

    opened = Study(study, storage=storage, trust_remote_code=trust_remote_code)
    diagnosis = opened.diagnose(trial)
    if as_json:
        print_json({"study": opened.name, **asdict(diagnosis)})
    else:
        _print(diagnosis)
    raise typer.Exit(0 if diagnosis.broken else 1)


def _print(diagnosis: Diagnosis) -> None:
    from hpo.trial.diagnosis import shown

    broken, head = diagnosis.broken, f"Trial {diagnosis.trial} ({diagnosis.outcome}, {diagnosis.precision})"
    if broken is None:
        typer.echo(f"{head}: all was finite this time, run eagerly and on one rank")
        return
    typer.echo(f"{head}: {broken.text}")
    if broken.operator:
        typer.echo(f"First: {broken.operator}")
    for remedy in diagnosis.remedies:
        typer.echo(f"Tried: {shown(remedy.settings)} ({remedy.result})")
    healed_by = diagnosis.healed_by
    typer.echo(f"Use {shown(healed_by)}." if healed_by else "Nothing of what was tried heals it.")
