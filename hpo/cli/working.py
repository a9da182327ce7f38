"""The command `worker`: one or more workers of a study, or one of every open study of a database.

Told to stop because its job ends, it asks the scheduler to run the job again, also where the database is
away.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hpo.api.messages import progress_shown
from hpo.api.opening import RUNS, is_path, load_to_work
from hpo.cli.options import (
    WORK_OPTIONS,
    JsonOption,
    StorageOption,
    TrustCodeOption,
    TrustOption,
    app,
    check_work_options,
    print_json,
    stop_signals,
    with_options,
)
from hpo.cli.running import end_with, say_how_to_go_on
from hpo.errors import InputError, RunError, StoppedError
from hpo.outcome import Outcome

if TYPE_CHECKING:
    from hpo.study.running.run import OpenOptions
    from hpo.study.running.stopping import Stop


@app.command()
@with_options(WORK_OPTIONS)
def worker(
    study: Annotated[
        str | None,
        typer.Argument(
            metavar="[STUDY]",
            help="A name in the database, or a YAML file. Without it, every open study of the database.",
            show_default=False,
        ),
    ] = None,
    storage: StorageOption = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long to wait for trials before leaving: without STUDY those of any study, with a name "
            "in the database those of that one, such as a comparison, which gets more look by look.",
            show_default="0 without STUDY",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Join a study as one or more workers and leave when it is done; without a name, one serves all."""
    from hpo.api.running import ranks_of_torchrun
    from hpo.cluster.batch.slurm import requeue_this_job
    from hpo.study.running.run import OpenOptions

    check_work_options(options)
    if study is not None and idle_timeout is not None and is_path(study):
        raise InputError(
            f"With --idle-timeout, STUDY must be the name of one in the database, but got `{study}`, a file."
        )
    serves = study is None or idle_timeout is not None
    if serves and (options["workers"] or options["workers_per_device"]):
        raise InputError(
            "without STUDY, or with --idle-timeout, a worker is one process: leave --workers and "
            "--workers-per-device out, and start the command once for each."
        )
    with (
        progress_shown(quiet=as_json),
        stop_signals(options["until"], options["timeout"]) as stop,
        ranks_of_torchrun(),
    ):
        how = OpenOptions(resize=False, trust_remote_code=trust_remote_code, stop=stop)
        try:
            if serves:
                _serve(study, storage, how, idle_timeout or 0.0, as_json=as_json)
            else:
                _work_in(str(study), storage, how, stop, options, as_json=as_json)
        except StoppedError:  # while the database was away
            requeue_this_job("stopped", stop)
            raise


def _work_in(
    study: str, storage: str | None, how: OpenOptions, stop: Stop, options: dict[str, Any], *, as_json: bool
) -> NoReturn:
    """Be one or more workers of a study, and end the command."""
    from hpo.api.progress import shown
    from hpo.api.running import RunResult, worker_processes
    from hpo.cluster.batch.slurm import requeue_this_job
    from hpo.study.reading.reader import read_study
    from hpo.study.running.run import open_study, run_study
    from hpo.study.running.stopping import WORKERS_ON_DEVICE
    from hpo.study.store.database import storage_url

    url = storage_url(storage)
    config, is_file = load_to_work(study, url, stop)
    processes = worker_processes(config, storage, options["workers"], options["workers_per_device"])
    here = not processes.shares
    how = replace(
        how,
        trials_run="in this process" if here else "in workers",
        is_file=is_file,
    )
    with open_study(config, url, RUNS, how) as opened, shown(opened, quiet=as_json, own=here):
        summary = run_study(opened, processes, stop=stop)
        says_why = summary.ended in ("elsewhere", "closed", "timeout") and not as_json
        record = read_study(opened.storage, config.name) if says_why else None
    requeue_this_job(summary.ended, stop)
    if as_json:
        ended = {"study": config.name, "ended": summary.ended, "outcomes": summary.outcomes}
        print_json(ended | {"left_out": opened.left_out})
    elif record is not None:
        say_how_to_go_on(RunResult(**vars(summary), record=record, left_out=opened.left_out))
    if WORKERS_ON_DEVICE in os.environ:  # the supervisor counts the trials of all workers
        summary = replace(summary, outcomes={})
    end_with(summary, config.name)


def _serve(
    only: str | None, storage: str | None, how: OpenOptions, idle_timeout: float, *, as_json: bool
) -> NoReturn:
    """Be a worker of all studies of a database, or of one that gets more, and end the command."""
    from hpo.api.progress import shown
    from hpo.cluster.batch.slurm import requeue_this_job
    from hpo.study.running.serving import Server
    from hpo.study.store.database import storage_url

    display = partial(shown, quiet=as_json, own=True)
    server = Server(storage_url(storage), RUNS, how, only, idle_timeout, shown=display)
    ended = server.serve()
    requeue_this_job(ended, server.stop)
    if as_json:
        print_json({"ended": ended, "outcomes": server.outcomes, "left_out": server.left_out})
    else:
        counts = ", ".join(f"{name} {sum(each.values())}" for name, each in server.outcomes.items())
        why = {"idle": "Nothing is left to do here", "stopped": "Stopped", "timeout": "Out of time"}
        typer.echo(f"{why[ended]}. Trials of this worker: {counts or 'none'}.")
    if {outcome for each in server.outcomes.values() for outcome in each} == {Outcome.FAILED}:
        raise RunError("every trial that this worker ran failed.")
    raise typer.Exit(130 if ended == "stopped" else 0)
