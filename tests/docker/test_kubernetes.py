import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import kubernetes_validate
import pytest
import yaml
from support.command_line import COMMANDS, ROOT

from hpo.config.sections import CheckpointConfig
from hpo.errors import InputError
from hpo.study.checkpoints.remote_store import open_remote_store
from hpo.study.running.stopping import RunSummary

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


@pytest.mark.parametrize("name", WORKLOADS)
def test_names_in_a_pod_match_the_other_manifests(name: str) -> None:
    volumes = volumes_of(name)
    claim = volumes["/home/hpo/runs"]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["volume"]["metadata"]["name"]
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    assert volumes["/etc/hpo"]["configMap"]["name"] == generated["name"]
    assert pod_of(name)["serviceAccountName"] == MANIFESTS["service-account"]["metadata"]["name"]
    labels = MANIFESTS[name]["spec"]["template"]["metadata"]["labels"]
    for policy in ("network-policy", "https"):
        assert MANIFESTS[policy]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    program, command, *arguments = container_of(name)["command"]
    assert (program, command) == ("hpo", name)
    study = COMMANDS[command].make_context(command, arguments).params["study"]
    assert study == f"/etc/hpo/{generated['files'][0]}"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pod_reads_secrets_from_files_and_has_no_needless_right(name: str) -> None:
    """The root user owns the files and the group of the pod may read them, as `hpo` requires."""
    volumes, pod, container = volumes_of(name), pod_of(name), container_of(name)
    (folder,) = (path for path, volume in volumes.items() if "projected" in volume)
    assert volumes[folder]["projected"]["defaultMode"] == 0o440
    url, keys = (source["secret"] for source in volumes[folder]["projected"]["sources"])
    assert keys["optional"], "a study without checkpoints in S3 has no such Secret"
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert environment["HPO_STORAGE"] == f"@{folder}/{url['items'][0]['path']}"
    assert environment["AWS_SHARED_CREDENTIALS_FILE"] == f"{folder}/{keys['items'][0]['path']}"
    for secret in (url, keys):
        key = secret["items"][0]["key"]
        assert f"create secret generic {secret['name']} --namespace hpo --from-file={key}=" in README
    assert "envFrom" not in container
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


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


def test_exit_codes_of_hpo_have_their_rules() -> None:
    """A wrong study ends its job at once, and a stopped worker starts again."""
    job = MANIFESTS["worker"]["spec"]
    disruption, wrong_input, stopped = job["podFailurePolicy"]["rules"]
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert wrong_input["onExitCodes"]["values"] == [InputError.exit_code]
    assert stopped["onExitCodes"]["values"] == [RunSummary("stopped").exit_code]
    actions = [rule["action"] for rule in (disruption, wrong_input, stopped)]
    assert actions == ["Ignore", "FailIndex", "Ignore"]
    assert job["backoffLimitPerIndex"] > 0, "FailIndex requires it"
    (rule,) = MANIFESTS["init"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [InputError.exit_code])
    for name in ("init", "worker"):
        assert pod_of(name)["restartPolicy"] == "Never", "podFailurePolicy requires it"


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
    assert worker(full)["volumes"][0] == {"name": "runs", "emptyDir": {}}
