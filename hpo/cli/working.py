"""The command `worker`: one or more workers of a study.

Told to stop because its job ends, it asks the scheduler to run the job again, also where the database is
away.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hpo.api.messages import progress_shown
from hpo.api.opening import RUNS, check_workers, load_to_work
from hpo.cli.options import (
    WORK_OPTIONS,
    JsonOption,
    StorageOption,
    TrustCodeOption,
    TrustOption,
    app,
    print_json,
    stop_signals,
    with_options,
)
from hpo.cli.running import end_with, say_how_to_go_on
from hpo.errors import StoppedError

if TYPE_CHECKING:
    from hpo.study.running.stopping import Stop


@app.command()
@with_options(WORK_OPTIONS)
def worker(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A name in the database, or a YAML file.")],
    storage: StorageOption = None,
    trust_remote_code: TrustOption = False,
    _trust_code: TrustCodeOption = [],  # noqa: B006
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Join a study as one or more workers and leave when it is done."""
    from hpo.api.running import ranks_of_torchrun
    from hpo.cluster.batch.slurm import requeue_this_job

    check_workers(options["workers"], options["workers_per_device"])  # in each process of torchrun
    with (
        progress_shown(quiet=as_json),
        stop_signals(options["until"], options["timeout"]) as stop,
        ranks_of_torchrun(),
    ):
        try:
            _work(study, storage, stop, options, trust_remote_code=trust_remote_code, as_json=as_json)
        except StoppedError:  # while the database was away
            requeue_this_job("stopped", stop)
            raise


def _work(
    study: str,
    storage: str | None,
    stop: Stop,
    options: dict[str, Any],
    *,
    trust_remote_code: bool,
    as_json: bool,
) -> NoReturn:
    """Be one or more workers of a study, and end the command."""
    from hpo.api.progress import shown
    from hpo.api.running import RunResult, worker_processes
    from hpo.cluster.batch.slurm import requeue_this_job
    from hpo.study.reading.reader import read_study
    from hpo.study.running.run import OpenOptions, open_study, run_study
    from hpo.study.running.stopping import WORKERS_ON_DEVICE
    from hpo.study.store.database import storage_url

    url = storage_url(storage)
    config, is_file = load_to_work(study, url, stop)
    processes = worker_processes(config, storage, options["workers"], options["workers_per_device"])
    here = not processes.shares
    how = OpenOptions(
        resize=False,
        trials_run="in this process" if here else "in workers",
        is_file=is_file,
        trust_remote_code=trust_remote_code,
        stop=stop,
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
