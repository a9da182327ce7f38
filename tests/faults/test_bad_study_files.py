"""Errors of study files: `file:line: key: requirement, value`."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hpo.config.study_config import load_study
from hpo.config.study_file import StudyFile, read_study_file
from hpo.errors import StudyFileError

LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{above}'] * 10)}]\n" for above, name in pairwise("abcdefghij")
)
BASE = "name: s\ndata: {source: synthetic}\n"


def problems_of(folder: Path, text: str) -> list[str]:
    """Return the lines of the error, without the folder."""
    path = folder / "study.yaml"
    path.write_text(text)
    with pytest.raises(StudyFileError) as caught:
        load_study(path)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "").splitlines()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ": the file is empty. A study needs at least `name` and `data`."),
        ("name: s\ndata: [1,\n", ":3: this is not valid YAML: "),
        ("name: &a [*a]\n", ":1: this is not valid YAML: name.0: `*a` is an alias"),
        (LAUGHS, ":2: this is not valid YAML: b.0: `*a` is an alias, which is not read: write the value"),
        ("[" * 1000, ": this is not valid YAML: maximum recursion depth exceeded"),
        ("- name\n- data\n", ":1: a study file must be a mapping of keys such as `name:` and `data:`, but"),
    ],
)
def test_file_without_study_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems_of(tmp_path, text)
    assert found.startswith(f"study.yaml{problem}")


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    for name, why in (
        ("folder.yaml", "the file cannot be read: Is a directory"),
        ("nowhere", "the file cannot be read: No such file"),
        ("bytes.yaml", "the file must be text in UTF-8, but byte 6 is not"),
    ):
        with pytest.raises(StudyFileError, match=f"{name}: {why}"):
            load_study(tmp_path / name)


# Keys of a study, below `name: s` and synthetic data by default, and each line of the error.
CASES = """
# keys
path: x
  => 3: path: there is no such key. Did you mean `data.path`?
training:
  seed: 1
  pooling: cls
  seed: 2
  => 4: training.seed: the key is written twice, on lines 4 and 6. Keep one.
data:
  source: synthetic
  synthetic: {num_tain: 3}
  => 4: data.synthetic.num_tain: there is no such key. Did you mean `num_train`?
# values
n_trials: 12.5
  => 3: n_trials: must be a whole number, but got `12.5`.
training: {betas: [0.9, 1.5]}
  => 3: training.betas.1: must be < 1, but got `1.5`.
training: {optimizer: adamW}
  => 3: training.optimizer: must be one of adamw, adam, adafactor, lion, sgd, but got `adamW`. Did you mean
     `adamw`?
training: {max_steps: 1e30}
  => 3: training.max_steps: must be between -2^53 and 2^53, but got `1000000000000000019884624838656`.
training: {fp_precision: bf61}
  => 3: training.fp_precision: no precision is called 'bf61'. Did you mean `bf16`?
model: {encoder: 3}
  => 3: model.encoder: must be a name, a hub id, a folder, or a mapping with the config of a fresh encoder,
     but got `3`.
objective: []
  => 3: objective: there must be at least one objective.
objective: {metric: severity/mae}
  => 3: objective.direction: must be `minimize` for `severity/mae`: smaller is better.
objective: {metric: scor}
  => 3: objective.metric: unknown metric `scor`; one of a task is `task/name`. Did you mean `score`?
objective: [{metric: score}, {metric: score}]
  => 3: objective.1.metric: `score` is there twice. Keep one.
training: {loss_weight.a: 1, loss_weight: {a: 2}}
  => 3: training: `loss_weight.a` is given twice. Keep one.
name: a/b
data: {source: synthetic}
  => 1: name: must be letters, digits, `.`, `_` and `-`, at most 100, but got `a/b`.
# data
data: {source: jsonl}
  => 2: data.path: must be given for jsonl, or else `files.train`.
data: {source: jsonl, files: {train: a.jsonl}}
  => 2: data.tasks: must be given where there is no `path` with a tasks.json.
data: {source: hub}
  => 2: data.hub: must be given for source hub.
  => 2: data.tasks: must be given for source hub.
data: {source: synthetic, path: x}
  => 2: data.path: is read with source jsonl, csv, parquet, but the source is synthetic.
