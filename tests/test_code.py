"""A study with code of its own: trained, killed, resumed, exported; and who may have it run where."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
import torch
import yaml
from command_line import (
    ROOT,
    finish,
    hpo_command,
    ok,
    saved_steps,
    start_hpo,
    start_python,
    stored,
    wait_until,
)
from jsonl_sets import write_set
from tiny import CPU, TinyEncoder, write_study

import hpo
from hpo import code as own_code
from hpo.code import name_code, use_code
from hpo.config.study_config import load_study, stored_study
from hpo.config.trial_config import build_trial_config, parse_params
from hpo.config.trial_settings import setting_of
from hpo.data.tasks import Task
from hpo.errors import InputError, StudyFileError
from hpo.models.multitask import HeadSettings, MultitaskModel
from hpo.study.store.schema import studies
from hpo.study.store.storage import open_storage
from hpo.tasks.registry import KINDS
from hpo.training.losses import LossOptions, loss_sum
from hpo.trial.best_model import TrialSource, export_checkpoint, split_predictions
from hpo.trial.callbacks import Callbacks
from hpo.trial.compat import cache_key
from hpo.trial.executor import Executor
from hpo.trial.trial_parts import TrialLoader, build_trial
from hpo.trial.trial_run import checkpoint_key

EXAMPLE = (ROOT / "studies" / "own_kind.py").read_text()
NOTED = "\nwith open(__file__ + '.ran', 'a') as note:\n    note.write('x')  # each time it is run\n"
TASKS = {"times": {"kind": "count"}, "tone": {"kind": "single_label", "classes": ["no", "yes"]}}
TRAINING = {"max_steps": 60, "batch_size": 8, "max_length": 16, "dropout": 0.0, "fp_precision": "fp32"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the user has named in this process, as each process begins: nothing."""
    for name in ("_named", "_brought", "_in_use"):
        monkeypatch.setattr(own_code, name, {})
    before = {id(registry): dict(registry) for registry in own_code._registries}
    yield
    for registry in own_code._registries:
        registry.clear()
        registry.update(before[id(registry)])


def count_rows(split: str, size: int) -> list[dict[str, Any]]:
    """Posts in which a word occurs 0 to 4 times, which is what is counted."""
    times = [number * number % 5 for number in range(size)]
    return [
        {
            "id": f"{split}-{number}",
            "text": "it hurts " * count + "today",
            "labels": {"times": count, "tone": "yes" if count else "no"},
        }
        for number, count in enumerate(times)
    ]


def write(folder: Path, source: str = EXAMPLE + NOTED, **changes: Any) -> Path:
    """The tiny study with a task of an own kind, beside the file of its code."""
    (folder / "own_kind.py").write_text(source)
    data = write_set(
        folder / "rows",
        TASKS,
        train=count_rows("train", 40),
        validation=count_rows("v", 20),
        test=count_rows("t", 20),
    )
    (data / "tasks.json").unlink()
    named = {"source": "jsonl", "path": "rows", "tasks": TASKS}
    given = {"data": named, "code": "own_kind.py", "training": TRAINING, "objective": {"metric": "times/r2"}}
    return write_study(folder, **(given | changes))


def runs_of(code: Path) -> int:
    note = Path(f"{code}.ran")
    return len(note.read_text()) if note.exists() else 0


def refused(folder: Path, *arguments: str) -> str:
    """What a command says that ends with exit code 2, in a process of its own."""
    finished = finish(start_hpo(folder, *arguments))
    assert finished.exit_code == 2, finished
    assert "Traceback" not in finished.err
    return finished.err


