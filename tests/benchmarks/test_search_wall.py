from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import search_wall
import wall_searches
from peer_searches import TINY
from peers import missing
from search_wall import Found, Search, measured, table
from sklearn.metrics import f1_score
from wall import WALLS, Wall
from wall_searches import PEERS
from workload import Workload

MADE = Wall(Workload("made", "", ("severity",), 64, (1, 3), 64, 32, encoder=TINY), 1, best=0.055)
SEARCH = Search("made", "hpo", seed=1, target=MADE.target(), cap=120.0)
"""The first evaluation of a search scores at least the target."""


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WALLS, MADE.workload.name, MADE)


@pytest.mark.parametrize("contender", ["hpo", *PEERS])
def test_a_search_ends_when_a_checkpoint_reaches_the_target(
    contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package := missing(contender):
        pytest.skip(f"{package} is not installed: `make bench` does it")
    asked, results = replace(SEARCH, contender=contender), tmp_path / "runs" / "found.jsonl"
    (found,) = measured([asked], results)
    assert found.reached
    assert found.course[-1] == (found.seconds, max(score for _, score in found.course))
    assert all(score < SEARCH.target for _, score in found.course[:-1])
    assert found.course[-1][1] >= SEARCH.target
    monkeypatch.setattr(search_wall, "run", None)
    assert list(measured([asked], results)) == [found], "a stopped run goes on"


def test_a_search_ends_at_the_cap() -> None:
    (found,) = measured([replace(SEARCH, contender="plain", target=2.0, cap=0.5)])
    assert not found.reached
    assert found.seconds >= 0.5


def test_a_failed_search_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(search_wall.OURS, "hpo", {"no_such_key": 1})
    with pytest.raises(RuntimeError, match=r"hpo ended with 2:[^$]*no_such_key"):
        list(measured([SEARCH]))


def test_scores_of_peers_are_macro_f1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MADE.write(tmp_path)
    (classes,) = (one["classes"] for one in json.loads(Path("tasks.json").read_text())["tasks"].values())
    truth = [
        json.loads(line)["labels"]["severity"] for line in Path("validation.jsonl").read_text().splitlines()
    ]
    logits_NC = np.random.default_rng(0).normal(size=(len(truth), len(classes)))
    predicted = [classes[index] for index in logits_NC.argmax(axis=1)]
    wanted = f1_score(truth, predicted, average="macro", labels=sorted(set(truth)))
    assert wall_searches.Search(tmp_path, 0).scorer(logits_NC) == pytest.approx(wanted)
    assert search_wall.scores(tmp_path) == [pytest.approx(wanted)]


def test_the_best_peer_is_compared_and_a_cap_is_no_time() -> None:
    seconds = {"hpo": (10.0, 20.0, 120.0), "trainer": (120.0, 120.0, 60.0), "plain": (50.0, 40.0, 30.0)}
    found = [
        Found(replace(SEARCH, contender=name, seed=seed), one, one < 120, ((5, 0.5), (one, one < 120)))
        for name, of_seeds in seconds.items()
        for seed, one in enumerate(of_seeds)
    ]
    assert list(table(found, tuple(seconds), 0.9)) == [
        "| hpo | 20.0 (10.0 to > 120) | 2 of 3 |",
        "| trainer | > 120 (60.0 to > 120) | 1 of 3 |",
        "| plain | 40.0 (30.0 to 50.0) | 3 of 3 |",
        "hpo takes 0.50 of the time of plain; wanted at most 0.25: NOT reached",
    ]
    assert next(table(found, ("hpo",), 0.5)) == "| hpo | 5.0 (5.0 to 5.0) | 3 of 3 |"
