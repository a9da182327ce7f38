"""Study files that are wrong, and the message for each: file, line, key, what came, what must hold."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpo.config.study_config import load_study
from hpo.config.study_file import read_study_file
from hpo.errors import StudyFileError

BASE = "name: s\ndata: {source: synthetic}\n"


def problems_of(folder: Path, text: str) -> list[str]:
    """The lines of the error, without the folder."""
    path = folder / "study.yaml"
    path.write_text(text)
    with pytest.raises(StudyFileError) as caught:
        load_study(path)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def searched(line: str) -> str:
    return f"{BASE}search_space:\n  {line}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "study.yaml: the file is empty. A study needs at least `name` and `data`."),
        ("# only a comment\n", "study.yaml: the file is empty. A study needs at least `name` and `data`."),
        (
            "name: s\ndata: [1,\n",
            (
                "study.yaml:3: this is not valid YAML: while parsing a flow node, expected the node content, "
                "but found '<stream end>'."
            ),
        ),
        (
            "name: s\n\tdata: x\n",
            (
                "study.yaml:2: this is not valid YAML: while scanning for the next token, found "
                "character '\\t' "
                "that cannot start any token."
            ),
        ),
        (
            "name: s\n---\nname: t\n",
            (
                "study.yaml:2: this is not valid YAML: expected a single document in the stream, but found "
                "another document."
            ),
        ),
        ("name: &a [*a]\n", "study.yaml:1: this is not valid YAML: an alias contains itself."),
        (
            "- name\n- data\n",
            (
                "study.yaml:1: a study file must be a mapping of keys such as `name:` and `data:`, "
                "but this is "
                "`[name, data]`."
            ),
        ),
        (
            "just text\n",
            (
                "study.yaml:1: a study file must be a mapping of keys such as `name:` and `data:`, "
                "but this is "
                "`just text`."
            ),
        ),
    ],
)
def test_files_that_are_no_study(tmp_path: Path, text: str, problem: str) -> None:
    assert problems_of(tmp_path, text) == [problem]


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(StudyFileError, match=r"nowhere\.yaml: there is no such file\."):
        load_study(tmp_path / "nowhere.yaml")


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(StudyFileError, match=r"folder\.yaml: the file cannot be read: Is a directory\."):
        load_study(tmp_path / "folder.yaml")


def test_a_binary_file(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(StudyFileError, match=r"a study file must be UTF-8 text, but byte 6 is not\."):
        load_study(tmp_path / "study.yaml")


def test_a_name_with_a_folder_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(StudyFileError, match=r"there is no such file"):
        load_study(tmp_path / "study")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nam: x", "study.yaml:3: nam: there is no such key. Did you mean `name`?"),
        ("samler: {name: tpe}", "study.yaml:3: samler: there is no such key. Did you mean `sampler`?"),
        ("sampler: {sed: 1}", "study.yaml:3: sampler.sed: is no option of tpe. Did you mean `seed`?"),
        (
            "objective:\n- {metric: score}\n- {metrc: x/f1_micro}",
            "study.yaml:5: objective.1.metrc: there is no such key. Did you mean `metric`?",
        ),
        (
            "objective: {metrc: x}",
            "study.yaml:3: objective.metrc: there is no such key. Did you mean `metric`?",
        ),
        (
            "training:\n  lerning_rate: 1e-4",
            "study.yaml:4: training.lerning_rate: there is no such key. Did you mean `learning_rate`?",
        ),
        ("amp: {preest: auto}", "study.yaml:3: amp.preest: there is no such key. Did you mean `preset`?"),
        ("path: x", "study.yaml:3: path: there is no such key. Did you mean `data.path`?"),
        (
            "n_trials: 3\nn_trials: 4",
            "study.yaml:3: n_trials: the key is written twice, on lines 3 and 4. Keep one.",
        ),
        (
            "training:\n  seed: 1\n  pooling: cls\n  seed: 2",
            "study.yaml:4: training.seed: the key is written twice, on lines 4 and 6. Keep one.",
        ),
    ],
)
def test_unknown_and_repeated_keys(tmp_path: Path, text: str, problem: str) -> None:
    assert problems_of(tmp_path, f"{BASE}{text}\n") == [problem]


def test_unknown_keys_of_data(tmp_path: Path) -> None:
    text = "name: s\ndata:\n  source: synthetic\n  synthetic: {num_tain: 3}\n"
    assert problems_of(tmp_path, text) == [
        "study.yaml:4: data.synthetic.num_tain: there is no such key. Did you mean `num_train`?"
    ]


def test_keys_that_are_not_text(tmp_path: Path) -> None:
    assert problems_of(tmp_path, f"{BASE}training: {{1: x}}\n")[0] == (
        "study.yaml:3: training.1: a key must be text: put it in quotes."
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("n_trials: 12.5", "n_trials: must be a whole number, but got `12.5`."),
        ("n_trials: '12'", "n_trials: must be a whole number, but got `12`."),
        ("n_trials: true", "n_trials: must be a whole number, but got `true`."),
        ("n_trials: 0", "n_trials: must be >= 1, but got `0`."),
        ("n_trials: 1e9", "n_trials: must be <= 100000, but got `1000000000.0`."),
        ("given: [a]", "given: there is no such key."),
        ("timeout: soon", "timeout: must be a number, but got `soon`."),
        ("timeout: .inf", "timeout: must be a finite number, but got `.inf`."),
        ("training: [1]", "training: must be a mapping of keys, but got `[1]`."),
        ("sampler: tpe", "sampler: must be a mapping of keys, but got `tpe`."),
        ("training: {learning_rate: 0}", "training.learning_rate: must be > 0, but got `0`."),
        ("training: {betas: [0.9]}", "training.betas.1: must be given."),
        ("training: {betas: [0.9, 1.5]}", "training.betas.1: must be < 1, but got `1.5`."),
        (
            "training: {gradient_checkpointing: 1}",
            "training.gradient_checkpointing: must be true or false, but got `1`.",
        ),
        (
            "training: {pooling: median}",
            (
                "training.pooling: must be one of cls, mean, max, attention, but got `median`. "
                "Did you mean `mean`?"
            ),
        ),
        (
            "training: {fp_precision: bf61}",
            "training.fp_precision: no precision is called 'bf61'. Did you mean `bf16`?",
        ),
        (
            "training: {fp_precision: 16}",
            "training.fp_precision: must be text, but got `16`. Put it in quotes.",
        ),
        ("device: gpu", "device: must be one of auto, cpu, cuda, but got `gpu`. Did you mean `cpu`?"),
        (
            "sampler: {name: tpee}",
            (
                "sampler.name: must be one of tpe, gp, cmaes, nsga2, random, grid, qmc, but got `tpee`. "
                "Did you mean `tpe`?"
            ),
        ),
        (
            "pruner: {name: hyprband}",
            (
                "pruner.name: must be one of hyperband, asha, median, percentile, patient, none, but got "
                "`hyprband`. Did you mean `hyperband`?"
            ),
        ),
        (
            "amp: {preset: ulta}",
            "amp.preset: must be one of auto, basic, advanced, ultra, but got `ulta`. Did you mean `ultra`?",
        ),
        (
            "model: {encoder: 3}",
            (
                "model.encoder: must be a name, a hub id, a folder, or a mapping with the config "
                "of a fresh encoder, but got `3`."
            ),
        ),
        ("objective: []", "objective: there must be at least one objective."),
        (
            "objective: {metric: scor}",
            "objective.metric: unknown metric `scor`; one of a task is `task/name`. Did you mean `score`?",
        ),
        (
            "objective: {metric: peak_memory_bytes}",
            "objective.direction: must be `minimize` for `peak_memory_bytes`: smaller is better.",
        ),
        (
            "objective: [{metric: score}, {metric: score}]",
            "objective.1.metric: `score` is there twice. Keep one.",
        ),
        (
            "compat: {degraded_logits_relative_error: 0.9}",
            "compat.degraded_logits_relative_error: must be <= `incompatible_logits_relative_error`.",
        ),
        (
            "training: {loss_weight.a: 1, loss_weight: {a: 2}}",
            "training: `loss_weight.a` is given twice. Keep one.",
        ),
    ],
)
def test_wrong_types_and_values(tmp_path: Path, text: str, problem: str) -> None:
    assert problems_of(tmp_path, f"{BASE}{text}\n") == [f"study.yaml:3: {problem}"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("3", "must be text, but got `3`. Put it in quotes."),
        ("a/b", "must be letters, digits, `.`, `_` and `-`, at most 100, but got `a/b`."),
        ("''", "must be letters, digits, `.`, `_` and `-`, at most 100, but got ``."),
    ],
)
def test_names_that_cannot_be_a_folder(tmp_path: Path, name: str, problem: str) -> None:
    text = f"name: {name}\ndata: {{source: synthetic}}\n"
    assert problems_of(tmp_path, text) == [f"study.yaml:1: name: {problem}"]


@pytest.mark.parametrize(
    ("data", "problems"),
    [
        ("{}", ["data.source: must be given."]),
        (
            "{source: jsn}",
            [
                (
                    "data.source: must be one of synthetic, jsonl, csv, parquet, hub, but got `jsn`. "
                    "Did you mean `jsonl`?"
                )
            ],
        ),
        ("{source: jsonl}", ["data.path: must be given for jsonl, or else `files.train`."]),
        (
            "{source: jsonl, files: {train: a.jsonl}}",
            ["data.tasks: must be given where there is no `path` with a tasks.json."],
        ),
        (
            "{source: hub}",
            ["data.hub: must be given for source hub.", "data.tasks: must be given for source hub."],
        ),
        (
            "{source: synthetic, path: x}",
            ["data.path: is read with source jsonl, csv, parquet, but the source is synthetic."],
        ),
        (
            "{source: jsonl, path: x, columns: {text: t}}",
            ["data.columns: is read with source csv, parquet, hub, but the source is jsonl."],
        ),
        ("{source: jsonl, path: 3}", ["data.path: must be a path, but got `3`."]),
        ("{source: jsonl, path: x, tasks: {}}", ["data.tasks: there must be at least one task."]),
        (
            "{source: jsonl, path: x, tasks: {tasks: {}}}",
            ["data.tasks.tasks: there must be at least one task."],
        ),
        (
            "{source: jsonl, path: x, tasks: {a: {kind: singel_label}, b: {classes: [c]}, d: 3}}",
            [
                "data.tasks.a.kind: unknown kind `singel_label`. Did you mean `single_label`?",
                (
                    "data.tasks.b.kind: must be given: one of single_label, multi_label, "
                    "token_classification, "
                    "span_extraction, span_per_label, regression."
                ),
                "data.tasks.d: must be a mapping with `kind`, got `3`.",
            ],
        ),
        (
            "{source: synthetic, validation_fraction: 0.6, test_fraction: 0.5}",
            ["data.test_fraction: validation and test must leave a part for training."],
        ),
        (
            "{source: synthetic, synthetic: {min_sentences: 9}}",
            ["data.synthetic.min_sentences: `min_sentences <= max_sentences` must hold, but got 9 and 6."],
        ),
        (
            "{source: hub, tasks: t.json, hub: {name: a/b, splits: {dev: x}}}",
            ["data.hub.splits.dev: must be one of train, validation, test, but got `dev`."],
        ),
    ],
)
def test_data_sections(tmp_path: Path, data: str, problems: list[str]) -> None:
    text = f"name: s\ndata: {data}\n"
    assert problems_of(tmp_path, text) == [f"study.yaml:2: {problem}" for problem in problems]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "learning_rate: 3",
            ": must be a mapping such as `{type: categorical, choices: [...]}`, but got `3`.",
        ),
        ("learning_rate: {low: 1, high: 2}", ".type: must be given: one of categorical, float, int."),
        ("learning_rate: {type: flaot, low: 1}", ".type: unknown type `flaot`. Did you mean `float`?"),
        ("learning_rate: {type: [float]}", ".type: unknown type `[float]`. Did you mean `float`?"),
        ("learning_rate: {type: float, low: 1e-3}", ".high: must be given."),
        (
            "learning_rate: {type: float, low: 1e-3, hihg: 1e-2, high: 1e-2}",
            ".hihg: there is no such key. Did you mean `high`?",
        ),
        (
            "learning_rate: {type: float, low: 1e-2, high: 1e-3}",
            ".low: `low <= high` must hold, but got low 0.01 and high 0.001.",
        ),
        (
            "weight_decay: {type: float, low: 0, high: 0.1, log: true}",
            ".low: `low > 0` must hold with `log: true`, but got 0.0.",
        ),
        (
            "freeze_layers: {type: int, low: 0, high: 3, log: true}",
            ".low: `low > 0` must hold with `log: true`, but got 0.",
        ),
        (
            "learning_rate: {type: float, low: 1e-3, high: 1e-2, step: 1e-3, log: true}",
            ".step: `step` and `log: true` exclude each other. Keep one.",
        ),
        ("learning_rate: {type: float, low: 1e-3, high: 2e-3, step: 0}", ".step: must be > 0, but got `0`."),
        (
            "head_dropout: {type: float, low: 0, high: 0.5, step: 0.2}",
            ".high: must be `low` plus a multiple of `step`; 0.4 is, 0.5 is not.",
        ),
        ("learning_rate: {type: float, low: a, high: 2}", ".low: must be a number, but got `a`."),
        (
            "learning_rate: {type: float, low: .nan, high: 2}",
            ".low: must be a finite number, but got `.nan`.",
        ),
        ("learning_rate: {type: float, low: 1e-5, high: 20}", ".high: must be <= 10, but got `20.0`."),
        (
            "batch_size: {type: float, low: 8, high: 32}",
            ".type: must be `int`: the setting takes whole numbers.",
        ),
        ("batch_size: {type: int, low: 0, high: 32}", ".low: must be >= 1, but got `0`."),
        ("batch_size: {type: int, low: 1.5, high: 32}", ".low: must be a whole number, but got `1.5`."),
        ("pooling: {type: categorical}", ".choices: must be given."),
        (
            "pooling: {type: categorical, choices: []}",
            ".choices: must be a list of at least 1, but got `[]`.",
        ),
        ("pooling: {type: categorical, choices: cls}", ".choices: must be a list, but got `cls`."),
        (
            "pooling: {type: categorical, choices: [mean, median]}",
            ".choices.1: must be one of cls, mean, max, attention, but got `median`. Did you mean `mean`?",
        ),
        (
            "pooling: {type: categorical, choices: [mean, cls, mean]}",
            ".choices.2: `mean` is there twice. Keep one.",
        ),
        (
            "fp_precision: {type: categorical, choices: [bf16, bf16-mixed]}",
            ".choices.1: `bf16-mixed` means the same as `bf16`. Keep one.",
        ),
        (
            "fp_precision: {type: categorical, choices: [fp32, bf61]}",
            ".choices.1: no precision is called 'bf61'. Did you mean `bf16`?",
        ),
        (
            "fp_precision: {type: categorical, choices: [null, bf16]}",
            ".choices.0: must be named: `null` leaves it open, which a search cannot compare.",
        ),
        (
            "lerning_rate: {type: float, low: 1e-5, high: 1e-3}",
            ": there is no such setting. Did you mean `learning_rate`?",
        ),
        (
            "loss_weight: {type: float, low: 1, high: 2}",
            ": there is no such setting. Search `loss_weight.<task>`.",
        ),
    ],
)
def test_distributions(tmp_path: Path, line: str, problem: str) -> None:
    name = line.split(":")[0]
    assert problems_of(tmp_path, searched(line)) == [f"study.yaml:4: search_space.{name}{problem}"]


def test_a_search_space_that_is_a_list(tmp_path: Path) -> None:
    assert problems_of(tmp_path, f"{BASE}search_space: [pooling]\n") == [
        "study.yaml:3: search_space: must be a mapping of settings to distributions, but got `[pooling]`."
    ]


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        (
            "{fp_precison: fp16}",
            "when.fp_precison: must name another setting of `search_space`. Did you mean `fp_precision`?",
        ),
        ("{init_scale: 1024}", "when: the conditions form a circle: init_scale -> init_scale."),
        (
            "{fp_precision: [fp16, bf16]}",
            "when.fp_precision: `fp_precision` is never `bf16`: its choices are `fp32`, `fp16`.",
        ),
        (
            "{fp_precision: fp61}",
            "when.fp_precision: no precision is called 'fp61'. Did you mean `fp16`?",
        ),
        ("{batch_size: 64}", "when.batch_size: `batch_size` is never `64`: it is between 8 and 32."),
        (
            "{learning_rate: 1e-4}",
            "when.learning_rate: `learning_rate` is a float; a condition needs a categorical or an int.",
        ),
        ("{fp_precision: []}", "when.fp_precision: must be a list of at least 1, but got `[]`."),
        ("fp16", "when: must be a mapping of keys, but got `fp16`."),
    ],
)
def test_conditions(tmp_path: Path, when: str, problem: str) -> None:
    text = f"""{BASE}search_space:
  fp_precision: {{type: categorical, choices: [fp32, fp16]}}
  batch_size: {{type: int, low: 8, high: 32}}
  learning_rate: {{type: float, low: 1e-5, high: 1e-3}}
  init_scale: {{type: categorical, choices: [1024, 65536], when: {when}}}
