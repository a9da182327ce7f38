"""Workers of a study on Kubernetes, as manifests: plain documents that `kubectl apply` takes.

The workers are one Indexed Job. What its pods' ends mean follows from the exit codes of `hpo worker`:

    0            nothing is left to do: the index is complete, and with the last of them the Job
    1, a signal  the worker died: the index is tried again, `_RETRIES` times, each later than the one before
    2            the user's input is wrong, and would be again on every node: the Job fails
    130          told to stop, and checkpointed: another pod goes on, and it counts for nothing
    disruption   of the pod (a drained node, preemption, eviction): likewise, whatever it exited with

Nothing here has a password. Pods read the URL of the database from a file (`HPO_STORAGE=@FILE`), which a
Secret holds that the user makes (`secret_commands`). The study file goes along in a ConfigMap, and whichever
worker comes first makes the study, so neither the database nor a cluster is asked when this is written.

PostgreSQL is reached by the pods of hpo alone, where the cluster's network enforces policies, and by TLS in
any case. The dashboard, which has no login, listens on loopback within its pod: `kubectl port-forward` goes
there, and nothing else can.
"""

from __future__ import annotations

import hashlib
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpo.cluster.jobs import CONNECTIONS_PER_WORKER
from hpo.errors import InputError

Manifest = dict[str, Any]

DATABASE = "hpo-database"
"""Service, and so host name, of the PostgreSQL of a namespace, which all studies there share."""
POSTGRES_IMAGE = "docker.io/library/postgres:17-bookworm"

_RETRIES = 10
_MAX_CONNECTIONS = 500
_AWS_SECRET = "hpo-aws"
"""Of the user: AWS's variables, for checkpoints in an artifact store."""
_HOME, _DATA, _STUDY, _SECRETS = (
    "/home/hpo",
    "/data",
    "/etc/hpo",
    "/run/secrets/hpo",
)  # as in docker/Dockerfile
DASHBOARD_PORT, _DATABASE_PORT = 8080, 5432
_USER, _POSTGRES_USER = 10001, 999  # of the images
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"  # a DNS subdomain, RFC 1123


@dataclass(frozen=True)
class KubernetesJob:
    """What the manifests of a study are made from."""

    study: str
    """Its name."""
    image: str
    """Of docker/Dockerfile, with its registry."""
    study_file: str | None = None
    """The text of the study file; None: the study is in the database."""
    num_workers: int = 1
    num_gpus: int = 0
    """Of each pod, which runs a worker on each; 0: one on the CPU."""
    num_cpus: int = 1
    memory: str | None = None
    """As `sbatch --mem` takes it: `16G`, or megabytes."""
    seconds: int | None = None
    """After so long the Job ends, finished or not."""
    lead_seconds: int = 120
    """From the signal to stop to the end of a pod: for its checkpoints."""
    secret: str = "hpo-storage"
    """The Secret with the URL of the database, as `storage_url`."""
    volume_claim: str | None = None
    """A claim that pods on all nodes can mount: `runs/` and `data/` are folders in it. None: what a pod has
    written goes with it, and a trial that another goes on with begins anew."""
    private_database: bool = False
    """Whether PostgreSQL runs in the cluster, too."""

    def __post_init__(self) -> None:
        names = {"--secret": self.secret, "--volume-claim": self.volume_claim}
        for option, name in names.items():
            if name is not None and not re.fullmatch(_NAME, name):
                raise InputError(
                    f"{option} must be the name of an object of Kubernetes (small letters, digits, `-` and "
                    f"`.`), but got `{name}`."
                )
        most = _MAX_CONNECTIONS // CONNECTIONS_PER_WORKER
        if self.private_database and self.num_workers > most:
            raise InputError(
                f"--workers must be <= {most} with --database private, whose PostgreSQL takes "
                f"{_MAX_CONNECTIONS} connections, but got {self.num_workers}. Use a server of your own."
            )
        if not re.fullmatch(r"[\w./:@-]+", self.image, re.ASCII):
            raise InputError(
                f"--image must name an image, such as registry.example.org/hpo:cuda, but got `{self.image}`."
            )

    @property
    def name(self) -> str:
        """Of the study's objects: a DNS label, and another one for each study."""
        return f"hpo-{dns_label(self.study)}"

    @property
    def num_pods(self) -> int:
        return math.ceil(self.num_workers / max(1, self.num_gpus))


