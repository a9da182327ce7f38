"""A worker of a comparison stays for its next look, until it has ended."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from worker_process import result, study

from hpo.compare.companion import comparison_study, grown
from hpo.config.comparison import ComparedConfiguration, ComparisonConfig
from hpo.config.search_space import suggest
from hpo.config.study_config import StudyConfig
from hpo.study.running.next_look import has_ended, look_by_look, wait_for_next_look
from hpo.study.running.stopping import WORKERS_ON_DEVICE, Stop
from hpo.study.running.worker import run_worker
from hpo.study.store.lifecycle import delete_study, set_state
from hpo.study.store.storage import Storage
from hpo.study.store.studies import create_or_resume_study

PLAN = ComparisonConfig(
    study="tiny",
    study_token="token",
    precisions=("fp32", "bf16"),
    configurations=(ComparedConfiguration(trial=0, params={}, precisions=("fp32", "bf16")),),
    top=1,
    first_seed=100,
    seeds=3,
    num_seeds={"fp32": 3, "bf16": 3},
    max_seeds=5,
    margin=0.5,
)
MORE = PLAN.model_copy(update={"num_seeds": {"fp32": 5, "bf16": 5}})


@pytest.fixture
def companion(storage: Storage) -> StudyConfig:
    """A comparison whose trials are done so far; what they say is not known yet."""
    searched = study(1)
    create_or_resume_study(storage, searched)
    companion = comparison_study(searched, PLAN, has_test=False)
    run(storage, companion)
    return companion


def run(storage: Storage, companion: StudyConfig) -> None:
    """Run the trials that are left."""

    def execute(trial: Any, _: Any) -> Any:
        suggest(companion.search_space, trial)
        return result("complete", values=(0.5,))

    create_or_resume_study(storage, companion)
    assert run_worker(companion, storage, execute).ended == "finished"


def judged(storage: Storage, plan: ComparisonConfig, *, ended: bool) -> None:
    storage.store_comparison("tiny", "precisions", {"has_ended": ended, "num_seeds": plan.num_seeds})


def with_more(companion: StudyConfig) -> StudyConfig:
    assert companion.comparison is not None
    return grown(companion, companion.comparison.model_copy(update={"num_seeds": MORE.num_seeds}))


def test_a_worker_comes_back_for_each_look(storage: Storage, companion: StudyConfig) -> None:
    judged(storage, PLAN, ended=False)
    looks = look_by_look(companion, storage.url, Stop())
    assert next(looks) == companion
    adds = threading.Timer(0.2, lambda: create_or_resume_study(storage, with_more(companion)))
    adds.start()
    second = next(looks)
    adds.join()
    assert second.comparison is not None
    assert second.comparison.num_seeds == MORE.num_seeds
    run(storage, second)
    judged(storage, MORE, ended=True)
    assert list(looks) == []


def test_more_seeds_after_the_end(storage: Storage, companion: StudyConfig) -> None:
    """What ended had fewer seeds than there are now."""
    judged(storage, PLAN, ended=True)
    assert not wait_for_next_look(storage, companion.name, Stop(), seconds=1000)
    more = with_more(companion)
    create_or_resume_study(storage, more)
    assert wait_for_next_look(storage, companion.name, Stop(), seconds=0)
    run(storage, more)
    assert more.comparison is not None
    assert not has_ended(storage, more.comparison)


@pytest.mark.usefixtures("companion")
def test_a_worker_leaves_where_nobody_adds_trials(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    assert not wait_for_next_look(storage, "tiny-compare", Stop(), seconds=0)
    assert "`hpo compare` has added no trials to `tiny-compare` for 0 s." in caplog.text


@pytest.mark.parametrize("end", ["stop", "cancelled", "deleted", "search deleted"])
@pytest.mark.usefixtures("companion")
def test_what_ends_the_wait(end: str, storage: Storage) -> None:
    stop = Stop()
    if end == "stop":
        stop.set("told to")
    elif end == "cancelled":
        set_state(storage, "tiny-compare", "cancelled")
    else:
        delete_study(storage, "tiny-compare" if end == "deleted" else "tiny")
    assert not wait_for_next_look(storage, "tiny-compare", stop, seconds=1000)


def test_who_does_not_wait(storage: Storage, companion: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that is no comparison, and a process whose parent waits."""
    assert len(list(look_by_look(companion.with_values(comparison=None), storage.url, Stop()))) == 1
    monkeypatch.setenv(WORKERS_ON_DEVICE, "1")
    assert len(list(look_by_look(companion, storage.url, Stop()))) == 1
