"""The command `worker`: one or more workers of a study, or of every open study of a database.

Told to stop because its job ends, it asks the scheduler to run the job again, also where the database is
away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hpo.cli.options import (
    MAX_RESTARTS,
    RUNS,
    JsonOption,
    MaxRestartsOption,
    StorageOption,
    TimeoutOption,
    TrustOption,
    UntilOption,
    WorkersOption,
    WorkersPerDeviceOption,
    app,
    file_given,
    load_to_work,
    print_json,
    progress_shown,
    stop_signals,
    with_options,
)
from hpo.cli.running import check_one_of, ranks_of_torchrun, say_how_to_go_on, shown
from hpo.errors import InputError, RunError, StoppedError
from hpo.outcome import Outcome

if TYPE_CHECKING:
    from hpo.study.serving import ServingOptions
    from hpo.study.stopping import Stop
    from hpo.study.supervisor import WorkerPlace


_WORK_OPTIONS = {
    "workers": WorkersOption,
    "workers_per_device": WorkersPerDeviceOption,
    "timeout": TimeoutOption,
    "until": UntilOption,
}


@dataclass(frozen=True)
class _Given:
    """What the user gave, of workers of one study or of all."""

    url: str
    storage_as_given: str | None
    num_workers: int
    workers_per_device: int | None
    max_restarts: int
    timeout: float | None
    end: float | None
    """When the job ends, in seconds since the epoch."""
    trust_remote_code: bool
    as_json: bool


@app.command()
@with_options(_WORK_OPTIONS)
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
    max_restarts: MaxRestartsOption = MAX_RESTARTS,
    idle_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Without STUDY: how long to wait for a study with trials before leaving.",
            show_default="0",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Join a study as one or more workers and leave when it is done; without a name, serve all open ones."""
    from hpo.study.database import storage_url
    from hpo.study.stopping import end_of_job

    check_one_of(options["workers"], options["workers_per_device"])
    given = _Given(
        url=storage_url(storage),
        storage_as_given=file_given(storage),
        num_workers=options["workers"] or 1,
        workers_per_device=options["workers_per_device"],
        max_restarts=max_restarts,
        timeout=options["timeout"],
        end=end_of_job(options["until"]),
        trust_remote_code=trust_remote_code,
        as_json=as_json,
    )
    if study is None:
        _serve_all(given, idle_timeout or 0.0)
    elif idle_timeout is not None:
        raise InputError(
            "--idle-timeout is for a worker without STUDY: that of a study leaves when it is done."
        )
    else:
        _work_in(study, given)


def _work_in(study: str, given: _Given) -> NoReturn:
    """Be one or more workers of a study, and end the command."""
    from hpo.cluster.slurm import requeue_this_job
    from hpo.study.next_look import look_by_look
    from hpo.study.run import TrialsRun, open_study, plan_workers, run_study

    outcomes: Counter[str] = Counter()
    with progress_shown(quiet=given.as_json), stop_signals(given.end) as stop, _requeued_if_stopped(stop):
        config, trusted = load_to_work(study, given.url, stop, timeout=given.timeout)
        places = plan_workers(config, given.num_workers, given.workers_per_device)
        trials_run: TrialsRun = "in workers" if places else "in this process"
        with ranks_of_torchrun(stop) as ranks:
            for looked in look_by_look(config, given.url, stop):
                with (
                    open_study(
                        looked,
                        given.url,
                        RUNS,
                        resize=False,
                        trials_run=trials_run,
                        trust_remote_code=trusted or given.trust_remote_code,
                        ranks=ranks,
                        stop=stop,
                    ) as opened,
                    shown(opened, stop, quiet=given.as_json, own=not places),
                ):
                    summary = run_study(
                        opened,
                        places,
                        stop=stop,
                        max_restarts=given.max_restarts,
                        storage_as_given=given.storage_as_given,
                    )
                    says_why = summary.ended in ("elsewhere", "halted") and not given.as_json
                    record = opened.storage.read_study(config.name) if says_why else None
                outcomes.update(summary.outcomes)
                if summary.ended != "finished":
                    break
        if config.comparison and stop.is_set() and summary.ended == "finished":
            summary = replace(summary, ended="stopped")  # while it waited for the next look
    requeue_this_job(summary.ended, stop)
    if given.as_json:
        found = {"study": config.name, "ended": summary.ended, "outcomes": outcomes}
        print_json(found | {"left_out": opened.left_out})
    elif record is not None:
        say_how_to_go_on(record, summary)
    if outcomes and outcomes.keys() == {Outcome.FAILED}:
        raise RunError(f"every trial that this worker ran failed: {outcomes['failed']}.")
    raise typer.Exit(summary.exit_code)