def dns_label(name: str, limit: int = 40) -> str:
    """Return a DNS label of at most `limit` characters for `name`; one that had to change ends in a hash."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if label == name and len(name) <= limit:
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{label[: limit - 7].rstrip('-')}-{digest}".lstrip("-")


def manifests(job: KubernetesJob) -> dict[str, list[Manifest]]:
    """The documents of each file."""
    files = {"workers.yaml": [_workers(job), _closed_to_all(job)], "dashboard.yaml": _dashboard(job)}
    if job.study_file is not None:
        files = {"study.yaml": [_study(job, job.study_file)], **files}
    if job.private_database:
        files = {"database.yaml": _database(job), **files}
    return files


def as_yaml(documents: Sequence[Manifest]) -> str:
    """The text of a file; `kubectl` takes several documents in one."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=110)


def write(files: Mapping[str, Sequence[Manifest]], folder: Path) -> list[Path]:
    """Write each file into `folder`. Raises InputError where that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, documents in files.items():
            (folder / name).write_text(as_yaml(documents))
    except OSError as error:
        raise InputError(
            f"--out must be a folder that may be written, but {folder}: {error.strerror}."
        ) from None
    return [folder / name for name in files]


def secret_commands(job: KubernetesJob) -> str:
    """Shell commands that make the Secret; no password is an argument of a program."""
    if not job.private_database:
        return f"kubectl create secret generic {job.secret} --from-file=storage_url=FILE_WITH_THE_URL"
    url = f"postgresql://hpo:%s@{DATABASE}/hpo?sslmode=verify-full&sslrootcert={_SECRETS}/tls.crt"
    return textwrap.dedent(
        f"""\
        (umask 077 && mkdir hpo-secret && cd hpo-secret &&
        openssl rand -hex 24 | tr -d '\\n' > database_password &&
        printf '{url}' "$(cat database_password)" > storage_url &&
        openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj /CN={DATABASE} \\
            -addext subjectAltName=DNS:{DATABASE} -keyout tls.key -out tls.crt &&
        kubectl create secret generic {job.secret} --from-file=.)"""
    )


def memory_quantity(given: str) -> str:
    """What Kubernetes calls the memory that `sbatch --mem` takes as `given`. Raises InputError."""
    found = re.fullmatch(r"([1-9][0-9]*)([KMGT]?)B?", given.strip().upper())
    if not found:
        raise InputError(f"--mem must be a number with K, M, G or T, such as 16G, but got `{given}`.")
    return f"{found[1]}{found[2] or 'M'}i"


class _Dumper(yaml.SafeDumper):
    """Text of several lines as such; no aliases, which people do not read easily."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _object(api: str, kind: str, name: str, labels: Mapping[str, str], **content: Any) -> Manifest:
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _labels(instance: str, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "hpo",
        "app.kubernetes.io/instance": instance,
        "app.kubernetes.io/component": component,
    }


def _study(job: KubernetesJob, text: str) -> Manifest:
    return _object("v1", "ConfigMap", job.name, _labels(job.name, "study"), data={"study.yaml": text})


