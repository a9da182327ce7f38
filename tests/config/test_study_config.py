from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpo.config.sampler_config import PrunerConfig, SamplerConfig
from hpo.config.study_config import StudyConfig, load_study
from hpo.config.trial_settings import TrialSettings, setting_names, setting_value, takes_whole_numbers
from hpo.data.tasks import parse_tasks
from hpo.errors import InputError, StudyFileError
from hpo.precision.table import AmpConfig

STUDIES = Path(__file__).parents[2] / "studies"

DESIGN_STUDY = """
name: multitask
objective: {metric: score, direction: maximize}
sampler: {name: tpe, seed: 42}
pruner: {name: hyperband}
n_trials: 12
data: {source: synthetic}
model: {encoder: minilm}
training: {epochs: 2, seed: 42}
amp: {preset: auto}
search_space:
  fp_precision: {type: categorical, choices: [fp32, bf16, fp16]}
  learning_rate: {type: float, low: 1e-5, high: 1.0e-3, log: true}
  batch_size: {type: categorical, choices: [8, 16, 32]}
  init_scale: {type: categorical, choices: [1024, 65536], when: {fp_precision: fp16}}
"""


def load(folder: Path, text: str) -> StudyConfig:
    path = folder / "study.yaml"
    path.write_text(text)
    return load_study(path)


def test_the_study_of_the_design_loads(tmp_path: Path) -> None:
    study = load(tmp_path, DESIGN_STUDY)
    assert study.name == "multitask"
    assert [objective.metric for objective in study.objective] == ["score"]
    assert study.n_trials == 12
    assert study.training.model_fields_set == {"epochs", "seed"}
    assert study.training.epochs == 2.0
    assert study.search_space["learning_rate"].low == 1e-5  # type: ignore[union-attr]
    assert study.search_space["init_scale"].when == {"fp_precision": ("fp16",)}
    assert study.path == tmp_path / "study.yaml"


def test_a_study_needs_a_name_and_data_only(tmp_path: Path) -> None:
    study = load(tmp_path, "name: s\ndata: {source: synthetic}\n")
    assert study.search_space == {}
    assert study.model.encoder == "minilm"
    assert study.amp == AmpConfig()
    assert (study.pruner.name, study.pruner.options) == ("asha", {"min_resource": 2, "reduction_factor": 2})
    assert (study.sampler.name, study.sampler.seed) == ("tpe", 42)


@pytest.mark.parametrize(
    ("lines", "min_resource"),
    [
        ("training: {epochs: 2}", 2),
        ("training: {epochs: 4}", 2),
        ("training: {epochs: 4.5}", 3),
        ("training: {epochs: 20}", 3),
        ("training: {epochs: 2}\nevaluation: {per_epoch: 3}", 3),
        ("training: {max_steps: 100}\nevaluation: {per_epoch: 4}", 2),
        ("training: {epochs: 20}\nevaluation: {per_trial: 4}", 2),
    ],
)
def test_the_default_pruner_waits_for_the_second_or_third_evaluation(
    tmp_path: Path, lines: str, min_resource: int
) -> None:
    study = load(tmp_path, f"name: s\ndata: {{source: synthetic}}\n{lines}\n")
    assert (study.pruner.name, study.pruner.min_resource) == ("asha", min_resource)


@pytest.mark.parametrize(
    "objective",
    [
        "[{metric: score}, {metric: peak_memory_bytes, direction: minimize}]",
        "{metric: train_tokens_per_second}",
    ],
)
def test_what_cannot_be_told_early_is_not_pruned(tmp_path: Path, objective: str) -> None:
    study = load(tmp_path, f"name: s\ndata: {{source: synthetic}}\nobjective: {objective}\n")
    assert study.pruner.name == "none"
    assert StudyConfig.model_validate(study.definition()).pruner == study.pruner


def test_trials_of_different_budgets_are_not_pruned_by_default(tmp_path: Path) -> None:
    space = "search_space: {epochs: {type: int, low: 2, high: 10}}\n"
    study = load(tmp_path, f"name: s\ndata: {{source: synthetic}}\n{space}")
    assert study.pruner.name == "none"
    study = load(tmp_path, f"name: s\ndata: {{source: synthetic}}\npruner: {{name: asha}}\n{space}")
    assert study.pruner.name == "asha"


