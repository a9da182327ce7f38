from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jsonl_sets import load_set, write_set
from support.planted_comparison import HERE, begun, run, searched
from support.worker_process import study

from hpo.compare.comparison_study import (
    caught_up,
    comparison_name,
    grown,
    open_comparison,
    unlabelled_test_tasks,
)
from hpo.compare.planning import FIRST_SEED, Request
from hpo.config.comparison import ComparisonConfig
from hpo.config.study_config import StudyConfig
from hpo.errors import InputError
from hpo.study.reading.reader import read_study
from hpo.study.running.worker import run_worker
from hpo.study.sampling.device_sampler import WorkerDevice
from hpo.study.store.storage import Storage, open_storage
from hpo.study.store.studies import create_or_resume_study

REQUEST = Request(top=2, seeds=3, max_seeds=8)


def by_rate(params: dict[str, Any]) -> float:
    return 80.0 - 1e5 * params["learning_rate"] - (params["fp_precision"] == "bf16")


@pytest.fixture
def empty(sqlite_url: str) -> Iterator[Storage]:
    with open_storage(sqlite_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def of_search(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyConfig]:
    """A database with a study that has run, for each test to copy."""
    path = tmp_path_factory.mktemp("searched") / "hpo.db"
    with open_storage(f"sqlite:///{path}") as storage:
        return path, searched(storage, by_rate)


@pytest.fixture
def storage(of_search: tuple[Path, StudyConfig], tmp_path: Path) -> Iterator[Storage]:
    with open_storage(f"sqlite:///{shutil.copy(of_search[0], tmp_path)}") as opened:
        yield opened


@pytest.fixture
def config(of_search: tuple[Path, StudyConfig]) -> StudyConfig:
    return of_search[1]


def plan_of(study: StudyConfig) -> ComparisonConfig:
    assert study.comparison is not None
    return study.comparison


def test_the_best_under_each_precision(storage: Storage, config: StudyConfig) -> None:
    companion = begun(storage, config, REQUEST)
    plan = plan_of(companion)
    assert [one.params["learning_rate"] for one in plan.configurations] == [1e-5, 3e-5]
    assert plan.precisions == ("fp32", "bf16")
    assert companion.name == comparison_name("tiny", "precisions") == "tiny-compare"
    assert companion.pruner.name == "none"
    assert companion.evaluation.test


def test_no_trial_of_it_falls_back(empty: Storage) -> None:
    """Whatever the search did: fp32 in the place of bf16 says nothing of bf16."""
    config = searched(empty, by_rate, amp={"on_unsupported": "fallback", "allow_emulated": True})
    amp = begun(empty, config, REQUEST).amp
    assert (amp.on_unsupported, amp.allow_emulated) == ("skip", True)


def test_what_the_search_knew_beforehand_is_no_part_of_it(empty: Storage) -> None:
    create_or_resume_study(empty, study(1, name="earlier"))
    known = {"first": [{"learning_rate": 1e-5}], "sampler": {"name": "tpe"}}
    config = searched(empty, by_rate, **known)
    comparison = begun(empty, config, REQUEST)
    assert comparison.first == ()
    create_or_resume_study(empty, comparison)
    run(empty, comparison, by_rate)
    assert not any("source" in trial.attributes for trial in read_study(empty, comparison.name).trials)


def test_blocks_share_a_seed_that_the_search_never_had(storage: Storage, config: StudyConfig) -> None:
    plan = plan_of(begun(storage, config, REQUEST))
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


def test_a_setting_of_one_precision_has_its_best_value_there(empty: Storage) -> None:
    """In the configuration that all share."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {"type": "categorical", "choices": [1e-5]},
        "init_scale": {"type": "categorical", "choices": [8.0, 1024.0], "when": {"fp_precision": "bf16"}},
    }
    config = study(20, search_space=space)
    create_or_resume_study(empty, config)
    run(empty, config, lambda params: 80.0 - (params.get("init_scale") == 8.0))
    plan = plan_of(begun(empty, config, Request(top=2, seeds=3, max_seeds=8)))
    assert [one.params["init_scale"] for one in plan.configurations] == [1024.0]
    assert plan.precisions == ("fp32", "bf16")


def test_weights_that_the_precision_stores_itself_have_no_base_precision(empty: Storage) -> None:
    """bf16-true casts the reference, too."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["bf16-true", "fp32"]},
        "learning_rate": {"type": "categorical", "choices": [1e-5, 3e-5]},
    }
    config = searched(empty, by_rate, search_space=space, training={"adapter": "lora"})
    asked = Request("base_precision", precisions=("int8",), top=4)
    companion = begun(empty, config, asked)
    assert {one.params["fp_precision"] for one in plan_of(companion).configurations} == {"fp32"}
    assert plan_of(companion).precisions == ("fp32", "int8")
    assert companion.name == "tiny-compare-base"