def test_killed_resumed_exported_and_in_use(tmp_path: Path) -> None:
    """The whole way; and at each door other code is refused."""
    write(tmp_path, checkpoint={"every_seconds": 0.1}, evaluation={"per_trial": 4}, n_trials=1)
    process = start_hpo(tmp_path, "run", "tiny.yaml")
    wait_until(lambda: bool(saved_steps(tmp_path)), process)
    process.kill()
    assert finish(process).exit_code == -signal.SIGKILL
    assert stored(tmp_path).slots["done"] == 0, "killed too late to test anything"

    code = tmp_path / "own_kind.py"
    code.write_text(EXAMPLE + NOTED + "# changed\n")
    assert re.search(r'~ code\.own_kind\.py: "\w{64}" -> "\w{64}"', refused(tmp_path, "run", "tiny.yaml"))
    code.write_text(EXAMPLE + NOTED)
    ok(finish(start_hpo(tmp_path, "run", "tiny.yaml")))
    (trial,) = stored(tmp_path).trials
    assert trial.outcome == "complete"
    assert trial.telemetry["resumed_from_step"] > 0

    assert "needs the code `own_kind.py`" in refused(tmp_path, "best", "tiny", "--export", "model")
    ok(finish(start_hpo(tmp_path, "best", "tiny", "--export", "model", "--trust-code", "own_kind.py")))
    predict = ("predict", "model", str(tmp_path / "rows" / "test.jsonl"))
    assert "needs the code `own_kind.py`" in refused(tmp_path, *predict)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own_kind.py").write_text(EXAMPLE)
    other = refused(tmp_path, *predict, "--trust-code", "other/own_kind.py")
    assert "other/own_kind.py is other code: its hash is another" in other
    predicted = ok(finish(start_hpo(tmp_path, *predict, "--trust-code", "own_kind.py", "--json"))).json
    assert predicted["num_predictions"] == 20

    with pytest.raises(InputError, match="needs the code `own_kind"):
        hpo.load(tmp_path / "model", device="cpu")
    model = hpo.load(tmp_path / "model", device="cpu", code=code)
    rates = [one["times"].label for one in model.predict(["today", "it hurts it hurts it hurts today"])]
    assert 0 < rates[0] < rates[1]


