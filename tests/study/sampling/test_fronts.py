import numpy as np

from hpo.study.sampling.fronts import order, pareto_front


def test_no_row_is_better_than_one_of_the_front_in_every_objective() -> None:
    values = np.random.default_rng(0).integers(0, 6, (40, 2)).astype(float)
    front = pareto_front(values, ("maximize", "minimize"))
    for (high, low), is_in_front in zip(values, front, strict=True):
        is_as_good = (values[:, 0] >= high) & (values[:, 1] <= low)
        assert is_in_front == (not (is_as_good & (values != (high, low)).any(axis=1)).any())


def test_the_most_distant_rows_of_a_front_come_first() -> None:
    """The distances of rows 1, 2 and 3 are 0.9, 0.8 and 1.1; row 5 is in the second front."""
    losses = np.array([[0, 10], [1, 4], [2, 3], [6, 1], [10, 0], [5, 9]], dtype=float)
    for unit in (1, 1000):
        assert order(losses * [1, unit]).tolist() == [0, 4, 3, 1, 2, 5]
    assert order(np.ones((2, 2))).tolist() == [0, 1]
