from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set, write_set
from support.planted_comparison import HERE, begun, compared, planned, run, searched
from support.planted_comparison import lucky_score as score
from support.worker_process import SPACE, study

from hpo.compare.comparison_study import open_comparison, unlabelled_test_tasks
from hpo.compare.planning import FIRST_SEED, Request
from hpo.config.study_config import StudyConfig
from hpo.errors import InputError
from hpo.study.reading.reader import read_study
from hpo.study.running.worker import run_worker
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

REQUEST = Request(top=2, seeds=3, max_seeds=8)


def choices(*values: Any, **condition: str) -> dict[str, Any]:
    return {"type": "categorical", "choices": list(values)} | ({"when": condition} if condition else {})


def test_best_configurations_under_each_precision(storage: Storage, config: StudyConfig) -> None:
    asked = replace(REQUEST, precisions=("bf16-mixed", "fp32"))
    comparison = begun(storage, config, asked)
    plan = planned(comparison)
    assert [one.params["learning_rate"] for one in plan.configurations] == [3e-5, 1e-4]
    assert plan.precisions == ("fp32", "bf16")
    assert (comparison.name, comparison.pruner.name) == ("tiny-compare", "none")
    assert comparison.evaluation.test


def test_blocks_share_a_new_seed(storage: Storage, config: StudyConfig) -> None:
    plan = planned(begun(storage, config, REQUEST))
    points = plan.points()
    assert len(points) == 3 * len(plan.arms()) == 3 * 4
    assert min(point["seed"] for point in points) == FIRST_SEED
    assert max(point["seed"] for point in points) <= plan.last_seed
    assert len({tuple(point.values()) for point in points}) == len(points)
    blocks: dict[Any, list[str]] = {}
    for point in points:
        block = tuple(value for name, value in point.items() if name != "fp_precision")
        blocks.setdefault(block, []).append(point["fp_precision"])
    orders = [tuple(names) for names in blocks.values() if len(names) == 2]
    assert set(orders) == {("fp32", "bf16"), ("bf16", "fp32")}, "no precision is always the first"


@pytest.mark.parametrize(
    ("scales", "score", "expected"),
    [
        ((8.0, 1024.0), lambda params: 80.0 - (params.get("init_scale") == 8.0), 1024.0),
        ((1024.0,), lambda params: None if params["fp_precision"] == "bf16" else 80.0, None),
    ],
    ids=["best value", "default"],
)
def test_a_setting_of_one_precision_has_its_best_value_or_default(
    empty: Storage, scales: tuple[float, ...], score: Any, expected: Any
) -> None:
    """All precisions share the configuration. The default stands if no trial with the setting is complete."""
    space = {
        "fp_precision": choices("fp32", "bf16"),
        "learning_rate": choices(1e-5),
        "init_scale": choices(*scales, fp_precision="bf16"),
    }
    config = study(20, search_space=space)
    create_or_resume_study(empty, config)
    run(empty, config, score)
    plan = planned(begun(empty, config, REQUEST))
    assert [one.params["init_scale"] for one in plan.configurations] == [expected]


@pytest.mark.parametrize(
    ("fixed", "searched", "first"),
    [
        (2**32 - 1, None, FIRST_SEED),
        (FIRST_SEED + 399, None, FIRST_SEED + 400),
        (0, (0, 2**32 - 1), FIRST_SEED),
        (0, (FIRST_SEED, FIRST_SEED + 300), FIRST_SEED + 400),
    ],
)
def test_new_seeds_are_none_of_the_search(empty: Storage, fixed: int, searched: Any, first: int) -> None:
    space = SPACE | ({"seed": {"type": "int", "low": searched[0], "high": searched[1]}} if searched else {})
    config = study(2, search_space=space, training={} if searched else {"seed": fixed})
    create_or_resume_study(empty, config)
    run(empty, config, lambda _: 80.0)
    assert planned(begun(empty, config, REQUEST)).first_seed == first


def test_options_of_a_stored_comparison_stay(storage: Storage, config: StudyConfig) -> None:
    first = begun(storage, config, REQUEST)
    create_or_resume_study(storage, first)
    same = Request("precisions", ("bf16", "fp32"), top=2, seeds=3, max_seeds=8, margin=0.5)
    assert planned(begun(storage, config, same)) == planned(first)
    options = "--top 2 --seeds 3 --margin 0.5"
    with pytest.raises(InputError, match=f"was begun with {options}, and .*hpo delete tiny-compare"):
        begun(storage, config, Request(margin=1.0, seeds=5, top=3))


