"""The first trials of a study: configurations of the file, earlier trials, a portfolio, points of a grid."""

import os
import signal
from typing import Any

import pytest
from optuna.trial import TrialState
from support.planted_comparison import plan_of
from support.worker_process import (
    SPACE,
    begin,
    finish,
    result,
    run_trials,
    run_until_killed,
    start_process,
    study,
    worker_on,
)

from hpo.compare.comparison_study import comparison_study
from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.errors import InputError, StudyChangedError
from hpo.study.reading.reader import read_study
from hpo.study.sampling.points import Point, grid_points, point_key, unused_points
from hpo.study.store import schema, studies
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

GIVEN = [{"learning_rate": 2e-5, "batch_size": 32}, {"fp_precision": "fp32"}, {"learning_rate": 5e-4}]


def make(url: str, config: StudyConfig, kill: str = "") -> None:
    """Make the study; with `kill`, this process dies after that function."""
    if kill:
        function = getattr(studies, kill)

        def call_and_die(*args: Any, **kwargs: Any) -> None:
            function(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(studies, kill, call_and_die)
    with open_storage(url) as storage:
        create_or_resume_study(storage, config)


def waiting(storage: Storage) -> list[dict[str, Any]]:
    trials = storage.load_study("tiny").get_trials(states=(TrialState.WAITING,))
    return [trial.system_attrs["fixed_params"] for trial in trials]


@pytest.mark.parametrize(
    ("kind", "kill"),
    [("sqlite", "create_study"), pytest.param("postgres", "enqueue_trials", marks=pytest.mark.postgres)],
)
def test_configurations_are_enqueued_once_by_killed_and_parallel_processes(
    request: pytest.FixtureRequest, kind: str, kill: str
) -> None:
    storage_url, config = request.getfixturevalue(f"{kind}_url"), study(6, first=GIVEN)
    run_until_killed(make, storage_url, config, kill)
    finish(*(start_process(make, storage_url, config) for _ in range(3)))
    with open_storage(storage_url) as storage:
        assert waiting(storage) == GIVEN
        run_trials(storage, config)
        record = read_study(storage, "tiny")
        assert record.counts["done"] == len(record.trials) == 6
        for index, given in enumerate(GIVEN):
            assert given.items() <= record.trials[index].params.items()
            assert record.trials[index].attributes["source"] == f"first.{index}"


def test_the_best_earlier_trials_are_tried_without_unfitting_settings(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    config = study(12, name="earlier")
    run_trials(storage, config, lambda trial: result("complete", values=(trial.params["learning_rate"],)))
    ranked = sorted(read_study(storage, "earlier").trials, key=lambda trial: -trial.values[0])  # type: ignore[index]
    space = {
        "learning_rate": {"type": "float", "low": 1e-5, "high": ranked[1].params["learning_rate"]},
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16", "fp16"]},
    }
    create_or_resume_study(storage, study(9, search_space=space, first={"study": "earlier", "top": 3}))
    assert waiting(storage) == [
        {"fp_precision": ranked[0].params["fp_precision"]},
        *({name: ranked[index].params[name] for name in space} for index in (1, 2)),
    ]
    assert "left out, as they do not fit: `batch_size`, `learning_rate`." in caplog.text
    assert [trial.attributes["source"] for trial in read_study(storage, "tiny").trials[:3]] == [
        f"trial {ranked[0].number} of earlier without its batch_size, learning_rate",
        *(f"trial {ranked[index].number} of earlier without its batch_size" for index in (1, 2)),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fronts", "`first.study` of `tiny` must have one objective, but `fronts` has several."),
        ("front", "`first.study` of `tiny`: There is no study `front` in"),
    ],
)
def test_an_earlier_study_without_a_ranking_is_refused(storage: Storage, name: str, message: str) -> None:
    create_or_resume_study(
        storage, study(1, name="fronts", objective=[{"metric": "score"}, {"metric": "topic/f1_macro"}])
    )
    with pytest.raises(InputError, match=message):
        create_or_resume_study(storage, study(1, first={"study": name}))


def test_a_study_after_an_earlier_one_draws_other_configurations(storage: Storage) -> None:
    """Both have the same seed."""
    first = {"study": "earlier", "top": 2}
    for config in (study(6, name="earlier"), study(6, first=first)):
        run_trials(storage, config)
    rates = [
        [trial.params["learning_rate"] for trial in read_study(storage, name).trials]
        for name in ("earlier", "tiny")
    ]
    assert len(set(rates[0] + rates[1])) == 10


@pytest.mark.parametrize(
    ("n_trials", "first", "rates"),
    [
        (1, [{"learning_rate": 1e-4, "batch_size": 32}], [1e-4]),
        (12, [{"learning_rate": 1e-4, "batch_size": 32}], [1e-4, 5e-5]),
        (21, [], [5e-5, 1e-4, 2e-5]),
    ],
)
def test_the_portfolio_follows_the_file(
    storage: Storage, n_trials: int, first: list[dict[str, Any]], rates: list[float]
) -> None:
    """A tenth of the trials try it. A configuration of the file is not tried again."""
    config = study(n_trials, sampler={"name": "tpe"}, first=first)
    run_trials(storage, config)
    known = [trial for trial in read_study(storage, "tiny").trials if "source" in trial.attributes]
    assert [trial.number for trial in known] == [*range(len(rates))]
    assert [trial.params["learning_rate"] for trial in known] == rates
    sources = [trial.attributes["source"] for trial in known[len(first) :]]
    assert all(source.startswith("portfolio: ") for source in sources)


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


@pytest.mark.parametrize(
    ("config", "points"),
    [(GRID, grid_points(GRID.search_space, 1)), (COMPARISON, PLAN.points())],
    ids=["grid", "comparison"],
)
def test_parallel_workers_get_different_points(storage: Storage, config: Any, points: list[Point]) -> None:
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


def test_a_run_stores_a_wider_range_and_a_worker_does_not(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    wide = {**SPACE, "learning_rate": {**SPACE["learning_rate"], "high": 1e-2}}
    run_trials(storage, study(2))
    with pytest.raises(
        StudyChangedError, match=r"The range of learning_rate is wider now\. `hpo run` stores"
    ):
        run_trials(storage, study(4, search_space=wide))
    create_or_resume_study(storage, study(40, search_space=wide))
    assert "The range of learning_rate is wider now. Workers that run keep the old one" in caplog.text
    assert storage.read_definition("tiny")["search_space"]["learning_rate"]["high"] == 1e-2
    assert storage.stored("tiny", schema.studies.c.space_hash) == study(search_space=wide).space_hash
    run_trials(storage, study(40, search_space=wide))
    assert max(trial.params["learning_rate"] for trial in read_study(storage, "tiny").trials) > 1e-3
