"""The command `diagnose`: where a trial stopped being finite, and what helps."""

from __future__ import annotations

from typing import Annotated

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


@app.command()
def diagnose(
    study: StudyArgument,
    trial: Annotated[int, typer.Option("--trial", min=0, metavar="N", help="Its number.")],
    storage: StorageOption = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Name the operator that broke a trial and what helps, by the batch after its checkpoint.

    Tries a lower loss scale, bf16 and fp32. Changes nothing in the study. Exit code 1: that batch is finite.
    """
    from dataclasses import asdict

    from hpo.api.study import Study

    opened = Study(study, storage=storage, trust_remote_code=trust_remote_code)
    found = opened.diagnose(trial)
    broken = found.broken
    if as_json:
        print_json({"study": opened.name, **asdict(found)})
        raise typer.Exit(0 if broken else 1)
    weights = "the last checkpoint" if found.has_checkpoint else "the initial weights (it has no checkpoint)"
    result = f"{broken.what} not finite" if broken else "all is finite, so it broke in a later step"
    typer.echo(f"Trial {found.trial} ({found.outcome}, {found.precision}), step {found.step}: {result}")
    typer.echo(f"Run with {weights}.")
    if broken and broken.operator:
        typer.echo(f"First: {broken.operator}")
    for remedy in found.remedies:
        settings = ", ".join(f"{name}: {value}" for name, value in remedy.settings.items())
        typer.echo(f"With {settings}: {remedy.result}")
    if broken and not any(remedy.heals for remedy in found.remedies):
        typer.echo("The precision is not the cause. Lower `learning_rate` or `max_grad_norm`.")
    raise typer.Exit(0 if broken else 1)
