"""The README's code of one's own, the whole way: trained, compared, exported, loaded, deployed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import finish, ok, start_hpo, stored
from jsonl_sets import write_set
from readme import README
from sklearn.metrics import cohen_kappa_score
from tiny import ENCODER, write_study

import hpo

pytestmark = pytest.mark.usefixtures("forgotten")

(BLOCK,) = re.findall(
    r"```python\n(.*?)```", README.read_text().split("## Your own code", 1)[1].split("\n## ")[0], re.DOTALL
)
TASKS = {"topic": {"kind": "single_label", "classes": ["bad", "good"]}}


def rows(split: str, size: int) -> list[dict[str, object]]:
    words = ("late again", "all is well")
    return [
        {"id": f"{split}-{n}", "text": f"{words[n % 2]} {n}", "labels": {"topic": ["bad", "good"][n % 2]}}
        for n in range(size)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a study with that code was run."""
    assert len(BLOCK.splitlines()) <= 22
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_tasks.py").write_text(BLOCK)
    write_set(folder / "rows", TASKS, train=rows("t", 60), validation=rows("v", 24), test=rows("e", 24))
    write_study(
        folder,
        code="my_tasks.py",
        n_trials=2,
        data={"source": "jsonl", "path": "rows"},
        model={"encoder": ENCODER},
        objective={"metric": "topic/kappa"},
        training={"max_steps": 80, "batch_size": 8, "max_length": 16, "head_type": "gated", "loss": "poly1"},
        search_space={
            "gated.width": {"type": "int", "low": 4, "high": 16},
            "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
            "learning_rate": {"type": "float", "low": 2e-3, "high": 4e-3},
        },
    )
    ok(finish(start_hpo(folder, "run", "tiny.yaml")))
    assert [trial.outcome for trial in stored(folder).trials] == ["complete", "complete"]
    return folder


def test_its_metric_is_compared(folder: Path) -> None:
    options = ("--precisions", "bf16", "--top", "1", "--seeds", "3", "--max-seeds", "3", "--json")
    compared = ok(finish(start_hpo(folder, "compare", "tiny.yaml", *options), 300)).json
    (verdict,) = compared["verdicts"]
    assert (verdict["metric"], verdict["num_runs"], verdict["num_rows"]) == ("topic/kappa", 3, 24), compared


def test_its_model_is_exported_and_scores_as_it_predicts(folder: Path) -> None:
    ok(finish(start_hpo(folder, "best", "tiny.yaml", "--export", "model")))
    model = hpo.load(folder / "model", device="cpu", code=folder / "my_tasks.py")
    answers = [one["topic"].label for one in model.predict([str(row["text"]) for row in rows("e", 24)])]
    assert score_on_test(folder) == cohen_kappa_score(["bad", "good"] * 12, answers) > 0.9


def score_on_test(folder: Path) -> float:
    scored = ok(finish(start_hpo(folder, "best", "tiny.yaml", "--evaluate", "test", "--json"))).json
    return float(scored["evaluation"]["metrics"]["topic"]["kappa"])


@pytest.mark.slow
def test_its_model_is_deployed(folder: Path) -> None:
    deployed = ok(finish(start_hpo(folder, "deploy", "tiny.yaml", "--json"), 300)).json
    assert deployed["objective"] == "topic/kappa"
    assert {"fp32", "onnx_fp32"} <= {one["artifact"] for one in deployed["artifacts"]}, deployed
    assert deployed["test"]["fp32_score"]["value"] == score_on_test(folder)
