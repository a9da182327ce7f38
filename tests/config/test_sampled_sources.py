from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.several_sources import write_sources
from support.tiny import tiny_study, write_study

from hpo.config.study_config import load_study, stored_study
from hpo.config.trial_config import build_trial_config
from hpo.errors import StudyFileError

WEIGHT = {"type": "float", "low": 0.0, "high": 2.0}
ONE_SET = {"source": "synthetic"}
NO_SOURCES = "needs `data.sources`, but there are none."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"sampling_weight.new": 2}}, "there is no such source. Did you mean `news`?"),
        ({"search_space": {"sampling_weight.new": WEIGHT}}, "there is no such source. Did you mean `news`?"),
        ({"training": {"sampling_weight": {"news": 0, "mail": 0}}}, "above 0 for one source in every trial"),
        (
            {"training": {"sampling_weight.news": 0}, "search_space": {"sampling_weight.mail": WEIGHT}},
            "above 0 for one source in every trial",
        ),
        ({"training": {"sampling_temperature": 0.5}}, "must be >= 1, but got `0.5`"),
        ({"training": {"sampling_weight.news": -1}}, "must be >= 0, but got `-1`"),
        ({"training": {"sampling_weight": 2}}, "must be a mapping of keys, but got `2`"),
        ({"search_space": {"sampling_weight": WEIGHT}}, "Did you mean `sampling_weight.<source>`?"),
        ({"data": ONE_SET, "training": {"sampling_weight.a": 2}}, NO_SOURCES),
        (
            {"data": ONE_SET, "training": {"sampling_temperature": 2}},
            NO_SOURCES,
        ),
    ],
)
def test_settings_must_fit_the_sources(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StudyFileError) as raised:
        tiny_study(tmp_path, **{"data": write_sources(tmp_path), **changes})
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "jsonl"}, "data.source: must be given for each of `sources`, and not beside them."),
        ({"limits": {"train": 4}}, "data.limits: must be given for each of `sources`, and not beside them."),
        ({"sources": []}, "data.source: must be given."),
        ({"sources": [{"source": "synthetic"}]}, "data.sources.0.name: must be given."),
        ({"sources": [{"name": "a"}]}, "data.sources.0.source: must be given."),
        (
            {"sources": [{"name": "a.b", "source": "synthetic"}]},
            "a source's name must be a letter followed by",
        ),
        (
            {"sources": [{"name": "a", "source": "synthetic"} for _ in range(2)]},
            "sources.1.name: `a` is there twice.",
        ),
        ({"sources": [{"name": "a", "source": "jsonl"}]}, "data.sources.0.path: must be given for jsonl"),
        (
            {"sources": [{"name": "a", "source": "synthetic", "sources": []}]},
            "data.sources.0.sources: there is no such key.",
        ),
        (
            {"sources": [{"name": "a", "source": "synthetic"}], "pair_segments": ["a", "b"]},
            "data.pair_segments: is read with source jsonl, but the source `a` is synthetic.",
        ),
    ],
)
def test_each_source_is_checked(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StudyFileError) as raised:
        tiny_study(tmp_path, data=write_sources(tmp_path) | change)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_trial_has_fixed_and_searched_weights(tmp_path: Path) -> None:
    study = tiny_study(
        tmp_path,
        data=write_sources(tmp_path),
        training={"sampling_weight": {"news": 2}},
        search_space={
            "sampling_weight.mail": WEIGHT,
            "sampling_temperature": {"type": "float", "low": 1, "high": 5},
        },
    )
    params = {"sampling_weight.mail": 0.5, "sampling_temperature": 3.0}
    config = build_trial_config(study, params, "fp32")
    assert config.sampling_weight == {"news": 2.0, "mail": 0.5}
    assert config.sampling_temperature == 3.0


def test_a_stored_study_keeps_its_sources(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, data=write_sources(tmp_path, rename={"tone": "mood"}))
    definition = study.definition()
    news, mail = definition["data"]["sources"]
    assert "hub" not in news
    assert "source" not in definition["data"]
    assert mail["rename"] == {"tone": "mood"}
    assert stored_study("tiny", definition).data == study.data
    assert study.resumed(definition).data == study.data


def test_sources_may_lie_elsewhere_when_a_study_is_resumed(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, data=write_sources(tmp_path))
    (tmp_path / "moved").mkdir()
    data = write_sources(tmp_path / "moved")
    moved = load_study(write_study(tmp_path, data=data))
    assert moved.resumed(study.definition()).data == moved.data


def test_a_study_with_one_source_is_stored_without_sources(tmp_path: Path) -> None:
    assert "sources" not in tiny_study(tmp_path).definition()["data"]
