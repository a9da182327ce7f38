"""The command `compare`: which precision is as good as fp32, and which configuration is really the best."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.cli.options import (
    JsonOption,
    StorageOption,
    StudyArgument,
    TrustCodeOption,
    UntilOption,
    WorkersOption,
    app,
    config_of,
    existing_study,
    make_runs_folder,
    print_json,
    progress_shown,
    stop_signals,
    with_options,
    worker_processes,
)
from hpo.cli.running import run_here, say_how_to_go_on
from hpo.config.comparison import MOST_SEEDS, question_of
from hpo.errors import InputError
from hpo.json_safe import json_safe
from hpo.precision.table import PRECISION

if TYPE_CHECKING:
    from hpo.compare.planning import Request
    from hpo.compare.price import Price
    from hpo.config.study_config import StudyConfig
    from hpo.data.dataset import DataSet
    from hpo.study.reading.study_record import StudyRecord
    from hpo.study.running.stopping import Stop
    from hpo.study.store.storage import Storage

COMPARISON_OPTIONS: Mapping[str, Any] = {
    "price": Annotated[
        bool | None,
        typer.Option("--price", help="Only say what it costs, and how probable it is that it decides."),
    ],
    "precisions": Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="What is compared with fp32: bf16,fp16.",
            show_default="all that this device runs",
        ),
    ],
    "top": Annotated[
        int | None, typer.Option(min=1, max=20, metavar="K", help="Configurations.", show_default="3")
    ],
    "seeds": Annotated[
        int | None,
        typer.Option(
            min=3, max=MOST_SEEDS, metavar="N", help="New seeds before the first look.", show_default="3"
        ),
    ],
    "max_seeds": Annotated[
        int | None,
        typer.Option(
            min=3,
            max=MOST_SEEDS,
            metavar="N",
            help="No more are added. It may be raised when they have not decided.",
            show_default="12",
        ),
    ],
    "margin": Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            metavar="POINTS",
            help="A smaller loss is none; in hundredths, of mae and rmse in the labels' units.",
            show_default="0.5",
        ),
    ],
}


@app.command()
@with_options(COMPARISON_OPTIONS)
def compare(
    study: StudyArgument,
    storage: StorageOption = None,
    over: Annotated[
        Literal["fp_precision", "base_precision", "optimizer_state"],
        typer.Option(help="What is compared: of training, of the weights under an adapter, of the moments."),
    ] = "fp_precision",
    configurations: Annotated[
        bool,
        typer.Option(
            "--configurations", help="The best configurations with each other, each in its own precision."
        ),
    ] = False,
    workers: WorkersOption = None,
    until: UntilOption = None,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Compare precisions on new seeds: is one as good as fp32, and how much faster? Goes on where it was."""
    from hpo.cli.display import print_comparison
    from hpo.compare.looks import run_looks
    from hpo.compare.planning import Request

    only_price = options.pop("price")
    if configurations and over != PRECISION:
        raise InputError(f"--configurations has no use for --over {over}: leave one of them out.")
    if options["precisions"]:
        options["precisions"] = tuple(name.strip() for name in options["precisions"].split(","))
    request = Request("configurations" if configurations else question_of(over), **options)
    with (
        progress_shown(quiet=as_json),
        stop_signals(until) as stop,
        existing_study(study, storage) as (database, record),
    ):
        config = config_of(study, record, trust_remote_code=False)
        companion, data, cost, sentence = prepared(database, record, config, request)
        if only_price and as_json:
            print_json({"price": cost and cost.as_json(), "sentence": sentence})
        elif only_price or not (as_json or database.has_study(companion.name)):
            typer.echo(sentence)
        if only_price:
            return
        run_look = partial(_run_look, workers=workers, stop=stop, storage=storage, as_json=as_json)
        result = run_looks(database, companion, record, data.tasks, run_look, cost)
    print_json(result.content) if as_json else print_comparison(json_safe(result.content))


def prepared(
    database: Storage, record: StudyRecord, config: StudyConfig, request: Request
) -> tuple[StudyConfig, DataSet, Price | None, str]:
    """The comparison of a study, its data, what it costs and the sentence that says so; nothing is stored."""
    from hpo.compare.companion import open_comparison
    from hpo.compare.looks import price_before
    from hpo.data.dataset import load_data
    from hpo.device import probe_device
    from hpo.study.running.run import check_trust
    from hpo.study.store.studies import check_data

    device, data = probe_device(config.device), load_data(config.data)
    check_data(database, record.name, data.fingerprint)
    has_test = _say_what_is_compared(config, data)
    companion = open_comparison(database, record, config, request, device=device, has_test=has_test)
    check_trust(companion, config, trust_remote_code=False)  # what the database has of it
    return companion, data, *price_before(record, companion, data)


def _say_what_is_compared(config: StudyConfig, data: DataSet) -> bool:
    """Say where scores are not those that a user may expect; returns whether they are of the test split."""
    from hpo.compare.companion import unlabelled_in_test

    unlabelled = unlabelled_in_test(config, data)
    if unlabelled:
        tasks = " and ".join(f"`{name}`" for name in unlabelled)
        typer.echo(f"Scores are of the validation split: the test split has no labels of {tasks}.", err=True)
    return "test" in data.splits and not unlabelled


def _run_look(
    companion: StudyConfig, *, workers: int | None, stop: Stop, storage: str | None, as_json: bool
) -> StudyRecord:
    """Train what the plan names and has no result yet. Ends the command where it is stopped before."""
    from hpo.report.status import study_status

    make_runs_folder(companion.name)
    processes = worker_processes(companion, storage, {"workers": workers})
    record, summary, left_out = run_here(companion, processes, stop, storage, quiet=as_json)
    if summary.ended != "finished":
        if as_json:
            print_json(study_status(record) | {"ended": summary.ended, "left_out": left_out})
        else:
            say_how_to_go_on(record, summary)
        raise typer.Exit(summary.exit_code or (1 if summary.ended == "elsewhere" else 0))
    return record