def _serve_all(given: _Given, idle_timeout: float) -> NoReturn:
    """Be one or more workers of all studies of a database, and end the command."""
    from hpo.study.run import plan_workers
    from hpo.study.serving import ServingOptions

    options = ServingOptions(idle_timeout, given.timeout, given.trust_remote_code)
    if places := plan_workers(None, given.num_workers, given.workers_per_device):
        _serve_with_workers(given, options, places)
    _serve(given, options)


def _serve(given: _Given, options: ServingOptions) -> NoReturn:
    """Serve in this process."""
    from hpo.cluster.slurm import requeue_this_job
    from hpo.device import probe_device
    from hpo.study.serving import serve

    options = replace(options, device=probe_device("auto").device_id)
    with (
        progress_shown(quiet=given.as_json),
        stop_signals(given.end) as stop,
        ranks_of_torchrun(stop) as ranks,
    ):
        options = replace(options, ranks=ranks)
        served = serve(
            given.url,
            RUNS,
            options,
            stop=stop,
            shown=partial(shown, stop=stop, quiet=given.as_json, own=True),
        )
    requeue_this_job(served.ended, stop)
    if given.as_json:
        print_json({"ended": served.ended, "outcomes": served.outcomes, "left_out": served.left_out})
    else:
        counts = (f"{name} {sum(outcomes.values())}" for name, outcomes in served.outcomes.items())
        why = {"idle": "Nothing is left to do here", "stopped": "Stopped", "timeout": "Out of time"}
        typer.echo(f"{why[served.ended]}. Trials of this worker: {', '.join(counts) or 'none'}.")
    ends = {outcome for outcomes in served.outcomes.values() for outcome in outcomes}
    if ends == {Outcome.FAILED}:
        raise RunError("every trial that this worker ran failed.")
    raise typer.Exit(served.exit_code)


def _serve_with_workers(given: _Given, options: ServingOptions, places: Sequence[WorkerPlace]) -> NoReturn:
    """Serve in processes of their own."""
    from hpo.cluster.slurm import requeue_this_job
    from hpo.study.storage import open_storage
    from hpo.study.supervisor import serve_with_workers

    arguments = ["--idle-timeout", str(options.idle_timeout)]
    arguments += ["--timeout", str(options.timeout)] if options.timeout is not None else []
    arguments += ["--trust-remote-code"] if options.trust_remote_code else []
    with (
        progress_shown(quiet=given.as_json),
        stop_signals(given.end) as stop,
        _requeued_if_stopped(stop),
        open_storage(given.url, create=False, stop=stop) as storage,
    ):
        ended = serve_with_workers(
            storage,
            RUNS,
            places,
            arguments,
            stop=stop,
            max_restarts=given.max_restarts,
            storage_as_given=given.storage_as_given,
        )
    requeue_this_job(ended, stop)
    if given.as_json:
        print_json({"ended": ended})
    else:
        typer.echo("Stopped." if ended == "stopped" else "Nothing is left to do here.")
    raise typer.Exit(130 if ended == "stopped" else 0)


@contextmanager
def _requeued_if_stopped(stop: Stop) -> Iterator[None]:
    """Have this job run again where it was told to stop while the database was away."""
    from hpo.cluster.slurm import requeue_this_job

    try:
        yield
    except StoppedError:
        requeue_this_job("stopped", stop)
        raise
