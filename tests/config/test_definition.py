import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import study_of as study

from hpo.config.definition import widened_ranges
from hpo.config.study_config import StudyConfig, load_study, stored_study
from hpo.config.study_file import study_files
from hpo.config.trial_config import build_trial_config
from hpo.config.trial_settings import TrialSettings
from hpo.errors import StorageError, StudyChangedError

STUDIES = Path(__file__).parents[2] / "studies"
pytestmark = pytest.mark.usefixtures("forgotten")


def stored(config: StudyConfig) -> dict[str, Any]:
    return dict(json.loads(json.dumps(config.definition())))


@pytest.mark.parametrize("name", sorted(study_files(STUDIES)))
def test_definition_restores_study(name: str) -> None:
    made = load_study(name)
    definition = stored(made)
    assert "path" not in definition
    again = StudyConfig.model_validate(definition)
    assert again.definition() == definition
    assert again.given == made.given
    if not made.has_own_loop:
        params = {"learning_rate": 1e-4, "fp_precision": "fp32"}
        assert build_trial_config(again, params, "fp32") == build_trial_config(made, params, "fp32")


def test_definition_has_all_keys_and_given_ones() -> None:
    definition = study(training={"loss_weight": {"a": 2}, "seed": 3}, amp={"preset": "basic"}).definition()
    assert set(TrialSettings.model_fields) == set(definition["training"])
    assert not set(definition["data"]) & {"path", "files", "hub", "columns"}, "keys of other sources"
    assert definition["training"]["epochs"] == 3.0
    assert definition["pruner"]["name"] == "promote"
    given = ["amp.preset", "data.source", "name", "training.loss_weight.a", "training.seed"]
    assert definition["given"] == given


@pytest.mark.parametrize("name", sorted(study_files(STUDIES)))
def test_explicit_defaults_are_no_change(name: str) -> None:
    made = load_study(name)
    definition = stored(made)
    written = {key: value for key, value in definition.items() if key not in ("given", "folder")}
    for section, elsewhere in (("training", {"encoder"}), ("amp", definition["training"].keys())):
        left_out = {*definition["search_space"], *elsewhere}
        values = definition[section].items()
        written[section] = {key: value for key, value in values if key not in left_out and value is not None}
    config = StudyConfig.model_validate(written)
    assert len(config.given) > len(made.given)
    resumed = config.resumed(definition)
    own = {key: definition[key] for key in ("given", "folder")}
    assert resumed.definition() | own == definition
    assert stored(made.resumed(stored(resumed))) == definition


def test_new_default_needs_old_value_in_file() -> None:
    definition = stored(study())
    definition["training"]["pooling"] = "cls"  # an earlier default
    remedy = r'Write the stored values \(left\) into the file(.|\n)*~ training\.pooling: "cls" -> "mean"'
    with pytest.raises(StudyChangedError, match=remedy):
        study().resumed(definition)
    assert study(training={"pooling": "cls"}).resumed(definition).training.pooling == "cls"


def test_earlier_default_of_attention_is_the_same_study() -> None:
    definition = stored(study())
    definition["training"]["attention"] = "sdpa"
    assert study().resumed(definition).training.attention is None
    definition["given"].append("training.attention")
    with pytest.raises(StudyChangedError, match=r'~ training\.attention: "sdpa" -> null'):
        study().resumed(definition)


def test_key_of_one_version_counts_if_given() -> None:
    earlier = stored(study())
    earlier["training"] |= {"weight_rounding": "nearest", "precision_overrides": {}}
    del earlier["training"]["focal_gamma"]
    assert study().resumed(earlier).definition() == study().definition()
    assert stored_study("s", earlier).definition() == study().definition() | {"folder": earlier["folder"]}
    with pytest.raises(StudyChangedError, match=r"\+ training\.focal_gamma: 3\.0"):
        study(training={"focal_gamma": 3}).resumed(earlier)
    earlier["given"].append("training.weight_rounding")
    with pytest.raises(StudyChangedError, match=r'- training\.weight_rounding: "nearest"'):
        study().resumed(earlier)
    with pytest.raises(StorageError, match=r"training\.weight_rounding: there is no such key"):
        stored_study("s", earlier)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"training": {"epochs": 7}}, "training.epochs: 3.0 -> 7.0"),
        ({"training": {"max_steps": 7}}, "training.epochs: 3.0 -> null"),
        ({"model": {"encoder": "other/name"}}, 'model.encoder: "minilm" -> "other/name"'),
        ({"search_space": {"seed": {"type": "categorical", "choices": [1]}}}, "+ search_space.seed: "),
    ],
)
def test_changed_value_is_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(StudyChangedError, match=r"another (definition|search space)") as refused:
        study(**change).resumed(stored(study()))
    assert line in str(refused.value)