def test_the_database_has_nothing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what lies on this machine, wherever that is, but what its user names."""
    made, here = tmp_path / "made", tmp_path / "here"
    made.mkdir()
    here.mkdir()
    ok(finish(start_hpo(made, "init", str(write(made)))))
    code = here / "own_kind.py"
    code.write_text(EXAMPLE + NOTED)
    monkeypatch.setenv("HPO_ALLOW", str(made / "rows"))
    url = f"sqlite:///{made}/runs/hpo.db"
    for name in (str(code), "own_kind", "own_kind.py"):  # as a definition may name it
        with open_storage(url) as storage, storage.engine.begin() as connection:
            definition = json.loads(connection.execute(sa.select(studies)).one().definition)
            changed = definition | {"code": {name: hashlib.sha256(code.read_bytes()).hexdigest()}}
            connection.execute(sa.update(studies).values(definition=json.dumps(changed)))
        for command in (("worker", "tiny"), ("verify", "tiny")):
            refusal = hpo_command(here, *command, "--storage", url)
            assert (refusal.exit_code, f"needs the code `{name}`" in refusal.err) == (2, True)
        assert "needs the code" in ok(hpo_command(here, "worker", "--storage", url)).err
        assert "0 of 2 trials done" in ok(hpo_command(here, "status", "tiny", "--storage", url)).out
    assert runs_of(code) == 0
    trusted = ("worker", "tiny", "--storage", url, "--trust-code", "own_kind.py", "--workers", "2")
    ok(finish(start_hpo(here, *trusted)))
    assert runs_of(code) == 3  # here and in each of the workers
    with open_storage(url, create=False) as storage:
        assert storage.slot_counts("tiny")["done"] == 2


def test_the_ranks_of_torchrun_run_the_code_that_the_first_names(tmp_path: Path) -> None:
    """Of a worker, only the first of them reads the study file."""
    path = write(tmp_path, n_trials=1, training=TRAINING | {"max_steps": 4})
    ok(hpo_command(tmp_path, "init", path.name))
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hpo")
    ended = finish(start_python(tmp_path, *module, "worker", path.name))
    assert ended.exit_code == 0, ended.err
    assert runs_of(tmp_path / "own_kind.py") == 3
    assert [trial.outcome for trial in stored(tmp_path).trials] == ["complete"]


def test_a_definition_is_read_without_its_code_but_not_trained(tmp_path: Path) -> None:
    definition = load_study(write(tmp_path)).definition()
    assert definition["code"] == {"own_kind.py": name_code(str(tmp_path / "own_kind.py")).sha256}
    assert "count" in KINDS
    load_study(write(tmp_path, "", code=[], data={"source": "synthetic"}, objective={"metric": "score"}))
    assert "count" not in KINDS, "a name is known where its study is in use"
    assert stored_study("tiny", definition).data.tasks == {"tasks": TASKS}
    del definition["code"]
    with pytest.raises(InputError, match=r"data\.tasks\.times\.kind: must be one of .*, but got `count`"):
        stored_study("tiny", definition)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import hpo\n\nclass\n", r"own_kind\.py:3: SyntaxError: invalid syntax"),
        ("\n\nraise SystemExit(3)\n", r"own_kind\.py:3: SystemExit: 3"),
        ("def f():\n    return {}['a']\n\nf()\n", r"own_kind\.py:2: KeyError: 'a'"),
        (
            EXAMPLE + "\n\nhpo.kind(type('C', (Count,), {}))\n",
            rf"py:{len(EXAMPLE.splitlines()) + 3}: ValueError: there is a kind of task `count`",
        ),
        (
            EXAMPLE.replace('"count"', '"regression"'),
            r"py:12: ValueError: there is a kind of task `regression`",
        ),
    ],
)
def test_an_error_in_the_code_has_its_line(tmp_path: Path, source: str, message: str) -> None:
    known = dict(KINDS)
    with pytest.raises(InputError, match=message):
        load_study(write(tmp_path, source))
    assert known == KINDS, "nothing is left of it"


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


def write_extended(folder: Path, source: str = EXTENSIONS, **changes: Any) -> Path:
    """A study with a pooling and a loss of its own, whose options it searches."""
    space = {
        "pooling": {"type": "categorical", "choices": ["mean", "power"]},
        "power.exponent": {"type": "int", "low": 1, "high": 3, "when": {"pooling": "power"}},
        "pinball.level": {"type": "float", "low": 0.05, "high": 0.95},
    }
    given = {
        "data": {"source": "jsonl", "path": "rows", "tasks": NUMBERS},
        "training": TRAINING | {"loss": "pinball", "learning_rate": 3e-3},
        "search_space": space,
        "objective": {"metric": "times/r2"},
    }
    return write(folder, source, **(given | changes))


def test_a_pooling_and_a_loss_with_options(tmp_path: Path) -> None:
    executor = Executor(load_study(write_extended(tmp_path)), CPU, tmp_path / "runs")
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

    folder = export_checkpoint(executor, tmp_path / "cubed", tmp_path / "model", TrialSource(0, params))
    use_code({}, "none")
    with pytest.raises(KeyError):
        MultitaskModel(TinyEncoder(), (), HeadSettings(pooling="power"))
    model = hpo.load(folder, device="cpu", code=tmp_path / "own_kind.py")
    texts = [row["text"] for row in count_rows("t", 20)]
    assert [one["times"].label for one in model.predict(texts)] == pytest.approx(predicted["cubed"], rel=1e-4)


def test_options_are_settings(tmp_path: Path) -> None:
    config = load_study(
        write_extended(tmp_path, training={"loss": "pinball", "power.exponent": 2}, search_space={})
    )
    trial = build_trial_config(config, {}, "fp32")
    assert [setting_of(trial, name) for name in ("power.exponent", "pinball.level")] == [2, 0.5]
    assert parse_params(["pinball.level=0.25"]) == {"pinball.level": 0.25}
    searched = load_study(write_extended(tmp_path)).definition()
    use_code({}, "none")
    for definition in (config.definition(), searched):
        stored_one = stored_study("tiny", json.loads(json.dumps(definition)))
        assert stored_one.definition() == definition, "as it is stored, also where its code is not in use"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"power.exponent": 0}}, r"training\.power\.exponent: must be >= 1, but got `0`"),
        (
            {"training": {"power.exponent": 2}},
            r"power\.exponent: is fixed too, as `training\.power\.exponent`",
        ),
        ({"training": {"power.exponnt": 2}}, r"training\.power\.exponnt: there is no such key"),
        ({"training": {"loss": "pinbal"}}, r"training\.loss: must be one of auto, .*, but got `pinbal`"),
        (
            {"search_space": {"power.exponnt": {"type": "int", "low": 1, "high": 3}}},
            r"power\.exponnt: there is no such setting\. Did you mean `power\.exponent`",
        ),
        (
            {"search_space": {"power.exponent": {"type": "float", "low": 1, "high": 3}}},
            r"power\.exponent\.type: must be `int`: the setting takes whole numbers",
        ),
        (
            {"search_space": {"pinball.level": {"type": "float", "low": 0.5, "high": 1}}},
            r"pinball\.level\.high: must be < 1, but got `1.0`",
        ),
        (
            {"source": EXTENSIONS.replace('"power"', '"mean"')},
            "ValueError: there is a pooling `mean` already",
        ),
        ({"source": EXTENSIONS.replace("= 3", "")}, r"own_kind\.py:14: ValidationError: .*exponent"),
    ],
)
def test_options_are_checked_before_the_study_is_made(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=rf"(?s){message}"):
        load_study(write_extended(tmp_path, **changes))


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


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_an_optimizer_and_a_schedule_with_options(tmp_path: Path, precision: str) -> None:
    """They do what PyTorch's and ours of the same formula do, and their options count."""
    sizes = {"num_train": 40, "num_validation": 8, "num_test": 8, "max_sentences": 2}
    changes = {"data": {"source": "synthetic", "synthetic": sizes}, "objective": {"metric": "score"}}
    training = {"max_steps": 8, "batch_size": 8, "max_length": 32, "dropout": 0.0, "head_dropout": 0.0}
    study = load_study(write(tmp_path, OPTIMIZER, training=training, **changes))
    executor = Executor(study, CPU, tmp_path / "runs")

    def loss_of(**params: Any) -> Any:
        losses: list[Any] = []
        seen = Callbacks(lambda scored: losses.append(scored.evaluation.train_loss))
        given = {"fp_precision": precision, "learning_rate": 0.05} | params
        result = executor.run(given, None, "", seen)
        assert result.outcome == "complete", result.traceback
        return losses[-1]

    ours = loss_of(optimizer="sgd", schedule="linear")
    own = {"optimizer": "heavy_ball", "schedule": "polynomial"}
    momentum = {"heavy_ball.momentum": 0.9}
    assert loss_of(**own, **momentum) == pytest.approx(ours, rel=1e-3)
    assert loss_of(**own) != pytest.approx(ours, rel=1e-3)
    assert loss_of(**own, **momentum, **{"polynomial.power": 4.0}) != pytest.approx(ours, rel=1e-3)


