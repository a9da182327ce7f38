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
    with_options,
)
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.cluster.batch.slurm import WorkerArray
    from hpo.config.study_config import StudyConfig


def _option(kind: Any, panel: str | None, metavar: str, help_text: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(metavar=metavar, help=help_text, rich_help_panel=panel, **more)]


_OF_BOTH: Mapping[str, Any] = {
    "n_trials": NumTrialsOption,
    "time": _option(
        str | None,
        None,
        "D-HH:MM:SS",
        "sbatch --time: limit of a job, which is requeued when it comes to it. On Kubernetes: of the whole "
        "Job, which then ends, finished or not.",
    ),
    "gpus_per_node": _option(
        str | None, None, "[TYPE:]G", "GPUs of a job or pod, which runs a worker on each."
    ),
    "cpus_per_task": _option(
        int | None, None, "N", "CPU cores of a job or pod.", show_default="of a pod, 4 for each GPU", min=1
    ),
    "mem": _option(str | None, None, "SIZE", "Memory of a job or pod, such as 60G."),
}
_OF_SLURM: Mapping[str, Any] = {
    "partition": _option(str | None, "With --slurm", "NAME", "sbatch --partition: where the jobs run."),
    "account": _option(str | None, "With --slurm", "NAME", "sbatch --account: what the jobs are charged to."),
    "sbatch": _option(
        list[str] | None,
        "With --slurm",
        "NAME[=VALUE]",
        "Any other option of sbatch, such as qos=long or exclusive. Repeatable.",
    ),
}
_OF_KUBERNETES: Mapping[str, Any] = {
    "image": _option(str | None, "With --kubernetes", "IMAGE", "Of docker/Dockerfile, with its registry."),
    "volume_claim": _option(
        str | None,
        "With --kubernetes",
        "NAME",
        "Claim that all nodes can mount, for runs/ and data/ (HPO_DATA_DIR). Needed unless the study's "
        "checkpoints go to a store.",
    ),
}


@app.command()
@with_options(_OF_BOTH, _OF_SLURM, _OF_KUBERNETES)
def submit(
    study: StudyArgument,
    storage: StorageOption = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit an array of Slurm jobs.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Print manifests for `kubectl apply`.")
    ] = False,
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
    given = {name: value for name, value in options.items() if value is not None}
    if slurm == kubernetes:
        raise InputError("hpo submit must be told where the workers are to run: --slurm or --kubernetes.")
    name, config = _named_study(study)
    of_other = _OF_SLURM.keys() | {"n_trials"} if kubernetes else _OF_KUBERNETES.keys()
    if others := [other.replace("_", "-") for other in given if other in of_other]:
        here = "--kubernetes, which asks no database" if kubernetes else "--slurm"
        raise InputError(f"--{', --'.join(others)} means nothing to {here}. Leave it out.")
    from hpo.code import code_in_use, name_code

    code = code_in_use(config.code) if config else [name_code(one) for one in trust_code]
    if kubernetes:
        _print_manifests(name, config, workers, given | {"code": code}, as_json=as_json)
        return
    from hpo.cluster.batch.slurm import WorkerArray, job_folder
    from hpo.config.allowed import allowing
    from hpo.study.store.database import storage_url

    n_trials = given.pop("n_trials", None)
    array = WorkerArray(
        study=name,
        storage=file_given(storage) or storage_url(storage),
        folder=job_folder(RUNS, name),
        num_workers=workers,
        sbatch=_sbatch_options(given),
        trust_remote_code=trust_remote_code or (config is not None and config.model.trust_remote_code),
        code=code,
        allow=allowing(config) if config else None,
    )
    array.check_time()
    script = array.script()  # refuses options that contradict each other, before the study is made
    if dry_run:
        answer({"study": name, "script": script}, script, as_json=as_json)
    else:
        _submit(study, array, n_trials, as_json=as_json)


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


def _print_manifests(
    study: str, config: StudyConfig | None, num_workers: int, given: dict[str, Any], *, as_json: bool
) -> None:
    from hpo.cluster.batch.kubernetes import Pods, manifests
    from hpo.cluster.batch.slurm import seconds_of

    if "image" not in given:
        raise InputError("--kubernetes needs --image: what docker/Dockerfile builds, in a registry of yours.")
    gpus, time = given.get("gpus_per_node", "0"), given.get("time")
    if not gpus.isdecimal():
        raise InputError(f"--gpus-per-node must be a number with --kubernetes, but got `{gpus}`.")
    if time is not None and not seconds_of(time):
        raise InputError(
            f"--time must be a time such as 90 (minutes), 12:00:00 or 2-00:00:00, but got `{time}`."
        )
    pods = Pods(
        image=given["image"],
        num_workers=num_workers,
        num_gpus=int(gpus),
        num_cpus=given.get("cpus_per_task"),
        memory=given.get("mem"),
        seconds=seconds_of(time) if time else None,
        volume_claim=given.get("volume_claim"),
    )
    text = manifests(study, config, pods, given["code"])
    answer({"study": study, "manifests": text}, text, as_json=as_json)


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
    """Options as sbatch names them, with those of `--sbatch NAME=VALUE`; True for one without a value."""
    named = {name.replace("_", "-"): value for name, value in options.items() if name != "sbatch"}
    for text in options.get("sbatch", ()):
        name, equals, value = text.lstrip("-").partition("=")
        named[name] = value if equals else True
    return named