def test_a_base_precision_that_this_device_lacks(empty: Storage) -> None:
    config = searched(empty, by_rate, training={"adapter": "lora"})
    asked = Request("base_precision", precisions=("nf4", "int8"))
    record, without = read_study(empty, config.name), replace(HERE, has_bitsandbytes=False)
    with pytest.raises(InputError, match=r"needs base_precision=nf4, but .* Leave nf4 out of --precisions"):
        open_comparison(empty, record, config, asked, device=without, has_test=True)
    every = open_comparison(empty, record, config, Request("base_precision"), device=without, has_test=True)
    assert plan_of(every).precisions == ("fp32", "bf16", "int8")


def test_the_precision_that_a_search_did_not_draw_is_that_of_its_trials(empty: Storage) -> None:
    """A preset decided it there, on another kind of device."""
    rates = {"learning_rate": {"type": "categorical", "choices": [1e-5, 3e-5]}}
    config = searched(empty, lambda _: 80.0, search_space=rates)
    (one, *_) = plan_of(begun(empty, config, Request("optimizer_state", precisions=("int8",)))).configurations
    assert one.params["fp_precision"] == "fp32"


def test_configurations_with_and_without_an_adapter(empty: Storage) -> None:
    """Each has the settings that it can have, in a study that could not combine them all."""
    of_adapters = {"when": {"adapter": "lora"}, "type": "categorical"}
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {"type": "categorical", "choices": [1e-5]},
        "adapter": {"type": "categorical", "choices": ["none", "lora"]},
        "base_precision": {"choices": ["fp32", "int8"], **of_adapters},
    }
    config = searched(empty, by_rate, search_space=space, sampler={"name": "random", "seed": 1})
    plan = plan_of(begun(empty, config, Request(top=3)))
    found = {(one.params["adapter"], one.params["base_precision"]) for one in plan.configurations}
    assert found == {("none", "fp32"), ("lora", "fp32"), ("lora", "int8")}


def test_precisions_have_their_canonical_names(storage: Storage, config: StudyConfig) -> None:
    asked = replace(REQUEST, precisions=("bf16-mixed", "fp32"))
    assert plan_of(begun(storage, config, asked)).precisions == ("fp32", "bf16")


def test_a_setting_that_the_search_left_out_has_its_default(empty: Storage) -> None:
    """Where no trial of the precision that searches it is complete."""
    space = {
        "fp_precision": {"type": "categorical", "choices": ["fp32", "bf16"]},
        "learning_rate": {"type": "categorical", "choices": [1e-5, 3e-5, 1e-4]},
        "init_scale": {"type": "categorical", "choices": [1024.0], "when": {"fp_precision": "bf16"}},
    }
    config = study(20, search_space=space)
    create_or_resume_study(empty, config)
    run(empty, config, lambda params: None if params["fp_precision"] == "bf16" else by_rate(params))
    companion = begun(empty, config, REQUEST)
    assert {one.params["init_scale"] for one in plan_of(companion).configurations} == {None}
    assert companion.search_space["init_scale"].grid() == (None,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precisions": ("fp32",)}, "`tiny-compare` was begun with --precisions bf16, and what its trials "),
        ({"precisions": ("fp32", "bf16", "fp16")}, "begun with --precisions bf16, and"),
        (
            {"margin": 1.0, "seeds": 5, "top": 3},
            (
                "begun with --top 2 --seeds 3 --margin 0.5, and what its trials tell counts for that alone. "
                "Leave it out to go on, or begin anew, without its trials: hpo delete tiny-compare"
            ),
        ),
    ],
)
def test_a_comparison_goes_on_as_it_was_begun(
    changes: Any, message: str, storage: Storage, config: StudyConfig
) -> None:
    create_or_resume_study(storage, begun(storage, config, REQUEST))
    again = begun(
        storage, config, Request("precisions", ("bf16", "fp32"), top=2, seeds=3, max_seeds=8, margin=0.5)
    )
    assert plan_of(again) == plan_of(begun(storage, config, REQUEST))
    with pytest.raises(InputError, match=message):
        begun(storage, config, Request(**changes))


