"""Results in a notebook, with a real kernel."""

import re
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from support.command_line import PYTHON_PATH
from support.tiny import ENCODER

CLASSES = ["<script>alert(1)</script>", "b & c"]
CELLS = (
    "import hpo; study = hpo.Study('odd.yaml')",
    *("study.check()", "study.run()", "study.best()", "study.status()", "study.plan()"),
)


def odd_study(folder: Path, **changes: object) -> Path:
    """A study of two classes whose names are HTML."""
    rows = [f'text number {number},"{CLASSES[number % 2]}"' for number in range(40)]
    (folder / "odd.csv").write_text("\n".join(["text,topic", *rows]))
    content = {
        "name": "odd",
        "n_trials": 1,
        "sampler": {"name": "random", "seed": 1},
        "pruner": {"name": "none"},
        "data": {
            "source": "csv",
            "files": {"train": "odd.csv"},
            "validation_fraction": 0.25,
            "columns": {"labels": {"topic": "topic"}},
            "tasks": {"topic": {"kind": "single_label", "classes": CLASSES}},
        },
        "model": {"encoder": ENCODER},
        "amp": {"preset": "basic"},
        "training": {"max_steps": 4, "batch_size": 8, "max_length": 16},
        **changes,
    }
    path = folder / "odd.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run_cells(folder: Path, cells: tuple[str, ...]) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def test_results_are_tables_without_live_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    odd_study(tmp_path)
    _, *cells = run_cells(tmp_path, CELLS).cells
    outputs = [[one for one in cell.outputs if one.output_type == "execute_result"] for cell in cells]
    check, run, best, status, plan = (of[0].data["text/html"] for of in outputs)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in check
    for shown in (check, run, best, status, plan):
        assert not re.search("<script|\x1b", shown)
    assert check.count("<table>") >= 3
    assert re.search(r"<td[^>]*>1 complete</td>", run)
    assert "<b>" not in plan
    assert "best trial 0: " in best
    assert re.search(r"<td[^>]*>complete</td><td[^>]*>1</td>", status)
    assert "A trial in fp32: " in plan
