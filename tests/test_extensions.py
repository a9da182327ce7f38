"""Poolings, losses, optimisers, schedules, kinds and sources of data of a study's own code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import hpo_command, ok
from support.own_code_studies import TASKS, TRAINING, count_rows, write
from support.tiny import TinyEncoder, executor_of, tiny_executor

import hpo
from hpo.code import use_code
from hpo.config.study_config import load_study, stored_study
from hpo.config.trial_config import build_trial_config, parse_params
from hpo.config.trial_settings import setting_of
from hpo.data.dataset import load_data
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.training.optim import build_optimizer, own_schedule
from hpo.trial.best_model import export_checkpoint, split_predictions
from hpo.trial.telemetry import StoredTrial

pytestmark = pytest.mark.usefixtures("forgotten")

EXTENSIONS = """
from typing import Annotated

import torch
from pydantic import Field

import hpo


class Power(hpo.Section):
    exponent: Annotated[int, Field(ge=1, le=9)] = 3


@hpo.pooling("power", Power)
def power_mean(hidden_size, options):
    def pool(hidden_BLD, mask_BL):
        mask_BL1 = mask_BL[..., None]
        return (hidden_BLD**options.exponent * mask_BL1).sum(1) / mask_BL1.sum(1)

    return pool


class Level(hpo.Section):
    level: Annotated[float, Field(gt=0, lt=1)] = 0.5


@hpo.loss("pinball", ["regression"], Level)
def pinball(kind, logits, target, options, _weight, _mask_BL):
    known = kind.labelled(target)
    scaled = (torch.where(known, target, 0.0) - kind.task.target_mean) / kind.task.target_std
    error = scaled - logits.squeeze(-1)
    return torch.where(known, torch.maximum(options.level * error, (options.level - 1) * error), 0.0).sum()
"""
NUMBERS = TASKS | {"times": {"kind": "regression"}}


SPACE = {
    "pooling": {"type": "categorical", "choices": ["mean", "power"]},
    "power.exponent": {"type": "int", "low": 1, "high": 3, "when": {"pooling": "power"}},
    "pinball.level": {"type": "float", "low": 0.05, "high": 0.95},
}


def write_extended(folder: Path, **changes: Any) -> Path:
    """Write a study with its own pooling and loss and their searched options."""
    data = {"source": "jsonl", "path": "rows", "tasks": NUMBERS}
    training = TRAINING | {"loss": "pinball", "learning_rate": 3e-3}
    given = {"data": data, "training": training, "search_space": SPACE}
    return write(folder, EXTENSIONS, **(given | changes))


def test_pooling_and_loss_with_options(tmp_path: Path) -> None:
    executor = executor_of(write_extended(tmp_path))
    executor.check_study()
    predicted = {}
    for name, exponent, level in (("low", 1, 0.1), ("high", 1, 0.9), ("cubed", 3, 0.9)):
        params = {"pooling": "power", "power.exponent": exponent, "pinball.level": level}
        result = executor.run(params, tmp_path / name, name)
        assert result.outcome == "complete", result.traceback
        predicted[name] = split_predictions(executor, tmp_path / name, params, "test").predictions["times"]
    truth = [row["labels"]["times"] for row in count_rows("t", 20)]
    below = {name: np.mean(np.array(of_name) < truth) for name, of_name in predicted.items()}
    assert below["low"] > below["high"] + 0.3, "a quantile of 0.1 lies below most, one of 0.9 above"
    assert predicted["cubed"] != pytest.approx(predicted["high"], abs=1e-2)

    folder = export_checkpoint(executor, tmp_path / "cubed", tmp_path / "model", StoredTrial(0, params))
    use_code({}, "none")
    with pytest.raises(KeyError):
        MultitaskModel(TinyEncoder(), (), HeadSettings(pooling="power"))
    model = hpo.load(folder, device="cpu", code=tmp_path / "own_kind.py")
    texts = [row["text"] for row in count_rows("t", 20)]
    assert [one["times"].label for one in model.predict(texts)] == pytest.approx(predicted["cubed"], rel=1e-4)


def test_options_are_settings(tmp_path: Path) -> None:
    training = {"loss": "pinball", "power.exponent": 2}
    config = load_study(write_extended(tmp_path, training=training, search_space={}))
    trial = build_trial_config(config, {}, "fp32")
    assert [setting_of(trial, name) for name in ("power.exponent", "pinball.level")] == [2, 0.5]
    assert parse_params(["pinball.level=0.25"]) == {"pinball.level": 0.25}
    searched = load_study(write_extended(tmp_path)).definition()
    use_code({}, "none")
    for definition in (config.definition(), searched):
        stored_one = stored_study("tiny", json.loads(json.dumps(definition)))
        assert stored_one.definition() == definition, "as it is stored, also where its code is not in use"


OPTIMIZER = """
import torch
import hpo