"""
    assert problems_of(tmp_path, text) == [f"study.yaml:7: search_space.init_scale.{problem}"]


def test_conditions_in_a_circle(tmp_path: Path) -> None:
    text = f"""{BASE}search_space:
  pooling: {{type: categorical, choices: [cls, mean], when: {{loss: bce}}}}
  loss: {{type: categorical, choices: [bce, focal], when: {{head_type: mlp}}}}
  head_type: {{type: categorical, choices: [mlp, linear], when: {{pooling: cls}}}}
"""
    (problem,) = problems_of(tmp_path, text)
    assert "the conditions form a circle: " in problem
    assert problem.endswith("pooling -> loss -> head_type -> pooling.")


@pytest.mark.parametrize(
    ("fixed", "line", "problem"),
    [
        (
            "training: {learning_rate: 1e-4}",
            "learning_rate: {type: float, low: 1e-5, high: 1e-3}",
            "learning_rate: is fixed too, as `training.learning_rate`. Fix it or search it, not both.",
        ),
        (
            "training: {learning_rate: 1e-4, sed: 1}",
            "learning_rate: {type: float, low: 1e-5, high: 1e-3}",
            "learning_rate: is fixed too, as `training.learning_rate`. Fix it or search it, not both.",
        ),
        (
            "training: {loss_weight.a: 2}",
            "loss_weight.a: {type: float, low: 1, high: 2}",
            "loss_weight.a: is fixed too, as `training.loss_weight.a`. Fix it or search it, not both.",
        ),
        (
            "training: {loss_weight: {a: 2}}",
            "loss_weight.a: {type: float, low: 1, high: 2}",
            "loss_weight.a: is fixed too, as `training.loss_weight.a`. Fix it or search it, not both.",
        ),
        (
            "model: {encoder: minilm}",
            "encoder: {type: categorical, choices: [minilm, org/name]}",
            "encoder: is fixed too, as `model.encoder`. Fix it or search it, not both.",
        ),
        (
            "amp: {init_scale: 1024}",
            "init_scale: {type: categorical, choices: [8, 16]}",
            "init_scale: is fixed too, as `amp.init_scale`. Fix it or search it, not both.",
        ),
        (
            "training: {max_seconds: 10}",
            "epochs: {type: int, low: 1, high: 3}",
            "epochs: a trial has one budget, but this study gives epochs and training.max_seconds. Keep one.",
        ),
    ],
)
def test_fixed_and_searched(tmp_path: Path, fixed: str, line: str, problem: str) -> None:
    text = f"{BASE}{fixed}\nsearch_space:\n  {line}\n"
    assert f"study.yaml:5: search_space.{problem}" in problems_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "training: {epochs: 1, max_steps: 5, max_seconds: 3}",
            "training: a trial has one budget, but epochs and max_steps and max_seconds are given. Keep one.",
        ),
        (
            "model: {encoder: a}\ntraining: {encoder: b}",
            "training.encoder: is given too as `model.encoder`. Keep one.",
        ),
        (
            "training: {init_scale: 8}\namp: {init_scale: 16}",
            "amp.init_scale: is given too as `training.init_scale`. Keep one.",
        ),
    ],
)
def test_given_twice(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems_of(tmp_path, f"{BASE}{text}\n")
    assert found.endswith(f": {problem}")


TWO_OBJECTIVES = "objective: [{metric: score}, {metric: train_examples_per_second}]"
CHOICE = "pooling: {type: categorical, choices: [cls, mean]}"
FLOAT = "learning_rate: {type: float, low: 1e-5, high: 1e-3}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"{TWO_OBJECTIVES}\npruner: {{name: hyperband}}",
            "study.yaml:4: pruner.name: must be `none` with several objectives: Optuna cannot prune by them.",
        ),
        (
            (
                f"{TWO_OBJECTIVES}\nsampler: {{name: cmaes}}\nsearch_space:\n  {FLOAT}\n"
                "  head_dropout: {type: float, low: 0, high: 0.5}"
            ),
            "study.yaml:4: sampler.name: cmaes takes one objective. Use tpe, gp or nsga2.",
        ),
        (
            f"sampler: {{name: cmaes}}\nsearch_space:\n  {FLOAT}\n  {CHOICE}",
            (
                "study.yaml:4: search_space: cmaes needs two float or int settings without `when`, but has "
                "learning_rate. Use tpe."
            ),
        ),
        (
            f"sampler: {{name: grid}}\nsearch_space:\n  {FLOAT}",
            (
                "study.yaml:5: search_space.learning_rate.step: must be given for a grid; or list "
                "the values as "
                "`choices`."
            ),
        ),
        (
            "sampler: {name: tpe, n_startup_trial: 4}",
            "study.yaml:3: sampler.n_startup_trial: is no option of tpe. Did you mean `n_startup_trials`?",
        ),
        (
            "sampler: {name: nsga2, population_size: 1}",
            (
                "study.yaml:3: sampler: Optuna refuses the options of nsga2: `population_size` must be "
                "greater than or equal to 2."
            ),
        ),
        (
            "sampler:\n  name: tpe\n  n_startup_trials: ten",
            "study.yaml:5: sampler.n_startup_trials: must be a whole number, but got `ten`.",
        ),
        (
            "sampler: {name: tpe, n_startup_trials: true}",
            "study.yaml:3: sampler.n_startup_trials: must be a whole number, but got `true`.",
        ),
        (
            "sampler: {name: cmaes, sigma0: -0.1}",
            "study.yaml:3: sampler.sigma0: must be >= 0, but got `-0.1`.",
        ),
        (
            "sampler: {name: tpe, constant_liar: 1}",
            "study.yaml:3: sampler.constant_liar: must be true or false, but got `1`.",
        ),
        ("sampler: {name: gp, constraints_func: f}", "is no option of gp."),
        (
            "pruner: {name: none, patience: 3}",
            "study.yaml:3: pruner.patience: is no option of none. Known: name.",
        ),
        (
            "pruner: {name: asha, min_resource: 1.5}",
            "study.yaml:3: pruner.min_resource: must be text or a whole number, but got `1.5`.",
        ),
    ],
)
def test_samplers_and_pruners(tmp_path: Path, text: str, problem: str) -> None:
    assert any(problem in found for found in problems_of(tmp_path, f"{BASE}{text}\n"))


def test_a_grid_with_conditions(tmp_path: Path) -> None:
    text = f"""{BASE}sampler: {{name: grid}}
