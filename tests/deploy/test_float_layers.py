"""The search for layers in float, where it is known which are needed."""

from __future__ import annotations

import itertools

import pytest

from hpo.deploy.float_layers import FloatLayersSearch, SearchLimits

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
        assert found is not None
        assert set(found.names) == set(needed)
        assert found.is_smallest
        assert found.num_quantizations == len(model.ranked) + len(model.asked)
        assert len(model.asked) == len(set(map(frozenset, model.asked))), "no set is asked for twice"
        assert hidden or len(model.asked) <= 15


def test_a_model_that_is_in_float_as_a_whole_is_no_answer() -> None:
    model = Model(set(SIZES))
    assert FloatLayersSearch(SIZES).search(model.error_of, model.is_ok) is None
    assert not any(len(names) == len(SIZES) for names in model.asked)


def test_a_second_way_to_quantise_begins_with_what_the_first_needed() -> None:
    search, first = FloatLayersSearch(SIZES), Model({"layer3", "layer7"})
    assert search.search(first.error_of, first.is_ok) is not None
    second = Model({"layer7"})
    found = search.search(second.error_of, second.is_ok)
    assert found is not None
    assert (found.names, second.ranked) == (("layer7",), [])
    assert len(second.asked) <= 3
    third = Model({"layer1"})
    found = search.search(third.error_of, third.is_ok)
    assert found is not None
    assert (found.names, third.ranked) == (("layer1",), []), "the ranking of the first is used again"


def test_a_limit_ends_with_the_best_so_far() -> None:
    model = Model({"layer1", "layer8", "layer9"})
    found = FloatLayersSearch(SIZES, SearchLimits(tries=3)).search(model.error_of, model.is_ok)
    assert found is not None
    assert not found.is_smallest
    assert model.needed < set(found.names)
    assert len(model.asked) == 3
    assert FloatLayersSearch(SIZES, SearchLimits(seconds=-1)).search(model.error_of, model.is_ok) is None
