"""Every command of the READMEs and of the study files' heads is executed by a test: here, or by one named."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from command_line import hpo_command, ok
from readme import README, READMES, ROOT
from readme_commands import commands
from tiny import ENCODER, write_study

COMMANDS = commands()
HERE = ""
"""Executed by `test_a_reader_types`, in the order of `EXECUTED`."""

COMPARED = "tests/cli/test_comparing.py::test_precisions_and_configurations"
COMPARED_ELSEWHERE = "tests/cli/test_comparing.py::test_killed_comparisons_go_on_to_the_same_verdicts"
SLURM = "tests/cluster/batch/test_slurm.py::test_the_commands_of_the_readme"
COPY = "tests/cli/test_database_commands.py::test_copy"
DIAGNOSED = "tests/cli/test_diagnosing.py::test_a_trial_that_diverged"
RANKS = "tests/faults/test_ranks.py::test_told_to_stop"
WORKERS = "tests/integration/test_whole_studies.py::test_two_workers_on_one_device"
COMPOSE = "tests/docker/test_docker.py::test_compose_takes_the_files"
IMAGE = "tests/docker/test_docker.py::test_the_image_is_built_and_runs_the_smoke_study"
DASHBOARD = "tests/cli/test_commands.py::test_dashboard_prints_its_address_and_ends_on_ctrl_c"
VERIFIED = "tests/cli/test_commands.py::test_verify"
SERVER = "tests/cluster/postgres/test_postgres_server.py::test_made_used_stopped_and_started_again"
INSTALL = "tests/test_readme_commands.py::test_a_second_install_installs_nothing"
RECIPE = "tests/test_readme_commands.py::test_a_recipe_calls_what_is_there"

EXECUTED = {
    # The study that comes first, as `multitask` here, and one's own.
    "hpo init STUDY": HERE,
    "hpo check STUDY": HERE,
    "hpo train STUDY": HERE,
    "hpo worker STUDY": HERE,
    "hpo run STUDY": HERE,
    "make hpo STUDY=multitask": HERE,
    "make hpo": HERE,
    "make report STUDY=multitask": HERE,
    "hpo report STUDY": HERE,
    "hpo status STUDY": HERE,
    "hpo best STUDY": HERE,
    "hpo best multitask": HERE,
    "hpo best STUDY --evaluate test": HERE,
    "hpo best STUDY --export model": HERE,
    "hpo check own_data": HERE,
    "make hpo STUDY=own_data": HERE,
    "hpo worker": HERE,
    "hpo studies": HERE,
    "hpo doctor STUDY": HERE,
    "hpo doctor": HERE,
    "hpo pause STUDY": HERE,
    "hpo resume STUDY": HERE,
    "hpo cancel STUDY": HERE,
    "hpo status own_data": HERE,
    "make hpo STUDY=precision": HERE,
    "make hpo STUDY=smoke": "tests/integration/test_smoke.py::test_the_smoke_study",
    # What takes a test of its own.
    "make hpo WORKERS_PER_DEVICE=4": WORKERS,
    "hpo run STUDY --workers-per-device 4": WORKERS,
    "hpo predict model texts.csv --output predictions.jsonl": (
        "tests/cli/test_predicting.py::test_the_command_of_the_readme"
    ),
    "hpo predict MODEL FILE": "tests/cli/test_predicting.py::test_an_output_file",
    "hpo verify STUDY": VERIFIED,
    "hpo verify own_data": VERIFIED,
    "hpo diagnose": DIAGNOSED,
    "hpo diagnose STUDY": DIAGNOSED,
    "hpo diagnose STUDY --trial N": DIAGNOSED,
    "hpo compare": COMPARED,
    "hpo compare STUDY": COMPARED,
    "hpo compare STUDY --price": COMPARED,
    "hpo compare STUDY --configurations": COMPARED,
    "hpo worker STUDY-compare": COMPARED_ELSEWHERE,
    "hpo worker ./study.yaml": "tests/cli/test_studies.py::test_a_worker_needs_the_database_alone",
    "hpo delete STUDY": "tests/cli/test_studies.py::test_delete",
    "make dashboard STUDY=multitask": DASHBOARD,
    "hpo dashboard STUDY": DASHBOARD,
    "hpo copy": COPY,
    "hpo copy STUDY --to URL": COPY,
    "hpo copy STUDY --storage sqlite:///runs/hpo.db --to @runs/postgres/url": COPY,
    "hpo copy STUDY --to sqlite:///study.db": COPY,
    "hpo database start": SERVER,
    "hpo database start --host 0.0.0.0": (
        "tests/cluster/postgres/test_postgres_server.py::test_others_than_this_machine_need_tls"
    ),
    "hpo database stop": SERVER,
    "torchrun -m hpo run STUDY": RANKS,
    "torchrun --standalone --nproc-per-node 4 -m hpo run STUDY": RANKS,
    # A cluster.
    "hpo submit": SLURM,
    "hpo submit STUDY": SLURM,
    "hpo submit STUDY --slurm --database private": SLURM,
    "hpo submit smoke --slurm --database private --workers 2 --partition PARTITION --time 1:00:00 "
    "--gpus-per-node 1 --cpus-per-task 1 --mem 8G": SLURM,
    "hpo status smoke": SLURM,
    "hpo report smoke": SLURM,
    "squeue --me": SLURM,
    "scancel JOBID": "tests/faults/test_slurm_jobs.py::test_a_job_that_is_cancelled",
    "hpo cancel smoke --jobs": "tests/cluster/batch/test_slurm.py::test_jobs_that_wait",
    "hpo submit STUDY --kubernetes --image IMAGE --workers 8 --gpus-per-node 1 --volume-claim NAME": (
        "tests/cluster/batch/test_kubernetes.py::test_the_command_prints_what_kubectl_takes"
    ),
    # Containers.
    "docker/make-secrets": "tests/docker/test_docker.py::test_secrets_are_made_once_for_their_owner_alone",
    "docker/build-and-run": IMAGE,
    "podman run --rm localhost/hpo:cpu --help": IMAGE,
    "docker-compose config": COMPOSE,
    "hpo deploy STUDY": "tests/cli/test_deploying.py::test_what_int8_ruins_is_refused",
    "hpo best STUDY --evaluate test --predictions FILE": (
        "tests/cli/test_best.py::test_predictions_are_those_of_predict_with_the_truth"
    ),
    "hpo best": "tests/cli/test_best.py::test_best_stores_what_it_evaluates",
    "hpo best STUDY --evaluate SPLIT": "tests/cli/test_best.py::test_best_stores_what_it_evaluates",
    # Installing, and what is for those who work on the package.
    "make install": INSTALL,
    "make install EXTRAS=onnx": INSTALL,
    "make install EXTRAS=fp8": INSTALL,
    "make test": RECIPE,
    "make test-all": RECIPE,
    "make lint": RECIPE,
    "make reference": "tests/test_readme.py::test_the_reference_is_made_from_the_models",
    # Benchmarks: a test has the program's parts on a small workload, or its recipe is looked at.
    "make bench": RECIPE,
    'make bench BENCH="2 3b 4 5 6" PAIRS=5': RECIPE,
    "make bench BENCH=7a PAIRS=1": RECIPE,
    "make bench BENCH=7b PAIRS=5": RECIPE,
    'make bench BENCH="1 3a 8" EXAMPLES=160 PAIRS=3': RECIPE,
    'make bench BENCH="9 11"': RECIPE,
    'make bench BENCH="12a 12b"': RECIPE,
    "make bench BENCH=10": RECIPE,
    "make bench BENCH=7c PAIRS=2": RECIPE,
    "make bench BENCH=search": (
        "tests/benchmarks/test_search_speed.py::test_every_configuration_has_its_whole_course"
    ),
    "make bench-gpu": "tests/integration/test_gpu_benchmark.py::test_a_quick_run_on_a_cpu",
    "python tests/benchmarks/peer_precision.py": (
        "tests/benchmarks/test_peer_precision.py::test_a_sound_model_runs_what_is_recorded"
    ),
    "python tests/benchmarks/deploy_errors.py": (
        "tests/benchmarks/test_deploy_errors.py::"
        "test_a_loss_at_the_margin_is_called_as_good_at_most_as_often_as_stated"
    ),
    "python tests/benchmarks/decision_errors.py": (
        "tests/benchmarks/test_decision_errors.py::test_errors_are_at_most_those_stated"
    ),
}
NOT_EXECUTED = {
    "podman run --rm --volume hpo-runs:/home/hpo/runs --volume ./studies:/home/hpo/studies:ro "
    "localhost/hpo:cpu run own_data": "an engine for containers",
    "STUDY=smoke docker compose --file docker/compose.yaml up --build --detach": "an engine for containers",
    "docker compose --file docker/compose.yaml logs --follow worker": "an engine for containers",
    "docker compose --file docker/compose.yaml exec dashboard hpo status smoke": "an engine for containers",
    "docker compose --file docker/compose.yaml down": "an engine for containers",
    "DEVICE=cuda docker compose --file docker/compose.yaml --file docker/compose.cuda.yaml up --build "
    "--detach": "an engine for containers",
    "podman-compose --in-pod false --file docker/compose.yaml up --detach": "an engine for containers",
    "docker/build-and-run --build-arg DEVICE=cuda": "a GPU, and an engine for containers",
    "tail -f 'runs/smoke/slurm-*/*.log'": "no end",
    "ssh -L 8080:localhost:8080": "another machine",
    "kubectl create secret generic hpo-aws --from-env-file=FILE": "a Kubernetes cluster",
    "podman unshare chown 10001:10001 docker/secrets/*": "podman of a user who is not root",
    "python tests/benchmarks/deploying.py nlupp": "minutes, and a real set",
    "python tests/benchmarks/compare_real.py nlupp": "minutes, and a real set",
    "python tests/benchmarks/scale.py rate": "minutes",
    "python tests/benchmarks/scale.py grow": "an hour",
}
"""With what they would need."""


def test_every_command_is_executed_by_a_test() -> None:
    known = EXECUTED.keys() | NOT_EXECUTED.keys()
    new = {line: str(file.relative_to(ROOT)) for line, file in COMMANDS.items() if line not in known}
    assert not new, "execute these in a test, and name it in EXECUTED"
    assert not known - COMMANDS.keys(), "no README has these any more"
    assert not EXECUTED.keys() & NOT_EXECUTED.keys()


@pytest.mark.parametrize("test", sorted({test for test in EXECUTED.values() if test}))
def test_the_test_that_is_named_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("python ")])
def test_the_programs_of_the_benchmarks_are_there(line: str) -> None:
    assert (ROOT / line.split()[1]).is_file()


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    """`test_readme.py` loads those of yaml, `test_the_script_of_the_readme` runs the one of Python."""
    languages = [
        kind for readme in READMES for kind in re.findall(r"^ *```(\w+)$", readme.read_text(), re.MULTILINE)
    ]
    assert set(languages) == {"json", "yaml", "python"}
    assert languages.count("python") == languages.count("json") == 1


# make


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `make` finds everything installed, with tiny studies under the names of ours."""
    folder = tmp_path_factory.mktemp("project")
    for file in ("Makefile", "pyproject.toml", "docker/constraints.txt"):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    (folder / ".venv").mkdir()
    for done in (".installed", *(f".installed-{extra}" for extra in ("dev", "bench", "fp8", "onnx"))):
        (folder / ".venv" / done).touch()
    studies = folder / "studies"
    studies.mkdir()
    for name in ("multitask", "precision"):
        write_study(studies, name=name, amp={"preset": "basic"}).rename(studies / f"{name}.yaml")
    write_own_data(studies)
    return folder


