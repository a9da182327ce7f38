"""The command `submit`: start workers by a batch system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from hpo.cli.options import TRUST, Answer, StudyArgument, command, flag, optional
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.cluster.batch.slurm import WorkerArray


_SBATCH_OPTIONS: Mapping[str, Any] = {
    "time": optional(str, "D-HH:MM:SS", "sbatch --time: limit of a job. A job that reaches it is requeued."),
    "gpus_per_node": optional(str, "[TYPE:]G", "GPUs of a job, with a worker on each."),
    "cpus_per_task": optional(int, "N", "CPU cores of a job.", min=1),
    "mem": optional(str, "SIZE", "Memory of a job, such as 60G."),
    "partition": optional(str, "NAME", "sbatch --partition: partition of the jobs."),
    "account": optional(str, "NAME", "sbatch --account: account of the jobs."),
}
_LAUNCH_OPTIONS: Mapping[str, Any] = {
    "setup": optional(
        typer.FileBinaryRead,
        "FILE",
        "bash script to source at the start of each job (module load, conda activate). It is copied.",
        callback=lambda file: file and file.read(),
    ),
    "python": optional(str, "PATH", "Python on the nodes or in the container, with hpo installed."),
    "apptainer": optional(str, "IMAGE", "Run the workers in this image by `apptainer exec`."),
    "pyxis": optional(str, "IMAGE", "Run the workers in this image by pyxis (`srun --container-image`)."),
    "mount": optional(list[str], "PATH", "Another path for the container. Repeatable."),
}


@command(
    *("storage", "n_trials"),
    *TRUST,
    study=StudyArgument,
    slurm=flag("--slurm", "Submit an array of Slurm jobs."),
    workers=optional(int, "N", "Total number of workers.", "1", min=1, max=10_000),
    dry_run=flag("--dry-run", "Print the job script; make and submit nothing."),
    sbatch=optional(
        list[str], "NAME[=VALUE]", "Any other option of sbatch: qos=long or exclusive. Repeatable."
    ),
    **_SBATCH_OPTIONS,
    **_LAUNCH_OPTIONS,
)
def submit(
    study: str, *, trust_remote_code: bool, trust_code: list[str], as_json: bool, **options: Any
) -> Answer:
    """Check and make a study like `hpo init`, and submit batch jobs with workers for it.

    STUDY may also be a name in the database: that study continues, with --n-trials trials if given. The jobs
    need a database server in reach of all nodes. They end with the study.
    """
    from hpo.api.opening import RUNS, file_error_first, file_given, load_file
    from hpo.cluster.batch.slurm import Launch, WorkerArray, job_folder
    from hpo.code import code_in_use, trust
    from hpo.config.allowed import allowing
    from hpo.config.study_file import check_study_name
    from hpo.study.store.database import storage_url
    from hpo.study.store.storage import existing_database

    if not options["slurm"]:
        raise InputError("The batch system must be named: give --slurm. For Kubernetes: docker/README.md.")
    config = load_file(study)  # None: STUDY can only be a name in the database
    name = config.name if config else study
    check_study_name(name)
    array = WorkerArray(
        study=name,
        storage=file_given(options.get("storage")) or storage_url(options.get("storage")),
        folder=job_folder(RUNS, name),
        num_workers=options.get("workers", 1),
        sbatch=_sbatch_options(options),
        launch=Launch(**{name: value for name, value in options.items() if name in _LAUNCH_OPTIONS}),
        trust_remote_code=trust_remote_code or (config is not None and config.model.trust_remote_code),
        code=code_in_use(config.code, config.class_names) if config else [trust(one) for one in trust_code],
        allow=allowing(config) if config else None,
    )
    array.check_time()
    script = array.script()  # refuses options that contradict each other, before the study is made
    if options["dry_run"]:
        if config is None:  # then it must be in the database
            with file_error_first(study), existing_database(options.get("storage")) as database:
                database.check_study(study)
        return Answer({"study": name, "script": script}, script)
    return _submit(study, array, options.get("n_trials"), quiet=as_json)


def _submit(study: str, array: WorkerArray, n_trials: int | None, *, quiet: bool) -> Answer:
    from hpo.api.opening import RUNS, file_given, load_to_work, make_runs_folder, progress_shown
    from hpo.code import code_in_use
    from hpo.config.allowed import allowing
    from hpo.study.running.open_study import OpenOptions, open_study
    from hpo.study.store.database import parse_url, storage_url

    make_runs_folder(array.study)
    url = storage_url(array.storage)
    if parse_url(url).get_backend_name() == "sqlite":
        raise InputError(
            "The database must be a PostgreSQL server in reach of all nodes, but it is a SQLite file, which "
            "several hosts would damage. `hpo database start --foreground --host 0.0.0.0` runs a server in a "
            "job; `hpo copy STUDY --to URL` copies a study to it."
        )
    config, is_file = load_to_work(study, url, n_trials=n_trials)
    options = OpenOptions(
        resize=n_trials is not None,
        trials_run="elsewhere",
        is_file=is_file,
        trust_remote_code=array.trust_remote_code,
    )
    with progress_shown(quiet=quiet), open_study(config, url, RUNS, options):
        job = replace(
            array, allow=allowing(config), code=code_in_use(config.code, config.class_names)
        ).submit()
    file, num_workers = file_given(array.storage), array.num_jobs * array.workers_per_job
    return Answer(
        {"study": config.name, "job": job, "num_workers": num_workers, "folder": str(array.folder)},
        (f"The database: export HPO_STORAGE={file}\n" if file else "")
        + f"Submitted job {job}. Workers: {num_workers}, jobs: {array.num_jobs}.\n"
        f"Watch it:  hpo status {array.study}   squeue --job {job}\n"
        f"Logs:      {array.sbatch.get('output', array.folder / '*.log')}",
    )


def _sbatch_options(options: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return the given options of sbatch by name; True for one without a value."""
    given = {name: value for name, value in options.items() if name in _SBATCH_OPTIONS}
    named = {name.replace("_", "-"): value for name, value in given.items()}
    for text in options.get("sbatch", ()):
        name, equals, value = text.lstrip("-").partition("=")
        named[name] = value if equals else True
    return named
