"""The command `plan`: what a study's trials or its budget come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import (
    RUNS,
    HoursOption,
    JsonOption,
    NumTrialsOption,
    StorageOption,
    StudyArgument,
    TrustCodeOption,
    TrustOption,
    app,
    load_to_check,
    print_json,
    progress_shown,
    resized,
)
from hpo.errors import RunError

if TYPE_CHECKING:
    from hpo.config.study_config import StudyConfig
    from hpo.report.plan import Plan
    from hpo.study.reading.study_record import StudyRecord


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
    from hpo.data.dataset import load_data
    from hpo.errors import NoDatabaseError
    from hpo.study.reading.reader import read_study
    from hpo.study.store.database import storage_url
    from hpo.study.store.storage import open_storage
    from hpo.trial.trial_parts import fit_rungs

    config = resized(load_to_check(study, storage, trust_remote_code), n_trials, hours)
    record = None
    try:
        with open_storage(storage_url(storage), create=False) as database:
            if database.has_study(config.name):
                record = read_study(database, config.name)
    except NoDatabaseError:
        pass  # nothing has run yet
    if record is None:
        config = fit_rungs(config, load_data(config.data))
    else:
        config = config.resumed(record.definition)
    with progress_shown(quiet=as_json):
        result = measured_plan(config, record, workers)
    if as_json:
        print_json(result.as_json())
    else:
        _print(config.name, result)


def measured_plan(
    config: StudyConfig,
    record: StudyRecord | None,
    workers: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan of a study by its complete trials, and by some steps here in a precision that has none.

    Args:
        record: of the study, where it is in the database.
        workers: so many work; None: those that do, or one.

    Raises:
        RunError: the steps did not work, or were stopped.
    """
    from hpo.device import probe_device
    from hpo.precision.table import apply_preset
    from hpo.report.plan import costs_of, make_plan, measure_cost
    from hpo.study.running.run import check_precisions

    device = probe_device(config.device)
    lacking = check_precisions(config, device)
    costs = costs_of(record) if record else {}
    for name in config.precisions or apply_preset(config.amp, device)[1:]:
        if name not in costs and name not in lacking:
            typer.echo(f"measuring {name} ...", err=True)
            costs[name] = measure_cost(config, device, RUNS, name, should_stop)
    if not costs:
        raise RunError("No precision of the study was measured.")
    live = sum(worker.alive for worker in record.workers) if record else 0
    return make_plan(config, list(costs.values()), record, workers or live or 1)


def say_what_it_buys(config: StudyConfig, workers: int, should_stop: Callable[[], bool]) -> None:
    """Print what the budget of a study comes to, of which no trial has trained."""
    try:
        _print(config.name, measured_plan(config, None, workers, should_stop))
    except RunError as error:  # the trials will tell
        typer.echo(f"What the budget buys is not known yet. {error}")


def _print(name: str, plan: Plan) -> None:
    import pandas as pd
    from rich.console import Console

    from hpo.cli.display import dataframe_table
    from hpo.report.formats import format_number, format_seconds

    console = Console(highlight=False)
    costs = pd.DataFrame(
        {
            "precision": cost.precision,
            "examples/s": "" if cost.examples_per_second is None else format_number(cost.examples_per_second),
            "a whole trial": format_seconds(cost.seconds),
            "measured by": cost.measured_by,
        }
        for cost in plan.costs
    )
    console.print(dataframe_table(costs, f"{name}: what a trial takes"))
    counts = [f"{stage.num_trials} to {stage.end:.0%}" for stage in plan.stages]
    start, *later = counts
    going_on = f"; of these go on {', '.join(later)}" if later else ""
    console.print(f"Trials: {start} of their budget{going_on}. That is {plan.whole_trials:.3g} whole trials.")
    of = "" if plan.budget_hours is None else f" of the budget of {plan.budget_hours:.3g}"
    spent = f", {plan.spent_hours:.3g} of them spent" if plan.spent_hours else ""
    console.print(f"Device-hours: about {plan.hours:.3g}{of}{spent}.")
    clock = format_seconds(3600 * plan.hours_to_the_end)
    console.print(f"With {plan.num_workers} worker{'s' * (plan.num_workers > 1)}: about {clock} from now.")
