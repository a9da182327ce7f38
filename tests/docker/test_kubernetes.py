from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import fsspec
import kubernetes_validate
import pytest
import yaml
from support.command_line import COMMANDS, ROOT

from hpo.config.sections import CheckpointConfig
from hpo.errors import InputError
from hpo.study.checkpoints.remote_store import open_remote_store
from hpo.study.running.stopping import Ended, RunSummary

FOLDER = ROOT / "docker" / "kubernetes"
TEXT = (FOLDER / "kustomization.yaml").read_text()
KUSTOMIZATION = yaml.safe_load(TEXT)
WITH_OPTIONS = re.sub(r"^( *)# (?=- |  )", r"\1", TEXT, flags=re.MULTILINE)
"""The kustomization with all lines that a user may activate."""
FILES = yaml.safe_load(WITH_OPTIONS)["resources"]
MANIFESTS = {Path(file).stem: yaml.safe_load((FOLDER / file).read_text()) for file in FILES}
WORKLOADS = ("init", "worker", "dashboard")
README = (ROOT / "docker" / "README.md").read_text()


def pod_of(name: str) -> Any:
    return MANIFESTS[name]["spec"]["template"]["spec"]


def container_of(name: str) -> Any:
    (container,) = pod_of(name)["containers"]
    return container


