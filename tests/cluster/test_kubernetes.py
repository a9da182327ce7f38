from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from command_line import ROOT, Finished, hpo_command, ok
from tiny import write_study

from hpo.cluster.kubernetes import (
    DATABASE,
    KubernetesJob,
    as_yaml,
    dns_label,
    manifests,
    memory_quantity,
    secret_commands,
    write,
)
from hpo.errors import InputError
from hpo.study.database import parse_url, storage_url

STUDY_FILE = "# A study: with *odd* {{characters}} \n\nname: 'x'\nquestion: \"é\\t\"\n---\nkind: Secret\n"
SMALL = KubernetesJob("tiny", "registry.example.org/hpo:cpu")
FULL = KubernetesJob(
    "tiny",
    "registry.example.org/hpo:cuda",
    study_file=STUDY_FILE,
    num_workers=8,
    num_gpus=2,
    num_cpus=6,
    memory="48G",
    seconds=7200,
    lead_seconds=300,
    secret="my-secret",
    volume_claim="shared",
    private_database=True,
)


def documents(job: KubernetesJob) -> list[Any]:
    """The documents as `kubectl` reads them."""
    return [one for file in manifests(job).values() for one in yaml.safe_load_all(as_yaml(file))]


def of_kind(job: KubernetesJob, kind: str, name: str = "") -> Any:
    (found,) = (
        one for one in documents(job) if one["kind"] == kind and one["metadata"]["name"].endswith(name)
    )
    return found


def pods(job: KubernetesJob) -> list[Any]:
    return [one["spec"]["template"] for one in documents(job) if "template" in one.get("spec", ())]


def containers(job: KubernetesJob) -> Iterator[Any]:
    for pod in pods(job):
        yield from (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))


