"""Heads, metrics and encoders of a study's own code."""

import hashlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sqlalchemy as sa
from sklearn.metrics import cohen_kappa_score
from support.command_line import hpo_command, ok
from support.own_code_studies import TASKS, count_rows, write
from support.tiny import executor_of, parts_of
from torch import nn

import hpo
from hpo.code import use_code
from hpo.config.study_config import load_study, stored_study
from hpo.deploy.onnx_fp32 import export_onnx
from hpo.errors import InputError
from hpo.evaluation.intervals import metric_intervals
from hpo.models.own_encoder import OwnEncoder, load_own_encoder
from hpo.study.reading.detailed_evaluations import _of_task, _packed
from hpo.study.store.schema import studies
from hpo.study.store.storage import open_storage
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.training.metrics import row_statistics
from hpo.trial.best_model import export_checkpoint, split_predictions
from hpo.trial.executor import Executor
from hpo.trial.telemetry import Callbacks, StoredTrial

pytestmark = pytest.mark.usefixtures("forgotten")

MODELS = """
import torch
from torch import nn

import hpo


class Wide(hpo.Section):
    width: int = 8


@hpo.head("wide", Wide)
def wide(hidden_size, num_outputs, options):
    width = options.width
    return nn.Sequential(nn.Linear(hidden_size, width), nn.Tanh(), nn.Linear(width, num_outputs))


class Gru(hpo.Section):
    size: int = 24


class GruEncoder(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embed = nn.Embedding(30522, size)
        self.gru = nn.GRU(size, 2 * size, batch_first=True)

    def forward(self, input_ids, attention_mask):
        hidden, _ = self.gru(self.embed(input_ids) * attention_mask[..., None])
        return hidden


@hpo.encoder("gru", Gru)
def gru(options):
    return GruEncoder(options.size)


@hpo.metric("kappa", ["single_label"])
def kappa(truths, predictions):
    from sklearn.metrics import cohen_kappa_score

    return cohen_kappa_score(truths, predictions)


@hpo.metric("cost", ["regression"], less_is_better=True)
def cost(truths, predictions):
    return sum(3 * max(0, t - p) + max(0, p - t) for t, p in zip(truths, predictions)) / len(truths)
"""
KINDS = {"times": {"kind": "regression"}, "tone": TASKS["tone"]}
PLAIN = {"max_steps": 60, "batch_size": 8, "max_length": 16, "fp_precision": "fp32", "learning_rate": 5e-3}


SIZE, WIDTH = {"type": "int", "low": 8, "high": 24}, {"type": "int", "low": 2, "high": 9}
STUDY = {
    "data": {"source": "jsonl", "path": "rows", "tasks": KINDS},
    "model": {"encoder": "gru"},
    "training": PLAIN | {"head_type.times": "wide"},
    "search_space": {"gru.size": SIZE, "wide.width": WIDTH},
    "objective": {"metric": "times/cost", "direction": "minimize"},
    "constraints": {"tone/kappa": {"min": 0.5}},
}
"""A study with an own head, an own encoder and an own metric as its objective."""


def write_models(folder: Path, source: str = MODELS, **changes: Any) -> Path:
    return write(folder, source, **(STUDY | changes))


def own_executor(folder: Path, source: str = MODELS, **changes: Any) -> Executor:
    return executor_of(write_models(folder, source, **changes))


