"""The search for layers in float, where it is known which are needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hpo.deploy.float_layers import FloatLayers, FloatLayersSearch, NothingFound, SearchLimits

SIZES = {f"layer{number}": 100 - number for number in range(12)}


class Model:
    """Is as good where all layers of `needed` are in float; their errors are the largest, unless `hidden`."""

    def __init__(self, needed: set[str], *, hidden: bool = False) -> None:
        self.needed, self.hidden = needed, hidden
        self.ranked: list[str] = []
        self.asked: list[tuple[str, ...]] = []

    def error_of(self, name: str) -> float:
        self.ranked.append(name)
        return float(name in self.needed and not self.hidden)

    def is_ok(self, names: tuple[str, ...]) -> bool:
        self.asked.append(names)
        return self.needed <= set(names)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("hidden", [False, True], ids=["ranked", "not ranked"])
def test_exactly_the_layers_that_are_needed_are_found(size: int, hidden: bool) -> None:
    for needed in itertools.islice(itertools.combinations(SIZES, size), 0, None, 7):
        model = Model(set(needed), hidden=hidden)
        found = FloatLayersSearch(SIZES).search(model.error_of, model.is_ok)
        assert isinstance(found, FloatLayers)
        assert set(found.names) == set(needed)
        assert found.is_smallest
        assert found.num_quantizations == len(model.ranked) + len(model.asked)
        assert len(model.asked) == len(set(map(frozenset, model.asked))), "no set is asked for twice"
        assert hidden or len(model.asked) <= 15


def test_a_model_that_is_in_float_as_a_whole_is_no_answer() -> None:
    model = Model(set(SIZES))
    found = FloatLayersSearch(SIZES).search(model.error_of, model.is_ok)
    assert found == NothingFound("No set of its layers in float was found that mends it.")
    assert not any(len(names) == len(SIZES) for names in model.asked)


def test_a_second_way_to_quantise_begins_with_what_the_first_needed() -> None:
    search, first = FloatLayersSearch(SIZES), Model({"layer3", "layer7"})
    assert isinstance(search.search(first.error_of, first.is_ok), FloatLayers)
    second = Model({"layer7"})
    found = search.search(second.error_of, second.is_ok)
    assert isinstance(found, FloatLayers)
    assert (found.names, second.ranked) == (("layer7",), [])
    assert len(second.asked) <= 3
    third = Model({"layer1"})
    found = search.search(third.error_of, third.is_ok)
    assert isinstance(found, FloatLayers)
    assert (found.names, third.ranked) == (("layer1",), []), "the ranking of the first is used again"


def test_a_limit_ends_with_the_best_so_far() -> None:
    model = Model({"layer1", "layer8", "layer9"})
    found = FloatLayersSearch(SIZES, SearchLimits(tries=4)).search(model.error_of, model.is_ok)
    assert isinstance(found, FloatLayers)
    assert not found.is_smallest
    assert model.needed < set(found.names)
    assert len(model.asked) == 4
    few = FloatLayersSearch(SIZES).search(model.error_of, model.is_ok, tries=2)
    assert few == NothingFound("No set of its layers in float was found in 2 tries that mends it.")


class Clock:
    """Time that passes only where `error_of` and `is_ok` take it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("hpo.deploy.float_layers.time.monotonic", lambda: self.seconds)

    def takes(self, seconds: float, ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def slow(of: Any) -> Any:
            self.seconds += seconds
            return ask(of)

        return slow


def test_the_ranking_has_half_of_the_time_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch), Model({"layer2"})
    search = FloatLayersSearch(SIZES, SearchLimits(seconds=10))
    found = search.search(clock.takes(1, model.error_of), model.is_ok)
    assert model.ranked == list(SIZES)[:6]
    assert found == FloatLayers(("layer2",), 8, is_smallest=True)
    second = Model({"layer9"})
    found = search.search(clock.takes(1, second.error_of), second.is_ok)
    assert second.ranked == list(SIZES)[6:], "what was ranked is not ranked again"
    assert isinstance(found, FloatLayers)
    assert found.names == ("layer9",)


def test_a_search_that_runs_out_of_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(monkeypatch), Model({"layer9"})
    search = FloatLayersSearch(SIZES, SearchLimits(seconds=10))
    found = search.search(clock.takes(1, model.error_of), clock.takes(3, model.is_ok))
    assert found == NothingFound("No set of its layers in float was found in 10 s that mends it.")


def test_what_is_as_good_as_it_is_names_no_layer() -> None:
    model = Model(set())
    found = FloatLayersSearch(SIZES).search(model.error_of, model.is_ok)
    assert isinstance(found, NothingFound)
    assert "it is as good without any, so they cannot tell which layers break it" in found.reason
    assert (model.ranked, model.asked) == ([], [()])
