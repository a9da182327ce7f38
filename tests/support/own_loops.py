"""Studies with a training loop of their own, for tests."""

from pathlib import Path
from typing import Any

import yaml

from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study
from hpo.trial.executor import OwnLoopExecutor, build_executor
from support.tiny import CPU

HEAD = """
import torch
from torch import nn
import hpo

ROWS = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
CLASSES = (ROWS.sum(1) > 0).long()

def loss_of_batch(model, batch):
    rows, classes = batch
    return nn.functional.cross_entropy(model(rows).float(), classes)

def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2))

def accuracy(model, amp):
    with amp.evaluation():
        return (model.eval()(amp.inputs(ROWS)).argmax(1) == CLASSES).float().mean()

"""
LOOP = """
@hpo.trial
def train(run):
    model = net(run.params["width"])
    amp = run.prepare(model, loss_of_batch, (ROWS[:8], CLASSES[:8]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.params["learning_rate"])
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(run.params["rounds"]):
        model.train()
        for rows in torch.randperm(48).split(16):
            amp.step(loss_of_batch, (ROWS[rows], CLASSES[rows]), optimizer)
        run.report({"accuracy": accuracy(model, amp)})
"""
SPACE = {"learning_rate": {"type": "float", "low": 1e-4, "high": 20.0, "log": True}}


def write_own(folder: Path, loop: str = LOOP, **changes: Any) -> Path:
    """Write a study with this training loop; `changes` replace its top-level keys."""
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(HEAD + loop)
    content: dict[str, Any] = {
        "name": "tiny",
        "code": "own.py",
        "n_trials": 2,
        "sampler": {"name": "random", "seed": 1},
        "objective": {"metric": "accuracy"},
        "pruner": {"name": "none"},
        "training": {"seed": 3, "width": 8, "rounds": 3},
        "amp": {"allow_emulated": True},
        "checkpoint": {"every_seconds": 1e-6},
        "search_space": SPACE,
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def own_executor(folder: Path, loop: str = LOOP, **changes: Any) -> OwnLoopExecutor:
    study = load_study(write_own(folder, loop, **changes))
    executor = build_executor(resolve_study(study, CPU), folder / "runs")
    assert isinstance(executor, OwnLoopExecutor)
    return executor
