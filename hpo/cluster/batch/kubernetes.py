"""Workers of a study on Kubernetes: the manifests in `kubernetes.yaml.j2`, filled in.

Nothing in them has a password: pods read the database's URL from a file of a Secret that the user makes. The
study file goes along in a ConfigMap, and the first worker makes the study, so neither the database nor a
cluster is asked here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpo.code import Code, code_in_use
from hpo.config.study_config import StudyConfig
from hpo.errors import InputError

CPUS_PER_GPU = 4
"""Of a pod, where the user gives no number: batches are prepared on them."""


@dataclass(frozen=True)
class Pods:
    """What the workers' pods are made from, as the options of `hpo submit` name it."""

    image: str
    num_workers: int = 1
    num_gpus: int = 0
    """Of each pod, which runs a worker on each; 0: one on the CPU."""
    num_cpus: int | None = None
    memory: str | None = None
    seconds: int | None = None
    """After so long the Job ends, finished or not."""
    volume_claim: str | None = None
    """A claim that pods on all nodes can mount: `runs/` and `data/` are folders in it."""


def manifests(study: str, config: StudyConfig | None, pods: Pods, named: Sequence[Code] = ()) -> str:
    """Return what `kubectl apply` takes.

    Args:
        config: of the study's file; None: the study is in the database.
        named: the code that the user lets the pods run where the study is in the database.

    Raises:
        InputError: nothing would outlive a pod, or the memory is no quantity.
    """
    location = config.checkpoint.location if config else None
    if pods.volume_claim is None and "://" not in str(location):
        raise InputError(
            "--kubernetes needs a place for checkpoints and models that outlives a pod: --volume-claim NAME "
            "of a PersistentVolumeClaim that pods on all nodes can mount, or a study file with a store in "
            "`checkpoint.location`, such as s3://BUCKET/FOLDER."
        )
    resources: dict[str, str | int] = {"cpu": pods.num_cpus or max(1, CPUS_PER_GPU * pods.num_gpus)}
    if pods.memory:
        if not (match := re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", pods.memory.upper())):
            raise InputError(
                f"--mem must be a number with K, M, G or T, such as 16G, but got `{pods.memory}`."
            )
        resources["memory"] = f"{match[1]}{match[2] or 'M'}i"
    if pods.num_gpus:
        resources["nvidia.com/gpu"] = pods.num_gpus
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=False
    )
    return environment.get_template("kubernetes.yaml.j2").render(
        **vars(pods),
        study=study,
        study_file=config.path.read_text() if config else None,
        code=_code_files(config) if config else [_file_of(code, code.name) for code in named if code.is_file],
        trusting=[] if config else _trusting(named),
        name=f"hpo-{dns_label(study)}",
        num_pods=math.ceil(pods.num_workers / max(1, pods.num_gpus)),
        resources=json.dumps(resources),
    )


def _code_files(config: StudyConfig) -> list[tuple[str, str, str]]:
    """Of each file of the study's code: its name, its path from the study file, and what it holds.

    Raises InputError where a pod could not have it there.
    """
    folder = config.path.parent.absolute()
    files = []
    for code in code_in_use(config.code):
        if code.is_file and not Path(code.place).is_relative_to(folder):
            raise InputError(
                f"code: with --kubernetes, {code.place} must lie in the folder of the study file, {folder}: "
                "pods get one folder with both."
            )
        if code.is_file:
            path = Path(code.place).relative_to(folder)
            files.append(_file_of(code, path.as_posix()))
    return files


def _file_of(code: Code, path: str) -> tuple[str, str, str]:
    return f"{code.sha256[:16]}.py", path, code.files[code.place].decode()


def _trusting(named: Sequence[Code]) -> list[str]:
    """The options of a worker that lets it run the code, files of which lie beside a study file."""
    places = [f"/etc/hpo/{code.name}" if code.is_file else code.place for code in named]
    return [word for place in places for word in ("--trust-code", place)]


def dns_label(name: str, limit: int = 40) -> str:
    """Return a DNS label of at most `limit` characters for `name`; one that had to change ends in a hash."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if label == name and len(name) <= limit:
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{label[: limit - 7].rstrip('-')}-{digest}".lstrip("-")
