"""The command `compare`: which precision is as good as fp32, and which configuration is really the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import (
    MAX_RESTARTS,
    RUNS,
    JsonOption,
    StorageOption,
    StudyArgument,
    WorkersOption,
    app,
    config_of,
    existing_study,
    file_given,
    make_runs_folder,
    print_json,
    progress_shown,
    stop_signals,
)
from hpo.cli.running import say_how_to_go_on, shown
from hpo.config.comparison import REFERENCE
from hpo.errors import InputError
from hpo.precision.table import PRECISION_NAMES, canonical_precision, left_out

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.device import DeviceInfo
    from hpo.study.study_record import StudyRecord


@app.command()
def compare(
    study: StudyArgument,
    storage: StorageOption = None,
    configurations: Annotated[
        bool,
        typer.Option(
            "--configurations", help="The best configurations with each other, each in its own precision."
        ),
    ] = False,
    precisions: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="What is compared with fp32: bf16,fp16.",
            show_default="all that this device runs",
        ),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, max=20, metavar="K", help="Configurations.", show_default="3")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=3, max=200, metavar="N", help="New seeds before the first look.", show_default="3"),
    ] = None,
    max_seeds: Annotated[
        int | None,
        typer.Option(min=3, max=200, metavar="N", help="No more are added.", show_default="12"),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100,
            metavar="POINTS",
            help="A smaller loss is none; in hundredths.",
            show_default="0.5",
        ),
    ] = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare precisions on new seeds: is one as good as fp32, and how much faster? Goes on where it was."""
    from hpo.cli.display import print_comparison, print_race
    from hpo.compare.companion import Request, open_comparison
    from hpo.compare.results import RaceResult, judge, look_by_look
    from hpo.data.dataset import load_data
    from hpo.device import probe_device

    with progress_shown(quiet=as_json), existing_study(study, storage) as (database, record):
        config = config_of(study, record, trust_remote_code=False)
        device, data = probe_device(config.device), load_data(config.data)
        database.check_data(record.name, data.fingerprint)
        companion = open_comparison(
            database,
            record,
            config,
            Request(
                "configurations" if configurations else "precisions",
                _parse_precisions(precisions) if precisions else None,
                top,
                seeds,
                max_seeds,
                margin,
            ),
            runnable=_runnable(config, device),
            has_test="test" in data.splits,
        )
        for found in look_by_look(
            companion,
            lambda grown: _run_look(grown, storage, workers, as_json),
            lambda looked, grown: judge(looked, grown, record, data.tasks),
        ):
            database.store_comparison(record.name, found.plan.question, found.as_json())
    if as_json:
        print_json(found.as_json())
    else:
        print_race(found) if isinstance(found, RaceResult) else print_comparison(found)


def _run_look(companion: StudyConfig, storage: str | None, workers: int | None, as_json: bool) -> StudyRecord:
    """Train what the plan names and has no result yet. Ends the command where it is stopped before."""
    from hpo.study.database import storage_url
    from hpo.study.run import open_study, plan_workers, run_study

    make_runs_folder(companion.name)
    places = plan_workers(companion, workers or 1)
    with (
        stop_signals() as stop,
        open_study(
            companion,
            storage_url(storage),
            RUNS,
            trials_run="in workers" if places else "in this process",
            trust_remote_code=companion.model.trust_remote_code,
        ) as opened,
    ):
        with shown(opened, stop, quiet=as_json):
            summary = run_study(
                opened,
                places,
                stop=stop,
                max_restarts=MAX_RESTARTS,
                storage_as_given=file_given(storage),
            )
        record = opened.storage.read_study(companion.name)
    if summary.ended != "finished":
        say_how_to_go_on(record, summary)
        raise typer.Exit(summary.exit_code)
    return record


def _parse_precisions(given: str) -> tuple[str, ...]:
    """fp32 and those that are named."""
    try:
        names = [canonical_precision(name.strip()) for name in given.split(",")]
    except ValueError as error:
        raise InputError(f"--precisions: {error}") from None
    return tuple(dict.fromkeys([REFERENCE, *names]))


def _runnable(config: StudyConfig, device: DeviceInfo) -> tuple[str, ...]:
    lacking = left_out(PRECISION_NAMES, device, config.amp)
    return tuple(name for name in PRECISION_NAMES if name not in lacking)