RANGE = {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}
STEPS = {"type": "int", "low": 16, "high": 32, "step": 8}


@pytest.mark.parametrize(
    ("was", "change", "line"),
    [
        (RANGE, {"high": 1e-2}, ""),
        (RANGE, {"low": 1e-5, "high": 1e-2}, ""),
        (RANGE, {"high": 5e-4}, "~ search_space.dropout.high: 0.001 -> 0.0005"),
        (RANGE, {"low": 2e-4, "high": 1e-2}, "~ search_space.dropout.low: 0.0001 -> 0.0002"),
        (RANGE, {"high": 1e-2, "log": False}, "~ search_space.dropout.log: true -> false"),
        (STEPS, {"low": 8, "high": 40}, ""),
        (STEPS, {"low": 12, "high": 44}, "~ search_space.max_length.low: 16 -> 12"),
        (STEPS, {"step": 4}, "~ search_space.max_length.step: 8 -> 4"),
        ({"type": "float", "low": 0.1, "high": 0.3, "step": 0.1}, {"low": 0.0, "high": 0.5}, ""),
        (
            {"type": "categorical", "choices": [0.1]},
            {"choices": [0.1, 0.2]},
            "~ search_space.dropout.choices: ",
        ),
    ],
)
def test_only_a_range_may_grow(was: Any, change: Any, line: str) -> None:
    name = "max_length" if was is STEPS else "dropout"
    before, now = (study(search_space={name: one}) for one in (was, was | change))
    if not line:
        resumed = now.resumed(stored(before))
        assert resumed.search_space == now.search_space
        assert resumed.space_hash == now.space_hash != before.space_hash
        assert [*widened_ranges(stored(before), stored(now))] == [name]
        return
    with pytest.raises(StudyChangedError, match=r"`first: {study: s, top: 3}` begins with") as refused:
        now.resumed(stored(before))
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("key", "was", "now", "options"),
    [
        ("pruner", {"name": "none"}, {}, {"starts": 0.04, "keep": 2, "reduction_factor": 3}),
        ("pruner", {"name": "median", "n_warmup_steps": 3}, {"name": "median"}, {}),
        ("pruner", {"name": "none"}, {"name": "percentile"}, {"percentile": 25.0}),
        ("sampler", {"name": "nsga2", "seed": 1}, {"name": "random"}, {}),
        ("sampler", {"multivariate": False}, {"seed": 1}, {"n_startup_trials": 5}),
    ],
)
def test_sampler_and_pruner_may_change(key: str, was: Any, now: Any, options: dict[str, Any]) -> None:
    made, config = (study(**({key: given} if given else {})) for given in (was, now))
    resumed = getattr(config.resumed(stored(made)), key)
    assert (resumed, resumed.options) == (getattr(config, key), options)


def test_other_changeable_keys() -> None:
    config = study(amp={"memory_fraction": 0.5}).with_values(n_trials=5, timeout=2.0)
    resumed = config.resumed(stored(study()))
    assert (resumed.n_trials, resumed.timeout, resumed.amp.memory_fraction) == (5, 2.0, 0.5)
    assert study().resumed(stored(resumed)).n_trials == 20

    def of_csv(**csv: str) -> StudyConfig:
        return study(data={"source": "csv", "path": "x", "csv": csv})

    now = of_csv(empty="unlabelled", delimiter=";")
    assert now.resumed(stored(of_csv())).data.csv == now.data.csv