def volumes_of(name: str) -> dict[str, Any]:
    """The volumes of a pod by the paths where its container mounts them."""
    volumes = {volume["name"]: volume for volume in pod_of(name)["volumes"]}
    mounts = container_of(name)["volumeMounts"]
    assert volumes.keys() == {mount["name"] for mount in mounts}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_accepts_each_manifest(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(MANIFESTS[name] | {"specs": {}}, "1.31", strict=True)


def test_the_kustomization_includes_each_manifest() -> None:
    others = {"kustomization.yaml", "study.yaml"}
    assert {path.name for path in FOLDER.glob("*.yaml")} - others == {*FILES}
    assert {*FILES} - {*KUSTOMIZATION["resources"]} == {"https.yaml"}
    assert KUSTOMIZATION["namespace"] == MANIFESTS["namespace"]["metadata"]["name"]
    assert {container_of(name)["image"] for name in WORKLOADS} == {KUSTOMIZATION["images"][0]["name"]}


@pytest.mark.parametrize("name", WORKLOADS)
def test_names_in_a_pod_match_the_other_manifests(name: str) -> None:
    assert MANIFESTS[name]["metadata"]["name"] == f"hpo-{name}"
    volumes = volumes_of(name)
    claim = volumes["/home/hpo/runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["volume"]["metadata"]["name"]
    assert MANIFESTS["volume"]["spec"]["accessModes"] == ["ReadWriteMany"]
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    assert volumes["/etc/hpo"]["configMap"]["name"] == generated["name"]
    assert KUSTOMIZATION["generatorOptions"] == {"disableNameSuffixHash": True}
    assert container_of(name)["command"][-1] == f"/etc/hpo/{generated['files'][0]}"
    account = MANIFESTS["service-account"]
    assert pod_of(name)["serviceAccountName"] == account["metadata"]["name"]
    assert [secret["name"] for secret in account["imagePullSecrets"]] == ["hpo-registry"]
    labels = MANIFESTS[name]["spec"]["template"]["metadata"]["labels"]
    for policy in ("network-policy", "https"):
        selected = MANIFESTS[policy]["spec"]["podSelector"]["matchLabels"]
        assert selected
        assert selected.items() <= labels.items()


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_reads_its_secrets_from_files_and_not_from_variables(name: str) -> None:
    """The root user owns the files and the group of the pod may read them, as `hpo` requires."""
    volumes = volumes_of(name)
    (folder,) = (path for path, volume in volumes.items() if "projected" in volume)
    assert volumes[folder]["projected"]["defaultMode"] == 0o440
    url, keys = (source["secret"] for source in volumes[folder]["projected"]["sources"])
    assert (url["name"], keys["name"]) == ("hpo-storage", "hpo-aws")
    assert "optional" not in url
    assert keys["optional"], "a study without checkpoints in S3 has no such Secret"
    (url_item,), (keys_item,) = url["items"], keys["items"]
    container = container_of(name)
    assert "envFrom" not in container
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "HPO_STORAGE": f"@{folder}/{url_item['path']}",
        "AWS_SHARED_CREDENTIALS_FILE": f"{folder}/{keys_item['path']}",
        "HPO_DATA_DIR": "/data",
    }
    assert volumes["/data"] == volumes["/home/hpo/runs"]
    for secret, item in ((url, url_item), (keys, keys_item)):
        command = f"create secret generic {secret['name']} --namespace hpo --from-file={item['key']}="
        assert command in README


@pytest.mark.parametrize("with_file", [True, False], ids=["file", "no file"])
def test_s3_keys_come_from_an_optional_file(
    s3: str, moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_file: bool
) -> None:
    """The fixture sets the variables, so a missing file must not hide other sources of keys."""
    file = tmp_path / "aws_credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    if with_file:
        file.write_text(
            f"[default]\naws_access_key_id = user\naws_secret_access_key = secret\nendpoint_url = {moto}\n"
        )
        for setting in ("ENDPOINT_URL", "DEFAULT_REGION", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.delenv(f"AWS_{setting}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    store = open_remote_store(CheckpointConfig(location=s3), create=True)
    assert store is not None
    assert store.trials(Path("runs/tiny")) == set()  # raises CheckpointError if the store does not answer


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_has_only_the_rights_and_the_memory_it_needs(name: str) -> None:
    pod, container = pod_of(name), container_of(name)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    resources = container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_commands_parse(name: str) -> None:
    program, command, *arguments = container_of(name)["command"]
    assert (program, command) == ("hpo", name)
    context = COMMANDS[command].make_context(command, arguments)
    assert context.params["study"] == "/etc/hpo/study.yaml"


def test_workers_are_an_indexed_job_with_a_rule_for_each_exit_code() -> None:
    job = MANIFESTS["worker"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert job["backoffLimitPerIndex"] > 0, "FailIndex requires it"
    assert job["ttlSecondsAfterFinished"] > 0
    disruption, wrong_input, stopped = job["podFailurePolicy"]["rules"]
    assert disruption["action"] == "Ignore"
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    by_code = {"containerName": container_of("worker")["name"], "operator": "In"}
    assert wrong_input["onExitCodes"] == {**by_code, "values": [InputError.exit_code]}
    assert stopped["onExitCodes"] == {**by_code, "values": [RunSummary("stopped").exit_code]}
    assert (wrong_input["action"], stopped["action"]) == ("FailIndex", "Ignore")
    assert pod_of("worker")["terminationGracePeriodSeconds"] == 120
    assert container_of("worker")["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert volumes_of("worker")["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_the_readme_says_how_workers_start_again_after_exit_code_0() -> None:
    """Kubernetes never starts a completed index again, and the study may not be finished."""
    assert {ended for ended in get_args(Ended) if RunSummary(ended).exit_code == 0} == {
        *("finished", "timeout", "elsewhere", "closed")
    }
    (resume,) = (paragraph for paragraph in README.split("\n\n") if "-- hpo resume" in paragraph)
    for reason in ("timeout", "another device", "paused", "cancelled", "Complete"):
        assert reason in resume
    assert "delete the Job `hpo-worker` and apply again" in " ".join(resume.split())


def test_each_command_names_the_namespace_of_the_kustomization() -> None:
    """Commands on lines of their own and commands between backticks. The others do not need the namespace."""
    text = "\n".join([README, *((FOLDER / file).read_text() for file in FILES)])
    commands = re.findall(r"^(?:# )?kubectl .+|`kubectl [^`]+`", text, re.MULTILINE)
    commands = [command for command in commands if not re.search("kubectl (apply|kustomize)", command)]
    assert len(commands) == 10
    named = {tuple(re.findall(r"--namespace (\S+)", command)) for command in commands}
    assert named == {(KUSTOMIZATION["namespace"],)}


def test_the_readme_names_the_workloads_of_the_manifests() -> None:
    named = [*re.findall(r"(job|deployment)/hpo-(\w+)", README), ("job", "worker")]
    assert {name for _, name in named} == {*WORKLOADS}
    assert all(MANIFESTS[name]["kind"].lower() == kind for kind, name in named)
    assert "delete --namespace hpo job hpo-init hpo-worker" in README
    labels = MANIFESTS["worker"]["spec"]["template"]["metadata"]["labels"]
    assert f"app.kubernetes.io/component={labels['app.kubernetes.io/component']} " in README


def test_a_wrong_study_ends_the_check_at_once() -> None:
    job = MANIFESTS["init"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    by_code = {"containerName": container_of("init")["name"], "operator": "In", "values": [2]}
    assert rule == {"action": "FailJob", "onExitCodes": by_code}
    for name in ("init", "worker"):
        assert pod_of(name)["restartPolicy"] == "Never", "podFailurePolicy requires it"


def test_pods_connect_only_to_a_name_server_anywhere_and_the_database() -> None:
    """The name server may be a pod, or an address of the node or of the cloud. OpenShift's has port 5353."""
    policy = MANIFESTS["network-policy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy
    names, database = policy["egress"]
    assert names.keys() == database.keys() == {"ports"}, "a rule without `to` allows each address"
    ports = {(port["protocol"], port["port"]) for port in names["ports"]}
    assert ports == {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)}
    assert database["ports"] == [{"protocol": "TCP", "port": 5432}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which builds the kustomization")
def test_kubectl_builds_the_kustomization_with_its_optional_lines(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "kubernetes"))
    (folder / "study.yaml").write_text("name: tiny\n")
    (folder / "own_kind.py").write_text("KIND = 1\n")

    def build() -> dict[str, Any]:
        done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        built = list(yaml.safe_load_all(done.stdout))
        for one in built:
            kubernetes_validate.validate(one, "1.31", strict=True)
            assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "hpo"
        return {one["metadata"]["name"]: one for one in built if one["kind"] != "Namespace"}

    def worker(built: dict[str, Any]) -> Any:
        return built["hpo-worker"]["spec"]["template"]["spec"]

    plain = build()
    assert worker(plain) == pod_of("worker") | {
        "containers": [container_of("worker") | {"image": "registry.example.org/hpo:cuda"}]
    }
    assert plain["hpo-study"]["data"] == {"study.yaml": "name: tiny\n"}
    (folder / "kustomization.yaml").write_text(WITH_OPTIONS)
    full = build()
    assert full["hpo-study"]["data"].keys() == {"study.yaml", "own_kind.py"}
    assert full["hpo-worker"]["spec"]["activeDeadlineSeconds"] == 86400
    assert worker(full)["containers"][0]["resources"]["limits"] == {"memory": "32Gi"}
    for name in WORKLOADS:
        assert full[f"hpo-{name}"]["spec"]["template"]["spec"]["volumes"][0] == {
            "name": "runs",
            "emptyDir": {},
        }