def test_options_on_the_command_line(tmp_path: Path) -> None:
    write_extended(tmp_path)
    ok(hpo_command(tmp_path, "init", "tiny.yaml"))
    given = ("--param", "pooling=power", "--param", "power.exponent=2", "--param", "pinball.level=0.5")
    trained = ok(hpo_command(tmp_path, "train", "tiny.yaml", *given, "--json")).json
    assert trained["params"] == {"pooling": "power", "power.exponent": 2, "pinball.level": 0.5}
    use_code({}, "none")
    assert (
        ok(hpo_command(tmp_path, "enqueue", "tiny", *given, "--json")).json["enqueued"] == trained["params"]
    )
    for name, value in (("power.exponent", 4), ("pooling", "other"), ("power.other", 1)):
        outside = hpo_command(tmp_path, "enqueue", "tiny", "--param", f"{name}={value}")
        assert (outside.exit_code, f"--param {name}" in outside.err) == (2, True)


def test_a_kind_has_options_too(tmp_path: Path) -> None:
    changes = {
        "@hpo.kind": "class Scale(hpo.Section):\n    scale: float = 1.0\n\n@hpo.kind",
        'losses = ("poisson",)': 'losses = ("poisson",)\n    options = Scale',
        "logits, target, *_)": "logits, target, options, *_)",
        ".sum()": '.sum() * options.of("count").scale',
    }
    source = EXAMPLE
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    load_study(write(tmp_path, source))
    task, logits, target = Task("times", "count"), torch.tensor([[0.5]]), torch.tensor([2.0])
    once, thrice = (
        loss_sum(task, logits, target, LossOptions(option={"count.scale": scale}), None, torch.ones(1, 1))
        for scale in (1.0, 3.0)
    )
    assert thrice == 3 * once != 0