@pytest.mark.parametrize(
    ("stored", "given", "expected"),
    [
        ("pruner: {name: none}", "", {"name": "none"}),
        ("pruner: {name: median, n_warmup_steps: 3}", "", {"name": "median", "n_warmup_steps": 3}),
        (
            "pruner: {name: median, n_warmup_steps: 3}",
            "pruner: {name: median, n_min_trials: 2}",
            {"name": "median", "n_warmup_steps": 3, "n_min_trials": 2},
        ),
        ("pruner: {name: median, n_warmup_steps: 3}", "pruner: {name: none}", {"name": "none"}),
        ("pruner: {name: none}", "pruner: {name: percentile}", {"name": "percentile", "percentile": 25.0}),
        ("sampler: {name: nsga2, seed: 1}", "", {"name": "nsga2", "seed": 1}),
        ("sampler: {name: nsga2, seed: 1}", "sampler: {seed: 2}", {"name": "nsga2", "seed": 2}),
        ("sampler: {name: nsga2, seed: 1}", "sampler: {name: random}", {"name": "random", "seed": 42}),
        (
            "sampler: {name: tpe, n_startup_trials: 9}",
            "sampler: {name: tpe, n_startup_trials: null}",
            {"name": "tpe", "seed": 42, "n_startup_trials": 5},
        ),
    ],
)
def test_what_a_file_leaves_out_is_as_the_study_was_made(
    tmp_path: Path, stored: str, given: str, expected: dict[str, Any]
) -> None:
    base = "name: s\ndata: {source: synthetic}\n"
    made = json.loads(json.dumps(load(tmp_path, base + stored).definition()))
    config = load(tmp_path, base + given).completed(made)
    assert config.definition()[(stored or given).partition(":")[0]] == expected


def test_options_of_another_algorithm_than_the_stored_one_are_refused(tmp_path: Path) -> None:
    base = "name: s\ndata: {source: synthetic}\n"
    made = load(tmp_path, base + "sampler: {name: nsga2}").definition()
    config = load(tmp_path, base + "sampler: {n_startup_trials: 3}")
    with pytest.raises(InputError, match="`n_startup_trials` is no option of `nsga2`, which the stored"):
        config.completed(made)


def test_the_definition_has_the_defaults(tmp_path: Path) -> None:
    """So that a study does not change when they do."""
    config = load(tmp_path, "name: s\ndata: {source: synthetic}\n")
    for section in (config.pruner, config.sampler, PrunerConfig(name="patient"), SamplerConfig(name="tpe")):
        made = section.definition()
        assert {key: made[key] for key in made if key not in ("name", "seed")} == section.options
        assert made["name"] == section.name
    assert PrunerConfig(name="patient").definition() == {"name": "patient", "patience": 2}
    assert {"sampler": config.sampler.definition(), "pruner": config.pruner.definition()}.items() <= (
        config.definition().items()
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_every_study_that_comes_with_the_project_loads(name: str) -> None:
    study = load_study(name)
    assert study.name == name
    opening = study.path.read_text().splitlines()[:3]
    assert [line.split(":")[0] for line in opening] == ["# Question", "# Command", "# Takes"]
    assert f"make hpo STUDY={name}" in opening[1]


def test_the_projects_studies_are_the_four_of_the_design() -> None:
    names = {path.stem for path in STUDIES.glob("*.yaml")}
    assert names >= {"smoke", "multitask", "precision", "own_data"}


def test_a_study_is_found_in_the_working_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_study("smoke").path == STUDIES / "smoke.yaml"
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "smoke.yaml").write_text("name: mine\ndata: {source: synthetic}\n")
    assert load_study("smoke").name == "mine"
    assert load_study("smoke", STUDIES).name == "smoke"


def test_an_unknown_study_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "emotions.yaml").write_text("name: emotions\n")
    (tmp_path / "slots.yaml").write_text("name: slots\n")
    with pytest.raises(StudyFileError, match=r"no study `emotion` in .*Did you mean `emotions`\?.*slots"):
        load_study("emotion", tmp_path)


def test_paths_are_relative_to_the_study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    study = load(
        tmp_path,
        "name: s\n"
        "data: {source: jsonl, path: set, tasks: set/my_tasks.json, files: {test: /absolute/test.jsonl}}\n",
    )
    assert study.data.path == tmp_path / "set"
    assert study.data.tasks == tmp_path / "set" / "my_tasks.json"
    assert study.data.files.test == Path("/absolute/test.jsonl")


def test_tasks_in_the_study_file_have_the_form_of_a_tasks_json(tmp_path: Path) -> None:
    task = {"kind": "single_label", "classes": ["a", "b"]}
    for tasks in ({"topic": task}, {"tasks": {"topic": task}}):
        data = {"source": "jsonl", "path": "set", "tasks": tasks}
        study = load(tmp_path, json.dumps({"name": "s", "data": data}))
        assert study.data.tasks == {"tasks": {"topic": task}}
        assert parse_tasks(study.data.tasks, "study")[0].labels == ("a", "b")


def test_several_objectives(tmp_path: Path) -> None:
    study = load(
        tmp_path,
        "name: s\ndata: {source: synthetic}\n"
        "objective: [{metric: score}, {metric: peak_memory_bytes, direction: minimize}]\n",
    )
    assert [(o.metric, o.direction) for o in study.objective] == [
        ("score", "maximize"),
        ("peak_memory_bytes", "minimize"),
    ]


@pytest.mark.parametrize("metric", ["severity/mae", "severity/rmse", "peak_memory_bytes"])
def test_what_is_better_when_smaller_cannot_be_maximised(tmp_path: Path, metric: str) -> None:
    text = "name: s\ndata: {source: synthetic}\nobjective: {metric: %s, direction: %s}\n"
    with pytest.raises(StudyFileError, match=f"must be `minimize` for `{metric}`: smaller is better"):
        load(tmp_path, text % (metric, "maximize"))
    assert load(tmp_path, text % (metric, "minimize")).objective[0].metric == metric