def _workers(job: KubernetesJob) -> Manifest:
    gpus = {"nvidia.com/gpu": job.num_gpus} if job.num_gpus else {}
    memory = {"memory": memory_quantity(job.memory)} if job.memory else {}
    # With the cores as a limit, too: a worker has as many threads as that.
    resources = {"cpu": job.num_cpus, **memory, **gpus}
    # Its parent process sees how a worker dies, which nobody else in the pod could.
    pod = _pod(job, ["worker", "--workers-per-device=1"], resources)
    pod["restartPolicy"] = "Never"
    pod["terminationGracePeriodSeconds"] = job.lead_seconds
    if gpus:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    labels = _labels(job.name, "worker")
    by_exit_code = {"containerName": "hpo", "operator": "In"}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {**by_exit_code, "values": [2]}},
        {"action": "Ignore", "onExitCodes": {**by_exit_code, "values": [130]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.num_pods,
        "parallelism": job.num_pods,
        "backoffLimitPerIndex": _RETRIES,
        **({"activeDeadlineSeconds": job.seconds} if job.seconds else {}),
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return _object("batch/v1", "Job", job.name, labels, spec=spec)


def _dashboard(job: KubernetesJob) -> list[Manifest]:
    name, labels = f"{job.name}-dashboard", _labels(job.name, "dashboard")
    pod = _pod(job, ["dashboard", "--port", str(DASHBOARD_PORT)], {"cpu": 1, "memory": "1Gi"})
    url = f"http://127.0.0.1:{DASHBOARD_PORT}/api/studies"
    answers = f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"
    # Run in the pod, because nothing outside of it reaches its loopback.
    probe = {"exec": {"command": ["python", "-c", answers]}, "periodSeconds": 30, "timeoutSeconds": 10}
    pod["containers"][0]["readinessProbe"] = probe
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return [_object("apps/v1", "Deployment", name, labels, spec=deployment)]


def _pod(job: KubernetesJob, command: list[str], resources: Mapping[str, Any]) -> Manifest:
    """A pod that runs `hpo COMMAND STUDY` with the database, a `runs/` and the data."""
    files = {"items": [_file("storage_url"), *([_file("tls.crt")] if job.private_database else [])]}
    volumes: list[Manifest] = [
        {"name": "secrets", "secret": {"secretName": job.secret, "defaultMode": 0o440, **files}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        {"name": "secrets", "mountPath": _SECRETS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    environment = {"HPO_STORAGE": f"@{_SECRETS}/storage_url"}
    if job.volume_claim is None:
        volumes.append({"name": "runs", "emptyDir": {}})
        mounts.append({"name": "runs", "mountPath": f"{_HOME}/runs"})
    else:
        environment["HPO_DATA_DIR"] = _DATA
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": job.volume_claim}})
        mounts.append({"name": "shared", "mountPath": f"{_HOME}/runs", "subPath": "runs"})
        mounts.append({"name": "shared", "mountPath": _DATA, "subPath": "data", "readOnly": True})
    study = job.study
    if job.study_file is not None:
        study = f"{_STUDY}/study.yaml"
        volumes.append({"name": "study", "configMap": {"name": job.name}})
        mounts.append({"name": "study", "mountPath": _STUDY, "readOnly": True})
    container = {
        "name": "hpo",
        "image": job.image,
        "command": ["hpo", *command, study],
        "workingDir": _HOME,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "envFrom": [{"secretRef": {"name": _AWS_SECRET, "optional": True}}],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": _CONFINED,
        "volumeMounts": mounts,
    }
    # Otherwise Python were the pod's process 1, which a signal does not end before its handler is there.
    shared = {"shareProcessNamespace": True}
    pod = {**_rights(_USER), **shared, "containers": [container], "volumes": volumes}
    return {**pod, "initContainers": [_wait_for_database()]} if job.private_database else pod


def _wait_for_database() -> Manifest:
    """Both are started at the same time, and a worker that finds no database ends with 2."""
    wait = f"trap exit TERM; until pg_isready --host={DATABASE} --port={_DATABASE_PORT}; do sleep 2; done"
    return {
        "name": "wait-for-database",
        "image": POSTGRES_IMAGE,
        "command": ["sh", "-c", wait],
        "securityContext": _CONFINED,
    }


def _closed_to_all(job: KubernetesJob) -> Manifest:
    """Nobody connects to the pods of a study."""
    labels = _labels(job.name, "network")
    selector = {"matchLabels": {"app.kubernetes.io/instance": job.name}}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", job.name, labels, spec=spec)


def _database(job: KubernetesJob) -> list[Manifest]:
    """PostgreSQL on a volume of its own, its service, and who may connect to it."""
    labels = _labels(DATABASE, "database")
    port = {"name": "postgresql", "port": _DATABASE_PORT, "targetPort": _DATABASE_PORT}
    stateful_set = {
        "replicas": 1,
        "serviceName": DATABASE,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": _database_pod(job)},
        "volumeClaimTemplates": [
            {
                "metadata": {"name": "database"},
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "10Gi"}},
                },
            }
        ],
    }
    policy = {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "hpo"}}}],
                "ports": [{"protocol": "TCP", "port": _DATABASE_PORT}],
            }
        ],
    }
    service = {"type": "ClusterIP", "selector": labels, "ports": [port]}
    script = Path(__file__).with_name("database-role.sh").read_text()
    return [
        _object("v1", "ConfigMap", DATABASE, labels, data={"role.sh": script}),
        _object("v1", "Service", DATABASE, labels, spec=service),
        _object("apps/v1", "StatefulSet", DATABASE, labels, spec=stateful_set),
        _object("networking.k8s.io/v1", "NetworkPolicy", DATABASE, labels, spec=policy),
    ]


