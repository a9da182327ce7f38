"""What `hpo submit --kubernetes` does: manifests for `kubectl`, and how to use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import load_file, print_json
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.cluster.kubernetes import KubernetesJob
    from hpo.config.study_config import StudyConfig

_PANEL = "With --kubernetes"

KUBERNETES_OPTIONS: Mapping[str, Any] = {
    "image": Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Of docker/Dockerfile, with its registry.", rich_help_panel=_PANEL
        ),
    ],
    "out": Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Write the manifests there.",
            show_default="to the standard output",
            rich_help_panel=_PANEL,
        ),
    ],
    "volume_claim": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Claim that all nodes can mount, with runs/ and data/ (HPO_DATA_DIR). Without it, "
            "checkpoints go with their pod.",
            rich_help_panel=_PANEL,
        ),
    ],
    "secret": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Secret with the database's URL as `storage_url`.",
            show_default="hpo-storage",
            rich_help_panel=_PANEL,
        ),
    ],
}


def print_manifests(
    study: str, num_workers: int, options: Mapping[str, Any], *, private: bool, as_json: bool
) -> None:
    """Write what workers of STUDY need on Kubernetes, or print it.

    Args:
        options: those of `KUBERNETES_OPTIONS`, and those of sbatch that mean the same here.
        private: whether PostgreSQL runs in the cluster, too.
    """
    from hpo.cluster.kubernetes import DASHBOARD_PORT, as_yaml, manifests, secret_commands, write

    rest = dict(options)
    out: Path | None = rest.pop("out", None)
    job = _job(study, num_workers, rest, private)
    files = manifests(job)
    written = [str(path) for path in write(files, out)] if out else []
    if as_json:
        print_json({"study": job.study, "secret": secret_commands(job), "written": written, "files": files})
        return
    if not out:
        typer.echo("".join(as_yaml(documents) for documents in files.values()), nl=False)
    typer.echo(
        f"{'Written: ' + ' '.join(written) if written else '# The manifests are above.'}\n"
        f"Once, the Secret:  {secret_commands(job)}\n"
        f"Then:              kubectl apply -f {out or '-'}\n"
        f"The dashboard:     kubectl port-forward deployment/{job.name}-dashboard {DASHBOARD_PORT}",
        err=not out,
    )


def named_study(study: str) -> tuple[str, StudyConfig | None]:
    """The name of STUDY, and its file; None: it can only be a name in the database.

    Raises InputError where it can be neither.
    """
    from hpo.config.study_config import study_name

    config = load_file(study)
    try:
        return study_name(config.name if config else study), config
    except ValueError as error:
        raise InputError(f"The name of a study {error}") from None


def _job(study: str, num_workers: int, options: dict[str, Any], private: bool) -> KubernetesJob:
    from hpo.cluster.kubernetes import KubernetesJob

    name, config = named_study(study)
    if "image" not in options:
        raise InputError("--kubernetes needs --image: what docker/Dockerfile builds, in a registry of yours.")
    num_gpus = _count("--gpus-per-node", options.pop("gpus_per_node", "0"), least=0)
    if "time" in options:
        options["seconds"] = _seconds(options.pop("time"))
    if "mem" in options:
        options["memory"] = options.pop("mem")
    if "signal_lead" in options:
        options["lead_seconds"] = options.pop("signal_lead")
    if "cpus_per_task" in options:
        options["num_cpus"] = _count("--cpus-per-task", options.pop("cpus_per_task"), least=1)
    if unknown := sorted(options.keys() - KubernetesJob.__dataclass_fields__.keys()):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        raise InputError(f"{names} means nothing to Kubernetes. Leave it out.")
    return KubernetesJob(
        study=name,
        study_file=config.path.read_text() if config else None,
        num_workers=num_workers,
        num_gpus=num_gpus,
        private_database=private,
        **options,
    )


def _seconds(given: str) -> int:
    from hpo.cluster.slurm import seconds_of

    if not (seconds := seconds_of(given.strip())):
        raise InputError(
            f"--time must be a time such as 90 (minutes), 12:00:00 or 2-00:00:00, but got `{given}`."
        )
    return seconds


def _count(option: str, given: str, *, least: int) -> int:
    if not given.isdecimal() or int(given) < least:
        raise InputError(f"{option} must be a number >= {least} with --kubernetes, but got `{given}`.")
    return int(given)
