"""The command `plan`: what a study's trials or its budget come to."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli.options import (
    HoursOption,
    JsonOption,
    NumTrialsOption,
    StorageOption,
    StudyArgument,
    TrustCodeOption,
    TrustOption,
    answer,
    app,
)


@app.command()
def plan(
    study: StudyArgument,
    storage: StorageOption = None,
    n_trials: NumTrialsOption = None,
    hours: HoursOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="W", help="So many work; left out, those that do, or one.")
    ] = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Show what a study's trials or its budget come to: hours, starts, and how many go on to the end.

    By its complete trials; in a precision of which there is none, some steps are trained here.
    """
    from hpo.api.planning import plan_told
    from hpo.api.study import Study

    opened = Study(study, storage=storage, trust_remote_code=trust_remote_code)
    result = opened.plan(n_trials=n_trials, hours=hours, workers=workers)
    answer(result.as_json(), "\n".join(plan_told(result)), as_json=as_json)
