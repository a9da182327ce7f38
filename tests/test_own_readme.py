"""The README's code of one's own, the whole way: killed, resumed, compared, exported, loaded, deployed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from command_line import finish, ok, saved_steps, start_hpo, stored, wait_until
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


def test_the_readmes_code_the_whole_way(tmp_path: Path) -> None:
    assert len(BLOCK.splitlines()) <= 22
    (tmp_path / "my_tasks.py").write_text(BLOCK)
    write_set(tmp_path / "rows", TASKS, train=rows("t", 60), validation=rows("v", 24), test=rows("e", 24))
    write_study(
        tmp_path,
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
        checkpoint={"every_seconds": 0.1},
        evaluation={"per_trial": 4},
    )
    process = start_hpo(tmp_path, "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    assert stored(tmp_path).slots["done"] == 0, "killed too late to test anything"
    ok(finish(start_hpo(tmp_path, "run", "tiny.yaml")))
    record = stored(tmp_path)
    assert [trial.outcome for trial in record.trials] == ["complete", "complete"]
    assert record.trials[0].telemetry["resumed_from_step"] > 0

    options = ("--precisions", "bf16", "--top", "1", "--seeds", "3", "--max-seeds", "3", "--json")
    compared = ok(finish(start_hpo(tmp_path, "compare", "tiny.yaml", *options), 300)).json
    (verdict,) = compared["verdicts"]
    assert (verdict["metric"], verdict["num_runs"], verdict["num_rows"]) == ("topic/kappa", 3, 24), compared

    ok(finish(start_hpo(tmp_path, "best", "tiny.yaml", "--export", "model")))
    model = hpo.load(tmp_path / "model", device="cpu", code=tmp_path / "my_tasks.py")
    answers = [one["topic"].label for one in model.predict([str(row["text"]) for row in rows("e", 24)])]
    scored = ok(finish(start_hpo(tmp_path, "best", "tiny.yaml", "--evaluate", "test", "--json"))).json
    found = scored["evaluation"]["metrics"]["topic"]["kappa"]
    assert found == cohen_kappa_score(["bad", "good"] * 12, answers) > 0.9, scored

    deployed = ok(finish(start_hpo(tmp_path, "deploy", "tiny.yaml", "--json"), 300)).json
    assert deployed["objective"] == "topic/kappa"
    assert {"fp32", "onnx_fp32"} <= {one["artifact"] for one in deployed["artifacts"]}, deployed
    assert deployed["test"]["fp32_score"]["value"] == found