@pytest.mark.parametrize("job", [SMALL, FULL], ids=["small", "full"])
def test_kubernetes_takes_every_document(job: KubernetesJob) -> None:
    for one in documents(job):
        kubernetes_validate.validate(one, "1.31", strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    job = of_kind(SMALL, "Job")
    job["spec"]["parallelisms"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_workers_are_an_indexed_job_that_tells_the_ends_of_its_pods_apart() -> None:
    job = of_kind(FULL, "Job")["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert job["activeDeadlineSeconds"] == 7200
    assert job["backoffLimitPerIndex"] > 0
    disruption, wrong_input, stopped = job["podFailurePolicy"]["rules"]
    assert disruption["action"] == "Ignore"
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    by_code = {"containerName": job["template"]["spec"]["containers"][0]["name"], "operator": "In"}
    assert wrong_input == {"action": "FailJob", "onExitCodes": {**by_code, "values": [2]}}
    assert stopped == {"action": "Ignore", "onExitCodes": {**by_code, "values": [130]}}
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy wants
    assert pod["terminationGracePeriodSeconds"] == 300
    assert "activeDeadlineSeconds" not in of_kind(SMALL, "Job")["spec"]


def test_a_worker_has_the_resources_that_were_asked_for() -> None:
    (worker,) = of_kind(FULL, "Job")["spec"]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"] == {"cpu": 6, "memory": "48Gi", "nvidia.com/gpu": 2}
    assert worker["resources"]["requests"] == worker["resources"]["limits"]
    (on_cpu,) = of_kind(SMALL, "Job")["spec"]["template"]["spec"]["containers"]
    assert on_cpu["resources"]["limits"] == {"cpu": 1}


@pytest.mark.parametrize("job", [SMALL, FULL], ids=["small", "full"])
def test_no_pod_may_more_than_it_needs(job: KubernetesJob) -> None:
    for template in pods(job):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in containers(job):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert all("hostPort" not in port for port in container.get("ports", ()))


def test_the_url_comes_from_a_secret_as_a_file_and_nothing_else_of_it_reaches_a_worker() -> None:
    pod = of_kind(FULL, "Job")["spec"]["template"]["spec"]
    secret = next(volume["secret"] for volume in pod["volumes"] if volume["name"] == "secrets")
    assert secret["secretName"] == "my-secret"
    assert [item["key"] for item in secret["items"]] == ["storage_url", "tls.crt"]
    assert secret["defaultMode"] == 0o440
    (container,) = pod["containers"]
    folder = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "secrets")
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert environment["HPO_STORAGE"] == f"@{folder}/storage_url"
    assert container["envFrom"] == [{"secretRef": {"name": "hpo-aws", "optional": True}}]
    assert all(one["kind"] != "Secret" for one in documents(FULL))


def test_what_workers_write_is_on_the_claim_or_goes_with_the_pod() -> None:
    def mounted(job: KubernetesJob) -> dict[str, Any]:
        pod = of_kind(job, "Job")["spec"]["template"]["spec"]
        kinds = {volume["name"]: volume for volume in pod["volumes"]}
        return {m["mountPath"]: (m, kinds[m["name"]]) for m in pod["containers"][0]["volumeMounts"]}

    mount, volume = mounted(FULL)["/home/hpo/runs"]
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    data, same_volume = mounted(FULL)["/data"]
    assert same_volume == volume
    assert data["readOnly"]
    assert data["subPath"] != mount["subPath"]
    assert mounted(SMALL)["/home/hpo/runs"][1]["emptyDir"] == {}
    assert "/data" not in mounted(SMALL)


def test_the_database_and_the_dashboard_are_reached_within_the_cluster_alone() -> None:
    kinds = {one["kind"] for one in documents(FULL)}
    assert not kinds & {"Ingress", "Gateway", "HTTPRoute"}
    services = [one for one in documents(FULL) if one["kind"] == "Service"]
    assert {one["spec"]["type"] for one in services} == {"ClusterIP"}
    for service in services:  # each finds the pods of its own
        (labels,) = (
            pod["metadata"]["labels"]
            for pod in pods(FULL)
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        )
        assert labels == service["spec"]["selector"]
    policy = of_kind(FULL, "NetworkPolicy", DATABASE)["spec"]
    assert policy["podSelector"]["matchLabels"] == of_kind(FULL, "Service", DATABASE)["spec"]["selector"]
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [5432]
    (allowed,) = rule["from"]
    for pod in pods(FULL):
        assert allowed["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    closed = of_kind(FULL, "NetworkPolicy", "hpo-tiny")["spec"]
    assert closed["policyTypes"] == ["Ingress"]
    assert "ingress" not in closed
    dashboard = of_kind(FULL, "Deployment")["spec"]["template"]
    assert closed["podSelector"]["matchLabels"].items() <= dashboard["metadata"]["labels"].items()
    assert "--host" not in dashboard["spec"]["containers"][0]["command"]  # so it listens on loopback


def test_the_database_keeps_its_files_and_says_when_it_is_ready() -> None:
    stateful_set = of_kind(FULL, "StatefulSet")["spec"]
    (claim,) = stateful_set["volumeClaimTemplates"]
    (container,) = stateful_set["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert environment["PGDATA"].startswith(mounts[claim["metadata"]["name"]] + "/")
    assert environment["POSTGRES_PASSWORD_FILE"].startswith(mounts["secrets"] + "/")
    assert "POSTGRES_PASSWORD" not in environment
    assert environment["HPO_CONNECTIONS"] == "hostssl"
    script = of_kind(FULL, "ConfigMap", DATABASE)["data"]["role.sh"]
    assert script == (ROOT / "hpo/cluster/database-role.sh").read_text()
    assert mounts["role"] == "/docker-entrypoint-initdb.d"
    assert container["readinessProbe"]["exec"]["command"][0] == "pg_isready"
    assert stateful_set["serviceName"] == of_kind(FULL, "Service", DATABASE)["metadata"]["name"]
    assert "StatefulSet" not in {one["kind"] for one in documents(SMALL)}


def test_the_dashboard_is_probed_from_within() -> None:
    (container,) = of_kind(SMALL, "Deployment")["spec"]["template"]["spec"]["containers"]
    command = container["readinessProbe"]["exec"]["command"]
    compile(command[-1], "probe", "exec")
    port = container["command"][container["command"].index("--port") + 1]
    assert f"127.0.0.1:{port}/" in command[-1]


def test_the_study_file_goes_along_letter_by_letter() -> None:
    study = of_kind(FULL, "ConfigMap", "hpo-tiny")
    assert study["data"]["study.yaml"] == STUDY_FILE
    (worker,) = of_kind(FULL, "Job")["spec"]["template"]["spec"]["containers"]
    folder = next(m["mountPath"] for m in worker["volumeMounts"] if m["name"] == "study")
    assert worker["command"] == ["hpo", "worker", "--workers-per-device=1", f"{folder}/study.yaml"]
    (named,) = of_kind(SMALL, "Job")["spec"]["template"]["spec"]["containers"]
    assert named["command"] == ["hpo", "worker", "--workers-per-device=1", "tiny"]
    assert "ConfigMap" not in {one["kind"] for one in documents(SMALL)}


@pytest.mark.parametrize(
    "study", ["my_Study.1", "a" * 100, "UPPER", "1", "0x1f", "no", "a...b", "x_", "ends-", "a" * 34 + "." * 9]
)
def test_names_are_dns_labels_whatever_the_study_is_called(study: str) -> None:
    job = KubernetesJob(study, "hpo", num_workers=100, private_database=True)
    for one in documents(job):
        kubernetes_validate.validate(one, "1.31", strict=True)
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
        for label in one["metadata"]["labels"].values():
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", label)
            assert len(label) <= 63
    assert len(f"{job.name}-99999") <= 63  # the host name of the last pod
    assert of_kind(job, "Job")["spec"]["template"]["spec"]["containers"][0]["command"][-1] == study


def test_each_study_has_a_name_of_its_own() -> None:
    studies = ["a-b", "a_b", "A-b", "a.b", "a" * 60, "a" * 61]
    assert len({dns_label(study) for study in studies}) == len(studies)
    assert dns_label("multitask") == "multitask"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "hpo\nprivileged: true"}, "--image must name an image"),
        ({"image": ""}, "--image must name an image"),
        ({"secret": "My Secret"}, "--secret must be the name of an object"),
        ({"volume_claim": "a/../b"}, "--volume-claim must be the name of an object"),
    ],
)
def test_names_that_kubernetes_would_refuse_are_refused_here(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KubernetesJob(**{"study": "tiny", "image": "hpo", **changes})


@pytest.mark.parametrize(
    ("given", "quantity"), [("16G", "16Gi"), ("16gb", "16Gi"), ("4000", "4000Mi"), ("500M", "500Mi")]
)
def test_memory_is_given_as_to_sbatch(given: str, quantity: str) -> None:
    assert memory_quantity(given) == quantity


@pytest.mark.parametrize("given", ["", "0", "16Gi", "-1G", "1.5G", "all"])
def test_what_is_no_amount_of_memory_is_refused(given: str) -> None:
    with pytest.raises(InputError, match="--mem must be a number"):
        memory_quantity(given)


def test_files_are_written_into_a_folder(tmp_path: Path) -> None:
    paths = write(manifests(FULL), tmp_path / "out")
    assert sorted(path.name for path in paths) == [
        "dashboard.yaml",
        "database.yaml",
        "study.yaml",
        "workers.yaml",
    ]
    read = [one for path in paths for one in yaml.safe_load_all(path.read_text())]
    assert read == documents(FULL)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--out must be a folder .* but .*file: "):
        write(manifests(SMALL), tmp_path / "file")


def test_the_secret_is_made_by_commands_without_a_password_in_their_arguments(tmp_path: Path) -> None:
    """`kubectl` and `openssl` note their arguments here; the rest of the commands is the shell's own."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("kubectl", "openssl"):
        note = f'#!/bin/sh\necho {program} "$@" >> {tmp_path}/arguments\n'
        really = f'exec "$(PATH="${{PATH#*:}}" command -v {program})" "$@"\n'
        (programs / program).write_text(note + (really if program == "openssl" else ""))
        (programs / program).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    commands = ["sh", "-eu", "-c", secret_commands(FULL)]
    subprocess.run(commands, cwd=tmp_path, env=environment, check=True, capture_output=True)
    folder = tmp_path / "hpo-secret"
    password = (folder / "database_password").read_text()
    assert re.fullmatch("[0-9a-f]{48}", password)
    url = parse_url(storage_url(f"@{folder}/storage_url"))
    assert (url.password, url.host, url.query["sslmode"]) == (password, DATABASE, "verify-full")
    arguments = (tmp_path / "arguments").read_text()
    assert password not in arguments
    assert arguments.splitlines()[-1] == "kubectl create secret generic my-secret --from-file=."
    asked_for = {
        item["key"]
        for pod in pods(FULL)
        for volume in pod["spec"]["volumes"]
        for item in volume.get("secret", {}).get("items", ())
    }
    assert asked_for == {path.name for path in folder.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_the_secret_for_a_database_that_is_there_holds_its_url() -> None:
    command = secret_commands(SMALL)
    assert command.startswith("kubectl create secret generic hpo-storage --from-file=storage_url=")


def submit(folder: Path, *arguments: str) -> Finished:
    return hpo_command(folder, "submit", str(folder / "tiny.yaml"), "--kubernetes", *arguments)


def test_the_command_prints_what_kubectl_takes(tmp_path: Path) -> None:
    text = write_study(tmp_path).read_text()
    finished = ok(
        submit(tmp_path, "--image", "hpo:cpu", "--workers", "3", "--time", "2:00:00", "--mem", "8G")
    )
    printed = list(yaml.safe_load_all(finished.out))
    (job,) = (one["spec"] for one in printed if one["kind"] == "Job")
    assert (job["parallelism"], job["activeDeadlineSeconds"]) == (3, 7200)
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    (study,) = (one["data"]["study.yaml"] for one in printed if one["kind"] == "ConfigMap")
    assert study == text
    assert "kubectl create secret generic hpo-storage" in finished.err
    assert "kubectl port-forward deployment/hpo-tiny-dashboard 8080" in finished.err
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}  # no database is asked or made


def test_the_command_writes_into_a_folder(tmp_path: Path) -> None:
    write_study(tmp_path)
    options = ("--image", "hpo:cuda", "--database", "private", "--gpus-per-node", "2", "--cpus-per-task", "4")
    more = ("--workers", "3", "--signal-lead", "60", "--volume-claim", "shared", "--secret", "mine")
    finished = ok(submit(tmp_path, "--out", str(tmp_path / "out"), *options, *more))
    assert "Written: " in finished.out
    assert f"kubectl apply -f {tmp_path}/out" in finished.out.replace("\n", "")
    job = yaml.safe_load((tmp_path / "out" / "workers.yaml").read_text().split("\n---\n")[0])["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["completions"] == 2
    assert container["resources"]["limits"] == {"cpu": 4, "nvidia.com/gpu": 2}
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 60
    assert (tmp_path / "out" / "database.yaml").exists()
    described = ok(submit(tmp_path, "--json", *options)).json
    assert sorted(described["files"]) == ["dashboard.yaml", "database.yaml", "study.yaml", "workers.yaml"]


def test_a_study_that_is_in_the_database_alone_goes_by_its_name(tmp_path: Path) -> None:
    finished = ok(hpo_command(tmp_path, "submit", "of.the_database", "--kubernetes", "--image", "hpo"))
    (job,) = (one for one in yaml.safe_load_all(finished.out) if one["kind"] == "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][-1] == "of.the_database"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--kubernetes needs --image"),
        (("--image", "hpo", "--partition", "a"), "--partition means nothing to Kubernetes"),
        (("--image", "hpo", "--sbatch", "qos=long"), "--sbatch means nothing to Kubernetes"),
        (("--image", "hpo", "--gpus-per-node", "a100:4"), "--gpus-per-node must be a number >= 0"),
        (("--image", "hpo", "--cpus-per-task", "0"), "--cpus-per-task must be a number >= 1"),
        (("--image", "hpo", "--mem", "lots"), "--mem must be a number"),
        (("--image", "hpo", "--storage", "postgresql://a/b"), "--storage means nothing to --kubernetes"),
        (("--image", "hpo", "--n-trials", "9"), "--n-trials means nothing to --kubernetes"),
        (("--image", "hpo", "--dry-run", "--out", "x"), "--dry-run writes nothing, but --out writes"),
        (
            ("--image", "hpo", "--database", "private", "--workers", "126"),
            "--workers must be <= 125 with --database private, whose PostgreSQL takes 500 connections",
        ),
        (("--image", "hpo", "--time", "1h"), "--time must be a time such as 90 (minutes)"),
        (("--image", "hpo", "--slurm"), "--slurm or --kubernetes"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_study(tmp_path)
    refused = submit(tmp_path, *arguments)
    assert refused.exit_code == 2
    assert message in " ".join(refused.err.split())


@pytest.mark.parametrize("name", ["a;b", "-x", "a\nkind: Secret", "a b"])
def test_what_is_no_name_of_a_study_is_refused(tmp_path: Path, name: str) -> None:
    refused = hpo_command(tmp_path, "submit", "--kubernetes", "--image", "hpo", "--", name)
    assert refused.exit_code == 2
    assert "The name of a study must be letters" in " ".join(refused.err.split())


def test_options_of_kubernetes_are_refused_with_slurm(tmp_path: Path) -> None:
    write_study(tmp_path)
    refused = hpo_command(tmp_path, "submit", "tiny.yaml", "--slurm", "--image", "hpo")
    assert refused.exit_code == 2
    assert "--image goes with --kubernetes" in refused.err