def write_own_data(studies: Path) -> None:
    """`own_data.yaml` with a tiny encoder, and the row of the README among rows of its form."""
    study = yaml.safe_load((ROOT / "studies" / "own_data.yaml").read_text())
    study |= {"model": {"encoder": ENCODER}, "n_trials": 1, "amp": {"preset": "basic"}}
    study["training"] = {"max_steps": 4, "max_length": 64, "seed": 42}
    study["search_space"] = {"learning_rate": study["search_space"]["learning_rate"]}
    (studies / "own_data.yaml").write_text(yaml.safe_dump(study))
    (line,) = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    given = json.loads(line)
    texts = (f"Late again, for the {number}th time!" for number in range(60))
    rows = [given, *({**given, "id": f"more-{number}", "text": text} for number, text in enumerate(texts))]
    (studies / "my_data").mkdir()
    (studies / "my_data" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def recipe(folder: Path, *words: str) -> list[list[str]]:
    """The commands that `make` would execute."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "HPO_STORAGE")}
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("make: ")]


def installs(folder: Path, *words: str) -> list[str]:
    """What `make` would have pip install."""
    return [words[-1] for words in recipe(folder, *words) if "pip" in words]


def test_a_second_install_installs_nothing(project: Path) -> None:
    for target in ("install", "hpo", "test", "lint", "report", "bench"):
        assert not installs(project, target)
    assert not installs(project, "install", "EXTRAS=onnx fp8")
    pins = project / "docker" / "constraints.txt"
    before = pins.stat()
    try:
        made = (project / ".venv" / ".installed").stat().st_mtime
        os.utime(pins, (made + 10, made + 10))
        assert [what for what in installs(project, "hpo") if what.startswith(".")] == ["."]
        assert installs(project, "test")[3:] == [".[dev]"], "what a user does not need"
        assert installs(project, "bench")[3:] == [".[dev]", ".[bench]"]
        assert installs(project, "install", "EXTRAS=onnx")[3:] == [".[onnx]"]
    finally:
        os.utime(pins, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_a_recipe_calls_what_is_there(line: str, project: Path) -> None:
    for words in recipe(project, *shlex.split(line)[1:]):
        called = [word for word in words if word.startswith(("tests/", ".venv/"))]
        for word in called:
            if word.startswith("tests/"):
                assert (ROOT / word).is_file()
        if words[0] == ".venv/bin/hpo":
            assert [word for word in words if word.startswith("--")] == (
                ["--workers-per-device"] if "WORKERS_PER_DEVICE" in line else []
            )
        if "tests/benchmarks/run.py" in words:
            program = (ROOT / "tests/benchmarks/run.py").read_text()
            given = words[words.index("tests/benchmarks/run.py") + 1 :]
            figures = given[: next((at for at, word in enumerate(given) if word.startswith("--")), None)]
            assert figures == shlex.split(" ".join(re.findall(r'BENCH="?([^"]*?)(?:"| \w+=|$)', line)))
            assert all(f'"{figure}"' in program for figure in figures)


# hpo


def test_a_reader_types(project: Path) -> None:
    """The commands one after another, each with what those before it have left."""
    done: list[list[str]] = []
    for line in [line for line, test in EXECUTED.items() if test == HERE]:
        program, *words = shlex.split(line)
        typed = [words] if program == "hpo" else [called[1:] for called in recipe(project, *words)]
        for arguments in typed:
            study = ["multitask"] if arguments == ["init"] else []
            arguments = ["multitask" if word == "STUDY" else word for word in arguments] + study
            if arguments not in done:
                ok(hpo_command(project, *arguments))
                done.append(arguments)
    assert (project / "runs/multitask/report/report.html").is_file()
    assert (project / "model/hpo.json").is_file()
    own = ok(hpo_command(project, "status", "own_data", "--json")).json
    assert own["outcomes"] == {"complete": 1}
