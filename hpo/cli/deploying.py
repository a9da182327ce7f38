"""The command `deploy`: the form of a study's best model that is as good as fp32 and the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.cli.options import ended_at_once, option, print_json, study_command

if TYPE_CHECKING:
    from hpo.api.study import Study

DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "timeout": option(
        float | None,
        "SECONDS",
        "After so long no further form is begun, and the choice is among those that are scored.",
        min=1,
        show_default="1800",
    ),
    "max_drop": option(
        float | None,
        "POINTS",
        "What loses more is refused; in hundredths, of mae and rmse in the labels' units.",
        min=1e-6,
        show_default="1",
    ),
    "batch": option(int | None, "SIZE", "Batch whose latency decides: 1 or 32.", show_default="1"),
    "threads": option(int | None, "N", "Threads.", min=1, max=1024, show_default="one a core"),
    "artifacts": option(
        str | None,
        "NAMES",
        "Which, beside fp32: bf16,onnx_int8_dynamic.",
        show_default="all that this machine can have",
    ),
    "device": option(
        Literal["auto", "cpu", "cuda"] | None, "DEVICE", "auto, cpu or cuda.", show_default="cpu"
    ),
}


@study_command(DEPLOYMENT_OPTIONS)
def deploy(
    opened: Study,
    as_json: bool,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Folder.", show_default="runs/STUDY/deploy"),
    ] = None,
    **options: Any,
) -> None:
    """Find the fastest form of the best model that is as good as fp32: bf16, fp16, ONNX, int8.

    Chosen on validation, reported on test. Writes it to DIR/model, and the numbers to DIR/deploy.json.
    Ctrl-C ends the search with the forms that are scored by then; a second one leaves nothing.
    """
    from hpo.api.deploying import DeploymentStopped
    from hpo.cli.display import print_deployment

    with ended_at_once():
        try:
            stored = opened.deploy(out, **options)
        except DeploymentStopped as stopped:
            typer.echo(str(stopped), err=True)
            raise typer.Exit(130) from None
    was_stopped = stored.pop("was_stopped")
    if as_json:
        print_json(stored)
    else:
        print_deployment(stored, Path(stored["folder"]))
    raise typer.Exit(130 if was_stopped else 0)
