"""Each example of `studies/examples`, copied by `hpo new` and run with fewer steps; the template as it is."""

import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from support.command_line import PYTHON_PATH, finish, hpo_command, ok, start_python, stored
from support.readme import ROOT, STUDIES
from support.slurm import SlurmCluster
from support.tiny import ENCODER

pytestmark = pytest.mark.usefixtures("forgotten")
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("studies/examples/*/study.yaml"))
NO_CHECK = ("own_loop", "own_trainer")
"""Examples without data of a study, which `hpo check` needs."""


def copied(folder: Path, example: str, name: str = "mine") -> Path:
    """Copy an example with one short trial and, in place of MiniLM, a tiny encoder."""
    ok(hpo_command(folder, "new", name, "--from", example))
    path = folder / name / "study.yaml"
    study = yaml.safe_load(path.read_text())
    assert study["name"] == name
    study |= {"n_trials": 1, "amp": {"preset": "basic"}}
    if study.get("model") == {"encoder": "minilm"}:
        study["model"] = {"encoder": ENCODER}
    if "max_steps" in study["training"]:
        study["training"]["max_steps"] = 20
    path.write_text(yaml.safe_dump(study))
    return path.parent


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    if example == "own_trainer":
        pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    if example == "lora_decoder":
        pytest.importorskip("peft", reason="LoRA needs peft")
    folder = copied(tmp_path, example)
    if example not in NO_CHECK:
        checked = ok(hpo_command(folder, "check", "study.yaml", "--json")).json
        assert checked["advice"] == []
    ok(hpo_command(folder, "run", "study.yaml"))
    (trial,) = stored(folder, "mine").trials
    assert trial.outcome == "complete", trial


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = copied(tmp_path, "tickets")
    notebook = nbformat.read(folder / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    for cell in notebook.cells:
        cell.source = cell.source.replace(", quiet=True", "")
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    shown = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    progress = [one.data["text/html"] for one in shown if one.output_type == "display_data"]
    assert "complete" in "".join(progress)
    outputs = [cell.outputs[-1] for cell in notebook.cells if cell.get("outputs")]
    texts = [one.get("text", one.get("data", {}).get("text/plain", "")) for one in outputs]
    assert "'finished'" in texts
    assert len(texts[-1].splitlines()) == 2, "a prediction for each text"
    assert stored(folder, "mine").trials[0].outcome == "complete"


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.postgres
def test_the_slurm_example_submits_two_workers(slurm: SlurmCluster) -> None:
    folder = copied(slurm.folder, "slurm")
    program = slurm.folder / "bin" / "hpo"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={PYTHON_PATH} exec {sys.executable} -m hpo "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    settings = f"PATH={program.parent}:$PATH MEM=1500M DATABASE_MEM=500M"
    slurm.run("bash -c", f"cd {folder} && {settings} bash submit.sh low")
    slurm.wait(lambda: not slurm.run("squeue --noheader --name=hpo-mine"), 120)
    status = ok(hpo_command(folder, "status", "mine", "--storage", "@runs/postgres/url", "--json")).json
    slurm.run("scancel --name hpo-database")
    assert status["outcomes"] == {"complete": 1}


def masked(line: str) -> str:
    """Return a line without its numbers, its precision and the width of its columns."""
    return re.sub(r"\d[\d.e-]*|─+", "0", re.sub(r"fp_precision=\S+", "", " ".join(line.split())))


@pytest.mark.slow
def test_the_tutorial_prints_its_lines(tmp_path: Path) -> None:
    folder, printed, num_compared = tmp_path, "", 0
    steps = STUDIES.read_text().partition("## Without a clone")[0]
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", steps, re.DOTALL | re.MULTILINE):
        lines = block.splitlines()
        if language == "yaml":
            assert yaml.safe_load(block) == yaml.safe_load((folder / "study.yaml").read_text())
        elif language == "python":
            printed = ok(finish(start_python(folder, "-c", block))).out
        elif language == "text":
            shown = {masked(line) for line in printed.splitlines()}
            expected = {masked(line) for line in lines if "[...]" not in line}
            assert expected <= shown, expected - shown
            num_compared += len(expected)
        else:
            printed = ""
            for program, *words in map(shlex.split, lines):
                if program == "hpo":
                    printed += ok(hpo_command(folder, *words)).out
                elif program == "cd":
                    folder /= words[0]
                else:
                    printed += subprocess.check_output([program, *words], cwd=folder, text=True)
    assert num_compared > 15


def test_the_list_has_every_example_and_study(tmp_path: Path) -> None:
    shown = ok(hpo_command(tmp_path, "new")).out
    listed = ok(hpo_command(tmp_path, "new", "--json")).json["examples"]
    known = {*(path.stem for path in (ROOT / "studies").glob("*.yaml")), *EXAMPLES}
    assert set(listed) == known == set(re.findall(r"^\| \[(\w+)\]", STUDIES.read_text(), re.MULTILINE))
    assert all(f"  {name} " in shown and question in shown for name, question in listed.items())