n_trials: 2
search_space:
  fp_precision: {{type: categorical, choices: [fp32, fp16]}}
  init_scale: {{type: categorical, choices: [8, 16], when: {{fp_precision: fp16}}}}
"""
    assert problems_of(tmp_path, text) == [
        (
            "study.yaml:7: search_space.init_scale.when: a grid combines all values: `when` would "
            "run some of "
            "them twice."
        )
    ]


def test_windows_that_overlap_too_far(tmp_path: Path) -> None:
    data = "name: s\ndata: {source: synthetic, long_text: window, stride: 64}\n"
    choices = "search_space:\n  max_length: {type: categorical, choices: [64, 256]}\n"
    for lines, shortest in (("training: {max_length: 100}\n", 100), (choices, 64)):
        message = f"study.yaml:2: data.stride: must be at most half of `max_length`, but is 64 of {shortest}."
        assert problems_of(tmp_path, data + lines) == [message]


def test_all_problems_of_a_file_are_told_at_once_in_its_order(tmp_path: Path) -> None:
    text = """nmae: x
sampler: {name: tpe, sed: 1}
n_trials: 12.5
n_trials: 3
data: {source: jsonl, colums: {text: 1}, tasks: {a: {kind: singel_label}}}
training: {learning_rate: 1e-4, sede: 1}
amp: {preset: autoo}
pruner: {name: asa}
search_space:
  fp_precision: {type: categorical, choices: [none, fp32, bf61]}
  learning_rate: {type: float, low: 1e-2, high: 1e-3, log: true}
  batch_size: {type: categorical, choices: []}
  init_scale: {type: categorical, choices: [8, 16], when: {head: mlp}}
