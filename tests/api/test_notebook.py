from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from support.tiny import write_study

CELLS = (
    'import hpo\nstudy = hpo.Study("tiny.yaml")\nstudy.run().ended',
    'study.trials_dataframe()[["outcome", "precision"]]',
    """\
import torch

model, batch = torch.nn.Linear(8, 2), torch.randn(4, 8)
print(hpo.check_precision(model, lambda model, batch: model(batch).square().mean(), batch, "bf16"))""",
)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    write_study(tmp_path)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_notebook_shows_progress_and_results(outputs: list[Any]) -> None:
    run, table, checked = outputs
    printed = "".join(one.text for one in run if one.output_type == "stream" and one.name == "stdout")
    assert "Study tiny (new): 0 of 2 trials ended" in printed
    assert run[-1].data["text/plain"] == "'finished'"
    lines = "".join(one.data["text/html"] for one in run if one.output_type == "display_data")
    assert re.findall(r"trial +(\d)  <[^>]*>complete", lines) == ["0", "1"], "its progress"

    assert "text/html" in table[-1].data
    assert "bf16: ok" in checked[-1].text
