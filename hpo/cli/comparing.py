"""The command `compare`: is a precision as good as fp32, and how good are the best configurations?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.cli.options import UntilOption, WorkersOption, ended_at_once, option, print_json, study_command
from hpo.cli.running import run_told, say_how_to_go_on
from hpo.config.questions import CONFIGURATIONS, MOST_SEEDS

if TYPE_CHECKING:
    from hpo.api.study import Study

COMPARISON_OPTIONS: Mapping[str, Any] = {
    "precisions": option(
        str | None,
        "NAMES",
        "Precisions to compare with fp32: bf16,fp16.",
        show_default="all that this device runs",
    ),
    "top": option(int | None, "K", "Configurations.", min=1, max=20, show_default="3"),
    "seeds": option(
        int | None, "N", "New seeds before the first look.", min=3, max=MOST_SEEDS, show_default="3"
    ),
    "max_seeds": option(
        int | None,
        "N",
        "Most seeds of a configuration. It may be raised later.",
        min=3,
        max=MOST_SEEDS,
        show_default="12",
    ),
    "margin": option(
        float | None,
        "POINTS",
        "A smaller loss does not count. In hundredths, for mae and rmse in the units of the labels.",
        min=1e-6,
        show_default="0.5",
    ),
}


@study_command(COMPARISON_OPTIONS)
def compare(
    opened: Study,
    as_json: bool,
    over: Annotated[
        Literal["fp_precision", "base_precision", "optimizer_state"] | None,
        typer.Option(
            help="What is compared: of training, of the weights under an adapter, of the moments.",
            show_default="fp_precision",
        ),
    ] = None,
    configurations: Annotated[
        bool,
        typer.Option(
            "--configurations",
            help="Show the best configurations on new seeds, each in its own precision, without a verdict.",
        ),
    ] = False,
    workers: WorkersOption = None,
    until: UntilOption = None,
    **options: Any,
) -> None:
    """Compare precisions on new seeds: is one as good as fp32, and how much faster? Goes on where it was."""
    from hpo.api.comparing import ComparisonStopped
    from hpo.cli.display import print_comparison
    from hpo.compare.planning import refuse_options
    from hpo.config.comparison import question_of
    from hpo.precision.table import PRECISION

    if configurations and over:
        refuse_options(["over"])
    question = CONFIGURATIONS if configurations else question_of(over or PRECISION)
    if options["precisions"]:
        options["precisions"] = tuple(name.strip() for name in options["precisions"].split(","))
    with ended_at_once():
        try:
            result = opened.compare(question, workers=workers, until=until, **options)
        except ComparisonStopped as stopped:
            ended = stopped.result
            if as_json:
                print_json(run_told(ended))
            else:
                say_how_to_go_on(ended)
            code = ended.exit_code or (1 if ended.ended == "elsewhere" else 0)
            raise typer.Exit(code) from None
    print_json(result) if as_json else print_comparison(result)