def test_head_is_searched_for_one_task(tmp_path: Path) -> None:
    space = {"head_type.tone": {"type": "categorical", "choices": ["linear", "wide"]}}
    executor = own_executor(tmp_path, training=PLAIN | {"head_type": "mlp"}, search_space=space)
    for name, expected in {"wide": [nn.GELU, nn.Tanh], "linear": [nn.GELU]}.items():
        modules = parts_of(executor, **{"head_type.tone": name}).model.heads.modules()
        assert [type(one) for one in modules if isinstance(one, (nn.GELU, nn.Tanh))] == expected
    definition = json.loads(json.dumps(executor.study.definition()))
    assert stored_study("tiny", definition).definition() == executor.study.definition()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nn.Linear(width, num_outputs)", "nn.Linear(width, 1)", "for the task `tone` gives logits (2, 2)"),
        ("return nn.Sequential(nn.Linear", "return (nn.Linear", "but it is a tuple"),
        ("nn.Tanh()", "nn.BatchNorm2d(2)", "of states (2, 48), but raises ValueError: expected 4D input"),
        ("return GruEncoder(options.size)", "return nn.Embedding(9, 9)", "the model cannot be built: "),
        ("return nn.Sequential(nn", "return nn.Sequential(n", "own_kind.py:15: NameError: name 'n' is not"),
        ("return hidden\n", "return hidden[:, 0]\n", "`gru` must give states (2, 3, D) of ids (2, 3), but"),
        ("nn.Embedding(30522, size)", "nn.Embedding(300, size)", "own_kind.py:29: IndexError: index out of"),
        ("return GruEncoder(options.size)", "return options", "`gru` must be a module, but it is a Gru"),
        ("kappa_score(truths, predictions)", "kappa_score(truths)", "own_kind.py:42: TypeError: "),
        ("return cohen_kappa_score(truths, predictions)", "return {}", "`kappa` must return a number"),
        ('@hpo.metric("kappa"', '@hpo.metric("accuracy"', "there is a metric `accuracy` already"),
    ],
)
def test_wrong_code_is_refused_before_it_is_stored(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MODELS
    space = {"head_type": {"type": "categorical", "choices": ["linear", "wide"]}}
    write_models(tmp_path, MODELS.replace(old, new), training=PLAIN, search_space=space)
    refused = hpo_command(tmp_path, "init", "tiny.yaml")
    assert (refused.exit_code, message in refused.err) == (2, True), refused.err
    assert hpo_command(tmp_path, "status", "tiny").exit_code == 2, "nothing is stored"


def test_own_head_with_wrong_logits_ends_one_trial(tmp_path: Path) -> None:
    """The head may work with other values of its settings."""
    source = MODELS.replace("nn.Linear(width, num_outputs)", "nn.Linear(8, num_outputs)")
    training = PLAIN | {"head_type": "wide", "max_steps": 2, "gru.size": 8}
    executor = own_executor(tmp_path, source, training=training, search_space={"wide.width": WIDTH})
    assert executor.run({"wide.width": 8}, None, "").outcome == "complete"
    refused = executor.run({"wide.width": 9}, None, "")
    assert (refused.outcome, "but raises RuntimeError: mat1" in refused.reason) == ("invalid", True)


def test_own_metric_intervals_equal_scikit_learn(tmp_path: Path) -> None:
    """Resampled, with each row left out, and after the database."""
    load_study(write_models(tmp_path))
    task = Task("tone", "single_label", ("no", "yes"), primary="kappa")
    truths = [["no", "yes"][n % 3 == 0] for n in range(12)]
    predictions = [["no", "yes"][n % 4 == 0] for n in range(12)]
    examples = [Example("labelled", "x", {"tone": truth}, {}, annotated={"tone"}) for truth in truths]
    examples[4:4] = [Example("unlabelled", "x", {}, {})]
    statistics = row_statistics(task, [*predictions[:4], "yes", *predictions[4:]], examples)
    with np.load(io.BytesIO(_packed({task.name: statistics})), allow_pickle=False) as archive:
        stored: Any = _of_task(archive, task)
    for one in (statistics, stored):
        assert one.scores()["kappa"] == cohen_kappa_score(truths, predictions)
        without = one.scores_without_each("kappa")
        assert without[2] == cohen_kappa_score(truths[:2] + truths[3:], predictions[:2] + predictions[3:])
        weights = np.zeros((1, 13))
        weights[0, [0, 1, 3, 6]] = 1, 2, 1, 5  # row 6 is the fifth labelled one
        drawn = [0, 1, 1, 3, *[5] * 5]
        expected = cohen_kappa_score(*([labels[n] for n in drawn] for labels in (truths, predictions)))
        assert one.weighted_scores(weights)["kappa"] == [expected]
    intervals: Any = metric_intervals({"tone": stored}, num_resamples=50)
    kappa = intervals.tasks["tone"]["kappa"]
    assert intervals.score.high == kappa.high
    assert intervals.score.low == 0 > kappa.low, "below 0 counts as 0 in `score`"


def test_own_metric_is_primary(tmp_path: Path) -> None:
    def data(task: str, metric: str) -> dict[str, Any]:
        tasks = KINDS | {task: KINDS[task] | {"primary_metric": metric}}
        return {"source": "jsonl", "path": "rows", "tasks": tasks}

    study = {"data": data("tone", "kappa"), "training": PLAIN, "objective": {"metric": "score"}}
    executor = own_executor(tmp_path, **study)
    executor.check_study()
    result = executor.run({"gru.size": 8, "wide.width": 2}, None, "")
    assert result.outcome == "complete", result.traceback
    metrics = result.telemetry["metrics"]
    assert result.values == ((max(metrics["times"]["r2"], 0) + metrics["tone"]["kappa"]) / 2,)
    for name in ("cost", "kapa"):
        with pytest.raises(
            InputError, match=f"primary_metric: must be one of r2, pearson, spearman, but got `{name}`"
        ):
            own_executor(tmp_path, data=data("times", name), constraints={})


UNDEFINED = """
calls = []


@hpo.metric("rank", ["single_label"])
def rank(truths, predictions):
    calls.append(predictions)  # the first call has right predictions
    return float("nan") if len(calls) - 1 in UNDEFINED_CALLS else 0.5
"""


@pytest.mark.parametrize(("undefined", "end"), [((1,), "complete"), ((2,), "complete"), ((1, 2), "invalid")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_metric_must_be_defined_once(tmp_path: Path, undefined: Any, end: str, precision: str) -> None:
    source = MODELS + UNDEFINED.replace("UNDEFINED_CALLS", str(undefined))
    study = {"training": PLAIN | {"max_steps": 4, "fp_precision": precision}, "evaluation": {"per_trial": 2}}
    study |= {"search_space": {}, "objective": {"metric": "tone/rank"}, "constraints": {}}
    executor = own_executor(tmp_path, source, **study)
    seen: list[tuple[float, ...]] = []
    executor.loader.__dict__["baseline"] = {}  # its computation would call the metric too
    result = executor.run({}, None, "", Callbacks(lambda scored: seen.append(scored.values)))
    assert (result.outcome, len(seen)) == (end, 2), result.reason
    assert [math.isnan(values[0]) for values in seen] == [call in undefined for call in (1, 2)]
    assert result.values == ((0.5,) if end == "complete" else None)
    if end == "invalid":
        assert "tone/rank of an objective or a limit has no value" in result.reason


MARKED = """
import hpo
from pathlib import Path


def mark(*given):
    Path(__file__ + ".marked").touch()


mark()
hpo.head("mine")(mark)
hpo.metric("mine", ["single_label"])(mark)
hpo.encoder("mine")(mark)
hpo.source("mine")(mark)
"""


@pytest.mark.parametrize("name", ["mine", pytest.param("os.system", marks=pytest.mark.slow)])
def test_database_cannot_run_code(tmp_path: Path, name: str) -> None:
    """A changed definition names code of a study, with or without a hash of code on this machine."""
    code = tmp_path / "own_kind.py"
    path = write(tmp_path, "", code=[], data={"source": "synthetic"}, objective={"metric": "score"})
    ok(hpo_command(tmp_path, "init", path.name))
    path.unlink()
    code.write_text(MARKED)
    sha = hashlib.sha256(MARKED.encode()).hexdigest()
    source = {"source": name, "tasks": {"a": {"kind": "regression"}}, "options": {}}
    searched = {"type": "categorical", "choices": [name, "minilm"], "when": {}}
    attacks: list[dict[str, Any]] = [
        {"data": source},
        {"model": {"encoder": name}},
        {"search_space": {"encoder": searched}},
        {"training": {"head_type": name, "head_types": {"criteria": name}}},
        {"objective": [{"metric": f"criteria/{name}", "direction": "maximize"}]},
    ]
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        before = json.loads(storage.read(lambda c: c.execute(sa.select(studies)).one().definition))
        keys = [key for key in before["given"] if not key.startswith("model.")]
        for changes in attacks:
            for hashes in ({}, {"own_kind.py": sha}, {name: sha}):
                definition = before | {"code": hashes, "given": keys}
                for key, value in changes.items():
                    definition[key] = before[key] | value if isinstance(value, dict) else value
                values = {"definition": json.dumps(definition)}
                storage.write(lambda c, values=values: c.execute(sa.update(studies).values(values)))
                refused = hpo_command(tmp_path, "worker", "tiny")
                assert (refused.exit_code, "Traceback" in refused.err) == (2, False), (changes, refused)
                assert not hashes or "needs the code" in refused.err
    assert not Path(f"{code}.marked").exists()


@pytest.mark.parametrize("name", ["os", "builtins.exec", "other"])
def test_export_loads_no_other_encoder(tmp_path: Path, name: str) -> None:
    load_study(write_models(tmp_path))
    OwnEncoder("gru", {}).save_pretrained(tmp_path)
    assert load_own_encoder(tmp_path) is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hpo_encoder": name, "hpo_options": {}}))
    with pytest.raises(LookupError):
        load_own_encoder(tmp_path)


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning")  # mlflow's own types
def test_export_predicts_with_its_code_and_keeps_tied_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = "self.out = nn.Linear(size, 30522, bias=False); self.out.weight = self.embed.weight; self.gru ="
    executor = own_executor(tmp_path, MODELS.replace("self.gru =", tied))
    params = {"gru.size": 8, "wide.width": 2, "max_steps": 4}
    result = executor.run(params, tmp_path / "trial", "key")
    metrics = result.telemetry["metrics"]
    assert result.values == (metrics["times"]["cost"],)
    assert result.constraints["tone/kappa"] == pytest.approx((0.5 - metrics["tone"]["kappa"]) / 0.5)
    folder = export_checkpoint(executor, tmp_path / "trial", tmp_path / "model", StoredTrial(0, params))
    use_code({}, "none")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    model = hpo.load(folder, device="cpu", code=tmp_path / "own_kind.py")
    network: Any = model.network
    assert network.encoder.module.out.weight is network.encoder.module.embed.weight
    assert network.heads[0][0].out_features == 2
    expected = split_predictions(executor, tmp_path / "trial", params, "test").predictions["times"]
    texts = [row["text"] for row in count_rows("t", 20)]
    assert [one["times"].label for one in model.predict(texts)] == pytest.approx(expected, rel=1e-4)
    onnx = hpo.load(export_onnx(model, tmp_path / "onnx"), device="cpu", code=tmp_path / "own_kind.py")
    assert [one["times"].label for one in onnx.predict(texts)] == pytest.approx(expected, rel=1e-4)
    import mlflow

    options = {"code": str(tmp_path / "own_kind.py")}
    rows = mlflow.pyfunc.load_model(str(tmp_path / "onnx"), model_config=options).predict(
        pd.DataFrame({"text": texts})
    )
    assert [row["times"]["label"] for row in rows] == pytest.approx(expected, rel=1e-4)


PARTS = """
@hpo.pooling("first")
def first(hidden_size, options):
    return lambda hidden, mask: hidden[:, 0]


@hpo.loss("plain", ["single_label"])
def plain(kind, logits, target, options, class_weight, mask):
    return nn.functional.cross_entropy(logits, target, reduction="sum")


@hpo.optimizer("plain_sgd")
def plain_sgd(groups, options):
    return torch.optim.SGD(groups, lr=0.1)


@hpo.schedule("flat")
def flat(remaining, options):
    return 1.0
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden[:, 0]", "hidden", "pooling: `first` must give (2, 48) of states (2, 3, 48), but gives"),
        ("hidden[:, 0]", "hidden[:, 0].double()", "the model cannot be built: "),
        ("lambda hidden, mask: hidden[:, 0]", "nn.Identity()", "(2, 3, 48), but raises TypeError: Identity"),
        ("lambda hidden, mask: hidden[:, 0]", "None", "of states (2, 3, 48), but it is a NoneType"),
        ('"sum")', '"sum").item()', "the loss `plain` must return a tensor with one number and"),
        ('"sum")', '"sum").detach()', "the loss `plain` must return a tensor with one number and"),
        ('"sum")', '"none")', "the loss `plain` must return a tensor with one number and"),
        ("torch.optim.SGD(groups, lr=0.1)", "groups", "`plain_sgd` must be a torch.optim.Optimizer over"),
        ("return 1.0", "return", "the schedule `flat` must return a number, but got `None`."),
        ("return 1.0", "return 1 / 0", "own_kind.py:66: ZeroDivisionError: division by zero"),
        ("return 1.0", "raise SystemExit(0)", "own_kind.py:66: SystemExit: 0"),
        ("flat(remaining, options)", "flat(remaining)", "`flat` must take (remaining, options): "),
    ],
)
def test_wrong_parts_are_refused_with_their_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PARTS
    named = {"pooling": "first", "loss": "plain", "optimizer": "plain_sgd", "schedule": "flat"}
    source = MODELS + PARTS.replace(old, new)
    with pytest.raises(InputError, match=re.escape(message)):
        own_executor(tmp_path, source, training=PLAIN | named, search_space={}).check_study()


def test_loss_of_one_number_in_a_list(tmp_path: Path) -> None:
    source = MODELS + PARTS.replace('"sum")', '"sum")[None]')
    training = PLAIN | {"max_steps": 2, "loss": "plain"}
    executor = own_executor(tmp_path, source, training=training, search_space={})
    assert executor.run({}, None, "").outcome == "complete"


def test_trial_with_an_error_of_a_metric_is_invalid(tmp_path: Path) -> None:
    source = MODELS + UNDEFINED.replace("return", 'assert len(calls) < 3, "late"\n    return')
    executor = own_executor(
        tmp_path,
        source.replace("UNDEFINED_CALLS", "()"),
        training=PLAIN | {"max_steps": 4},
        evaluation={"per_trial": 2},
        search_space={},
        constraints={},
    )
    executor.loader.__dict__["baseline"] = {}  # its computation would call the metric too
    result = executor.run({}, None, "")
    assert (result.outcome, "AssertionError: late" in result.reason) == ("invalid", True), result.reason


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true"])
def test_head_with_a_batch_norm_trains(tmp_path: Path, precision: str) -> None:
    """Every batch has at least two rows, in the check and in the observation too."""
    source = MODELS.replace("nn.Tanh()", "nn.BatchNorm1d(width)")
    training = PLAIN | {"head_type": "wide", "max_steps": 2, "gru.size": 8, "fp_precision": precision}
    changes: dict[str, Any] = {"search_space": {"wide.width": WIDTH}, "amp": {"allow_emulated": True}}
    result = own_executor(tmp_path, source, training=training, **changes).run({"wide.width": 8}, None, "")
    assert result.outcome == "complete", result.reason
    assert result.telemetry["compatibility"]["verdict"] == "ok"
