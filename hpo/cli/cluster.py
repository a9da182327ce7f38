"""The command that hands workers to a batch system: `submit`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpo.cli.kubernetes import KUBERNETES_OPTIONS, named_study, print_manifests
from hpo.cli.options import (
    RUNS,
    JsonOption,
    NumTrialsOption,
    StorageOption,
    StudyArgument,
    TrustOption,
    app,
    file_given,
    load_to_work,
    make_runs_folder,
    print_json,
    progress_shown,
    with_options,
)
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.cluster.slurm import WorkerArray
    from hpo.cluster.slurm_database import DatabaseJob

_OF_ALL_JOBS = ("partition", "account", "qos")
"""Options of the workers' jobs that the database's job has too."""


def _of_slurm(metavar: str, help_text: str) -> Any:
    return Annotated[
        str | None, typer.Option(metavar=metavar, help=help_text, rich_help_panel="With --slurm")
    ]


SLURM_OPTIONS: Mapping[str, Any] = {
    "partition": _of_slurm("NAME", "sbatch --partition: where the jobs run."),
    "account": _of_slurm("NAME", "sbatch --account: what the jobs are charged to."),
    "time": _of_slurm(
        "D-HH:MM:SS",
        "sbatch --time: limit of a job, which is requeued when it comes to it. On Kubernetes: of the whole "
        "Job, which then ends, finished or not.",
    ),
    "gpus_per_node": _of_slurm(
        "[TYPE:]G", "sbatch --gpus-per-node: GPUs of a job, which runs a worker on each."
    ),
    "cpus_per_task": _of_slurm("N", "sbatch --cpus-per-task: CPU cores of a job."),
    "mem": _of_slurm("SIZE", "sbatch --mem: memory of a job, such as 60G."),
    "sbatch": Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Any other option of sbatch, such as qos=long or exclusive. Repeatable.",
            rich_help_panel="With --slurm",
        ),
    ],
    "signal_lead": Annotated[
        int | None,
        typer.Option(
            min=10,
            metavar="SECONDS",
            help="How long before its time limit a job is warned, to write its checkpoints.",
            show_default="120",
            rich_help_panel="With --slurm",
        ),
    ],
}


_STUDY_OPTIONS: Mapping[str, Any] = {
    "database": Annotated[
        Literal["private"] | None,
        typer.Option(
            metavar="private",
            help="Run a PostgreSQL in a job of its own, in runs/postgres, or use the one that runs there; on "
            "Kubernetes, as a service of the cluster.",
        ),
    ],
    "n_trials": NumTrialsOption,
}


@app.command()
@with_options(_STUDY_OPTIONS, SLURM_OPTIONS, KUBERNETES_OPTIONS)
def submit(
    study: StudyArgument,
    storage: StorageOption = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit an array of Slurm jobs.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Write manifests for kubectl.")] = False,
    workers: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Workers in all.")] = 1,
    trust_remote_code: TrustOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what is submitted; make and submit nothing.")
    ] = False,
    as_json: JsonOption = False,
    **options: Any,
) -> None:
    """Check and make a study as `hpo init` does, and submit batch jobs whose workers run its trials.

    STUDY may also be a name in the database: the study goes on as it is there, with as many trials unless
    --n-trials says more or fewer. The jobs need a database that all their nodes reach. They end when the
    study is done.
    """
    is_private, n_trials = options.pop("database") is not None, options.pop("n_trials")
    given = {name: value for name, value in options.items() if value is not None}
    if slurm == kubernetes:
        raise InputError("hpo submit must be told where the workers are to run: --slurm or --kubernetes.")
    if kubernetes:
        _refuse_with_kubernetes(storage, n_trials, dry_run and "out" in given)
        print_manifests(study, workers, given, private=is_private, as_json=as_json)
        return
    if others := [name.replace("_", "-") for name in given if name in KUBERNETES_OPTIONS]:
        raise InputError(f"--{', --'.join(others)} goes with --kubernetes, not with --slurm. Leave it out.")
    from hpo.cluster.slurm import WorkerArray, job_folder
    from hpo.study.database import URL_FROM_FILE, storage_url

    name, config = named_study(study)
    signal_lead = given.pop("signal_lead", 120)
    sbatch = _sbatch_options(given)
    private = _private_database(storage, sbatch) if is_private else None
    if private is not None:
        storage = f"{URL_FROM_FILE}{private.url_file}"
    array = WorkerArray(
        study=name,
        storage=file_given(storage) or storage_url(storage),
        folder=job_folder(RUNS, name),
        num_workers=workers,
        signal_lead=signal_lead,
        sbatch=sbatch,
        trust_remote_code=trust_remote_code or (config is not None and config.model.trust_remote_code),
    )
    array.check_time()  # before the study is made
    scripts = [array.script()] if private is None else [private.script(), array.script()]
    if dry_run and as_json:
        print_json({"study": name, "scripts": scripts})
    elif dry_run:
        typer.echo("\n".join(scripts))
    else:
        _submit(study, array, private, n_trials, as_json=as_json)


def _private_database(storage: str | None, sbatch: Mapping[str, str | bool]) -> DatabaseJob:
    """The job of --database private. Raises InputError where --storage names another database."""
    from hpo.cluster.slurm_database import DatabaseJob
    from hpo.study.database import URL_FROM_FILE

    private = DatabaseJob(RUNS / "postgres", {key: sbatch[key] for key in _OF_ALL_JOBS if key in sbatch})
    file = file_given(storage)
    if storage and (file is None or Path(file.removeprefix(URL_FROM_FILE)).absolute() != private.url_file):
        raise InputError(
            "--database private makes the study's database, but --storage or HPO_STORAGE names another. "
            "Give one of them."
        )
    return private


def _refuse_with_kubernetes(storage: str | None, n_trials: int | None, writes: bool) -> None:
    """Raise InputError for options of `submit` that would be without effect."""
    if storage and storage != os.environ.get("HPO_STORAGE"):  # which is for other commands, too
        raise InputError(
            "--storage means nothing to --kubernetes, where pods read the database's URL from the Secret "
            "that --secret names. Leave it out."
        )
    if n_trials is not None:
        raise InputError(
            "--n-trials means nothing to --kubernetes, which asks no database. Set `n_trials` in the study "
            "file, or use `hpo init --n-trials`."
        )
    if writes:
        raise InputError("--dry-run writes nothing, but --out writes the manifests. Give one of them.")


def _submit(
    study: str, array: WorkerArray, private: DatabaseJob | None, n_trials: int | None, *, as_json: bool
) -> None:
    from hpo.cluster.jobs import add_job, connection_warning
    from hpo.cluster.slurm import number_of
    from hpo.study.database import parse_url, storage_url
    from hpo.study.run import open_study

    make_runs_folder(array.study)
    if private is not None:
        private.start(lambda what: typer.echo(what, err=True))
    url = storage_url(array.storage)
    if parse_url(url).get_backend_name() == "sqlite":
        raise InputError(
            "The study's database must be a PostgreSQL server that all nodes reach, but it is a SQLite file, "
            "which several hosts would damage. --database private runs one in a job; "
            "`hpo copy STUDY --to URL` takes a study there."
        )
    config, trusted = load_to_work(study, url, n_trials=n_trials)
    array = replace(array, trust_remote_code=array.trust_remote_code or trusted)
    with (
        progress_shown(quiet=as_json),
        open_study(
            config,
            url,
            RUNS,
            resize=n_trials is not None,
            trials_run="elsewhere",
            trust_remote_code=array.trust_remote_code,
        ) as opened,
    ):
        num_workers = array.num_jobs * array.workers_per_job
        if warning := connection_warning(opened.storage, num_workers):
            typer.echo(warning, err=True)
        job_id = array.submit()
        add_job(opened.storage, job_id, config.name, num_workers)
    if as_json:
        print_json(
            {"study": config.name, "job": job_id, "num_workers": num_workers, "folder": str(array.folder)}
        )
        return
    if file := file_given(array.storage):
        typer.echo(f"The database: export HPO_STORAGE={file}")
    typer.echo(
        f"Submitted {job_id}. Workers: {num_workers}, jobs: {array.num_jobs}.\n"
        f"Watch it:  hpo status {array.study}   squeue --job {number_of(job_id)}\n"
        f"Logs:      {array.folder}/*.log"
    )


def _sbatch_options(options: Mapping[str, Any]) -> dict[str, str | bool]:
    """Options as sbatch names them, with those of `--sbatch NAME=VALUE`; True for one without a value."""
    named = {name.replace("_", "-"): value for name, value in options.items() if name != "sbatch"}
    for text in options.get("sbatch", ()):
        name, equals, value = text.lstrip("-").partition("=")
        named[name] = value if equals else True
    return named
