"""The replay of searches with two objectives: what holds by construction, and on tables where they are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import search_fronts
from curves import load
from search_fronts import POLICIES, FrontSearch, hypervolume, second_losses

SHARED = Path(__file__).parents[3] / "shared" / "curves" / "taskset"
TABLE = Path(os.environ.get("HPO_CURVES_DIR", SHARED)) / "patch32_GRU128_bs128.npz"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of 20 runs the loss is less the greater the rate, from the start, and every fifth breaks."""
    rates_N = np.logspace(-5, -2, 20)
    losses_NP = np.linspace(100, 50, 26) - np.arange(20)[:, None]
    losses_NP[::5, 20:] = np.nan
    file = tmp_path / "planted.npz"
    settings_NK = np.stack([rates_N, np.linspace(-1, 1, 20)], axis=1)
    np.savez(file, names=["rate", "shift"], hyperparameters=settings_NK, valid_loss=losses_NP)
    return file


def test_a_hypervolume_is_the_area_under_the_stairs() -> None:
    gains_N2 = np.array([(1.0, 0.2), (0.5, 0.5), (0.4, 0.4), (0.2, 1.0), (3.0, 0.0)])
    assert hypervolume(gains_N2) == pytest.approx(0.2 + 0.5 * 0.3 + 0.2 * 0.5)
    assert hypervolume(gains_N2[:0]) == 0.0


@pytest.mark.parametrize("name", POLICIES)
def test_a_front_is_found_if_there_is_enough_compute(path: Path, name: str) -> None:
    """Every run is on the front. With `promote`, at least two for each objective reach the end."""
    curves = load(path)
    search = FrontSearch(POLICIES[name], curves, 0, second_losses(path, curves, "rate"))
    search.run(25.0)
    ended, intact = {row for _, row in search.found}, {row for row in range(20) if row % 5}
    if name == "no pruner":
        assert ended == intact
        assert search.hypervolume_at(25.0) == pytest.approx(1.0)
        assert search.lost_at(25.0)[0] == 0
    assert ended <= intact
    assert len(ended) >= 4
    assert search.hypervolume_at(25.0) > 0.5
    lost, on_front = search.lost_at(0.0)
    assert (search.hypervolume_at(0.0), lost) == (0.0, on_front)
    for trial in search.study.trials:
        assert trial.values is None or len(trial.values) == 2


@pytest.mark.skipif(not TABLE.is_file(), reason=f"{TABLE} is not there")
def test_short_starts_find_a_larger_front_than_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_fronts, "COMPUTE", (10,))
    shares = {
        name: [search_fronts.searched(name, TABLE, "beta1", seed)[0][0] for seed in range(4)]
        for name in POLICIES
    }
    assert np.mean(shares["promote, the default"]) > np.mean(shares["no pruner"])
