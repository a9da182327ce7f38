"""Screens and page of a finished study, against numbers of Optuna and scikit-learn."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pytest
from sklearn.metrics import f1_score, mean_absolute_error
from support.browser import page_that_fits
from support.command_line import hpo_command, ok
from support.every_kind import write_every_kind

N_TRIALS = 16
"""All points of the grid."""
SPACE = {
    "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "bf16-true", "tf32"]},
    "learning_rate": {"type": "categorical", "choices": [3e-3, 10.0]},
    "optimizer": {"type": "categorical", "choices": ["adamw", "sgd"]},  # sgd at 10 diverges
}
UNKNOWN = re.compile(r"\b(nan|None|undefined|Infinity|inf)\b")
"""Texts of an unknown value that a page must not show."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the finished study."""
    folder = tmp_path_factory.mktemp("shown")
    amp = {"allow_emulated": True, "fallback_to_fp32": False, "on_unsupported": "prune"}
    training = {"max_steps": 12, "batch_size": 8, "max_length": 24, "dropout": 0.0, "max_grad_norm": None}
    sampler = {"name": "grid", "seed": 5}
    write_every_kind(
        folder, n_trials=N_TRIALS, sampler=sampler, amp=amp, training=training, search_space=SPACE
    )
    ok(hpo_command(folder, "run", "tiny.yaml"))
    return folder


@pytest.fixture(scope="module")
def study(folder: Path) -> optuna.Study:
    """The study as plain Optuna reads it."""
    study = optuna.load_study(study_name="tiny", storage=f"sqlite:///{folder}/runs/hpo.db")
    assert outcomes(study).keys() >= {"complete", "nonfinite", "unsupported"}
    complete = {trial.params["fp_precision"] for trial in study.trials if trial.values}
    assert complete == {"fp32", "bf16", "bf16-true"}
    return study


def outcomes(study: optuna.Study) -> Counter[str]:
    return Counter(trial.user_attrs["outcome"] for trial in study.trials)


def test_exported_model_has_the_shown_scores(folder: Path) -> None:
    options = ("--evaluate", "test", "--export", "model", "--json")
    shown = ok(hpo_command(folder, "best", "tiny.yaml", *options)).json["evaluation"]["metrics"]
    rows = [json.loads(line) for line in (folder / "data" / "test.jsonl").read_text().splitlines()]
    predicted = [
        json.loads(line)
        for line in ok(hpo_command(folder, "predict", "model", "data/test.jsonl")).out.splitlines()
    ]

    def both(task: str) -> tuple[list[Any], list[Any]]:
        return [row["labels"][task] for row in rows], [row["labels"][task] for row in predicted]

    truth, said = both("topic")
    classes = sorted(set(truth))
    assert shown["topic"]["f1_macro"] == pytest.approx(f1_score(truth, said, labels=classes, average="macro"))
    truth, said = both("urgency")
    assert shown["urgency"]["mae"] == pytest.approx(mean_absolute_error(truth, said), rel=1e-4)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_report(folder: Path, study: optuna.Study, chromium: Any, width: int) -> None:
    path = folder / ok(hpo_command(folder, "report", "tiny.yaml", "--json")).json["report"]
    trials = pd.read_csv(path.parent / "tables" / "trials.csv")
    assert trials["objective.score"].dropna().tolist() == pytest.approx(
        [t.value for t in study.trials if t.values]
    )
    with page_that_fits(chromium, path, width, num_plots=8) as page:
        first = page.inner_text("body")
        assert f"{study.best_value:.4f}" in first
        for summary in page.locator("summary").all():
            summary.click()
        text = page.inner_text("body")
        assert not UNKNOWN.search(text), text[UNKNOWN.search(text).start() - 200 :]  # type: ignore[union-attr]
        drawn = page.evaluate("document.getElementById('history').data.map(each => [each.name, each.y])")
        values = sorted(
            value for name, ys in drawn if name in SPACE["fp_precision"]["choices"] for value in ys
        )
        assert values == pytest.approx(sorted(trial.value for trial in study.trials if trial.values))
