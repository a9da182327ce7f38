"""Heads, metrics and encoders that a study's own code brings."""

from __future__ import annotations

import hashlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from sklearn.metrics import cohen_kappa_score
from support.command_line import hpo_command, ok
from support.own_code_studies import TASKS, count_rows, write
from support.tiny import CPU
from torch import nn

import hpo
from hpo.code import use_code
from hpo.config.resolved_study import resolve_study
from hpo.config.study_config import load_study, stored_study
from hpo.deploy.onnx_export import export_onnx
from hpo.errors import InputError
from hpo.evaluation.intervals import metric_intervals
from hpo.models.own_encoder import build_own_encoder, load_own_encoder
from hpo.study.reading.row_statistics import _of_task, _packed
from hpo.study.store.schema import studies
from hpo.study.store.storage import open_storage
from hpo.tasks.example import Example
from hpo.tasks.kind import Task
from hpo.training.metrics import row_statistics
from hpo.trial.best_model import TrialSource, export_checkpoint, split_predictions
from hpo.trial.callbacks import Callbacks
from hpo.trial.executor import Executor
from hpo.trial.trial_parts import build_trial

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


def write_models(folder: Path, source: str = MODELS, **changes: Any) -> Path:
    """A study with a head and an encoder of its own, judged by a metric of its own."""
    given = {
        "data": {"source": "jsonl", "path": "rows", "tasks": KINDS},
        "model": {"encoder": "gru"},
        "training": PLAIN | {"head_type.times": "wide"},
        "search_space": {
            "gru.size": {"type": "int", "low": 8, "high": 24},
            "wide.width": {"type": "int", "low": 2, "high": 9},
        },
        "objective": {"metric": "times/cost", "direction": "minimize"},
        "constraints": {"tone/kappa": {"min": 0.5}},
    }
    return write(folder, source, **(given | changes))


@pytest.mark.slow
def test_from_the_file_to_a_model_in_use(tmp_path: Path) -> None:
    executor = Executor(resolve_study(load_study(write_models(tmp_path)), CPU), tmp_path / "runs")
    executor.check_study()
    params = {"gru.size": 16, "wide.width": 5}
    result = executor.run(params, tmp_path / "trial", "key")
    assert result.outcome == "complete", result.traceback
    values = result.telemetry["metrics"]
    assert result.values == (values["times"]["cost"],)
    assert result.constraints["tone/kappa"] == pytest.approx((0.5 - values["tone"]["kappa"]) / 0.5)

    predicted = split_predictions(executor, tmp_path / "trial", params, "test")
    rows = count_rows("t", 20)
    tones = [row["labels"]["tone"] for row in rows]
    found = predicted.metrics()["tone"]["kappa"]
    assert found == cohen_kappa_score(tones, predicted.predictions["tone"]) > 0.5

    source = TrialSource(0, params)
    folder = export_checkpoint(executor, tmp_path / "trial", tmp_path / "model", source)
    use_code({}, "none")
    model = hpo.load(folder, device="cpu", code=tmp_path / "own_kind.py")
    network: Any = model.network
    assert network.encoder.module.gru.hidden_size == 32
    assert [type(head[-1]) for head in network.heads] == [nn.Linear, nn.Linear]
    assert network.heads[0][0].out_features == 5
    texts = [row["text"] for row in rows]
    answers = model.predict(texts)
    assert [one["times"].label for one in answers] == pytest.approx(predicted.predictions["times"], rel=1e-4)
    onnx = hpo.load(export_onnx(model, tmp_path / "onnx"), device="cpu", code=tmp_path / "own_kind.py")
    assert [one["tone"].label for one in onnx.predict(texts)] == [one["tone"].label for one in answers]


