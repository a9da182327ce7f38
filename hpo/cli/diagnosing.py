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
    checkpoint_of,
    config_of,
    existing_study,
    print_json,
    progress_shown,
)
from hpo.errors import InputError

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

    from hpo.config.search_space import decode
    from hpo.trial.diagnosis import StoredTrial
    from hpo.trial.diagnosis import diagnose as find

    with progress_shown(quiet=as_json), existing_study(study, storage) as (database, record):
        chosen = next((each for each in record.trials if each.number == trial), None)
        if chosen is None:
            raise InputError(f"--trial {trial}: {record.name} has {len(record.trials)}, numbered from 0.")
        config = config_of(study, record, trust_remote_code)
        executor, folder = checkpoint_of(config, database, chosen, kind="step")
        params = decode(config.search_space, chosen.params)
        key = f"{database.study_token(config.name)}/{chosen.origin}"
        stored = StoredTrial(trial, chosen.outcome, params, chosen.telemetry, folder, key)
        diagnosis = find(executor, stored, lambda what: typer.echo(what, err=True))
    if as_json:
        print_json({"study": record.name, **asdict(diagnosis)})
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
