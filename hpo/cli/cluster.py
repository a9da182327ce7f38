"""The command that hands workers to a batch system: `submit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.api.messages import progress_shown
from hpo.api.opening import RUNS, file_given, load_file, load_to_work, make_runs_folder
from hpo.cli.options import (
    JsonOption,
    NumTrialsOption,
    StorageOption,
    StudyArgument,
    TrustCodeOption,
    TrustOption,
    answer,
    app,
    option,
    with_options,
)
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.cluster.batch.slurm import WorkerArray
    from hpo.config.study_config import StudyConfig


_SLURM_OPTIONS: Mapping[str, Any] = {
    "n_trials": NumTrialsOption,
    "time": option(
        str | None, "D-HH:MM:SS", "sbatch --time: limit of a job, which is requeued when it reaches it."
    ),
    "gpus_per_node": option(str | None, "[TYPE:]G", "GPUs of a job, which runs a worker on each."),
    "cpus_per_task": option(int | None, "N", "CPU cores of a job.", min=1),
    "mem": option(str | None, "SIZE", "Memory of a job, such as 60G."),
    "partition": option(str | None, "NAME", "sbatch --partition: where the jobs run."),
    "account": option(str | None, "NAME", "sbatch --account: what the jobs are charged to."),
    "sbatch": option(
        list[str] | None,
        "NAME[=VALUE]",
        "Any other option of sbatch, such as qos=long or exclusive. Repeatable.",
    ),
}
_LAUNCH_OPTIONS: Mapping[str, Any] = {
    "setup": option(
        typer.FileBinaryRead | None,
        "FILE",
        "bash script that each job sources first (module load, conda activate). A job gets a copy.",
        callback=lambda file: file and file.read(),
    ),
    "python": option(str | None, "PATH", "Python of the nodes or of the container, where hpo is installed."),
    "apptainer": option(str | None, "IMAGE", "Run the workers in this image by `apptainer exec`."),
    "pyxis": option(
        str | None, "IMAGE", "Run the workers in this image by pyxis (`srun --container-image`)."
    ),
    "mount": option(list[str] | None, "PATH", "Another place that the container needs. Repeatable."),
}


@app.command()
@with_options(_SLURM_OPTIONS, _LAUNCH_OPTIONS)
def submit(
    study: StudyArgument,
    _slurm: Annotated[bool, typer.Option("--slurm", help="Submit an array of Slurm jobs.")],
    storage: StorageOption = None,
    workers: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Workers in all.")] = 1,
    trust_remote_code: TrustOption = False,
    trust_code: TrustCodeOption = [],  # noqa: B006
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
    from hpo.cluster.batch.launch import Launch
    from hpo.cluster.batch.slurm import WorkerArray, job_folder
    from hpo.code import code_in_use, name_code
    from hpo.config.allowed import allowing
    from hpo.study.store.database import storage_url

    name, config = _named_study(study)
    array = WorkerArray(
        study=name,
        storage=file_given(storage) or storage_url(storage),
        folder=job_folder(RUNS, name),
        num_workers=workers,
        sbatch=_sbatch_options(options),
        launch=Launch(**{name: options[name] for name in _LAUNCH_OPTIONS}),
        trust_remote_code=trust_remote_code or (config is not None and config.model.trust_remote_code),
        code=code_in_use(config.code) if config else [name_code(one) for one in trust_code],
        allow=allowing(config) if config else None,
    )
    array.check_time()
    script = array.script()  # refuses options that contradict each other, before the study is made
    if dry_run:
        answer({"study": name, "script": script}, script, as_json=as_json)
    else:
        _submit(study, array, options["n_trials"], as_json=as_json)


def _named_study(study: str) -> tuple[str, StudyConfig | None]:
    """The name of STUDY, and its file; None: it can only be a name in the database.

    Raises InputError where it can be neither.
    """
    from hpo.config.study_config import study_name

    config = load_file(study)
    try:
        return study_name(config.name if config else study), config
    except ValueError as error:
        raise InputError(f"The name of a study {error}") from None


def _submit(study: str, array: WorkerArray, n_trials: int | None, *, as_json: bool) -> None:
    from hpo.code import code_in_use
    from hpo.config.allowed import allowing
    from hpo.study.running.run import OpenOptions, open_study
    from hpo.study.store.database import parse_url, storage_url

    make_runs_folder(array.study)
    url = storage_url(array.storage)
    if parse_url(url).get_backend_name() == "sqlite":
        raise InputError(
            "The study's database must be a PostgreSQL server that all nodes reach, but it is a SQLite file, "
            "which several hosts would damage. `hpo database start --foreground --host 0.0.0.0` runs one in "
            "a job; `hpo copy STUDY --to URL` takes a study there."
        )
    config, is_file = load_to_work(study, url, n_trials=n_trials)
    options = OpenOptions(
        resize=n_trials is not None,
        trials_run="elsewhere",
        is_file=is_file,
        trust_remote_code=array.trust_remote_code,
    )
    with progress_shown(quiet=as_json), open_study(config, url, RUNS, options):
        job = replace(array, allow=allowing(config), code=code_in_use(config.code)).submit()
    file, num_workers = file_given(array.storage), array.num_jobs * array.workers_per_job
    answer(
        {"study": config.name, "job": job, "num_workers": num_workers, "folder": str(array.folder)},
        (f"The database: export HPO_STORAGE={file}\n" if file else "")
        + f"Submitted job {job}. Workers: {num_workers}, jobs: {array.num_jobs}.\n"
        f"Watch it:  hpo status {array.study}   squeue --job {job}\n"
        f"Logs:      {array.folder}/*.log",
        as_json=as_json,
    )


def _sbatch_options(options: Mapping[str, Any]) -> dict[str, str | bool]:
    """The given options of sbatch by their names there; True for one without a value."""
    named = {
        name.replace("_", "-"): value
        for name, value in options.items()
        if value is not None and name in _SLURM_OPTIONS and name not in ("n_trials", "sbatch")
    }
    for text in options["sbatch"] or ():
        name, equals, value = text.lstrip("-").partition("=")
        named[name] = value if equals else True
    return named
