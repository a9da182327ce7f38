"""The command `compare`: which precision is as good as fp32, and which configuration is really the best."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import (
    JsonOption,
    StorageOption,
    StudyArgument,
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
)
from hpo.cli.running import run_here, say_how_to_go_on
from hpo.config.comparison import MOST_SEEDS, REFERENCE
from hpo.errors import InputError
from hpo.precision.table import PRECISION_NAMES, canonical_precision, left_out

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.device import DeviceInfo
    from hpo.study.stopping import Stop
    from hpo.study.storage import Storage
    from hpo.study.study_record import StudyRecord

COMPARISON_OPTIONS: Mapping[str, Any] = {
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
    configurations: Annotated[
        bool,
        typer.Option(
            "--configurations", help="The best configurations with each other, each in its own precision."
        ),
    ] = False,
    workers: WorkersOption = None,
    until: UntilOption = None,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Compare precisions on new seeds: is one as good as fp32, and how much faster? Goes on where it was."""
    from hpo.cli.display import print_comparison
    from hpo.compare.companion import Request, open_comparison, unlabelled_in_test
    from hpo.compare.results import judge, look_by_look
    from hpo.config.study_config import of_deployed
    from hpo.data.dataset import load_data
    from hpo.device import probe_device
    from hpo.study.stopping import end_of_job
    from hpo.trial.objectives import quality_objective

    if options["precisions"]:
        options["precisions"] = _parse_precisions(options["precisions"])
    request = Request("configurations" if configurations else "precisions", **options)
    with (
        progress_shown(quiet=as_json),
        stop_signals(end_of_job(until)) as stop,
        existing_study(study, storage) as (database, record),
    ):
        config = config_of(study, record, trust_remote_code=False)
        device, data = probe_device(config.device), load_data(config.data)
        database.check_data(record.name, data.fingerprint)
        if unlabelled := unlabelled_in_test(config, data):
            tasks = " and ".join(f"`{name}`" for name in unlabelled)
            typer.echo(
                f"Scores are of the validation split: the test split has no labels of {tasks}.", err=True
            )
        if of_deployed(config.objective):
            typer.echo(
                "Compared are the models as they are trained, by "
                f"{quality_objective(config.objective).metric}, and not what they are worth when deployed.",
                err=True,
            )
        companion = open_comparison(
            database,
            record,
            config,
            request,
            runnable=_runnable(config, device),
            has_test="test" in data.splits and not unlabelled,
        )
        _refuse_lacking(companion, device, database)
        for found in look_by_look(
            database,
            companion,
            partial(_run_look, workers=workers, stop=stop, storage=storage, as_json=as_json),
            lambda looked, grown: judge(looked, grown, record, data.tasks),
        ):
            database.store_comparison(record.name, found.plan.question, found.as_json())
    print_json(found.as_json()) if as_json else print_comparison(found)


def _run_look(
    companion: StudyConfig, *, workers: int | None, stop: Stop, storage: str | None, as_json: bool
) -> StudyRecord:
    """Train what the plan names and has no result yet. Ends the command where it is stopped before."""
    from hpo.report.status import study_status
    from hpo.study.run import plan_workers

    make_runs_folder(companion.name)
    places = plan_workers(companion, workers or 1)
    record, summary, left_out = run_here(companion, places, stop, storage, quiet=as_json)
    if summary.ended != "finished":
        if as_json:
            print_json(study_status(record) | {"ended": summary.ended, "left_out": left_out})
        else:
            say_how_to_go_on(record, summary)
        raise typer.Exit(summary.exit_code or (1 if summary.ended == "elsewhere" else 0))
    return record


def _parse_precisions(given: str) -> tuple[str, ...]:
    """fp32 and those that are named."""
    try:
        names = [canonical_precision(name.strip()) for name in given.split(",")]
    except ValueError as error:
        raise InputError(f"--precisions: {error}") from None
    return tuple(dict.fromkeys([REFERENCE, *names]))


def _refuse_lacking(companion: StudyConfig, device: DeviceInfo, database: Storage) -> None:
    """Raise InputError where trials are left and `device` does not run all precisions: it would run none of
    them, since both sides of a pair run on one kind of device.
    """
    plan = companion.comparison
    assert plan is not None
    lacking = left_out(plan.precisions, device, companion.amp)
    has_begun = database.has_study(companion.name)
    if not lacking or (has_begun and database.slot_counts(companion.name)["done"] == companion.num_slots):
        return
    names, reasons = ", ".join(lacking), " ".join(dict.fromkeys(lacking.values()))
    if has_begun:
        todo = f"Go on on a device that does, or begin anew, without its trials: hpo delete {companion.name}"
    elif plan.question == "configurations":
        todo = "Compare on a device that does."
    else:
        todo = f"Leave {names} out of --precisions, or compare on a device that does."
    raise InputError(
        f"All that is compared must run on one kind of device, but this one does not run {names}. {reasons} "
        f"{todo}"
    )


def _runnable(config: StudyConfig, device: DeviceInfo) -> tuple[str, ...]:
    lacking = left_out(PRECISION_NAMES, device, config.amp)
    return tuple(name for name in PRECISION_NAMES if name not in lacking)
