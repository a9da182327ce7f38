from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.study_records import DEFINITION, fake_trial, record_of
from support.worker_process import study

from hpo.config.definition import CHANGEABLE
from hpo.track.follow import write_files
from hpo.track.runs import is_secret, runs_of, study_settings, trial_settings

SECRETS = (
    *("token", "github_token", "hf_token", "api-token", "openai_key", "apikey", "data.storage_key"),
    *("api_keys", "access_tokens", "password", "PGPASSWORD", "db_pass", "pass", "db.pwd"),
    *("key_passphrase", "client_secret", "credentials"),
)
OTHERS = (
    *("max_tokens", "special_tokens", "tokens", "tokenizer", "key", "keys", "monkey", "passes", "bypass"),
    *("train_tokens_per_second", "secretary", "pad_token", "model.encoder.tokenizer.mask_token", "text_key"),
    *("label_key", "sort_key", "group_key", "first_pass", "study_token"),
)


def test_names_of_secrets() -> None:
    assert [name for name in SECRETS if not is_secret(name)] == []
    assert [name for name in OTHERS if is_secret(name)] == []


def test_trial_has_all_unchangeable_settings() -> None:
    whole = study(training={"weight_decay": 0.1}, amp={"tf32": True}).definition()
    params = {"fp_precision": "bf16", "learning_rate": 1e-4, "batch_size": 8}
    settings = trial_settings(whole, params)
    assert settings.items() >= params.items()
    overriding = {"encoder", "init_scale"}  # null: `model` and `amp` decide
    assert whole["training"].keys() - {"option"} - overriding <= settings.keys()
    expected = {"weight_decay": 0.1, "amp.tf32": True, "model.encoder": "minilm"}
    assert settings.items() >= expected.items()
    for section in ("model", "amp", "compat", "data", "evaluation", "objective"):
        assert any(name.split(".")[0] == section for name in settings), section
    assert not [name for name in settings if name.split(".")[0] in ("n_trials", "sampler", "pruner", "tags")]
    everything = study_settings(whole)
    assert everything["search_space.batch_size"]["choices"] == [8, 16, 32]
    assert not params.keys() & everything.keys()
    for key in CHANGEABLE:
        if "." not in key and key != "tags":
            assert any(f"{name}.".startswith(f"{key}.") for name in everything), key


@pytest.mark.parametrize(
    ("params", "shown", "hidden"),
    [
        ({"encoder": "a"}, {"encoder": "a"}, ["model.encoder"]),
        ({}, {"model.encoder": "minilm"}, ["encoder", "init_scale"]),
        ({"init_scale": 8.0}, {"init_scale": 8.0}, ["amp.init_scale"]),
        ({"max_steps": 5}, {"max_steps": 5}, ["epochs", "max_seconds"]),
        ({"loss_weight.tags": 2.0}, {"loss_weight.tags": 2.0, "loss_weight.other": 3.0}, []),
    ],
    ids=["encoder", "nothing", "init_scale", "budget", "part of a setting"],
)
def test_searched_setting_replaces_fixed_one(
    params: dict[str, Any], shown: dict[str, Any], hidden: list[str]
) -> None:
    whole = study(training={"loss_weight": {"tags": 1.0, "other": 3.0}}).definition()
    settings = trial_settings(whole, params)
    assert settings.items() >= shown.items()
    assert not settings.keys() & set(hidden)


def test_runs_and_files_hide_secrets(tmp_path: Path) -> None:
    token, url = "hf_" + "a1B2" * 9, "https://me:url-secret@host/a.csv"
    hidden = {
        "data": {"path": url, "labels": [f"x {token}"]},
        "checkpoint": {"location": "s3://key:url-secret@bucket/a"},
        "training": {"option": {"hf_token": "plain-secret", "api_key": "other-secret"}},
        "tags": {"team": url},
    }
    trial = replace(fake_trial(0, "fp32"), reason="no answer of postgresql://me:url-secret@host/db")
    record = record_of([trial], definition={**DEFINITION, **hidden})
    of_trial = runs_of(record, "token")[0]
    for run in (of_trial, of_trial.study):
        shown = repr((run.params, run.facts))
        assert "secret" not in shown.replace("is_secret", "")
        assert token not in shown
        assert run.params["hf_token"] == run.params["api_key"] == "***"
        assert run.params["data.path"] == "https://me:***@host/a.csv"
    write_files(record, tmp_path)
    for path in tmp_path.rglob("*.*"):
        text = path.read_text()
        assert "-secret" not in text, path
        assert token not in text, path