def test_what_is_kept_belongs_to_the_code(tmp_path: Path) -> None:
    """Checkpoints, tokens with targets, and checks of precisions are not those of other code."""
    kept = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        config = load_study(write(tmp_path / str(number), EXAMPLE + f"# {number}\n"))
        parts = build_trial(config, CPU, {"learning_rate": 1e-3}, TrialLoader(config, CPU, tmp_path / "runs"))
        tokens = {path.name for path in (tmp_path / "runs" / "cache" / "tokens").iterdir() if path.is_dir()}
        kept.append((checkpoint_key("key", parts), cache_key(parts), len(tokens)))
    assert all(one != other for one, other in zip(*kept, strict=True)), kept


def test_a_loss_that_fits_no_task(tmp_path: Path) -> None:
    path = write_extended(tmp_path, EXTENSIONS.replace('["regression"]', '["multi_label"]'))
    with pytest.raises(InputError, match="loss: `pinball` fits the kinds multi_label, but the tasks are of"):
        Executor(load_study(path), CPU, tmp_path / "runs")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gone.py", r"tiny\.yaml:\d+: code: .*gone\.py must be a file that can be read, but: No such file"),
        (
            "no_such_module",
            r"code: must be the path of a \.py file, or an installed module, but got `no_such",
        ),
        (7, r"code: must be a path or the name of a module, or a list of them, but got `7`"),
        (["own_kind.py", "./own_kind.py"], r"code: `own_kind\.py` is there twice"),
    ],
)
def test_a_key_that_names_no_code(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(StudyFileError, match=message):
        load_study(write(tmp_path, code=given))


def test_an_installed_package_names_its_code_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "acme_tasks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import kinds\n")
    (package / "kinds.py").write_text(EXAMPLE)
    metadata = tmp_path / "site" / "acme_tasks-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tasks\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[hpo.plugins]\nacme = acme_tasks\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    config = load_study(write(tmp_path, code="acme"))
    assert "count" in KINDS
    (package / "kinds.py").write_text(EXAMPLE + "# changed\n")
    assert name_code("acme").sha256 != config.code["acme"]


def test_two_studies_have_each_its_own_code_under_one_name(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        load_study(write(tmp_path / str(number), EXAMPLE + f"\nCount.number = {number}\n"))
        assert KINDS["count"].number == number  # type: ignore[attr-defined]
    first = {"own_kind.py": name_code(str(tmp_path / "0" / "own_kind.py")).sha256}
    with pytest.raises(InputError, match=r"own_kind\.py: there is a kind of task `count` already"):
        use_code(first, "A model", stays=True)


def test_batch_jobs_get_the_code_of_the_study(tmp_path: Path) -> None:
    path = write(tmp_path)
    options = ("--slurm", "--dry-run", "--storage", "postgresql://db/x")
    script = ok(hpo_command(tmp_path, "submit", str(path), *options)).out
    assert re.search(rf"--trust-code {tmp_path}/runs/tiny/slurm-[\w-]+/own_kind\.py", script)
    options = ("--kubernetes", "--image", "hpo", "--volume-claim", "shared")
    manifests = list(yaml.safe_load_all(ok(hpo_command(tmp_path, "submit", str(path), *options)).out))
    files = next(one["data"] for one in manifests if one["kind"] == "ConfigMap")
    job = next(one for one in manifests if one["kind"] == "Job")["spec"]["template"]["spec"]
    items = next(volume["configMap"]["items"] for volume in job["volumes"] if volume["name"] == "study")
    assert {one["path"]: files[one["key"]] for one in items} == {
        "study.yaml": path.read_text().rstrip("\n") + "\n",
        "own_kind.py": EXAMPLE + NOTED,
    }
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "tiny.yaml").write_text(path.read_text().replace("own_kind.py", "../own_kind.py"))
    outside = hpo_command(tmp_path, "submit", "below/tiny.yaml", *options)
    assert (outside.exit_code, "must lie in the folder of the study file" in outside.err) == (2, True)
