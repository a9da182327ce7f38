"""Points: the configurations of a grid or of a comparison, in their order of use.

A point is chosen in the transaction that makes its trial: the first one with the fewest trials, among the
points for the worker's device.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.config.search_space import SearchSpace, grid

Point = dict[str, Any]  # parameters of a trial, in Optuna's form


def grid_points(space: SearchSpace, seed: int) -> list[Point]:
    """Return all combinations of the values of a finite space, in a random order."""
    values = grid(space)
    names = sorted(values)
    products = itertools.product(*(values[name] for name in names))
    points = [dict(zip(names, product, strict=True)) for product in products]
    random.Random(seed).shuffle(points)
    return points


def point_key(point: Point) -> str:
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:32]


def unused_points(points: Sequence[Point], num_trials: Mapping[str, int]) -> list[Point]:
    """Return the points with the fewest trials, in their order."""
    counts = [num_trials.get(point_key(point), 0) for point in points]
    fewest = min(counts, default=0)
    return [point for point, count in zip(points, counts, strict=True) if count == fewest]
