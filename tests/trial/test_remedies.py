"""What is tried for a trial that broke, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_study
from tiny_encoders import make_model

from hpo.config.trial_config import build_trial_config
from hpo.models.multitask import MultitaskModel
from hpo.precision.table import Resolution
from hpo.trial.remedies import Broken, Remedy, shown, try_remedies
from hpo.trial.replay import BadStep

LOSS = BadStep(7, "loss", None)
Attempt = Callable[[Mapping[str, Any]], Broken | str]


def broken(*parts: str, what: str = "loss") -> Broken:
    return Broken(what, None, parts, "it broke again")


def remedies(
    folder: Path,
    name: str,
    at: BadStep | MultitaskModel,
    attempt: Attempt = lambda _: broken(),
    first: Broken | None = None,
    **amp: Any,
) -> list[Remedy]:
    study = tiny_study(folder, amp={"allow_emulated": True} | amp)
    config = build_trial_config(study, {}, name, study.amp)
    resolution = Resolution(name, name, "emulated")
    return list(try_remedies(config, resolution, first or broken(), at, attempt, lambda _: None))


@pytest.mark.parametrize(
    ("name", "precisions"),
    [
        ("fp32", []),
        ("bf16", ["fp32"]),
        ("bf16-true", ["bf16", "fp32"]),
        ("fp16", ["bf16", "fp32"]),
        ("fp8", ["bf16", "fp32"]),
    ],
)
def test_the_precisions_that_are_tried(tmp_path: Path, name: str, precisions: list[str]) -> None:
    tried = [one.settings for one in remedies(tmp_path, name, LOSS)]
    assert [one["fp_precision"] for one in tried if "fp_precision" in one] == precisions
    assert tried[-1] == {"learning_rate": 5e-6}, "it changes the most"


@pytest.mark.parametrize(
    ("scale", "floor", "settings"),
    [
        (65536.0, 1.0, {"init_scale": 1024.0}),
        (1.0, 1.0, {"init_scale": 2.0**-6, "amp.min_scale": 2.0**-12}),
        (2.0**20, 2.0**20, {"init_scale": 2.0**14, "amp.min_scale": 2.0**8}),
        (None, 4.0, {"init_scale": 2.0**-4, "amp.min_scale": 2.0**-10}),
    ],
)
def test_a_smaller_loss_scale_has_a_floor_under_it(
    tmp_path: Path, scale: float | None, floor: float, settings: dict[str, float]
) -> None:
    """At its floor the next overflow would end the trial."""
    found = remedies(tmp_path, "fp16", BadStep(7, "gradients", scale), min_scale=floor)
    assert next(one.settings for one in found if "init_scale" in one.settings) == settings


def test_parts_that_the_origin_does_not_name_are_searched_for(tmp_path: Path) -> None:
    """The farthest module need not be the one to blame; no set of parts is tried twice."""
    model = make_model()
    needed = {"precision_overrides.embeddings", "precision_overrides.heads.label"}
    asked: list[frozenset[str]] = []

    def attempt(settings: Mapping[str, Any]) -> Broken | str:
        asked.append(frozenset(settings))
        return "the check is ok" if needed <= settings.keys() else broken("encoder.layer.1", what="far")

    first = broken("encoder.layer.1", what="far")
    found = remedies(tmp_path, "bf16", model, attempt, first)
    assert [set(one.settings) for one in found] == [
        {"precision_overrides.encoder.layer.1"},
        needed,
        {"fp_precision"},
    ]
    assert [one.heals for one in found] == [False, True, False]
    assert len(asked) == len(set(asked))


def test_nothing_is_searched_for_where_the_origin_s_part_heals(tmp_path: Path) -> None:
    asked: list[Mapping[str, Any]] = []

    def attempt(settings: Mapping[str, Any]) -> Broken | str:
        asked.append(settings)
        return "the check is ok"

    remedies(tmp_path, "bf16", make_model(), attempt, broken("encoder.layer.1", what="far"))
    assert asked == [{"precision_overrides.encoder.layer.1": "fp32"}, {"fp_precision": "fp32"}]


def test_settings_are_shown_as_in_a_study_file() -> None:
    settings = {"init_scale": 1024.0, "amp.min_scale": 0.25, "fp_precision": "bf16"}
    assert shown(settings) == "init_scale: 1024, amp.min_scale: 0.25, fp_precision: bf16"