def test_more_seeds_leave_earlier_points_unchanged(storage: Storage, config: StudyConfig) -> None:
    first = begun(storage, config, REQUEST)
    create_or_resume_study(storage, first)
    create_or_resume_study(storage, begun(storage, config, Request(max_seeds=20)))
    plan = planned(begun(storage, config, Request()))
    assert plan.max_seeds == 20
    assert plan.points() == planned(first).points()
    grown = plan.model_copy(update={"num_seeds": dict.fromkeys(plan.num_seeds, 20)}).points()
    assert grown[: len(plan.points())] == plan.points()
    assert len({tuple(point.values()) for point in grown}) == len(grown) == 20 * 4


def test_fewer_seeds_than_the_present_ones_end_a_comparison(storage: Storage, config: StudyConfig) -> None:
    """The remedy names more seeds than there are."""
    create_or_resume_study(storage, begun(storage, config, Request(top=1, seeds=5)))

    def noisy(params: dict[str, Any]) -> float:
        return score(params) + (params["seed"] % 3 if params["fp_precision"] == "bf16" else 0)

    found = compared(storage, config, noisy, Request(max_seeds=3))
    assert (found.plan.max_seeds, found.content["verdicts"][0]["num_runs"]) == (5, 5)
    assert found.content["verdicts"][0]["sentence"].endswith("hpo compare tiny --max-seeds 7")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Request(precisions=("fp32",)), "needs another precision than fp32, but"),
        (Request(seeds=9, max_seeds=8), "--seeds must be <= --max-seeds, but got 9 and 8"),
        (Request(precisions=("bf17",)), "--precisions: "),
    ],
)
def test_refused_requests(asked: Request, message: str, storage: Storage, config: StudyConfig) -> None:
    with pytest.raises(InputError, match=message):
        begun(storage, config, asked)


def test_refused_studies(storage: Storage, config: StudyConfig, empty: Storage) -> None:
    comparison = begun(storage, config, REQUEST)
    create_or_resume_study(storage, comparison)
    with pytest.raises(InputError, match="is itself a comparison, of `tiny`: hpo compare tiny"):
        begun(storage, comparison, REQUEST)
    failed = searched(empty, lambda _: None)
    with pytest.raises(InputError, match="needs complete trials, but the study `tiny` has none yet"):
        begun(empty, failed, REQUEST)


def test_a_comparison_stays_on_its_kind_of_device(storage: Storage, config: StudyConfig) -> None:
    comparison = begun(storage, config, REQUEST)
    create_or_resume_study(storage, comparison)
    run(storage, comparison, score, trials=1)
    other = replace(HERE, name="Other CPU")
    summary = run_worker(comparison, storage, lambda *_: None, device=WorkerDevice(kind=other.kind))
    assert (summary.ended, summary.elsewhere) == ("elsewhere", (f"the name {HERE.kind}",))
    record = read_study(storage, config.name)
    with pytest.raises(InputError, match=r"the name Example CPU \(avx512_bf16\), but this is Other CPU"):
        open_comparison(storage, record, config, REQUEST, device=other, has_test=True)
    run(storage, comparison, score)
    open_comparison(storage, record, config, REQUEST, device=other, has_test=True)  # to show the result


@pytest.mark.parametrize(
    ("objective", "unlabelled"),
    [
        ({"metric": "score"}, ("tone",)),
        ([{"metric": "train_examples_per_second"}, {"metric": "topic/f1_macro"}], ()),
    ],
)
def test_tasks_of_the_objective_without_test_labels(
    objective: Any, unlabelled: tuple[str, ...], tmp_path: Path
) -> None:
    kind = {"kind": "single_label", "classes": ["a", "b"]}
    rows: dict[str, Any] = {
        split: [{"id": split, "text": "x", "labels": {"topic": "a", "tone": "b"}}]
        for split in ("train", "validation", "test")
    }
    del rows["test"][0]["labels"]["tone"]
    data = load_set(write_set(tmp_path / "data", {"topic": kind, "tone": kind}, **rows))
    assert unlabelled_test_tasks(study(1, objective=objective), data) == unlabelled
    without = replace(data, splits={name: data.splits[name] for name in ("train", "validation")})
    assert unlabelled_test_tasks(study(1, objective=objective), without) == ()
