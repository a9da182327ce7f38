from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from command_line import Finished, hpo_command, ok
from tiny import tiny_study, write_study

from hpo.cluster.batch.kubernetes import Pods, dns_label, manifests
from hpo.errors import InputError

SMALL = Pods("registry.example.org/hpo:cpu", volume_claim="shared")
FULL = Pods(
    "registry.example.org/hpo:cuda",
    num_workers=8,
    num_gpus=2,
    num_cpus=6,
    memory="48G",
    seconds=7200,
    volume_claim="shared",
)


def documents(pods: Pods, study: str = "tiny") -> dict[str, Any]:
    """The documents as `kubectl` reads them, by their kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(manifests(study, None, pods))}


def spec_of(document: Any) -> Any:
    return document["spec"]["template"]["spec"]


def container_of(document: Any) -> Any:
    (container,) = spec_of(document)["containers"]
    return container


@pytest.mark.parametrize("pods", [SMALL, FULL], ids=["small", "full"])
def test_kubernetes_takes_every_document(pods: Pods) -> None:
    found = documents(pods)
    assert found.keys() == {"Job", "Deployment", "NetworkPolicy"}
    for one in found.values():
        kubernetes_validate.validate(one, "1.31", strict=True)
    found["Job"]["spec"]["parallelisms"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found["Job"], "1.31", strict=True)


def test_workers_are_an_indexed_job_that_tells_the_ends_of_its_pods_apart() -> None:
    """The input may be wrong on one node alone (its data are not there): that pod's index fails, no other."""
    job = documents(FULL)["Job"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert job["activeDeadlineSeconds"] == 7200
    assert job["backoffLimitPerIndex"] > 0, "what FailIndex wants"
    disruption, wrong_input, stopped = job["podFailurePolicy"]["rules"]
    assert disruption["action"] == "Ignore"
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    by_code = {"containerName": container_of(documents(FULL)["Job"])["name"], "operator": "In"}
    assert wrong_input == {"action": "FailIndex", "onExitCodes": {**by_code, "values": [2]}}
    assert stopped == {"action": "Ignore", "onExitCodes": {**by_code, "values": [130]}}
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "what podFailurePolicy wants"
    assert pod["terminationGracePeriodSeconds"] == 120
    assert "activeDeadlineSeconds" not in documents(SMALL)["Job"]["spec"]


@pytest.mark.parametrize(
    ("pods", "resources"),
    [
        (FULL, {"cpu": 6, "memory": "48Gi", "nvidia.com/gpu": 2}),
        (SMALL, {"cpu": 1}),
        (Pods("hpo", num_gpus=2, volume_claim="x"), {"cpu": 8, "nvidia.com/gpu": 2}),
        (Pods("hpo", memory="4000", volume_claim="x"), {"cpu": 1, "memory": "4000Mi"}),
    ],
)
def test_a_worker_has_the_resources_that_were_asked_for(pods: Pods, resources: dict[str, Any]) -> None:
    given = container_of(documents(pods)["Job"])["resources"]
    assert given == {"requests": resources, "limits": resources}


def test_no_pod_may_more_than_it_needs() -> None:
    for kind in ("Job", "Deployment"):
        pod, container = spec_of(documents(FULL)[kind]), container_of(documents(FULL)[kind])
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    policy = documents(FULL)["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert "ingress" not in policy
    labels = documents(FULL)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_url_comes_from_a_secret_as_a_file() -> None:
    pod, container = spec_of(documents(FULL)["Job"]), container_of(documents(FULL)["Job"])
    secret = next(volume["secret"] for volume in pod["volumes"] if volume["name"] == "secrets")
    assert (secret["secretName"], secret["defaultMode"]) == ("hpo-storage", 0o440)
    assert [item["key"] for item in secret["items"]] == ["storage_url"]
    folder = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "secrets")
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert environment["HPO_STORAGE"] == f"@{folder}/storage_url"
    made_by = "kubectl create secret generic hpo-storage --from-file=storage_url="
    assert made_by in manifests("tiny", None, FULL)


def mounted(text: str) -> dict[str, Any]:
    """Of the workers: the volume at each path."""
    (job,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Job")
    kinds = {volume["name"]: volume for volume in spec_of(job)["volumes"]}
    return {mount["mountPath"]: kinds[mount["name"]] for mount in container_of(job)["volumeMounts"]}


def test_what_workers_write_outlives_their_pods(tmp_path: Path) -> None:
    claim = mounted(manifests("tiny", None, FULL))
    assert claim["/home/hpo/runs"]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert claim["/data"] == claim["/home/hpo/runs"]
    for location in (None, {}, {"location": "/models"}):
        config = None if location is None else tiny_study(tmp_path, checkpoint=location)
        with pytest.raises(InputError, match=r"outlives a pod: --volume-claim NAME .*s3://BUCKET"):
            manifests("tiny", config, Pods("hpo"))
    stored = tiny_study(tmp_path, checkpoint={"location": "s3://bucket/models"})
    runs = mounted(manifests("tiny", stored, Pods("hpo")))
    assert runs["/home/hpo/runs"]["emptyDir"] == {}
    assert "/data" not in runs


def test_the_study_file_goes_along(tmp_path: Path) -> None:
    config = tiny_study(tmp_path)
    odd = "\n  # with *odd* {{ characters }}, <&> \n\nname: 'x'\nquestion: \"é\\t\"\n---\nkind: Secret\n"
    config.path.write_text(odd)
    found = list(yaml.safe_load_all(manifests("tiny", config, SMALL)))
    (study,) = (one for one in found if one["kind"] == "ConfigMap")
    assert study["data"]["study.yaml"] == odd
    (job,) = (one for one in found if one["kind"] == "Job")
    assert container_of(job)["command"] == ["hpo", "worker", "--workers-per-device=1", "/etc/hpo/study.yaml"]
    assert container_of(documents(SMALL)["Job"])["command"][-1] == "tiny"


@pytest.mark.parametrize("study", ["my_Study.1", "a" * 100, "1", "no", "ends-"])
def test_names_are_dns_labels_whatever_the_study_is_called(study: str) -> None:
    for one in documents(SMALL, study).values():
        kubernetes_validate.validate(one, "1.31", strict=True)
        for label in (one["metadata"]["name"], *one["metadata"]["labels"].values()):
            assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", label)
            assert len(label) <= 57, "the host name of the last pod is longer by -99999"
    assert container_of(documents(SMALL, study)["Job"])["command"][-1] == study


def test_each_study_has_another_name() -> None:
    studies = ["a-b", "a_b", "A-b", "a.b", "a" * 60, "a" * 61]
    assert len({dns_label(study) for study in studies}) == len(studies)
    assert dns_label("multitask") == "multitask"


def submit(folder: Path, *arguments: str) -> Finished:
    write_study(folder)
    return hpo_command(folder, "submit", "tiny.yaml", "--kubernetes", *arguments)


def test_the_command_prints_what_kubectl_takes(tmp_path: Path) -> None:
    given = ("--image", "hpo:cuda", "--workers", "3", "--gpus-per-node", "2", "--cpus-per-task", "4")
    more = ("--time", "2:00:00", "--mem", "8G", "--volume-claim", "shared")
    printed = ok(submit(tmp_path, *given, *more)).out
    (job,) = (one for one in yaml.safe_load_all(printed) if one["kind"] == "Job")
    assert (job["spec"]["parallelism"], job["spec"]["activeDeadlineSeconds"]) == (2, 7200)
    limits = container_of(job)["resources"]["limits"]
    assert limits == {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}, "no database is asked or made"
    assert json.loads(ok(submit(tmp_path, *given, *more, "--json")).out)["manifests"] == printed[:-1]
    by_name = hpo_command(tmp_path, "submit", "of.the_db", "--kubernetes", "--image=a", "--volume-claim=b")
    assert 'command: ["hpo", "worker", "--workers-per-device=1", "of.the_db"]' in ok(by_name).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--kubernetes needs --image"),
        (("--image", "hpo"), "--volume-claim NAME of a PersistentVolumeClaim"),
        (("--image", "hpo", "--partition", "a"), "--partition means nothing to --kubernetes"),
        (("--image", "hpo", "--n-trials", "9"), "--n-trials means nothing to --kubernetes"),
        (("--image", "hpo", "--gpus-per-node", "a100:4"), "--gpus-per-node must be a number"),
        (("--image", "hpo", "--volume-claim", "x", "--mem", "lots"), "--mem must be a number"),
        (("--image", "hpo", "--time", "1h"), "--time must be a time such as 90 (minutes)"),
        (("--image", "hpo", "--slurm"), "--slurm or --kubernetes"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused = submit(tmp_path, *arguments)
    assert refused.exit_code == 2
    assert message in " ".join(refused.err.split())


def test_what_names_cannot_be(tmp_path: Path) -> None:
    for name in ("-x", "a\nkind: Secret"):
        refused = hpo_command(tmp_path, "submit", "--kubernetes", "--image", "hpo", "--", name)
        assert refused.exit_code == 2
        assert "The name of a study must be letters" in " ".join(refused.err.split())