def test_more_seeds_leave_those_before_them_as_they_are(storage: Storage, config: StudyConfig) -> None:
    first = begun(storage, config, REQUEST)
    create_or_resume_study(storage, first)
    create_or_resume_study(storage, begun(storage, config, Request(max_seeds=20)))
    plan = plan_of(begun(storage, config, Request()))
    assert plan.max_seeds == 20
    assert plan.points() == plan_of(first).points()
    grown = with_seeds(plan, 20).points()
    assert grown[: len(plan.points())] == plan.points()
    assert len({tuple(point.values()) for point in grown}) == len(grown) == 20 * 4


def with_seeds(plan: ComparisonConfig, num: int) -> ComparisonConfig:
    return plan.model_copy(update={"num_seeds": dict.fromkeys(plan.num_seeds, num)})


def test_two_commands_take_nothing_from_each_other(storage: Storage, config: StudyConfig) -> None:
    """One has added seeds; what the other knows is older than what is stored."""
    old = begun(storage, config, REQUEST)
    create_or_resume_study(storage, grown(old, with_seeds(plan_of(old), 5)))
    assert plan_of(caught_up(storage, old)).num_seeds == {"fp32": 5, "bf16": 5}
    later = plan_of(caught_up(storage, grown(old, with_seeds(plan_of(old), 8))))
    assert later.num_seeds == {"fp32": 8, "bf16": 8}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(precisions=("fp32",)), "needs another precision than fp32, but"),
        (Request(seeds=9, max_seeds=8), "--seeds must be <= --max-seeds, but got 9 and 8"),
    ],
)
def test_refused_requests(request_: Request, message: str, storage: Storage, config: StudyConfig) -> None:
    with pytest.raises(InputError, match=message):
        begun(storage, config, request_)


def test_a_comparison_is_not_compared(storage: Storage, config: StudyConfig) -> None:
    companion = begun(storage, config, REQUEST)
    create_or_resume_study(storage, companion)
    with pytest.raises(
        InputError, match="`tiny-compare` is itself a comparison, of `tiny`: hpo compare tiny"
    ):
        begun(storage, companion, REQUEST)


def test_what_cannot_be_compared(empty: Storage) -> None:
    config = searched(empty, lambda _: None)
    with pytest.raises(InputError, match="needs complete trials, but the study `tiny` has none yet"):
        begun(empty, config, REQUEST)


def test_a_comparison_stays_on_the_kind_of_device_on_which_it_was_begun(
    storage: Storage, config: StudyConfig
) -> None:
    companion = begun(storage, config, REQUEST)
    create_or_resume_study(storage, companion)
    run(storage, companion, by_rate, trials=1)
    other = replace(HERE, name="Other CPU")
    device = WorkerDevice(kind=other.kind)
    summary = run_worker(companion, storage, lambda *_: None, device=device)
    assert (summary.ended, summary.elsewhere) == ("elsewhere", (f"the name {HERE.kind}",))
    record = read_study(storage, config.name)
    with pytest.raises(InputError, match=r"the name Example CPU \(avx512_bf16\), but this is Other CPU"):
        open_comparison(storage, record, config, REQUEST, device=other, has_test=True)
    run(storage, companion, by_rate)
    open_comparison(storage, record, config, REQUEST, device=other, has_test=True)  # to show the answer


def test_trials_of_more_seeds_follow_when_the_plan_grows(storage: Storage, config: StudyConfig) -> None:
    companion = begun(storage, config, REQUEST)
    create_or_resume_study(storage, companion)
    assert len(run(storage, companion, by_rate).trials) == 12
    plan = with_seeds(plan_of(companion), 5)
    grown = companion.with_values(comparison=plan, n_trials=len(plan.points()))
    create_or_resume_study(storage, grown)
    record = run(storage, companion, by_rate)  # a worker that has read the old plan
    assert len(record.trials) == 20
    assert len({tuple(trial.params.values()) for trial in record.trials}) == 20


@pytest.mark.parametrize(
    ("objective", "unlabelled"),
    [
        ({"metric": "score"}, ("tone",)),
        ({"metric": "tone/f1_macro"}, ("tone",)),
        ({"metric": "topic/f1_macro"}, ()),
        ([{"metric": "train_examples_per_second"}, {"metric": "topic/f1_macro"}], ()),
        ({"metric": "peak_memory_bytes", "direction": "minimize"}, ("tone",)),
    ],
)
def test_the_test_split_must_be_labelled_for_the_objective(
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