"""
    found = [line.split(": ")[:2] for line in problems_of(tmp_path, text)]
    assert found == [
        ["study.yaml:1", "name"],
        ["study.yaml:1", "nmae"],
        ["study.yaml:2", "sampler.sed"],
        ["study.yaml:3", "n_trials"],
        ["study.yaml:5", "data.tasks.a.kind"],
        ["study.yaml:5", "data.colums"],
        ["study.yaml:6", "training.sede"],
        ["study.yaml:7", "amp.preset"],
        ["study.yaml:8", "pruner.name"],
        ["study.yaml:10", "search_space.fp_precision.choices.1"],
        ["study.yaml:10", "search_space.fp_precision.choices.2"],
        ["study.yaml:11", "search_space.learning_rate.low"],
        ["study.yaml:11", "search_space.learning_rate"],
        ["study.yaml:12", "search_space.batch_size.choices"],
        ["study.yaml:13", "search_space.init_scale.when.head"],
    ]


def test_a_dotted_key_has_its_own_line(tmp_path: Path) -> None:
    text = f"{BASE}training:\n  seed: 1\n  loss_weight.severity: -1\n"
    assert problems_of(tmp_path, text) == [
        "study.yaml:5: training.loss_weight.severity: must be >= 0, but got `-1`."
    ]


def places(content: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in `content`."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*where, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*where, key))


STRANGE: list[Any] = [None, -1, float("nan"), "x", [], {}, [[]], {1: 2}]


def test_a_strange_value_anywhere_is_told_in_a_study_file_error(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    original = read_study_file(load_study("multitask").path).content
    messages: list[str] = []
    for place in places(original):
        for value in STRANGE:
            content = parent = copy.deepcopy(original)
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
            path.write_text(json.dumps(content))
            try:
                load_study(path)
            except StudyFileError as error:
                messages += str(error).splitlines()
    assert len(messages) > 200
    assert all(message.startswith(f"{path}:1: ") for message in messages)