def test_a_head_is_chosen_for_a_task_or_for_all_and_searched(tmp_path: Path) -> None:
    space = {"head_type.tone": {"type": "categorical", "choices": ["linear", "wide"]}}
    study = load_study(write_models(tmp_path, training=PLAIN | {"head_type": "mlp"}, search_space=space))
    executor = Executor(resolve_study(study, CPU), tmp_path / "runs")
    for name, kinds in {"wide": [nn.GELU, nn.Tanh], "linear": [nn.GELU]}.items():
        parts = build_trial(executor.resolved, {"head_type.tone": name}, executor.loader)
        found = [type(one) for one in parts.model.heads.modules() if isinstance(one, (nn.GELU, nn.Tanh))]
        assert found == kinds
    definition = json.loads(json.dumps(study.definition()))
    assert (
        study.resumed(definition).definition()
        == study.definition()
        == stored_study("tiny", definition).definition()
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "nn.Linear(width, num_outputs)",
            "nn.Linear(width, 1)",
            "for the task `tone` gives logits (2, 2) of states (2, 48), but gives (2, 1)",
        ),
        ("return nn.Sequential(nn.Linear", "return (nn.Linear", "but it is a tuple"),
        ("return nn.Sequential(nn", "return nn.Sequential(n", "own_kind.py:15: NameError: name 'n' is not"),
        (
            "return hidden\n",
            "return hidden[:, 0]\n",
            "`gru` must give states (2, 3, D) of ids (2, 3), but gives (2",
        ),
        ("nn.Embedding(30522, size)", "nn.Embedding(300, size)", "own_kind.py:29: IndexError: index out of"),
        (
            "return GruEncoder(options.size)",
            "return options",
            "the encoder `gru` must be a module, but it is a Gru",
        ),
        ("kappa_score(truths, predictions)", "kappa_score(truths)", "own_kind.py:42: TypeError: "),
        (
            "return cohen_kappa_score(truths, predictions)",
            "return {}",
            "the metric `kappa` must return a number",
        ),
        ('@hpo.metric("kappa"', '@hpo.metric("accuracy"', "there is a metric `accuracy` already"),
    ],
)
def test_what_is_wrong_is_told_before_the_study_is_made(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in MODELS
    space = {"head_type": {"type": "categorical", "choices": ["linear", "wide"]}}
    write_models(tmp_path, MODELS.replace(old, new), training=PLAIN, search_space=space)
    refused = hpo_command(tmp_path, "init", "tiny.yaml")
    assert (refused.exit_code, message in refused.err) == (2, True), refused.err
    assert hpo_command(tmp_path, "status", "tiny").exit_code == 2, "nothing is stored"


def test_a_metric_that_breaks_on_what_was_predicted_is_told_once_by_its_line(tmp_path: Path) -> None:
    """Not as trials that failed: each of them would."""
    broken = "if list(truths) != list(predictions):\n        raise ValueError('not equal')\n    return 1.0"
    source = MODELS.replace("return cohen_kappa_score(truths, predictions)", broken)
    write_models(tmp_path, source, training=PLAIN | {"max_steps": 1, "learning_rate": 1e-9}, search_space={})
    ended = hpo_command(tmp_path, "run", "tiny.yaml")
    assert (ended.exit_code, "own_kind.py:43: ValueError: not equal" in ended.err) == (2, True), ended.err
    assert "Traceback" not in ended.err


def test_a_metric_has_intervals_and_is_kept_for_comparisons(tmp_path: Path) -> None:
    """Resampled and with each row left out as scikit-learn has it, also after the database."""
    study = load_study(write_models(tmp_path, MODELS + SPANNED))
    task = Task("tone", "single_label", ("no", "yes"), primary="kappa")
    truths = [["no", "yes"][n % 3 == 0] for n in range(12)]
    predictions = [["no", "yes"][n % 4 == 0] for n in range(12)]
    examples = [
        Example(str(n), "x", {"tone": one}, {}, annotated=frozenset({"tone"})) for n, one in enumerate(truths)
    ]
    examples[4:4] = [Example("unlabelled", "x", {}, {})]
    given = row_statistics(task, [*predictions[:4], "yes", *predictions[4:]], examples)
    kept = stored_and_read({"tone": given}, [task])["tone"]
    for one in (given, kept):
        assert one.scores()["kappa"] == cohen_kappa_score(truths, predictions)
        without = one.scores_without_each()["kappa"]
        assert without[2] == cohen_kappa_score(truths[:2] + truths[3:], predictions[:2] + predictions[3:])
        weights = np.zeros((1, 13))
        weights[0, [0, 1, 3, 6]] = 1, 2, 1, 5  # the sixth is the fifth that is labelled
        drawn = [0, 1, 1, 3, *[5] * 5]
        expected = cohen_kappa_score(*([side[n] for n in drawn] for side in (truths, predictions)))
        assert one.weighted_scores(weights)["kappa"] == one.weighted_scores(weights)["kappa"] == [expected]
        assert one.weighted_scores(np.ones((1, 13)))["kappa"] == cohen_kappa_score(truths, predictions)
    intervals: Any = metric_intervals({"tone": kept}, num_resamples=50)
    assert intervals.score.high == intervals.tasks["tone"]["kappa"].high
    assert intervals.score.low == 0 > intervals.tasks["tone"]["kappa"].low, "below 0 counts as 0 in `score`"
    low, high = intervals.tasks["tone"]["kappa"].low, intervals.score.high
    assert low < intervals.score.value < high
    assert study.objective[0].direction == "minimize"


SPANNED = """
@hpo.metric("starts", ["token_classification", "span_extraction"])
def starts(truths, predictions):
    pairs = zip(truths, predictions)
    return sum({s[1] for s in t} == {s[1] for s in set(p)} for t, p in pairs) / len(truths)
"""


def test_a_metric_of_spans_is_the_same_after_the_database(tmp_path: Path) -> None:
    load_study(write_models(tmp_path, MODELS + SPANNED))
    task = Task("where", "token_classification", ("a",))
    spans: list[list[tuple[int, int]]] = [[(0, 3), (5, 6)], [], [(2, 4)]]
    examples = [
        Example(str(n), "some text", {}, {"a": one}, annotated=frozenset({"where"}))
        for n, one in enumerate(spans)
    ]
    given = row_statistics(task, [[("a", 0, 1), ("a", 5, 9)], [], [("a", 3, 4)]], examples)
    read = stored_and_read({"where": given}, [task])["where"]
    assert given.scores()["starts"] == read.scores()["starts"] == 2 / 3


def stored_and_read(statistics: Any, tasks: list[Task]) -> Any:
    with np.load(io.BytesIO(_packed(statistics)), allow_pickle=False) as archive:
        return {task.name: _of_task(archive, task) for task in tasks}


def test_a_metric_of_ones_own_is_primary(tmp_path: Path) -> None:
    primary = KINDS | {"tone": KINDS["tone"] | {"primary_metric": "kappa"}}
    data = {"source": "jsonl", "path": "rows", "tasks": primary}
    study = load_study(write_models(tmp_path, data=data, training=PLAIN, objective={"metric": "score"}))
    executor = Executor(resolve_study(study, CPU), tmp_path / "runs")
    executor.check_study()
    result = executor.run({"gru.size": 8, "wide.width": 2}, None, "")
    assert result.outcome == "complete", result.traceback
    found = result.telemetry["metrics"]
    assert result.values == ((max(found["times"]["r2"], 0) + found["tone"]["kappa"]) / 2,)
    for name in ("cost", "mae", "kapa"):
        wrong = KINDS | {"times": KINDS["times"] | {"primary_metric": name}}
        data = {"source": "jsonl", "path": "rows", "tasks": wrong}
        study = load_study(write_models(tmp_path, data=data, constraints={}))
        with pytest.raises(
            InputError, match=rf"`times`: primary_metric: must be one of r2, but got `{name}`"
        ):
            Executor(resolve_study(study, CPU), tmp_path / "runs")


UNDEFINED = """
calls = []


@hpo.metric("rank", ["single_label"])
def rank(truths, predictions):
    calls.append(predictions)
    return float("nan") if len(calls) in UNDEFINED_CALLS else 0.5
"""
LIMIT: dict[str, Any] = {
    "objective": {"metric": "times/cost", "direction": "minimize"},
    "constraints": {"tone/rank": {"min": 0.1}},
}
RANK: dict[str, Any] = {"objective": {"metric": "tone/rank"}, "constraints": {}}


@pytest.mark.parametrize(
    ("asked", "undefined", "outcome"),
    [
        (RANK, (1,), "complete"),
        (RANK, (2,), "complete"),
        (RANK, (1, 2), "invalid"),
        (LIMIT, (1, 2), "invalid"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_metric_must_be_defined_at_one_evaluation(
    tmp_path: Path, asked: dict[str, Any], undefined: tuple[int, ...], outcome: str, precision: str
) -> None:
    source = MODELS + UNDEFINED.replace("UNDEFINED_CALLS", str(undefined))
    training = PLAIN | {"max_steps": 4, "fp_precision": precision}
    study = load_study(
        write_models(
            tmp_path, source, training=training, evaluation={"per_trial": 2}, search_space={}, **asked
        )
    )
    seen: list[tuple[float, ...]] = []
    callbacks = Callbacks(lambda scored: seen.append(scored.values))
    executor = Executor(resolve_study(study, CPU), tmp_path / "runs")
    executor.loader.__dict__["baseline"] = {}  # which would call the metric too
    result = executor.run({}, None, "", callbacks)
    assert (result.outcome, len(seen)) == (outcome, 2), result.reason
    if asked is RANK:
        assert [math.isnan(values[0]) for values in seen] == [call in undefined for call in (1, 2)]
    if outcome == "complete":
        assert result.values == (0.5,)
    else:
        assert result.reason.startswith("the metric tone/rank is not defined for the predictions of any eval")
        assert result.values is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return float('nan')", "tone/rank must have a value where all predictions are right"),
        ("return 1.0 if truths == predictions else 1 / 0", "own_kind.py:.*: ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("objective", ["tone/rank", "score"])
def test_a_metric_without_a_value_is_refused_before_a_study(
    tmp_path: Path, body: str, message: str, objective: str
) -> None:
    source = (
        f"{MODELS}\n\n@hpo.metric('rank', ['single_label'])\ndef rank(truths, predictions):\n    {body}\n"
    )
    kinds = KINDS | {"tone": KINDS["tone"] | {"primary_metric": "rank"}}
    data = {"source": "jsonl", "path": "rows", "tasks": kinds}
    study = load_study(write_models(tmp_path, source, data=data, objective={"metric": objective}))
    executor = Executor(resolve_study(study, CPU), tmp_path / "runs")
    with pytest.raises(InputError, match=message):
        executor.check_study()


def test_an_error_of_ones_own_is_minimised(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be `minimize` for `times/cost`: smaller is better"):
        load_study(write_models(tmp_path, objective={"metric": "times/cost"}))


@pytest.mark.parametrize(
    "setting",
    [{"dropout": 0.0}, {"attention": "eager"}, {"freeze_layers": 1}, {"layerwise_lr_decay": 0.9}],
)
def test_what_an_encoder_of_ones_own_does_not_have(tmp_path: Path, setting: dict[str, Any]) -> None:
    study = load_study(write_models(tmp_path, training=PLAIN | setting))
    with pytest.raises(InputError, match=f"{next(iter(setting))}: the encoder `gru`"):
        Executor(resolve_study(study, CPU), tmp_path / "runs").check_study()


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


@pytest.mark.parametrize(
    "name",
    [
        "mine",
        pytest.param("os.system", marks=pytest.mark.slow),
        pytest.param("./own_kind.py", marks=pytest.mark.slow),
    ],
)
def test_the_database_can_have_nothing_of_these_run(tmp_path: Path, name: str) -> None:
    """By a definition of a study without code, or of one that names code that lies here."""
    code = tmp_path / "own_kind.py"
    path = write(tmp_path, "", code=[], data={"source": "synthetic"}, objective={"metric": "score"})
    ok(hpo_command(tmp_path, "init", path.name))
    path.unlink()
    code.write_text(MARKED)
    sha = hashlib.sha256(MARKED.encode()).hexdigest()
    source = {"source": name, "tasks": {"a": {"kind": "regression"}}, "options": {}}
    searched = {"type": "categorical", "choices": [name, "minilm"], "when": {}}
    chosen = {"head_type": name, "head_types": {"criteria": name}}
    of_each = [
        {"data": source},
        {"model": {"encoder": name}},
        {"search_space": {"encoder": searched}},
        {"training": chosen},
        {"objective": [{"metric": f"criteria/{name}", "direction": "maximize"}]},
    ]
    with open_storage(f"sqlite:///{tmp_path}/runs/hpo.db") as storage:
        before = json.loads(storage.read(lambda c: c.execute(sa.select(studies)).one().definition))
        given = [key for key in before["given"] if not key.startswith("model.")]
        for changes in of_each:
            for of_code in ({}, {"own_kind.py": sha}, {name: sha}):
                definition = before | {"code": of_code, "given": given}
                for key, value in changes.items():
                    definition[key] = before[key] | value if isinstance(value, dict) else value
                values = {"definition": json.dumps(definition)}
                storage.write(lambda c, values=values: c.execute(sa.update(studies).values(values)))
                refused = hpo_command(tmp_path, "worker", "tiny")
                assert (refused.exit_code, "Traceback" in refused.err) == (2, False), (changes, refused)
                assert not of_code or "needs the code" in refused.err
                assert hpo_command(tmp_path, "status", "tiny").exit_code in (0, 2)
    assert not Path(f"{code}.marked").exists()


@pytest.mark.parametrize("name", ["os", "builtins.exec", "other"])
def test_an_export_names_no_other_encoder(tmp_path: Path, name: str) -> None:
    load_study(write_models(tmp_path))
    encoder = build_own_encoder("gru", {}, ())
    encoder.save_pretrained(tmp_path)
    assert load_own_encoder(tmp_path) is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hpo_encoder": name, "hpo_options": {}}))
    with pytest.raises(LookupError):
        load_own_encoder(tmp_path)


def test_an_encoder_with_tied_weights(tmp_path: Path) -> None:
    line = (
        "        self.out = nn.Linear(size, 30522, bias=False)\n        self.out.weight = self.embed.weight\n"
    )
    tied = MODELS.replace("        self.gru =", line + "        self.gru =")
    executor = Executor(resolve_study(load_study(write_models(tmp_path, tied)), CPU), tmp_path / "runs")
    params = {"gru.size": 8, "wide.width": 2, "max_steps": 4}
    assert executor.run(params, tmp_path / "trial", "key").outcome == "complete"
    folder = export_checkpoint(executor, tmp_path / "trial", tmp_path / "model", TrialSource(0, params))
    encoder: Any = hpo.load(folder, device="cpu").network.encoder  # type: ignore[union-attr]
    assert encoder.module.out.weight is encoder.module.embed.weight


def test_the_check_of_the_data_knows_the_metrics(tmp_path: Path) -> None:
    write_models(tmp_path, objective={"metric": "tone/kapa"}, constraints={})
    refused = hpo_command(tmp_path, "check", "tiny.yaml")
    message = "objective.metric: no task of this study has 'tone/kapa'. Did you mean `tone/kappa`?"
    assert (refused.exit_code, message in refused.err) == (2, True), refused