def _database_pod(job: KubernetesJob) -> Manifest:
    settings = {"max_connections": str(_MAX_CONNECTIONS), "ssl": "on"}
    settings |= {
        f"ssl_{kind}_file": f"{_SECRETS}/tls.{end}" for kind, end in (("cert", "crt"), ("key", "key"))
    }
    # By TCP: the server that sets up a new database answers on its socket alone.
    is_ready = ["pg_isready", "--host=127.0.0.1", "--username=hpo", "--dbname=hpo"]
    environment = {
        "HPO_CONNECTIONS": "hostssl",
        "POSTGRES_PASSWORD_FILE": f"{_SECRETS}/database_password",
        "PGDATA": "/var/lib/postgresql/data/pgdata",
    }
    written = {
        "database": "/var/lib/postgresql/data",
        "run": "/var/run/postgresql",
        "tmp": "/tmp",
        "shm": "/dev/shm",
    }
    mounts = [{"name": name, "mountPath": path} for name, path in written.items()]
    resources = {"cpu": 1, "memory": "2Gi"}
    container = {
        "name": "postgres",
        "image": POSTGRES_IMAGE,
        "args": [word for name, value in settings.items() for word in ("-c", f"{name}={value}")],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "ports": [{"name": "postgresql", "containerPort": _DATABASE_PORT}],
        "readinessProbe": {"exec": {"command": is_ready}, "periodSeconds": 5, "timeoutSeconds": 5},
        "resources": {"requests": resources, "limits": {"memory": resources["memory"]}},
        "securityContext": _CONFINED,
        "volumeMounts": [
            *mounts,
            {"name": "secrets", "mountPath": _SECRETS, "readOnly": True},
            {"name": "role", "mountPath": "/docker-entrypoint-initdb.d", "readOnly": True},
        ],
    }
    files = [_file("database_password"), _file("tls.crt"), _file("tls.key")]
    secrets = {"secretName": job.secret, "defaultMode": 0o440, "items": files}
    return {
        **_rights(_POSTGRES_USER),
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": [
            {"name": "secrets", "secret": secrets},
            {"name": "role", "configMap": {"name": DATABASE}},
            {"name": "run", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
        ],
    }


_CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _rights(user: int) -> Manifest:
    """What every pod of ours may: nothing of the cluster, and on its node what an ordinary user may."""
    context = {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,  # reads the secrets
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {"automountServiceAccountToken": False, "enableServiceLinks": False, "securityContext": context}


def _file(key: str) -> Manifest:
    return {"key": key, "path": key}
