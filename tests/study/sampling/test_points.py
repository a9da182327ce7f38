"""Points of a grid or a comparison, one for each trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.planted_comparison import plan_of
from support.worker_process import begin, result, study, worker_on

from hpo.compare.comparison_study import comparison_study
from hpo.config.search_space import suggest
from hpo.study.claims.snapshot import Runnable
from hpo.study.sampling.points import Point, grid_points, point_key, unused_points
from hpo.study.store.storage import Storage, open_storage

GRID = study(
    4,
    sampler={"name": "grid", "seed": 1},
    search_space={
        "batch_size": {"type": "categorical", "choices": [8, 16]},
        "pooling": {"type": "categorical", "choices": ["cls", "mean"]},
    },
)
PLAN = plan_of(2)
COMPARISON = comparison_study(study(1), PLAN, has_test=False).with_values(name="tiny")


def points_of(config: Any) -> Sequence[Point]:
    return grid_points(config.search_space, 1) if config is GRID else PLAN.points()


@pytest.fixture(params=[GRID, COMPARISON], ids=["grid", "comparison"])
def config(request: pytest.FixtureRequest) -> Any:
    """A study of four points."""
    return request.param


def test_parallel_workers_get_different_points(storage: Storage, config: Any) -> None:
    points = points_of(config)
    with open_storage(storage.url) as other:
        workers = [worker_on(one, config, read_points=lambda: points) for one in (storage, other)]
        with workers[0], workers[1]:
            given = [suggest(config.search_space, begin(worker)[1]) for worker in workers * 2]
    assert given[:2] == given[2:] == list(points)[:2], "each claims its own trial again"


def test_points_are_used_again_after_the_last() -> None:
    points: list[Point] = [{"seed": seed} for seed in range(3)]
    keys = [*map(point_key, points)]
    assert unused_points(points, {}) == points
    assert unused_points(points, {keys[0]: 1, keys[2]: 1}) == points[1:2]
    assert unused_points(points, dict.fromkeys(keys, 2)) == points
    assert unused_points([], {}) == []


@pytest.mark.parametrize(("queued", "batch_size"), [({"batch_size": 12}, 12), ({}, 8)])
def test_an_enqueued_trial_gets_a_point_for_the_device(
    storage: Storage, queued: dict[str, Any], batch_size: int
) -> None:
    """Also if both points of fp32 have trials, and the others wait for another device."""
    points = [{"batch_size": size, "fp_precision": name} for name in ("fp16", "fp32") for size in (8, 16)]
    runnable = Runnable(("fp16", "fp32"), frozenset({"fp16"}))
    with worker_on(storage, study(8), read_points=lambda: points, runnable=runnable) as worker:
        for size in (8, 16):
            lease, trial = begin(worker)
            assert trial.suggest_categorical("batch_size", [8, 12, 16]) == size
            worker.record_outcome(lease, result("complete"))
        assert worker.claim() is None
        assert len(worker.left) == 2
        storage.load_study("tiny").enqueue_trial(queued)
        lease, trial = begin(worker)
        assert trial.suggest_categorical("batch_size", [8, 12, 16]) == batch_size
        assert trial.suggest_categorical("fp_precision", ["fp16", "fp32"]) == "fp32"


def test_the_points_of_a_grid_are_its_shuffled_combinations() -> None:
    points = grid_points(GRID.search_space, 1)
    assert {str(sorted(point.items())) for point in points} == {
        str([("batch_size", size), ("pooling", pooling)]) for size in (8, 16) for pooling in ("cls", "mean")
    }
    assert any(points != grid_points(GRID.search_space, seed) for seed in range(2, 9))
