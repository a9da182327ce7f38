from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpo.data.source_sampling import SourceSampling, source_sampling

SIZES = {"large": 90, "small": 10}


def sampling_of(temperature: float = 1.0, **weights: float) -> SourceSampling:
    """Return the sampling of sources with one window per row."""
    split: Any = SimpleNamespace(window_example_W=np.arange(100))
    sampling = source_sampling(split, SIZES, temperature, weights)
    assert sampling is not None
    return sampling


@pytest.mark.parametrize(
    ("temperature", "weights", "drawn"),
    [
        (1, {}, (90, 10)),
        (2, {}, (75, 25)),  # sqrt(90) : sqrt(10) is 3 : 1
        (1e9, {}, (50, 50)),
        (1, {"small": 9.0}, (50, 50)),
        (2, {"large": 0.0}, (0, 100)),
        (1, {"small": 1e-9}, (100, 0)),
    ],
)
def test_shares_of_sources(temperature: float, weights: dict[str, float], drawn: tuple[int, int]) -> None:
    assert sampling_of(temperature, **weights).drawn_S == drawn


def test_sources_are_counted_in_windows() -> None:
    split: Any = SimpleNamespace(window_example_W=np.array([0, 0, 0, 1, 2, 2]))
    sampling = source_sampling(split, {"a": 1, "b": 2}, 1.0, {})
    assert sampling is not None
    assert sampling.sizes_S == (3, 3)
    assert sampling.facts() == {name: {"num_windows": 3, "windows_per_epoch": 3} for name in "ab"}
    assert sampling.drawn_shares(0, np.array([], dtype=np.int64)) == {"a": 0.0, "b": 0.0}
    assert sampling.drawn_shares(1, np.array([0, 2])) == {"a": 5 / 8, "b": 3 / 8}


def test_an_epoch_at_temperature_1_holds_every_window_once() -> None:
    assert sorted(sampling_of().windows(seed=3, epoch=7)) == list(range(100))


def test_a_source_is_read_in_whole_passes() -> None:
    sampling = sampling_of(2)
    epochs = [sampling.windows(seed=3, epoch=epoch) for epoch in range(6)]
    large = np.concatenate([windows[windows < 90] for windows in epochs])
    small = np.concatenate([windows[windows >= 90] for windows in epochs])
    for drawn, size in ((large, 90), (small, 10)):
        passes = drawn[: len(drawn) // size * size].reshape(-1, size)
        assert len(passes) >= 5
        assert all(len(set(one)) == size for one in passes)
        assert any(list(one) != list(passes[0]) for one in passes)
    assert set(epochs[0][epochs[0] < 90]) != set(epochs[1][epochs[1] < 90]), "each epoch shows another part"