data: {source: jsonl, path: x, tasks: {a: {kind: singel_label}, b: 3}}
  => 2: data.tasks.a.kind: must be one of single_label, multi_label, token_classification, span_extraction,
     span_per_label, regression, but got `singel_label`. Did you mean `single_label`?
  => 2: data.tasks.b: must be a mapping of keys, but got `3`.
data: {source: synthetic, validation_fraction: 0.6, test_fraction: 0.5}
  => 2: data.test_fraction: validation and test must leave a part for training.
data: {source: synthetic, synthetic: {min_sentences: 9}}
  => 2: data.synthetic.min_sentences: `min_sentences <= max_sentences` must hold, but got 9 and 6.
# search
search_space: {learning_rate: 3}
  => 3: search_space.learning_rate: must be a mapping such as `{type: categorical, choices: [...]}`, but got
     `3`.
search_space: {learning_rate: {low: 1, high: 2}}
  => 3: search_space.learning_rate.type: must be given: one of categorical, float, int.
search_space: {learning_rate: {type: float, low: 1e-2, high: 1e-3}}
  => 3: search_space.learning_rate.low: `low <= high` must hold, but got low 0.01 and high 0.001.
search_space: {weight_decay: {type: float, low: 0, high: 0.1, log: true}}
  => 3: search_space.weight_decay.low: `low > 0` must hold with `log: true`, but got 0.0.
search_space: {learning_rate: {type: float, low: 1e-3, high: 1e-2, step: 1e-3, log: true}}
  => 3: search_space.learning_rate.step: `step` and `log: true` exclude each other. Keep one.
search_space: {head_dropout: {type: float, low: 0, high: 0.5, step: 0.2}}
  => 3: search_space.head_dropout.high: must be `low` plus a multiple of `step`; 0.4 is, 0.5 is not.
search_space: {batch_size: {type: float, low: 8, high: 32}}
  => 3: search_space.batch_size.type: must be `int`: the setting takes whole numbers.
search_space: {pooling: {type: categorical, choices: []}}
  => 3: search_space.pooling.choices: must be a list of at least 1, but got `[]`.
search_space: {pooling: {type: categorical, choices: [mean, cls, mean]}}
  => 3: search_space.pooling.choices.2: `mean` is there twice. Keep one.
search_space: {fp_precision: {type: categorical, choices: [bf16, bf16-mixed]}}
  => 3: search_space.fp_precision.choices.1: `bf16-mixed` means the same as `bf16`. Keep one.
search_space: {fp_precision: {type: categorical, choices: [null, bf16]}}
  => 3: search_space.fp_precision.choices.0: must be named: a search cannot compare `null`.
# conditions
search_space:
  fp_precision: {type: categorical, choices: [fp32, fp16]}
  init_scale: {type: categorical, choices: [1024, 65536], when: {fp_precison: fp16}}
  => 5: search_space.init_scale.when.fp_precison: must name another setting of `search_space`. Did you mean
     `fp_precision`?
search_space:
  fp_precision: {type: categorical, choices: [fp32, fp16]}
  init_scale: {type: categorical, choices: [1024, 65536], when: {fp_precision: [fp16, bf16]}}
  => 5: search_space.init_scale.when.fp_precision: `fp_precision` is never `bf16`: its choices are `fp32`,
     `fp16`.
search_space:
  loss: {type: categorical, choices: [bce, focal]}
  pooling: {type: categorical, choices: [cls, mean], when: {loss: bce}}
  head_type: {type: categorical, choices: [mlp, linear], when: {pooling: cls}}
  => 6: search_space.head_type.when.pooling: must name categorical settings without `when`, but `pooling` is
     none.
# budget
budget: {}
  => 3: budget.hours: must be given.
# twice
training: {learning_rate: 1e-4}
search_space: {learning_rate: {type: float, low: 1e-5, high: 1e-3}}
  => 4: search_space.learning_rate: is fixed too, as `training.learning_rate`. Fix it or search it, not both.
training: {max_seconds: 10}
search_space: {epochs: {type: int, low: 1, high: 3}}
  => 4: search_space.epochs: a trial has one budget, but this study gives epochs and training.max_seconds.
     Keep one.
training: {epochs: 1, max_steps: 5, max_seconds: 3}
  => 3: training: a trial has one budget, but epochs and max_steps and max_seconds are given. Keep one.