class Momentum(hpo.Section):
    momentum: float = 0.0


@hpo.optimizer("heavy_ball", Momentum)
def heavy_ball(groups, options):
    return torch.optim.SGD(groups, lr=0.0, momentum=options.momentum)


class Power(hpo.Section):
    power: float = 1.0


@hpo.schedule("polynomial", Power)
def polynomial(remaining, options):
    return remaining**options.power
"""


def test_optimizer_and_schedule_with_options(tmp_path: Path) -> None:
    """They are built for fp32 and bf16 weights, and a trial trains with them."""
    training = {"max_steps": 8, "max_length": 16, "optimizer": "heavy_ball", "schedule": "polynomial"}
    (tmp_path / "own_kind.py").write_text(OPTIMIZER)
    executor = tiny_executor(tmp_path, code="own_kind.py", training=training)
    result = executor.run({"fp_precision": "bf16-true", "learning_rate": 1e-3}, None, "")
    assert result.outcome == "complete", result.traceback
    option = {"heavy_ball.momentum": 0.9, "polynomial.power": 4.0}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        groups = [{"params": [weight], "lr": 0.1, "weight_decay": 0.2}]
        built = build_optimizer("heavy_ball", groups, option=option)
        assert [built.param_groups[0][key] for key in ("momentum", "lr", "weight_decay")] == [0.9, 0.1, 0.2]
    assert own_schedule("polynomial", option)(0.5) == 0.0625


SOURCE_TASKS = {"times": NUMBERS["times"], "tone": TASKS["tone"]}
SOURCE = """
import hpo


class Posts(hpo.Section):
    size: int = 20
    path: hpo.StudyPath | None = None


@hpo.source("posts", Posts)
def posts(split, options):
    if split == "validation":
        return None
    if options.path is not None:
        options.path.read_text()
    words = ["it hurts " * (n % 5) + "today" for n in range(options.size)]
    return ({"text": text, "labels": {"times": text.count("hurts"), "tone": "no"}} for text in words)
"""
POSTS = {"source": "posts", "tasks": SOURCE_TASKS, "options": {"size": 30}, "validation_fraction": 0.3}


def test_source_of_data(tmp_path: Path) -> None:
    config = load_study(write(tmp_path, SOURCE, data=POSTS))
    data = load_data(config.data)
    train, validation, test = (len(data.splits[split]) for split in ("train", "validation", "test"))
    assert (train + validation, test) == (30, 30), "there is no validation split: it is drawn from train"
    assert data.splits["test"][4].labels == {"times": 4.0, "tone": "no"}
    assert data.splits["test"][4].id == "test-5"
    assert load_data(config.data).fingerprint == data.fingerprint
    assert stored_study("tiny", json.loads(json.dumps(config.definition()))).data == config.data


def test_database_cannot_name_files_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, here = tmp_path / "made", tmp_path / "here"
    made.mkdir()
    here.mkdir()
    (made / "secret").write_text("a secret")
    data = POSTS | {"options": {"path": "secret", "size": 30}}
    ok(hpo_command(made, "init", write(made, SOURCE, data=data, objective={"metric": "score"}).name))
    monkeypatch.delenv("HPO_ALLOW", raising=False)
    (here / "own_kind.py").write_text(SOURCE)
    worker = ("worker", "tiny", "--storage", f"sqlite:///{made}/runs/hpo.db", "--trust-code", "own_kind.py")
    refused = hpo_command(here, *worker)
    told = "data.options.path: the study `tiny` of the database names"
    assert (refused.exit_code, told in refused.err) == (2, True), refused
    monkeypatch.setenv("HPO_ALLOW", str(made))
    ok(hpo_command(here, *worker))