def test_loss_weights_are_written_with_a_dot_or_as_a_mapping(tmp_path: Path) -> None:
    for training in (
        "{loss_weight.criteria: 2, loss_weight.severity: 0.5}",
        "{loss_weight: {criteria: 2, severity: 0.5}}",
    ):
        study = load(tmp_path, f"name: s\ndata: {{source: synthetic}}\ntraining: {training}\n")
        assert study.training.loss_weight == {"criteria": 2.0, "severity": 0.5}


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("on", True), ("no", False), ("off", False)])
def test_yes_and_no_are_booleans_where_one_is_due(tmp_path: Path, word: str, value: bool) -> None:
    study = load(
        tmp_path, f"name: s\ndata: {{source: synthetic}}\ntraining: {{gradient_checkpointing: {word}}}\n"
    )
    assert study.training.gradient_checkpointing is value


def test_none_is_a_name_where_one_is_due(tmp_path: Path) -> None:
    study = load(
        tmp_path,
        "name: s\ndata: {source: synthetic}\npruner: {name: none}\n"
        "training: {compile: none, fp_precision: none, class_weighting: none}\n",
    )
    assert study.training.compile == "none"
    assert study.training.fp_precision == "fp32"


@pytest.mark.parametrize(
    "text", [DESIGN_STUDY, *(path.read_text() for path in sorted(STUDIES.glob("*.yaml")))]
)
def test_the_definition_is_json_from_which_the_study_can_be_read_again(tmp_path: Path, text: str) -> None:
    study = load(tmp_path, text)
    definition = json.loads(json.dumps(study.definition()))
    assert "path" not in definition
    again = StudyConfig.model_validate(definition)
    same = {name: getattr(again, name) for name in ("path", "sampler", "pruner")}
    assert again == study.model_copy(update=same)
    assert again.definition() == definition
    assert (again.sampler.options, again.pruner.options) == (study.sampler.options, study.pruner.options)
    assert again.training.model_fields_set == study.training.model_fields_set


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"name": "tpe"}, {"n_startup_trials": 5}),
        (
            {"name": "tpe", "n_startup_trials": 4, "multivariate": False},
            {"n_startup_trials": 4, "multivariate": False},
        ),
        ({"name": "nsga2", "population_size": 8}, {"population_size": 8}),
        ({"name": "gp"}, {}),
    ],
)
def test_sampler_options_are_those_given_and_our_defaults(
    given: dict[str, Any], options: dict[str, Any]
) -> None:
    assert SamplerConfig.model_validate(given).options == options


def test_pruners_that_need_an_option_have_a_default() -> None:
    assert PrunerConfig(name="percentile").options == {"percentile": 25.0}
    assert PrunerConfig(name="patient", patience=5).options == {"patience": 5}


@pytest.mark.parametrize("config", [SamplerConfig, PrunerConfig])
def test_every_option_is_one_of_optunas(config: type[SamplerConfig | PrunerConfig]) -> None:
    import inspect

    import optuna

    classes: dict[str, Any] = {
        "tpe": optuna.samplers.TPESampler,
        "gp": optuna.samplers.GPSampler,
        "cmaes": optuna.samplers.CmaEsSampler,
        "nsga2": optuna.samplers.NSGAIISampler,
        "qmc": optuna.samplers.QMCSampler,
        "hyperband": optuna.pruners.HyperbandPruner,
        "asha": optuna.pruners.SuccessiveHalvingPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "patient": optuna.pruners.PatientPruner,
    }
    named = {option for options in config.OPTIONS.values() for option in options}
    assert named == set(config.model_fields) - {"name", "seed"}
    for name, options in config.OPTIONS.items():
        known = set(inspect.signature(classes[name].__init__).parameters) if options else set()
        assert set(options) <= known


def test_every_setting_says_what_it_means() -> None:
    assert all(field.description for field in TrialSettings.model_fields.values())


def test_settings_hold_values_in_their_own_form() -> None:
    assert setting_value("fp_precision", "16-mixed") == "fp16"
    assert setting_value("betas", [0.9, 0.95]) == (0.9, 0.95)
    assert setting_value("loss_weight.criteria", 2) == 2.0
    assert isinstance(setting_value("init_scale", 1024), float)
    assert setting_value("max_grad_norm", None) is None
    assert "loss_weight.<task>" in setting_names()
    assert takes_whole_numbers("micro_batch_size")
    assert not takes_whole_numbers("betas")


def test_reading_a_study_imports_neither_torch_nor_optuna() -> None:
    code = (
        "import sys; from hpo.config.study_config import load_study; load_study('smoke');"
        "import hpo.config.search_space, hpo.config.trial_config;"
        "print([name for name in ('torch', 'optuna', 'transformers', 'pandas') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