model: {encoder: a}
training: {encoder: b}
  => 4: training.encoder: is given too as `model.encoder`. Keep one.
# sampler
objective: [{metric: score}, {metric: train_examples_per_second}]
pruner: {name: hyperband}
  => 4: pruner.name: must be `promote` or `none` with several objectives.
sampler: {name: grid}
search_space:
  learning_rate: {type: float, low: 1e-5, high: 1e-3}
  => 5: search_space.learning_rate.step: must be given for a grid; or list the values as `choices`.
sampler: {name: gp, population_size: 4}
  => 3: sampler.population_size: is an option of nsga2, but the name is gp.
"""


def cases() -> Iterator[tuple[str, list[str]]]:
    """Yield the text and the messages of each case. A deeper line continues a message."""
    text, messages = "", []
    for line in re.sub(r"\n     +", " ", re.sub(r"(?m)^#.*\n", "", CASES.strip())).splitlines():
        if line.startswith("  => "):
            messages.append(f"study.yaml:{line.removeprefix('  => ')}")
            continue
        if messages:
            yield text, messages
            text, messages = "", []
        text += f"{line}\n"
    yield text, messages


@pytest.mark.parametrize(("text", "problems"), [pytest.param(*case, id=case[0]) for case in cases()])
def test_wrong_key_is_one_error(tmp_path: Path, text: str, problems: list[str]) -> None:
    name = "" if text.startswith("name:") else "name: s\n"
    data = "" if re.search(r"(?m)^data:", text) else "data: {source: synthetic}\n"
    assert problems_of(tmp_path, name + data + text) == problems


def test_large_stride_is_refused(tmp_path: Path) -> None:
    data = "name: s\ndata: {source: synthetic, long_text: window, stride: 64}\n"
    choices = "search_space:\n  max_length: {type: categorical, choices: [64, 256]}\n"
    for lines, shortest in (("training: {max_length: 100}\n", 100), (choices, 64)):
        message = f"study.yaml:2: data.stride: must be at most half of `max_length`, but is 64 of {shortest}."
        assert problems_of(tmp_path, data + lines) == [message]


def test_all_problems_are_in_order_of_file(tmp_path: Path) -> None:
    text = """nmae: x
n_trials: 12.5
n_trials: 3
data: {source: jsonl, colums: {text: 1}, tasks: {a: {kind: singel_label}}}
training: {learning_rate: 1e-4}
search_space:
  fp_precision: {type: categorical, choices: [none, fp32, bf61]}
  learning_rate: {type: float, low: 1e-2, high: 1e-3, log: true}
"""
    found = [line.split(": ")[:2] for line in problems_of(tmp_path, text)]
    assert found == [
        ["study.yaml:1", "name"],
        ["study.yaml:1", "nmae"],
        ["study.yaml:2", "n_trials"],
        ["study.yaml:4", "data.tasks.a.kind"],
        ["study.yaml:4", "data.colums"],
        ["study.yaml:7", "search_space.fp_precision.choices.1"],
        ["study.yaml:7", "search_space.fp_precision.choices.2"],
        ["study.yaml:8", "search_space.learning_rate.low"],
        ["study.yaml:8", "search_space.learning_rate"],
    ]


def paths_in(content: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in `content`."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*where, key)
        if isinstance(value, (dict, list)):
            yield from paths_in(value, (*where, key))


STRANGE: list[Any] = [None, -1, float("nan"), "x", [], {}, [[]], {1: 2}]


def test_strange_value_anywhere_is_study_file_error(monkeypatch: pytest.MonkeyPatch) -> None:
    path = load_study("multitask").path
    original = read_study_file(path).content
    messages: list[str] = []
    for path_in in paths_in(original):
        for value in STRANGE:
            content = parent = copy.deepcopy(original)
            for key in path_in[:-1]:
                parent = parent[key]
            parent[path_in[-1]] = value
            file = StudyFile(path, content, {}, ())
            monkeypatch.setattr("hpo.config.study_config.read_study_file", lambda _, file=file: file)
            try:
                load_study(path)
            except StudyFileError as error:
                messages += str(error).splitlines()
    assert len(messages) > 200
    assert all(message.startswith(f"{path}:1: ") for message in messages)
